"""Which blocks of a mask are empty, partial or full, without building L × S."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.masks._intervals import (
    EMPTY,
    FULL,
    PARTIAL,
    Spans,
    States,
    Strip,
    Whole,
    group_count,
    intersection,
    offset_array,
)

if TYPE_CHECKING:
    from regard.masks._base import Mask

_STRIP_ROWS = 2**16
_STRIP_CELLS = 2**22


class BlockTable(NamedTuple):
    """The non-empty blocks, one list for each group and query block.

    The key blocks of query block q of group g are ``cols[row_ptr[g, q] : row_ptr[g, q + 1]]``, ascending, and ``full``
    at the same places says whether all pairs of the block are permitted (for all heads). Blocks that are not listed are
    empty for all heads. There is one group, or one for each batch item.
    """

    row_ptr: Whole  # [groups, query blocks + 1]
    cols: NDArray[np.int32]
    full: NDArray[np.bool_]
    block_q: int
    block_k: int
    key_blocks: int

    @property
    def groups(self) -> int:
        return len(self.row_ptr)

    @property
    def query_blocks(self) -> int:
        return int(self.row_ptr.shape[1]) - 1

    @property
    def owners(self) -> Whole:
        """The query block of each listed one, counted through the groups."""
        counts = np.diff(self.row_ptr, axis=1).ravel()
        return np.repeat(np.arange(len(counts)), counts)

    @property
    def nbytes(self) -> int:
        return self.row_ptr.nbytes + self.cols.nbytes + self.full.nbytes


class _Cells(NamedTuple):
    """The non-empty blocks of a strip: how many in each query block, then all of them in order."""

    counts: Whole
    cols: NDArray[np.int32]
    full: NDArray[np.bool_]


def block_table(mask: Mask, L: int, S: int, offset: int | Tensor, B: int, block_q: int, block_k: int) -> BlockTable:
    """See :meth:`Mask.blocks`."""
    offsets = offset_array(offset)
    key_blocks = -(-S // block_k)
    if offsets is None or torch.compiler.is_compiling():
        parts = [_all_partial(-(-L // block_q), key_blocks)]
        groups = 1
    else:
        groups = group_count(mask, offsets, B)
        parts = _by_intervals(mask, L, S, offsets, groups, block_q, block_k) or [
            _within_intervals(mask, strip, block_q, block_k)
            for strip in _strips(L, S, offsets, groups, block_q, max(1, _STRIP_CELLS // max(1, key_blocks)) * block_q)
        ]
    counts = np.concatenate([part.counts for part in parts]) if parts else np.zeros(0, np.int64)
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    heads = np.arange(groups)[:, None] * -(-L // block_q)
    return BlockTable(
        ends[heads + np.arange(-(-L // block_q) + 1)],
        np.concatenate([part.cols for part in parts]) if parts else np.zeros(0, np.int32),
        np.concatenate([part.full for part in parts]) if parts else np.zeros(0, np.bool_),
        block_q,
        block_k,
        key_blocks,
    )


def _strips(
    L: int, S: int, offsets: Whole, groups: int, block_q: int, rows: int, together: bool = False
) -> Iterator[Strip]:
    """The call in strips of whole query blocks: several groups at once where they are short and may be together."""
    rows = max(block_q, rows // block_q * block_q)
    step = max(1, rows // max(L, 1)) if together else 1
    for g in range(0, groups, step):
        members = range(g, min(g + step, groups))
        for start in range(0, L, rows):
            yield Strip(L, S, offsets, range(start, min(start + rows, L)), members)


def _by_intervals(
    mask: Mask, L: int, S: int, offsets: Whole, groups: int, block_q: int, block_k: int
) -> list[_Cells] | None:
    parts = []
    for strip in _strips(L, S, offsets, groups, block_q, _STRIP_ROWS, together=True):
        spans = mask._spans(strip)
        if spans is None:
            return None
        parts.append(_interval_cells(spans, strip, block_q, block_k))
    return parts


def _narrowed(mask: Mask, strip: Strip) -> tuple[Spans | None, list[Mask]]:
    """Intervals that the mask lies within, and what of it they do not say; both together mean the mask."""
    spans, others = None, []
    for part in mask.conjuncts:
        found = part._spans(strip)
        joint = found if found is None or spans is None else intersection(spans, found, strip)
        if joint is None:
            others.append(part)
        else:
            spans = joint
    return spans, others


def _within_intervals(mask: Mask, strip: Strip, block_q: int, block_k: int) -> _Cells:
    """The blocks of a mask that is partly intervals: what is not is asked only about blocks that these touch."""
    spans, others = _narrowed(mask, strip)
    if spans is None:
        return _cells_of(_states(mask, strip, block_q, block_k))
    counts, cols, full = _interval_cells(spans, strip, block_q, block_k)
    rows = np.repeat(np.arange(len(counts)), counts)
    for part in others:
        states = part._states_at(strip, rows, cols, block_q, block_k)
        if states is None:
            states = _states(part, strip, block_q, block_k)[rows, cols]
        some = states > 0
        rows, cols, full = rows[some], cols[some], full[some] & (states[some] == FULL)
    return _Cells(np.bincount(rows, minlength=len(counts)), cols, full)


def cells(L: int, S: int, block: int) -> int:
    """How many blocks a call has."""
    return -(-L // block) * -(-S // block)


def most_blocks(mask: Mask, L: int, S: int, offset: int | Tensor, B: int, block: int) -> int:
    """The most blocks that are listed for a mask, 0 where intervals say all; in O(L), without listing them."""
    offsets = offset_array(offset)
    if offsets is None:
        return B * cells(L, S, block)
    groups, total = group_count(mask, offsets, B), 0
    for strip in _strips(L, S, offsets, groups, block, _STRIP_ROWS):
        spans, others = _narrowed(mask, strip)
        if not others:
            return 0
        if spans is None:
            return groups * cells(L, S, block)
        edges = np.arange(0, strip.stop - strip.start, block)
        for lo, hi in spans:
            low, high = np.broadcast_arrays(lo, hi, np.empty((1, strip.stop - strip.start)))[:2]
            first = np.minimum.reduceat(np.where(low < high, low, S)[0], edges) // block
            last = -(-np.maximum.reduceat(np.where(low < high, high, 0)[0], edges) // block)
            total += int(np.maximum(last - first, 0).sum())
    return min(total, groups * cells(L, S, block))


def _interval_cells(spans: Spans, strip: Strip, block_q: int, block_k: int) -> _Cells:
    """Sweep over the key blocks of each query block, counting the rows that touch and the rows that cover them."""
    height = strip.stop - strip.start
    query_blocks = -(-height // block_q)
    width = -(-strip.S // block_k) + 1  # one more than the key blocks, so that an end stays within its query block
    events = [_events(lo, hi, strip, block_q, block_k, width) for lo, hi in spans]
    if not events:
        none = np.zeros(0, dtype=np.int64)
        events = [(none, none, none)]
    places, touch, cover = (np.concatenate(column) for column in zip(*events, strict=True))
    order = np.argsort(places, kind="stable")
    places = places[order]
    touching, covering = np.cumsum(touch[order]), np.cumsum(cover[order])
    lengths = np.diff(places, append=places[-1:])
    used = (touching > 0) & (lengths > 0)
    places, lengths, covering = places[used], lengths[used], covering[used]
    block = places // width
    rows = np.minimum(block_q, height - block % query_blocks * block_q)
    # Each piece of the sweep becomes its blocks: its first column, then one further for each block in the piece.
    first = np.repeat(places - block * width - np.cumsum(lengths) + lengths, lengths)
    cols = (first + np.arange(len(first))).astype(np.int32)
    counts = np.bincount(block, weights=lengths, minlength=query_blocks * len(strip.groups)).astype(np.int64)
    return _Cells(counts, cols, np.repeat(covering == rows, lengths))


def _events(lo: Whole, hi: Whole, strip: Strip, block_q: int, block_k: int, width: int) -> tuple[Whole, Whole, Whole]:
    """Where a row begins and ends to touch, and to cover, key blocks; neighbouring rows that agree count once."""
    shape = (len(strip.groups), strip.stop - strip.start)
    some = lo < hi
    first, last = lo // block_k * some, (hi + (block_k - 1)) // block_k * some
    inner, outer = (lo + (block_k - 1)) // block_k, np.where(hi == strip.S, width - 1, hi // block_k)
    whole = (inner < outer) & some
    bounds = [np.broadcast_to(part, shape) for part in (first, last, inner * whole, outer * whole)]
    change = np.zeros(shape, dtype=np.bool_)
    change[:, ::block_q] = True
    for part in bounds:
        change[:, 1:] |= part[:, 1:] != part[:, :-1]
    at = np.flatnonzero(change)
    times = np.diff(at, append=change.size)
    group, row = np.divmod(at, shape[1])
    base = (group * -(-shape[1] // block_q) + row // block_q) * width
    first, last, inner, outer = (part[group, row] for part in bounds)
    zero = np.zeros_like(times)
    return (
        np.concatenate([base + first, base + last, base + inner, base + outer]),
        np.concatenate([times, -times, zero, zero]),
        np.concatenate([zero, zero, times, -times]),
    )


def _states(mask: Mask, strip: Strip, block_q: int, block_k: int) -> States:
    """Empty < partial < full for each block of a strip: & is the smaller of two, | the larger, ~ the opposite."""
    spans = mask._spans(strip)
    shape = (-(-(strip.stop - strip.start) // block_q), -(-strip.S // block_k))
    if spans is not None:
        cells = _interval_cells(spans, strip, block_q, block_k)
        states = np.zeros(shape, dtype=np.int8)
        states[np.repeat(np.arange(shape[0]), cells.counts), cells.cols] = np.where(cells.full, FULL, PARTIAL)
        return states
    if mask.parts:
        inner = [_states(part, strip, block_q, block_k) for part in mask.parts]
        joined: States = mask._join(inner, np.minimum, np.maximum, lambda states: (FULL - states).astype(np.int8))
        return joined
    found = mask._block_states(strip, block_q, block_k) if strip.S else None
    return np.full(shape, PARTIAL, dtype=np.int8) if found is None else found


def _cells_of(states: States) -> _Cells:
    rows, cols = np.nonzero(states)
    counts = np.bincount(rows, minlength=len(states))
    return _Cells(counts, cols.astype(np.int32), states[rows, cols] == FULL)


def _all_partial(query_blocks: int, key_blocks: int) -> _Cells:
    counts = np.full(query_blocks, key_blocks, dtype=np.int64)
    cols = np.tile(np.arange(key_blocks, dtype=np.int32), query_blocks)
    return _Cells(counts, cols, np.zeros(len(cols), dtype=np.bool_))


def states_of(seen: NDArray[np.bool_], block_q: int, block_k: int) -> States:
    """Empty, partial or full for each block, over all heads, of a [heads, rows or 1, keys or 1] array."""
    some = _over_blocks(np.logical_or.reduce(seen, axis=0), np.logical_or, block_q, block_k)
    every = _over_blocks(np.logical_and.reduce(seen, axis=0), np.logical_and, block_q, block_k)
    return np.where(every, FULL, np.where(some, PARTIAL, EMPTY)).astype(np.int8)


def _over_blocks(seen: NDArray[np.bool_], join: np.ufunc, block_q: int, block_k: int) -> NDArray[np.bool_]:
    """Join a [rows or 1, keys or 1] array block by block."""
    if 0 in seen.shape:
        return np.zeros((-(-seen.shape[0] // block_q), -(-seen.shape[1] // block_k)), dtype=np.bool_)
    # Rows first: whole rows are joined at vector speed, and few are left for the slower walk along columns.
    rows = [join.reduce(seen[start : start + block_q], axis=0) for start in range(0, seen.shape[0], block_q)]
    joined: NDArray[np.bool_] = join.reduceat(np.stack(rows), np.arange(0, seen.shape[1], block_k), axis=1)
    return joined
