"""Masks as a few areas of pairs, each a whole rectangle or a triangle below a causal edge: plain calls of a kernel.

A causal mask that leaves out some keys is one triangle, of the tokens that are left; a token that is left out sees, as
a query, a rectangle of the keys before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from regard.masks._intervals import RowIntervals, moves_of, segments

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
    moves = moves_of(lo, hi)
    last = (lo < hi).sum(0)[:-1] - 1  # the slot of the last interval
    grows = (last >= 0) & (moves == 4 ** np.maximum(last, 0))  # by one key at the end, and nothing else
    ranges = segments(np.where(grows | (moves == 0), moves, -1)) if lo.shape[1] else []
    if len(ranges) > _MOST_SEGMENTS:
        return None
    rectangles: dict[Ranges, Ranges] = {}  # rows of each, by keys
    triangles: list[Area] = []
    chain = _Chain()
    for start, stop, moved in ranges:
        keys = tuple((int(a), int(b)) for a, b in zip(lo[:, start], hi[:, start], strict=True) if a < b)
        if not keys:
            continue
        corner = keys[-1][1] - 1
        before = _without(keys, corner)
        # where rows stay the same, the first of them may still be the next row of a triangle
        if moved or before == chain.seen:
            edge = stop if moved else start + 1
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
