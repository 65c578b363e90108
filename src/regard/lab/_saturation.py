"""E4: without the scale, softmax saturates."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from regard.lab import _draw
from regard.lab._result import Result, Row, Table, Words, check_counts, look
from regard.lab._sharpness import Sharpness, sharpness

ROW = 3  # the query whose weights the figure shows


@dataclass(frozen=True)
class Saturation(Result):
    head_dim: int
    keys: int
    queries: int
    raw: Sharpness
    scaled: Sharpness
    raw_row: Row  # all weights of one query, in descending order
    scaled_row: Row

    def _tables(self, say: Words) -> list[Table]:
        digits = {"largest": 2, "entropy": 2, "slope": 4, "outside": 2}
        rows = (
            (say(key), *(f"{getattr(one, key):.{count}f}" for one in (self.raw, self.scaled)))
            for key, count in digits.items()
        )
        columns = ("", say("raw"), say("scaled", head_dim=self.head_dim))
        return [say.table("sizes", columns, rows, head_dim=self.head_dim, keys=self.keys)]

    def _figure(self) -> _draw.Figure:
        shares = f"{self.raw.largest:.0%} of the weight; with scaling, {self.scaled.largest:.0%}"
        title = f"Without scaling, one key takes {shares}"
        figure, (left, right) = _draw.subplots(8.4, 3.6, title, 2, width_ratios=(3, 2))
        ranks, scaled = range(1, self.keys + 1), f"scores divided by √{self.head_dim}"
        left.plot(ranks, self.raw_row, color=_draw.ORANGE, marker="s", markersize=3, label="no scaling")
        left.plot(ranks, self.scaled_row, color=_draw.BLUE, marker="o", markersize=3, label=scaled)
        left.set_yscale("log")
        left.set_ylim(1e-12, 2)
        names = {"x": "keys, largest weight first", "y": "weight", "title": "all weights of one query"}
        _draw.tidy(left, **names, legend="lower right")
        both = (("no scaling", self.raw, _draw.ORANGE), ("scaled", self.scaled, _draw.BLUE))
        groups = [_draw.Bars(name, (one.entropy, 100 * one.slope), colour) for name, one, colour in both]
        _draw.bars(right, groups, gap=0.4, width=0.4, written=".2f")
        right.set_xticks(range(2), ("entropy\n(nats)", "slope of softmax\n(× 100)"))
        right.set_ylim(0, 4.3)
        _draw.tidy(right, x="", y="mean", title=f"over {self.queries} queries", legend="best")
        return figure


def saturation(head_dim: int = 512, keys: int = 64, queries: int = 500, seed: int = 0) -> Saturation:
    """Largest weight, entropy and slope of attention over normal data, with scale 1 and 1/√head_dim."""
    check_counts(head_dim=head_dim, keys=keys, queries=queries)
    draw = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(1, 1, count, head_dim, generator=draw) for count in (queries, keys))
    scales = (1.0, head_dim**-0.5)
    raw, scaled = (sharpness(head_dim, keys, queries, scale=scale, seed=seed) for scale in scales)
    lines = [
        look(query, key, key, scale=scale).weights[0, 0, min(ROW, queries - 1)].sort(descending=True).values
        for scale in scales
    ]
    return Saturation(head_dim, keys, queries, raw, scaled, *(tuple(line.tolist()) for line in lines))
