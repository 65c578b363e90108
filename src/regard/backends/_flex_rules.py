"""A call as FlexAttention takes it: the mask's predicate and a table of its blocks, and what becomes of a logit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.masks import Mask
from regard.masks._flex import Frame, Predicate, lookup

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
# cells of a table of blocks; beyond, blocks grow, because FlexAttention wants the whole table in memory
_MOST_CELLS = 1 << 19
# pairs that are looked at together where a table is made on the device
_PAIRS = 1 << 24
_EMPTY, _PARTIAL, _FULL = 0, 1, 2


def score_of(bias: Tensor | None, softcap: float | None) -> tuple[Callable[..., Tensor] | None, tuple[Any, ...]]:
    """What becomes of a scaled logit, as FlexAttention's score_mod, and its kind."""
    if bias is None and softcap is None:
        return None, ()
    cap = (lambda s: s) if softcap is None else (lambda s: torch.tanh(s / softcap) * softcap)
    if bias is None:
        return lambda s, b, h, q, k: cap(s), (softcap,)
    look, kind = lookup(bias.detach())

    # filled rather than only added: an overflown logit plus -inf would be NaN
    return lambda s, b, h, q, k: torch.where(look(b, h, q, k) == -torch.inf, -torch.inf, cap(s) + look(b, h, q, k)), (
        softcap,
        kind,
    )


class Blocks(NamedTuple):
    """A mask made ready for FlexAttention; the table names the rule."""

    rule: Predicate
    table: BlockMask

    @property
    def nbytes(self) -> int:
        found = (self.table.kv_indices, self.table.full_kv_indices, self.table.q_indices, self.table.full_q_indices)
        return sum(tensor.nbytes for tensor in found if tensor is not None)


def blocks_of(mask: Mask, frame: Frame) -> Blocks:
    """The mask's rule and table, kept with the mask where its contents can be watched for changes."""

    def build() -> Blocks:
        # made in inference mode, tensors could not be kept for calls outside of it
        with torch.inference_mode(False), torch.no_grad():
            rule = mask.predicate(frame)
            size = _block_size(mask, frame)
            return Blocks(rule, _table(_states(mask, frame, size), frame, size, rule))

    return mask.remember(("flex", *frame), frame.offset, build)


def _block_size(mask: Mask, frame: Frame) -> int:
    size = BLOCK
    groups = frame.batch if mask.batch > 1 or isinstance(frame.offset, Tensor) else 1
    while groups * -(-frame.queries // size) * -(-frame.keys // size) > _MOST_CELLS:
        size *= 2
    return size


def _states(mask: Mask, frame: Frame, size: int) -> Tensor:
    """Empty, partial or full for each block, over all heads: int8 [B or 1, query blocks, key blocks]."""
    placed = isinstance(frame.offset, Tensor) and frame.offset.device.type != "cpu"
    states = _tiled_states(mask, frame, size) if placed or not mask.readable() else _read_states(mask, frame, size)
    # blocks that reach over the edge are never full: the kernel would take what lies beyond for permitted
    if frame.queries % size:
        states[:, -1].clamp_(max=_PARTIAL)
    if frame.keys % size:
        states[:, :, -1].clamp_(max=_PARTIAL)
    return states


def _read_states(mask: Mask, frame: Frame, size: int) -> Tensor:
    """From the mask's own table of blocks, worked out on the host."""
    table = mask.blocks(frame.queries, frame.keys, frame.offset, frame.batch, size, size)
    states = np.zeros((table.groups, table.query_blocks, table.key_blocks), dtype=np.int8)
    states.reshape(-1, table.key_blocks)[table.owners, table.cols] = np.where(table.full, _FULL, _PARTIAL)
    return torch.from_numpy(states).to(frame.device)


def _tiled_states(mask: Mask, frame: Frame, size: int) -> Tensor:
    """By looking at every pair on the device, some rows at a time: contents there are not read by the host."""
    items = frame.batch if mask.batch > 1 or isinstance(frame.offset, Tensor) else 1
    rows = max(1, _PAIRS // (frame.keys * items * mask.heads * size)) * size
    parts = []
    for start in range(0, frame.queries, rows):
        stop = min(start + rows, frame.queries)
        seen = mask.tile(
            range(start, stop), range(frame.keys), frame.queries, frame.keys, offset=frame.offset, device=frame.device
        )
        beyond = (0, -frame.keys % size, 0, -(stop - start) % size)
        some, every = (torch.nn.functional.pad(part, beyond) for part in (seen.any(1), seen.all(1)))
        cut = (len(seen), some.shape[1] // size, size, some.shape[2] // size, size)
        parts.append(some.view(cut).any(4).any(2).to(torch.int8) + every.view(cut).all(4).all(2).to(torch.int8))
    return torch.cat(parts, 1)


def _table(states: Tensor, frame: Frame, size: int, rule: Predicate) -> BlockMask:
    from torch.nn.attention.flex_attention import BlockMask

    states = states.unsqueeze(1)  # one table for all heads
    partial, full = states == _PARTIAL, states == _FULL
    kv_num_blocks, kv_indices = _listed(partial)
    full_kv_num_blocks, full_kv_indices = _listed(full)
    q_num_blocks, q_indices = _listed(partial.transpose(2, 3))
    full_q_num_blocks, full_q_indices = _listed(full.transpose(2, 3))
    return BlockMask(
        seq_lengths=(frame.queries, frame.keys),
        kv_num_blocks=kv_num_blocks,
        kv_indices=kv_indices,
        full_kv_num_blocks=full_kv_num_blocks,
        full_kv_indices=full_kv_indices,
        q_num_blocks=q_num_blocks,
        q_indices=q_indices,
        full_q_num_blocks=full_q_num_blocks,
        full_q_indices=full_q_indices,
        BLOCK_SIZE=(size, size),
        mask_mod=rule.see,
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each line are chosen, and all blocks, the chosen ones first and in order."""
    numbers = chosen.to(torch.int32)
    order = numbers.argsort(dim=-1, descending=True, stable=True)
    return numbers.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()
