"""Masks made of blocks: equal pieces of many rows in one kernel call, heads that see different keys apart.

Along the grid of its own blocks a mask has full blocks, triangles on the diagonal (where it is also causal) and perhaps
a few others. Full blocks of rows that see equally many of them are gathered into one call, likewise the triangles; what
is left goes step by step. A row's pieces merge by log-sum-exp.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard import masks
from regard.backends._schedule import Run, Step
from regard.masks import Mask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from regard.spec import Call, CallSpec

# a kernel works on many rows at a time; smaller blocks are left to the steps
LEAST, MOST = 16, 256
# keys, and weights where a backend keeps them, of the pieces computed at once, for each thread: few, to stay in
# its core's cache, but enough to be worth the launch
AT_ONCE = 3 << 18
# of one piece; up to here a thread is given two at least
LARGE = 1 << 19
# bytes of places that are kept for the next call
KEPT = 1 << 24


class Stack(NamedTuple):
    """n pieces of equal shape: piece p joins row blocks rows[p] of an item with key blocks cols[p]."""

    item: NDArray[np.int64] | None  # [n]; None: all items alike
    rows: NDArray[np.int64]  # [n, m]
    cols: NDArray[np.int64]  # [n, w]
    block: int
    causal: bool


class Places(NamedTuple):
    """Where a part of a stack is in tensors [item, head, block, size, ...], see ``by_keys``: three indices that
    broadcast together, and the numbers of its row blocks and of its key blocks when all blocks are counted through."""

    item: Tensor
    rows: Tensor
    cols: Tensor
    row_numbers: Tensor
    col_numbers: Tensor
    first: int | None  # the first row block where the others follow it one by one: no need to gather them


@dataclass(frozen=True)
class Stacks:
    block: int
    stacks: list[Stack]
    rest: list[Step]
    covers: bool  # every row is in one stack that is not causal; those come first
    _places: dict[tuple[int, ...], list[list[Places]]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(stack.rows.nbytes + stack.cols.nbytes for stack in self.stacks)

    def parts(self, spec: CallSpec) -> Iterator[tuple[Stack, list[Places]]]:
        """Each stack with its parts; worked out once for calls of the same sizes, unless that would be much memory."""
        key = (spec.batch, spec.heads, spec.kv_heads, max(spec.head_dim, spec.value_dim), torch.get_num_threads())
        found = self._places.get(key)
        if found is None:
            found = [list(_parts_of(stack, spec)) for stack in self.stacks]
            if sum(part.col_numbers.nbytes for parts in found for part in parts) <= KEPT:
                self._places.clear()
                self._places[key] = found
        return zip(self.stacks, found, strict=True)


def stacks_of(call: Call) -> Stacks | None:
    """The call in stacks, or None where its mask is not made of blocks or the call is better off otherwise."""
    spec, mask = call.spec, call.mask
    if mask is None or spec.device != "cpu" or spec.bias is not None or spec.dropout or mask.heads != 1:
        return None
    if isinstance(call.offset, Tensor):
        return None
    if not mask.readable() or not mask.grain:
        return None
    key = ("stacks", spec.queries, spec.keys, call.offset, spec.batch)
    return mask.remember(key, call.offset, lambda: _build(mask, spec, int(call.offset)))


def _build(mask: Mask, spec: CallSpec, offset: int) -> Stacks | None:
    L, S = spec.queries, spec.keys
    block = math.gcd(mask.grain, offset)
    while block > MOST:
        block = block // 2 if block % 2 == 0 else 0
    if block < LEAST or min(L, S) < 2 * block:
        return None
    causal, others = _without_causal(mask)
    table = others.blocks(L, S, offset, spec.batch, block, block)
    groups, height = table.groups, table.query_blocks
    counts = np.diff(table.row_ptr, axis=1).ravel()
    row: NDArray[np.int64] = np.repeat(np.arange(groups * height), counts)
    col = table.cols.astype(np.int64)
    # blocks that the last rows or keys do not fill cannot be stacked
    whole = table.full & (col < S // block) & (row % height < L // block)
    place = row % height + offset // block if causal else np.full_like(row, S)
    seen = col <= place
    full, diagonal = whole & (col < place), whole & (col == place)
    left = seen & ~full & ~diagonal
    stacks = [*_stacked(row[full], col[full], groups, height, block, causal=False)]
    covers = L % block == 0 and sum(stack.rows.size for stack in stacks) == groups * height
    stacks += _stacked(row[diagonal], col[diagonal], groups, height, block, causal=True)
    return Stacks(block, stacks, _steps(row[left], col[left], groups, height, block, L, S), covers)


def _without_causal(mask: Mask) -> tuple[bool, Mask]:
    """Whether a mask is causal() & something, and that something."""
    others = [part for part in mask.conjuncts if part != masks.causal()]
    if len(others) in (0, len(mask.conjuncts)):
        return False, mask
    return True, functools.reduce(operator.and_, others)


def _stacked(
    row: NDArray[np.int64], col: NDArray[np.int64], groups: int, height: int, block: int, *, causal: bool
) -> Iterator[Stack]:
    """Rows with equally many key blocks, together; rows that see the same ones as the row above join it."""
    if not len(row):
        return
    counts = np.bincount(row, minlength=groups * height)
    ends = np.cumsum(counts)
    tall = 1 if causal else max(1, MOST // block)
    pieces: dict[tuple[int, int], list[tuple[NDArray[np.int64], NDArray[np.int64]]]] = {}
    for count in np.unique(counts[counts > 0]).tolist():
        rows = np.flatnonzero(counts == count)
        cols = col[(ends[rows] - count)[:, None] + np.arange(count)]
        same = np.zeros(len(rows), dtype=bool)
        same[1:] = (np.diff(rows) == 1) & (rows[1:] % height != 0) & (cols[1:] == cols[:-1]).all(1)
        # places in a run of equal rows; a run is cut into pieces of `tall`
        run = np.arange(len(rows)) - np.maximum.accumulate(np.where(same, 0, np.arange(len(rows))))
        heads = np.flatnonzero(run % tall == 0)
        sizes = np.diff(heads, append=len(rows))
        for size in np.unique(sizes).tolist():
            first = heads[sizes == size]
            pieces.setdefault((size, count), []).append((rows[first][:, None] + np.arange(size), cols[first]))
    for found in pieces.values():
        rows, cols = (np.concatenate(part) for part in zip(*found, strict=True))
        item = None if groups == 1 else rows[:, 0] // height
        yield Stack(item, rows % height, cols, block, causal)


def _steps(
    row: NDArray[np.int64], col: NDArray[np.int64], groups: int, height: int, block: int, L: int, S: int
) -> list[Step]:
    steps = []
    edges = [*np.flatnonzero(np.diff(row, prepend=-1)).tolist(), len(row)]
    for start, stop in itertools.pairwise(edges):
        item, at = divmod(int(row[start]), height)
        runs: list[Run] = []
        for place in col[start:stop].tolist():
            end = min((place + 1) * block, S)
            if runs and runs[-1].stop == place * block:
                runs[-1] = Run(runs[-1].start, end, False)
            else:
                runs.append(Run(place * block, end, False))
        batch = None if groups == 1 else item
        steps.append(Step(batch, at * block, min((at + 1) * block, L), tuple(runs), "tile", None, None, again=True))
    return steps


def piece_of(stack: Stack) -> Step:
    """One piece as a step of its own keys: what a backend is told of the whole stack."""
    rows, width = stack.rows.shape[1] * stack.block, stack.cols.shape[1] * stack.block
    if not stack.causal:
        return Step(None, 0, rows, (Run(0, width, True),), "rect", None, None)
    lo, hi = np.zeros((1, rows), dtype=np.int64), np.arange(1, rows + 1)[None]
    return Step(None, 0, rows, (Run(0, width, False),), "triangle", lo, hi)


def _parts_of(stack: Stack, spec: CallSpec) -> Iterator[Places]:
    """Some pieces at a time, so that what is gathered stays small; one item after another, so that its keys are near.
    There is an item for each key head, and all are alike or those of one item of the batch are."""
    alike = spec.batch * spec.kv_heads if stack.item is None else spec.kv_heads
    owner = np.zeros(len(stack.rows), np.int64) if stack.item is None else stack.item
    item = torch.from_numpy((owner * alike + np.arange(alike)[:, None]).ravel())
    rows, cols = (torch.from_numpy(np.tile(blocks, (alike, 1))) for blocks in (stack.rows, stack.cols))
    group = spec.heads // spec.kv_heads
    rows_of_keys = rows.shape[1] * stack.block * group
    numbers = cols.shape[1] * stack.block * (max(spec.head_dim, spec.value_dim) + rows_of_keys)
    threads = torch.get_num_threads()
    step = threads * max(2 if numbers <= LARGE else 1, AT_ONCE // numbers)
    for start in range(0, len(item), step):
        part = slice(start, start + step)
        at, row, col = item[part, None, None], rows[part, None, :], cols[part, None, :]
        yield _places(at, row, col, group, spec.queries // stack.block, spec.keys // stack.block)


def _places(item: Tensor, rows: Tensor, cols: Tensor, group: int, row_blocks: int, col_blocks: int) -> Places:
    heads = torch.arange(group, device=item.device)[None, :, None]
    row_numbers = ((item * group + heads) * row_blocks + rows).flatten()
    col_numbers = (item * col_blocks + cols).flatten()
    follow = bool((row_numbers.diff() == 1).all())
    return Places(item, rows, cols, row_numbers, col_numbers, int(row_numbers[0]) if follow else None)


def by_keys(call: Call) -> Call:
    """The call with an item for each key head and the heads that share it: what is read for an item then fits a cache.
    Its mask does not fit it any more; pieces of stacks have no need of it."""
    spec = call.spec
    items, group = spec.batch * spec.kv_heads, spec.heads // spec.kv_heads
    query, key, value = (split_items(tensor, items) for tensor in (call.query, call.key, call.value))
    return call.replace(spec=spec._replace(batch=items, heads=group, kv_heads=1), query=query, key=key, value=value)


def split_items(tensor: Tensor, items: int) -> Tensor:
    """[batch, head, ...] as [item, heads of an item, ...]; a view where the strides allow it."""
    return tensor.reshape(items, -1, *tensor.shape[2:])


def in_blocks(tensor: Tensor, block: int) -> Tensor:
    """[batch, head, token, ...] as [batch, head, block, size, ...], without the tokens that fill no block; a view."""
    count = tensor.shape[2] // block
    return torch.unflatten(tensor[:, :, : count * block], 2, (count, block))


class Room:
    """Memory that what is gathered uses again and again: fresh pages would cost more than the copying."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def of(self, name: str, rows: int, width: int, like: Tensor) -> Tensor:
        """[rows, width], not cleared."""
        numbers = rows * width
        kept = self._kept.get(name)
        if kept is None or kept.numel() < numbers:
            self._kept.pop(name, None)
            del kept  # before there is another
            kept = self._kept[name] = like.new_empty(numbers)
        return kept[:numbers].view(rows, width)


def take(blocks: Tensor, at: Places, of: str, room: Room | None = None) -> Tensor:
    """[n, head, places · size, ...]: the blocks of each piece side by side. ``of``: "row" or a name of what keys have,
    whose memory in the room is used again. Rows that follow each other are a view."""
    places, numbers = (at.rows, at.row_numbers) if of == "row" else (at.cols, at.col_numbers)
    if not blocks.is_contiguous():
        heads = torch.arange(blocks.shape[1], device=blocks.device)[None, :, None]
        return blocks[at.item, heads, places].flatten(2, 3)
    # whole blocks as rows: one copy each
    flat = blocks.view(-1, math.prod(blocks.shape[3:]))
    if of == "row" and at.first is not None:
        rows = flat[at.first : at.first + len(numbers)]
    elif room is None:
        rows = flat.index_select(0, numbers)
    else:
        rows = torch.index_select(flat, 0, numbers, out=room.of(of, len(numbers), flat.shape[1], flat))
    return rows.view(len(at.item), blocks.shape[1], -1, *blocks.shape[4:])


class Work(NamedTuple):
    """A stack to be computed: the call by key heads (see ``by_keys``), its tensors in blocks, memory to use again."""

    call: Call
    stack: Stack
    parts: list[Places]
    query: Tensor
    key: Tensor
    value: Tensor
    room: Room

    def inputs(self, at: Places) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of a part."""
        keys, values = take(self.key, at, "key", self.room), take(self.value, at, "value", self.room)
        return take(self.query, at, "row"), keys, values


def put(blocks: Tensor, at: Places, of: str, part: Tensor, *, add: bool = False) -> None:
    """The inverse of ``take``: write, or add (a key block may be in many pieces)."""
    places, numbers = (at.rows, at.row_numbers) if of == "row" else (at.cols, at.col_numbers)
    if not blocks.is_contiguous():
        heads = torch.arange(blocks.shape[1], device=blocks.device)[None, :, None]
        blocks.index_put_((at.item, heads, places), torch.unflatten(part, 2, (-1, blocks.shape[3])), accumulate=add)
        return
    flat = blocks.view(-1, math.prod(blocks.shape[3:]))
    if of == "row" and at.first is not None:
        rows = flat[at.first : at.first + len(numbers)].view(part.shape)
        if add:
            rows += part
        elif rows.data_ptr() != part.data_ptr():  # what was merged in place is there already
            rows.copy_(part)
        return
    source = part.to(blocks.dtype).reshape(-1, flat.shape[1])
    (flat.index_add_ if add else flat.index_copy_)(0, numbers, source)


def by_heads(call: Call) -> Call | None:
    """A call whose mask differs from head to head as one of batch · head items with one head each; None where the mask
    does not, or other parts of the call know its heads."""
    spec, mask = call.spec, call.mask
    if mask is None or mask.heads == 1 or spec.device != "cpu" or spec.bias is not None or spec.dropout:
        return None
    if not mask.readable() or not mask.grain:
        return None
    B, H = spec.batch, spec.heads
    apart = mask.remember(("by heads", B, H), 0, lambda: mask.per_head(B, H))
    if apart is None:
        return None
    group = H // spec.kv_heads
    key, value = (t.repeat_interleave(group, 1) if group > 1 else t for t in (call.key, call.value))
    query, key, value = (t.reshape(B * H, 1, *t.shape[2:]) for t in (call.query, key, value))
    offset = call.offset.repeat_interleave(H) if isinstance(call.offset, Tensor) else call.offset
    spec = spec._replace(batch=B * H, heads=1, kv_heads=1, mask=apart.structure, sinks=False)
    return call.replace(spec=spec, query=query, key=key, value=value, mask=apart, sinks=None, offset=offset)
