"""Operations added up: by part, by layer, and in all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from regard.cost._describe import Block
from regard.cost._ops import PARTS, Op


@dataclass(frozen=True)
class Flops:
    """FLOPs of matrix products, two for each multiplication and its addition.

    Args:
        forward: one pass.
        backward: with fused attention, whose kernel computes the scores a second time.
        backward_eager: with the whole matrix of weights in memory.
        recomputed: on top of either, where layers are computed again in the backward pass.
    """

    forward: int = 0
    backward: int = 0
    backward_eager: int = 0
    recomputed: int = 0

    @property
    def training(self) -> int:
        """Forward and backward, with fused attention and nothing computed again."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Activations:
    """Bytes that autograd keeps between the forward and the backward pass.

    Args:
        eager: attention with the whole matrix in memory.
        fused: attention by a fused kernel.
        recomputed: fused, and of each layer its input only (`model.checkpoint_layers = True`).
        peak: the same while a layer is computed again, which is when most is alive.
        textbook: 34·b·s·h + 5·b·s²·a bytes per layer (Korthikanti et al., 2022), the usual estimate for half precision
            with the matrix in memory and dropout; `eager` is what our own eager attention keeps, whose softmax is in
            float32. None where layers are of another kind.
    """

    eager: int = 0
    fused: int = 0
    recomputed: int = 0
    peak: int = 0
    textbook: int | None = None


@dataclass(frozen=True)
class Part:
    """What one kind of operation costs in the whole model, or in one layer of it."""

    name: str
    parameters: int
    flops: Flops  # over all pairs of query and key, as torch.utils.flop_counter counts them
    kept_flops: Flops  # over the pairs that the mask keeps
    eager: int  # bytes kept
    fused: int


def parts_of(blocks: Iterable[Block]) -> tuple[Part, ...]:
    counted = [(op, block.count, block) for block in blocks for op in block.ops]
    found = []
    for name in PARTS:
        mine = [(op, count, block) for op, count, block in counted if op.part == name]
        if mine:
            found.append(
                Part(
                    name,
                    sum(op.parameters * count for op, count, _ in mine),
                    _flops(mine, kept=False),
                    _flops(mine, kept=True),
                    sum(op.eager * count for op, count, _ in mine),
                    sum(op.fused * count for op, count, _ in mine),
                )
            )
    return tuple(found)


def _flops(ops: list[tuple[Op, int, Block]], *, kept: bool) -> Flops:
    forward = backward = again = recomputed = 0
    for op, count, block in ops:
        one = op.kept if kept else (op.forward, op.backward, op.again)
        forward, backward, again = forward + count * one[0], backward + count * one[1], again + count * one[2]
        if block.layer_input is not None and op.repeated:
            recomputed += count * one[0]
    return Flops(forward, backward + again, backward, recomputed)


def flops_in_all(parts: Iterable[Flops]) -> Flops:
    parts = list(parts)
    return Flops(
        sum(part.forward for part in parts),
        sum(part.backward for part in parts),
        sum(part.backward_eager for part in parts),
        sum(part.recomputed for part in parts),
    )


def activations_of(blocks: list[Block]) -> Activations:
    eager = sum(block.count * sum(op.eager for op in block.ops) for block in blocks)
    fused = sum(block.count * sum(op.fused for op in block.ops) for block in blocks)
    # the input of the layer that is computed again is among its tensors
    inside = [
        sum(op.fused for op in block.ops) - block.layer_input for block in blocks if block.layer_input is not None
    ]
    recomputed = sum(
        block.count * (sum(op.fused for op in block.ops) if block.layer_input is None else block.layer_input)
        for block in blocks
    )
    return Activations(eager, fused, recomputed, recomputed + max(inside, default=0))
