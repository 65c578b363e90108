"""E9: attention from scratch, on four tokens of width 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from regard import api, reference
from regard._walk._draws import Draws
from regard._walk._examples import E9_X
from regard.lab import _draw
from regard.lab._result import Matrix, Result, Table, Words, named_rows, rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

TOKENS = ("x1", "x2", "x3", "x4")


@dataclass(frozen=True)
class FromScratch(Result):
    seed: int
    weights: Matrix
    out: Matrix
    again: float  # largest difference of a second run with the same seed
    redrawn: float  # and of one whose projections are drawn anew
    fast: float  # largest difference between the formulas and regard.attention

    def _tables(self, say: Words) -> list[Table]:
        differences = ((say(key), f"{getattr(self, key):.3g}") for key in ("again", "redrawn", "fast"))
        return [
            say.table("weights", ("", *TOKENS), named_rows(TOKENS, self.weights), seed=self.seed),
            say.table("out", ("", "1", "2", "3"), named_rows(TOKENS, self.out)),
            say.table("differences", ("", ""), differences),
        ]

    def _figure(self) -> _draw.Figure:
        title = "The same seed gives the same weights and outputs, bit for bit"
        figure, (left, right) = _draw.subplots(8.4, 3.6, title, 2, width_ratios=(4, 3))
        most = max(map(max, self.weights))
        _draw.heatmap(left, self.weights, "weights", tokens=TOKENS, digits=3, most=most, y="query")
        looks = zip((_draw.BLUE, _draw.ORANGE, _draw.GREEN, _draw.PINK), "osD^", strict=True)
        for row, token, (colour, mark) in zip(self.out, TOKENS, looks, strict=True):
            right.plot(("1", "2", "3"), row, color=colour, marker=mark, label=token)
        _draw.tidy(right, x="entry", y="output", title="outputs", legend="best")
        return figure


def from_scratch(seed: int = 0) -> FromScratch:
    """Q, K and V from random 3×3 projections, then the formulas in NumPy, compared with `regard.attention`."""
    weights, out = _run(seed)
    tensors = (torch.from_numpy(x)[None, None] for x in _projected(seed))
    fast = api.attention(*tensors)[0, 0].numpy()
    others = (_run(seed)[1], _run(seed + 1)[1], fast)
    again, redrawn, different = (float(np.abs(other - out).max()) for other in others)
    return FromScratch(seed, rows(torch.from_numpy(weights)), rows(torch.from_numpy(out)), again, redrawn, different)


def _projected(seed: int) -> list[Array]:
    draws = Draws(seed)  # those of `regard walk E9`
    return [np.array(E9_X) @ draws.normal(3, 3) for _ in range(3)]


def _run(seed: int) -> tuple[Array, Array]:
    found = reference.attention(*_projected(seed), return_weights=True)
    return found.weights, found.out
