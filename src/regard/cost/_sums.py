"""Operations added up: by part, by layer, and in all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

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
    found = []
    for name in PARTS:
        mine = [(op, block) for block in blocks for op in block.ops if op.part == name]
        if mine:
            parameters, eager, fused = (
                sum(block.count * getattr(op, what) for op, block in mine) for what in ("parameters", "eager", "fused")
            )
            flops, kept = (total(_flops(op, block, kept=kept) for op, block in mine) for kept in (False, True))
            found.append(Part(name, parameters, flops, kept, eager, fused))
    return tuple(found)


def _flops(op: Op, block: Block, *, kept: bool) -> Flops:
    """Of an operation in all layers of its block."""
    once = op.kept if kept else (op.forward, op.backward, op.again)
    forward, backward, again = (block.count * flops for flops in once)
    is_repeated = block.layer_input is not None and op.repeated
    return Flops(forward, backward + again, backward, forward if is_repeated else 0)


def total(several: Iterable[Flops]) -> Flops:
    return Flops(*map(sum, zip(*map(astuple, several), strict=True)))


def activations_of(blocks: list[Block]) -> Activations:
    eager = fused = recomputed = inside = 0
    for block in blocks:
        kept = sum(op.fused for op in block.ops)
        left = kept if block.layer_input is None else block.layer_input
        eager += block.count * sum(op.eager for op in block.ops)
        fused += block.count * kept
        recomputed += block.count * left
        inside = max(inside, kept - left)  # the input of the layer that is computed again is among its tensors
    return Activations(eager, fused, recomputed, recomputed + inside)
