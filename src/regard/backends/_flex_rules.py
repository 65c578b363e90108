"""A mask as FlexAttention takes it: a predicate of (item, head, row, key), and a table of its blocks.

Numbers of a rule (a window's width) become constants of the compiled code; everything that changes from call to call
(offsets, lengths, documents) is a captured tensor, so that one piece of code serves them all. What depends on a row or
a key alone is worked out once, outside the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from regard.masks import Mask

BLOCK = 128
# cells of a table of blocks; beyond, blocks grow, because FlexAttention wants the whole table in memory
_MOST_CELLS = 1 << 19
# pairs that are looked at together where a table is made on the device
_PAIRS = 1 << 24
_EMPTY, _PARTIAL, _FULL = 0, 1, 2

See = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Rule(NamedTuple):
    """``kind`` holds all that the code of ``see`` depends on: equal kinds, same code."""

    kind: tuple[Any, ...]
    see: See


class Frame(NamedTuple):
    """One call, as its rules see it."""

    queries: int
    keys: int
    batch: int
    offset: int | Tensor
    device: torch.device

    @property
    def near(self) -> bool:
        """Whether every position and distance fits into 30 bits, which makes the kernel's arithmetic faster."""
        return not isinstance(self.offset, Tensor) and abs(self.offset) + self.queries + self.keys < 1 << 30

    @property
    def start(self) -> Tensor:
        """The first query's position, [B or 1]; made on the device, without waiting for it."""
        if isinstance(self.offset, Tensor):
            return self.offset.to(self.device)
        return torch.full((1,), self.offset, dtype=torch.int32 if self.near else torch.int64, device=self.device)

    @property
    def positions(self) -> Tensor:
        """Every query's position, [B or 1, L]."""
        return self.start.to(torch.int64).unsqueeze(1) + torch.arange(self.queries, device=self.device)

    def limit(self, number: int) -> int:
        """A rule's number, cut where a larger one means the same and could overflow."""
        return min(number, 1 << (30 if self.near else 62))


def rule_of(mask: Mask, frame: Frame) -> Rule:
    """The predicate that means the same as the mask at this offset."""
    if mask.parts:
        parts = [rule_of(part, frame) for part in mask.parts]
        return Rule((mask.kind, *(part.kind for part in parts)), _join(mask.kind, [part.see for part in parts]))
    return _RULES[mask.kind](mask, frame)


def _join(kind: str, parts: list[See]) -> See:
    first, last = parts[0], parts[-1]
    if kind == "and":
        return lambda b, h, q, k: first(b, h, q, k) & last(b, h, q, k)
    if kind == "or":
        return lambda b, h, q, k: first(b, h, q, k) | last(b, h, q, k)
    assert kind == "not", kind
    return lambda b, h, q, k: ~first(b, h, q, k)


def _everything(mask: Any, frame: Frame) -> Rule:
    return Rule((mask.kind,), lambda b, h, q, k: k >= 0)


def _causal(mask: Any, frame: Frame) -> Rule:
    start = frame.start
    each = several(start, 0)
    return Rule((mask.kind, each), lambda b, h, q, k: k <= q + start[b * each])


def _window(mask: Any, frame: Frame) -> Rule:
    start = frame.start
    each = several(start, 0)
    left, right = frame.limit(mask.left), frame.limit(mask.right)
    return Rule(
        (mask.kind, left, right, each),
        lambda b, h, q, k: (k - (q + start[b * each]) >= -left) & (k - (q + start[b * each]) <= right),
    )


def _prefix(mask: Any, frame: Frame) -> Rule:
    start = frame.start
    each, n = several(start, 0), frame.limit(mask.n)
    return Rule((mask.kind, n, each), lambda b, h, q, k: (q + start[b * each] < n) & (k < n))


def _columns(mask: Any, frame: Frame) -> Rule:
    n = frame.limit(mask.n)
    return Rule((mask.kind, n), lambda b, h, q, k: k < n)


def _strided(mask: Any, frame: Frame) -> Rule:
    start = frame.start
    each, s = several(start, 0), frame.limit(mask.s)
    return Rule((mask.kind, s, each), lambda b, h, q, k: (q + start[b * each] - k) % s == 0)


def _padding(mask: Any, frame: Frame) -> Rule:
    edge = mask.lengths.to(frame.device, torch.int64).clamp(max=frame.keys).to(torch.int32)
    each = several(edge, 0)
    if mask.side == "right":
        return Rule((mask.kind, mask.side, each), lambda b, h, q, k: k < edge[b * each])
    edge = frame.keys - edge
    return Rule((mask.kind, mask.side, each), lambda b, h, q, k: k >= edge[b * each])


def _documents(mask: Any, frame: Frame) -> Rule:
    numbers = mask.tensors[0].to(frame.device)
    if mask.by == "lengths":
        at = torch.arange(frame.keys, device=frame.device)
        found = torch.searchsorted(numbers.to(torch.int64).cumsum(0), at, right=True)
        keys = torch.where(found < len(numbers), found, -1).unsqueeze(0)
    else:
        # unsigned numbers could not hold what stands for no document
        keys = numbers.to(torch.int64 if numbers.dtype == torch.int64 else torch.int32).reshape(-1, frame.keys)
    place = frame.positions
    items = max(len(keys), len(place))
    place = place.expand(items, -1)
    queries = keys.expand(items, -1).gather(1, place.clamp(0, frame.keys - 1))
    # queries and keys without a document get different numbers, so that they are equal to nothing
    queries = torch.where((place >= 0) & (place < frame.keys) & (queries >= 0), queries, -1)
    keys = torch.where(keys >= 0, keys, -2)
    q_each, k_each = several(queries, 0), several(keys, 0)
    return Rule((mask.kind, q_each, k_each), lambda b, h, q, k: queries[b * q_each, q] == keys[b * k_each, k])


def _blocks(mask: Any, frame: Frame) -> Rule:
    table = mask.tensors[0].to(frame.device)
    table = table if table.dim() == 4 else table[None, None]
    height, width = table.shape[2:]
    # one more row and column, seen by nobody, for all positions outside the table
    table = torch.nn.functional.pad(table, (0, 1, 0, 1))
    row = frame.positions // mask.size
    return _table_rule(mask, frame, table, torch.where((row >= 0) & (row < height), row, height), width)


def _random_blocks(mask: Any, frame: Frame) -> Rule:
    row = frame.positions // mask.size
    first = row[:, :1]
    steps = torch.arange((frame.queries - 1) // mask.size + 2, device=frame.device)
    table = mask._chosen(first + steps, frame.keys).unsqueeze(1)
    return _table_rule(mask, frame, table, row - first, table.shape[3])


def _table_rule(mask: Any, frame: Frame, table: Tensor, row: Tensor, width: int) -> Rule:
    """Query q reads row row[b, q] of a table [B or 1, H or 1, rows, columns], key k the column of its block."""
    row = row.to(torch.int32)
    column = (torch.arange(frame.keys, device=frame.device) // mask.size).clamp(max=width).to(torch.int32)
    item, head, each = several(table, 0), several(table, 1), several(row, 0)
    return Rule(
        (mask.kind, item, head, each),
        lambda b, h, q, k: table[b * item, h * head, row[b * each, q], column[k]],
    )


def _keep(mask: Any, frame: Frame) -> Rule:
    look, kind = lookup(mask.tensors[0].to(frame.device))
    return Rule((mask.kind, *kind), look)


def _drop(mask: Any, frame: Frame) -> Rule:
    look, kind = lookup(mask.tensors[0].to(frame.device))
    return Rule((mask.kind, *kind), lambda b, h, q, k: ~look(b, h, q, k))


def _from_additive(mask: Any, frame: Frame) -> Rule:
    look, kind = lookup(mask.tensors[0].to(frame.device))
    return Rule((mask.kind, *kind), lambda b, h, q, k: look(b, h, q, k) == 0)


_RULES: dict[str, Callable[[Any, Frame], Rule]] = {
    "everything": _everything,
    "causal": _causal,
    "window": _window,
    "prefix": _prefix,
    "columns": _columns,
    "strided": _strided,
    "padding": _padding,
    "documents": _documents,
    "blocks": _blocks,
    "random_blocks": _random_blocks,
    "keep": _keep,
    "drop": _drop,
    "from_additive": _from_additive,
}


def several(tensor: Tensor, dim: int) -> int:
    """0 where a dim is broadcast, else 1: what an index along it is multiplied by."""
    return int(tensor.shape[dim] != 1)


def lookup(tensor: Tensor) -> tuple[See, tuple[int, ...]]:
    """An element of a tensor that broadcasts to [B, H, L, S]; and which of its dims do not."""
    tensor = tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape))
    item, head, row, col = kind = (several(tensor, 0), several(tensor, 1), several(tensor, 2), several(tensor, 3))
    return lambda b, h, q, k: tensor[b * item, h * head, q * row, k * col], kind


def score_of(bias: Tensor | None, softcap: float | None) -> tuple[Callable[..., Tensor] | None, tuple[Any, ...]]:
    """What becomes of a scaled logit, as FlexAttention's score_mod, and its kind."""
    if bias is None and softcap is None:
        return None, ()
    cap = _cap(softcap)
    if bias is None:
        return lambda s, b, h, q, k: cap(s), (softcap,)
    look, kind = lookup(bias.detach())

    # filled rather than only added: an overflown logit plus -inf would be NaN
    return lambda s, b, h, q, k: torch.where(look(b, h, q, k) == -torch.inf, -torch.inf, cap(s) + look(b, h, q, k)), (
        softcap,
        kind,
    )


def _cap(softcap: float | None) -> Callable[[Tensor], Tensor]:
    return (lambda s: s) if softcap is None else (lambda s: torch.tanh(s / softcap) * softcap)


class Blocks(NamedTuple):
    """A mask made ready for FlexAttention; the table names the rule."""

    rule: Rule
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
            rule = rule_of(mask, frame)
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
    counts = np.diff(table.row_ptr, axis=1).reshape(-1)
    rows = np.repeat(np.arange(len(counts)), counts)
    states.reshape(len(counts), -1)[rows, table.cols] = np.where(table.full, _FULL, _PARTIAL)
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


def _table(states: Tensor, frame: Frame, size: int, rule: Rule) -> BlockMask:
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
