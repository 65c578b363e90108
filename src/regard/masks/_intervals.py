"""Masks as intervals of keys: for each query row a few half-open intervals, computed with NumPy in O(rows)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.masks._arguments import plain

if TYPE_CHECKING:
    from regard.masks._base import Mask

Whole = NDArray[np.int64]
States = NDArray[np.int8]
# Each slot is a pair of arrays (lo, hi), broadcastable to [groups, rows]; hi ≤ lo is empty. At one row, intervals of
# different slots neither overlap nor touch.
Spans = list[tuple[Whole, Whole]]

EMPTY, PARTIAL, FULL = 0, 1, 2
ZERO: Whole = np.zeros((1, 1), dtype=np.int64)
_MOST_SLOTS = 8
MOST_INTERVALS = 4


class RowIntervals(NamedTuple):
    """``lo`` and ``hi``, int64 [groups, K, L]: row r of group g may see the keys lo ≤ j < hi of its K intervals.

    There is one group, or one for each batch item. Intervals are ascending, apart from each other and inside [0, S];
    unused slots are last, with lo = hi = 0.
    """

    lo: Whole
    hi: Whole

    @property
    def nbytes(self) -> int:
        return self.lo.nbytes + self.hi.nbytes


class Strip:
    """Some neighbouring rows of some neighbouring batch groups of a call, for one head."""

    def __init__(self, L: int, S: int, offsets: Whole, rows: range, groups: range | None = None, head: int = 0) -> None:
        self.L = L
        self.S = S
        self.start = rows.start
        self.stop = rows.stop
        self.groups = range(len(offsets)) if groups is None else groups
        self.head = head
        self.offsets = self.pick(offsets)
        self._i: Whole | None = None

    @property
    def i(self) -> Whole:
        """Query positions, [groups, rows]."""
        if self._i is None:
            self._i = self.offsets + np.arange(self.start, self.stop, dtype=np.int64)
        return self._i

    def clip(self, keys: Whole) -> Whole:
        return np.clip(keys, 0, self.S)

    def pick(self, array: NDArray[np.generic]) -> NDArray:  # type: ignore[type-arg]
        """The part of an array [batch or 1, ...] that belongs to the groups of this strip."""
        return array if len(array) == 1 else array[self.groups.start : self.groups.stop]


def same_for_all(lo: int, hi: int) -> Spans:
    """One interval, the same in every row."""
    return [(np.full((1, 1), lo, dtype=np.int64), np.full((1, 1), hi, dtype=np.int64))]


def intersection(a: Spans, b: Spans, strip: Strip) -> Spans | None:
    spans = [(np.maximum(lo, low), np.minimum(hi, high)) for lo, hi in a for low, high in b]
    if len(spans) > 2:
        spans = _used(spans)
    return spans if len(spans) <= _MOST_SLOTS else _few(tidy(spans, strip))


def union(a: Spans, b: Spans, strip: Strip) -> Spans | None:
    spans = _ascending([_marked(lo, hi, strip.S) for lo, hi in a + b])
    for k in range(1, len(spans)):
        lo, hi = spans[k - 1]
        low, high = spans[k]
        # Merged into the later slot, so that a chain of touching intervals collapses in one pass.
        touch = low <= hi
        spans[k] = np.where(touch, lo, low), np.where(touch, np.maximum(hi, high), high)
        spans[k - 1] = np.where(touch, strip.S, lo), np.where(touch, strip.S, hi)
    return _few(_used(spans))


def complement(spans: Spans, strip: Strip) -> Spans | None:
    gaps: Spans = []
    end = ZERO
    for lo, hi in tidy(spans, strip):
        gaps.append((end, lo))
        end = hi
    gaps.append((end, np.full((1, 1), strip.S, dtype=np.int64)))
    return _few(_used(gaps))


def tidy(spans: Spans, strip: Strip) -> Spans:
    """Slots in ascending order at every row, empty ones last (as lo = hi = S), slots used nowhere left out."""
    return _used(_ascending([_marked(lo, hi, strip.S) for lo, hi in spans]))


def _few(spans: Spans) -> Spans | None:
    return spans if len(spans) <= _MOST_SLOTS else None


def _used(spans: Spans) -> Spans:
    return [(lo, hi) for lo, hi in spans if (lo < hi).any()]


def _marked(lo: Whole, hi: Whole, S: int) -> tuple[Whole, Whole]:
    """Empty intervals moved to the far end, where sorting leaves them last."""
    empty = lo >= hi
    return np.where(empty, S, lo), np.where(empty, S, hi)


def _ascending(spans: Spans) -> Spans:
    """Sort the slots of every row by lo: there are few slots and many rows, so slots are swapped pairwise."""
    for last in range(len(spans) - 1, 0, -1):
        for k in range(last):
            (lo, hi), (low, high) = spans[k], spans[k + 1]
            swap = lo > low
            if swap.any():
                spans[k] = np.where(swap, low, lo), np.where(swap, high, hi)
                spans[k + 1] = np.where(swap, lo, low), np.where(swap, hi, high)
    return spans


def moves_of(lo: Whole, hi: Whole) -> Whole:
    """How intervals [K, rows] move from each row to the next, as a number of two binary digits for each: whether its
    start, and whether its end, is one key further. −1 where they move in another way."""
    step_lo, step_hi = np.diff(lo), np.diff(hi)
    even = ((step_lo >= 0) & (step_lo <= 1) & (step_hi >= 0) & (step_hi <= 1)).all(0)
    digits = 4 ** np.arange(len(lo))[:, None]
    return np.where(even, ((step_lo * 2 + step_hi) * digits).sum(0), -1)


def segments(moves: Whole) -> list[tuple[int, int, int]]:
    """Maximal ranges of rows whose intervals move alike: (start, stop, how they move). There is one row more than there
    are moves."""
    ends = moves == -1
    ends[1:] |= (moves[1:] != moves[:-1]) & (moves[:-1] != -1)
    starts = [0, *(1 + np.flatnonzero(ends)).tolist()]
    stops = [*starts[1:], len(moves) + 1]
    ranges = zip(starts, stops, strict=True)
    return [(start, stop, int(moves[start]) if stop - start > 1 else 0) for start, stop in ranges]


def offset_array(offset: int | Tensor) -> Whole | None:
    """The query offsets, [1 or B, 1]; None when they may not be read."""
    if not isinstance(offset, Tensor):
        return np.full((1, 1), offset, dtype=np.int64)
    if torch.compiler.is_compiling() or not plain(offset):
        return None
    return offset.detach().reshape(-1, 1).to(torch.int64).numpy()


def group_count(mask: Mask, offsets: Whole, B: int) -> int:
    """B when rows differ between batch items, else 1."""
    return 1 if mask.batch == 1 and len(offsets) == 1 else B


def row_intervals(mask: Mask, L: int, S: int, offset: int | Tensor, B: int) -> RowIntervals | None:
    """See :meth:`Mask.rows`."""
    offsets = offset_array(offset)
    if offsets is None or mask.heads != 1 or not mask.readable():
        return None
    groups = group_count(mask, offsets, B)
    strip = Strip(L, S, offsets, range(L), range(groups))
    spans = mask._spans(strip)
    if spans is None:
        return None
    spans = tidy(spans, strip)
    if len(spans) > MOST_INTERVALS:
        return None
    shape = (groups, max(1, len(spans)), L)
    lo, hi = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for k, (low, high) in enumerate(spans):
        used = low < high
        lo[:, k] = np.where(used, low, 0)
        hi[:, k] = np.where(used, high, 0)
    return RowIntervals(lo, hi)
