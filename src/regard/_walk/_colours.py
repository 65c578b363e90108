"""How strong the colour of a number is, and what a matrix looks like when it is too large to be printed."""

from __future__ import annotations

import numpy as np

from regard._walk._story import Numbers, Panel


def strengths(values: Numbers, kind: str, top: float | None = None) -> Numbers:
    """From -1 to 1: which colour a number gets and how much of it; what is not finite gets none."""
    given = np.asarray(values, dtype=np.float64)
    numbers: Numbers = np.where(np.isfinite(given), given, 0.0)
    if kind == "weights":
        numbers = np.sqrt(numbers.clip(0.0, 1.0))  # square roots: small shares should still be seen
        return numbers
    if kind == "mask":
        return numbers
    largest = np.abs(numbers).max(initial=0.0) if top is None else top
    return (numbers / largest).clip(-1.0, 1.0) if largest > 0 else numbers


def smaller(panel: Panel, rows: int, columns: int) -> tuple[Numbers, tuple[int, int]]:
    """At most this many cells, each the mean of a rectangle of the matrix, and how large the rectangles are.

    Forbidden scores do not count: a cell of nothing else is 0.
    """
    values = np.asarray(panel.values, dtype=np.float64)
    finite = np.isfinite(values)
    row_ends, column_ends = (_cuts(size, most) for size, most in zip(values.shape, (rows, columns), strict=True))
    total = _sums(np.where(finite, values, 0.0), row_ends, column_ends)
    count = _sums(finite.astype(np.float64), row_ends, column_ends)
    sides = tuple(int(np.diff(ends).max(initial=1)) for ends in (row_ends, column_ends))
    return total / count.clip(min=1.0), (sides[0], sides[1])


def _cuts(size: int, most: int) -> Numbers:
    cells = min(size, most)
    return np.arange(cells + 1) * size // max(cells, 1)


def _sums(values: Numbers, row_ends: Numbers, column_ends: Numbers) -> Numbers:
    by_row = np.add.reduceat(values, row_ends[:-1], axis=0)
    sums: Numbers = np.add.reduceat(by_row, column_ends[:-1], axis=1)
    return sums
