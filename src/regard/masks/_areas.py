"""Masks as a few areas of pairs, each a whole rectangle or a triangle below a causal edge: plain calls of a kernel.

A causal mask that leaves out some keys is one triangle, of the tokens that are left; a token that is left out sees, as
a query, a rectangle of the keys before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from regard.masks._intervals import RowIntervals, Whole

# start and stop of each, ascending and apart
Ranges = tuple[tuple[int, int], ...]

# more areas are no few launches; and changes from row to row beyond which nobody looks for them
MOST_AREAS = 16
_MOST_SEGMENTS = 64
# calls of fewer rows have other kernels, and are asked about anew for every token that is decoded
LEAST_ROWS = 128


class Area(NamedTuple):
    """Some rows of a call with some of its keys. Every row sees every key; with ``causal`` there are as many rows as
    keys, and row n sees the keys 0 … n of the area."""

    rows: Ranges
    keys: Ranges
    causal: bool = False
    merges: bool = False  # the rows are in areas before this one too
    shift: float | None = None  # of a steer: joins the logits of all of its pairs


def areas_of(intervals: RowIntervals | None) -> tuple[Area, ...] | None:
    """The areas of a mask that is the same for all items; None where there are none, or too many."""
    if intervals is None or len(intervals.lo) != 1:
        return None
    lo, hi = intervals.lo[0], intervals.hi[0]
    segments = _segments(lo, hi)
    if segments is None:
        return None
    rectangles: dict[Ranges, Ranges] = {}  # rows of each, by keys
    triangles: list[Area] = []
    chain = _Chain()
    for start, stop, grows in segments:
        keys = tuple((int(a), int(b)) for a, b in zip(lo[:, start], hi[:, start], strict=True) if a < b)
        if not keys:
            continue
        corner = keys[-1][1] - 1
        before = _without(keys, corner)
        # where rows stay the same, the first of them may still be the next row of a triangle
        if grows or before == chain.seen:
            edge = stop if grows else start + 1
            if before != chain.seen:
                chain.end(rectangles, triangles)
                chain = _Chain(before)
            chain = chain.longer(start, edge, corner)
            start = edge
        if start < stop:
            rectangles[keys] = (*rectangles.get(keys, ()), (start, stop))
    chain.end(rectangles, triangles)
    areas = (*(Area(joined(rows), keys) for keys, rows in rectangles.items()), *triangles)
    return areas if len(areas) <= MOST_AREAS else None


class _Chain(NamedTuple):
    """Rows each of which sees the keys of the one before and one more; the first sees ``before`` and one more."""

    before: Ranges = ()
    rows: Ranges = ()
    keys: Ranges = ()

    @property
    def seen(self) -> Ranges:
        """The keys of its last row."""
        return joined(self.before + self.keys)

    def longer(self, start: int, stop: int, key: int) -> _Chain:
        rows, keys = (*self.rows, (start, stop)), (*self.keys, (key, key + stop - start))
        return _Chain(self.before, joined(rows), joined(keys))

    def end(self, rectangles: dict[Ranges, Ranges], triangles: list[Area]) -> None:
        """Puts its areas to the others."""
        if size(self.rows) > 1:
            triangles.append(Area(self.rows, self.keys, causal=True, merges=bool(self.before)))
        keys = self.before if size(self.rows) > 1 else self.seen  # a triangle of one row is a rectangle
        if keys:
            rectangles[keys] = (*rectangles.get(keys, ()), *self.rows)


def _segments(lo: Whole, hi: Whole) -> list[tuple[int, int, bool]] | None:
    """Maximal ranges of rows (start, stop, grows) that see the same keys, or each one key more than the row before;
    None where they are many."""
    rows = lo.shape[1]
    if rows == 0:
        return []
    more = np.diff(hi)
    fixed = (np.diff(lo) == 0).all(0)
    last = (lo < hi).sum(0)[:-1] - 1  # the slot of the last interval
    grown = np.take_along_axis(more, np.maximum(last, 0)[None], 0)[0]
    still = fixed & (more == 0).all(0)
    grows = fixed & (last >= 0) & (grown == 1) & (np.abs(more).sum(0) == 1)
    move = np.where(still, 0, np.where(grows, 1, 2))  # from each row to the next; 2 is a jump
    # a range ends before a jump, and where one way to move becomes the other
    ends = move == 2
    ends[1:] |= (move[1:] != move[:-1]) & (move[:-1] != 2)
    starts = np.concatenate([[0], 1 + np.flatnonzero(ends)])
    if len(starts) > _MOST_SEGMENTS:
        return None
    stops = [*starts[1:].tolist(), rows]
    ranges = zip(starts.tolist(), stops, strict=True)
    return [(start, stop, stop - start > 1 and bool(move[start] == 1)) for start, stop in ranges]


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same numbers as ranges that are ascending and apart."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return tuple(found)


def outside(ranges: Ranges, count: int) -> Ranges:
    """The other numbers below ``count``."""
    edges = [0, *(edge for each in joined(ranges) for edge in each), count]
    return tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)


def size(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _without(ranges: Ranges, last: int) -> Ranges:
    *rest, (start, _) = ranges
    return tuple(rest) if start == last else (*rest, (start, last))
