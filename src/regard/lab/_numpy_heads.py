"""E11: NumPy from scratch, 10 tokens of width 64, one head and eight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from regard import reference
from regard.lab._result import Result, Row, Table, check_counts, numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS = ("query", "query_heads", "scores", "weights", "heads", "concat", "output")


@dataclass(frozen=True)
class NumpyHeads(Result):
    name = "E11"
    topic = "numpy_heads"

    heads: int
    one: dict[str, tuple[int, ...]]  # the shape of every step, with one head
    many: dict[str, tuple[int, ...]]  # and with all of them
    first_row: Row  # weights of the first token, first of the many heads
    first_row_of_one: Row

    def tables(self, lang: str = "en") -> list[Table]:
        shapes = tuple((self.say(step, lang), str(list(self.one[step])), str(list(self.many[step]))) for step in STEPS)
        count = self.say("many", lang, heads=self.heads)
        rows = tuple(
            (*numbers(name, row, 3), f"{sum(row):.6f}")
            for name, row in ((self.say("one", lang), self.first_row_of_one), (count, self.first_row))
        )
        keys = tuple(str(key) for key in range(len(self.first_row)))
        return [
            Table(self.say("shapes", lang), ("", self.say("one", lang), count), shapes),
            Table(self.say("row", lang), ("", *keys, self.say("total", lang)), rows),
        ]

    def _figure(self) -> Figure:
        from regard.lab import _draw

        figure = _draw.figure(
            8.4, 2.6, f"The first token's weights: one head, and the first of {self.heads}; each row sums to 1"
        )
        axes = figure.add_subplot()
        most = max(*self.first_row, *self.first_row_of_one)
        _draw.heatmap(
            axes, (self.first_row_of_one, self.first_row), "", names=("one head", f"head 0 of {self.heads}"), most=most
        )
        axes.set_xlabel("key")
        return figure


def numpy_heads(tokens: int = 10, width: int = 64, heads: int = 8, seed: int = 0) -> NumpyHeads:
    """`regard.reference.trace` on a drawn X [tokens, width], with one head and with several."""
    check_counts(tokens=tokens, width=width, heads=heads)
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((tokens, width))
    weights = {name: draw.standard_normal((width, width)) / width**0.5 for name in ("q", "k", "v", "out")}
    one, many = (reference.trace(x, x, x, weights, num_heads=count) for count in (1, heads))
    return NumpyHeads(
        heads,
        {step: tuple(one[step].shape) for step in STEPS},
        {step: tuple(many[step].shape) for step in STEPS},
        tuple(many["weights"][0, 0].tolist()),
        tuple(one["weights"][0, 0].tolist()),
    )
