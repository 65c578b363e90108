"""E1: two tokens, every number by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from regard._walk._examples import E1_X
from regard.lab._result import Matrix, Result, Table, look, numbers, rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOKENS = ("x1", "x2")


@dataclass(frozen=True)
class TwoTokens(Result):
    name = "E1"
    topic = "two_tokens"

    scores: Matrix
    weights: Matrix
    out: Matrix
    scaled_weights: Matrix  # the scores divided by √4 first
    scaled_out: Matrix

    def tables(self, lang: str = "en") -> list[Table]:
        places = ("", *(self.say("entry", lang, number=at) for at in range(1, 5)))
        shown = [("scores", self.scores), ("weights", self.weights), ("scaled_weights", self.scaled_weights)]
        return [
            *(Table(self.say(key, lang), ("", *TOKENS), _named(values)) for key, values in shown),
            Table(self.say("out", lang), places, _named(self.out)),
            Table(self.say("scaled_out", lang), places, _named(self.scaled_out)),
        ]

    def _figure(self) -> Figure:
        from regard.lab import _draw

        figure = _draw.figure(9.2, 3.2, "Both tokens reach both outputs: no entry is zero")
        grid = figure.subplots(1, 4, width_ratios=(5, 5, 6, 6))
        for axes, values, title in (
            (grid[0], self.weights, "weights, no scaling"),
            (grid[1], self.scaled_weights, "weights, scaled by √4"),
        ):
            _draw.heatmap(axes, values, title, columns=TOKENS, names=TOKENS, digits=4)
            axes.set_xlabel("key")
        for axes, values, title in (
            (grid[2], self.out, "outputs, no scaling"),
            (grid[3], self.scaled_out, "outputs, scaled"),
        ):
            _draw.heatmap(axes, values, title, columns=("1", "2", "3", "4"), names=TOKENS, digits=2)
            axes.set_xlabel("entry")
        grid[0].set_ylabel("query")
        return figure


def two_tokens() -> TwoTokens:
    """x1 = [1, 0, 1, 0] and x2 = [0, 1, 0, 1] attend to each other; the projections are the identity."""
    x = torch.tensor(E1_X, dtype=torch.float64)[None, None]
    plain, scaled = look(x, x, x, scale=1.0), look(x, x, x)
    return TwoTokens(rows(x @ x.mT), rows(plain.weights), rows(plain.out), rows(scaled.weights), rows(scaled.out))


def _named(values: Matrix) -> tuple[tuple[str, ...], ...]:
    return tuple(numbers(token, row) for token, row in zip(TOKENS, values, strict=True))
