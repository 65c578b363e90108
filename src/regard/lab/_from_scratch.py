"""E9: attention from scratch, on four tokens of width 3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from regard import api, reference
from regard._walk._draws import Draws
from regard._walk._examples import E9_X
from regard.lab._result import Matrix, Result, Table, numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

TOKENS = ("x1", "x2", "x3", "x4")


@dataclass(frozen=True)
class FromScratch(Result):
    name = "E9"
    topic = "from_scratch"

    seed: int
    weights: Matrix
    out: Matrix
    again: float  # largest difference of a second run with the same seed
    redrawn: float  # and of one whose projections are drawn anew
    fast: float  # largest difference between the formulas and regard.attention

    def tables(self, lang: str = "en") -> list[Table]:
        weights = tuple(numbers(token, row) for token, row in zip(TOKENS, self.weights, strict=True))
        out = tuple(numbers(token, row) for token, row in zip(TOKENS, self.out, strict=True))
        shown = tuple((self.say(key, lang), f"{getattr(self, key):.3g}") for key in ("again", "redrawn", "fast"))
        return [
            Table(self.say("weights", lang, seed=self.seed), ("", *TOKENS), weights),
            Table(self.say("out", lang), ("", "1", "2", "3"), out),
            Table(self.say("differences", lang), ("", ""), shown),
        ]

    def _figure(self) -> Figure:
        from regard.lab import _draw

        figure = _draw.figure(8.4, 3.6, "The same seed gives the same weights and outputs, bit for bit")
        left, right = figure.subplots(1, 2, width_ratios=(4, 3))
        _draw.heatmap(
            left, self.weights, "weights", columns=TOKENS, names=TOKENS, digits=3, most=max(map(max, self.weights))
        )
        left.set_xlabel("key")
        left.set_ylabel("query")
        for row, token, colour, mark in zip(
            self.out, TOKENS, (_draw.BLUE, _draw.ORANGE, _draw.GREEN, _draw.PINK), "osD^", strict=True
        ):
            right.plot(("1", "2", "3"), row, color=colour, marker=mark, label=token)
        right.legend(fontsize=9)
        _draw.tidy(right, x="entry", y="output", title="outputs")
        return figure


def from_scratch(seed: int = 0) -> FromScratch:
    """Q, K and V from random 3×3 projections, then the formulas in NumPy, compared with `regard.attention`."""
    weights, out = _run(seed)
    again, redrawn = _run(seed)[1], _run(seed + 1)[1]
    tensors = (torch.from_numpy(x)[None, None] for x in _projected(seed))
    fast = api.attention(*tensors)[0, 0].numpy()
    return FromScratch(
        seed,
        weights=_plain(weights),
        out=_plain(out),
        again=_largest_difference(again, out),
        redrawn=_largest_difference(redrawn, out),
        fast=_largest_difference(fast, out),
    )


def _plain(matrix: Array) -> Matrix:
    return tuple(tuple(row) for row in matrix.tolist())


def _largest_difference(one: Array, other: Array) -> float:
    return float(np.abs(one - other).max())


def _projected(seed: int) -> list[Array]:
    draws = Draws(seed)  # those of `regard walk E9`
    return [np.array(E9_X) @ draws.normal(3, 3) for _ in range(3)]


def _run(seed: int) -> tuple[Array, Array]:
    found = reference.attention(*_projected(seed), return_weights=True)
    return found.weights, found.out
