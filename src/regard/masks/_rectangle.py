"""Some rows of a call with some of its columns, as a rule: what `keep` says by tensors, for a few intervals of each."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.masks import _intervals
from regard.masks._base import Mask, Structure
from regard.masks._facts import KeySets
from regard.masks._flex import Frame, Predicate
from regard.masks._grid import Grid
from regard.masks._intervals import Spans, Strip

# start and stop of each, ascending and apart; None stops at the end
Parts = tuple[tuple[int, int | None], ...]


class Rectangle(Mask):
    """``rows`` (None: all) with ``columns``; or, with ``inside`` False, all other pairs. It has no tensors: what was
    found out about it once is known to every later call."""

    kind = "rectangle"
    _countable = _of_intervals = _by_call = True

    def __init__(self, rows: Parts | None, columns: Parts, inside: bool = True) -> None:
        super().__init__((self.kind, rows, columns, inside))
        self.rows_of, self.columns_of, self.inside = rows, columns, inside
        self._about_keys = rows is None

    @classmethod
    def intervals_in(cls, structure: Structure) -> float:
        _, _, columns, inside = structure
        return len(columns) + (not inside)

    def __invert__(self) -> Mask:
        return Rectangle(self.rows_of, self.columns_of, not self.inside)

    def _see(self, grid: Grid) -> Tensor:
        seen = _within(grid.j, self.columns_of).unsqueeze(0)
        if self.rows_of is not None:
            rows = torch.arange(grid.row_start, grid.row_stop, device=grid.device)
            seen = seen & _within(rows, self.rows_of).unsqueeze(1)
        return seen if self.inside else ~seen

    def _spans(self, strip: Strip) -> Spans | None:
        here = _intervals.ZERO + 1
        if self.rows_of is not None:
            here = np.zeros((1, strip.stop - strip.start), dtype=np.int64)
            for a, b in self.rows_of:
                here[:, max(0, a - strip.start) : max(0, _end(b, strip.L) - strip.start)] = 1
        spans = [(_intervals.ZERO + a, here * min(_end(b, strip.S), strip.S)) for a, b in self.columns_of]
        return spans if self.inside else _intervals.complement(spans, strip)

    def _key_sets(self, S: int, device: torch.device) -> KeySets:
        columns = _within(torch.arange(S, device=device), self.columns_of).unsqueeze(0)
        sets = ~columns, columns if self.rows_of is None else None
        return sets if self.inside else (sets[1], sets[0])

    def _predicate(self, frame: Frame) -> Predicate:
        rows, columns, inside = self.rows_of, self.columns_of, self.inside

        def see(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            seen = _within(k, columns) if rows is None else _within(k, columns) & _within(q, rows)
            return seen if inside else ~seen

        return Predicate(self.structure, see)

    def _text(self) -> str:
        rows = "" if self.rows_of is None else f"rows={_written(self.rows_of)}, "
        return f"{'' if self.inside else '~'}rectangle({rows}columns={_written(self.columns_of)})"


def rectangle(rows: NDArray[np.bool_], columns: NDArray[np.bool_], most: int) -> Mask | None:
    """Those pairs of a call whose row and column are both chosen; None where that takes more than ``most`` intervals of
    rows or of columns. Rows that are all of the call's, and columns up to its last, stay so in longer calls: one mask
    for every token that is decoded."""
    down, across = _parts(rows), _parts(columns)
    if len(down) > most or len(across) > most:
        return None
    return Rectangle(None if down == ((0, None),) else down, across)


def _parts(chosen: NDArray[np.bool_]) -> Parts:
    padded = np.zeros(len(chosen) + 2, dtype=np.bool_)
    padded[1:-1] = chosen
    edges = np.flatnonzero(padded[1:] != padded[:-1]).tolist()
    ends = [None if stop == len(chosen) else stop for stop in edges[1::2]]
    return tuple(zip(edges[::2], ends, strict=True))


def _within(at: Tensor, parts: Parts) -> Tensor:
    found = at < 0
    for start, stop in parts:
        found = found | (at >= start if stop is None else (at >= start) & (at < stop))
    return found


def _end(stop: int | None, size: int) -> int:
    return size if stop is None else stop


def _written(parts: Parts) -> str:
    """As Python slices: [0, 5:8, 12:]."""
    shown = [f"{a}:" if b is None else str(a) if b == a + 1 else f"{a}:{b}" for a, b in parts]
    return f"[{', '.join(shown)}]"
