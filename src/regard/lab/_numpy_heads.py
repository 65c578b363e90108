"""E11: NumPy from scratch, 10 tokens of width 64, one head and eight."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from regard import reference
from regard.lab import _draw
from regard.lab._result import Result, Row, Table, Words, check_counts, numbers

STEPS = ("query", "query_heads", "scores", "weights", "heads", "concat", "output")


@dataclass(frozen=True)
class NumpyHeads(Result):
    heads: int
    one: dict[str, tuple[int, ...]]  # the shape of every step, with one head
    many: dict[str, tuple[int, ...]]  # and with all of them
    first_row: Row  # weights of the first token, first of the many heads
    first_row_of_one: Row

    def _tables(self, say: Words) -> list[Table]:
        names = (say("one"), say("many", heads=self.heads))
        shapes = ((say(step), str(list(self.one[step])), str(list(self.many[step]))) for step in STEPS)
        both = (self.first_row_of_one, self.first_row)
        rows = [numbers(str(key), weights, 3) for key, weights in enumerate(zip(*both, strict=True))]
        total = numbers(say("total"), tuple(map(sum, both)), 6)
        return [
            say.table("shapes", ("", *names), shapes),
            say.table("row", (say("key"), *names), [*rows, total]),
        ]

    def _figure(self) -> _draw.Figure:
        title = f"The first token's weights: one head, and the first of {self.heads}; each row sums to 1"
        figure, axes = _draw.subplots(8.4, 2.6, title)
        both = (self.first_row_of_one, self.first_row)
        keys = tuple(map(str, range(len(self.first_row))))
        _draw.heatmap(
            axes, both, "", tokens=("one head", f"head 0 of {self.heads}"), columns=keys, most=max(map(max, both))
        )
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
