"""E4: without the scale, softmax saturates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from regard.lab._result import Result, Row, Table, check_counts, look
from regard.lab._sharpness import Sharpness, sharpness

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROW = 3  # the query whose weights the figure shows


@dataclass(frozen=True)
class Saturation(Result):
    name = "E4"
    topic = "saturation"

    head_dim: int
    keys: int
    queries: int
    raw: Sharpness
    scaled: Sharpness
    raw_row: Row  # all weights of one query, in descending order
    scaled_row: Row

    def tables(self, lang: str = "en") -> list[Table]:
        columns = ("", self.say("raw", lang), self.say("scaled", lang, head_dim=self.head_dim))
        digits = {"largest": 2, "entropy": 2, "slope": 4, "outside": 2}
        shown = tuple(
            (self.say(key, lang), *(f"{getattr(one, key):.{count}f}" for one in (self.raw, self.scaled)))
            for key, count in digits.items()
        )
        return [Table(self.say("sizes", lang, head_dim=self.head_dim, keys=self.keys), columns, shown)]

    def _figure(self) -> Figure:
        from regard.lab import _draw

        title = (
            f"Without the scale one key takes {self.raw.largest:.0%} of the weight; with it, {self.scaled.largest:.0%}"
        )
        figure = _draw.figure(8.4, 3.6, title)
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        ranks = range(1, self.keys + 1)
        for values, colour, mark, name in (
            (self.raw_row, _draw.ORANGE, "s", "no scaling"),
            (self.scaled_row, _draw.BLUE, "o", f"scores divided by √{self.head_dim}"),
        ):
            left.plot(ranks, values, color=colour, marker=mark, markersize=3, label=name)
        left.set_yscale("log")
        left.set_ylim(1e-12, 2)
        left.legend(fontsize=9, loc="lower right")
        _draw.tidy(left, x="keys, from the heaviest", y="weight", title="all weights of one query")
        names = ("entropy\n(nats)", "slope of softmax\n(× 100)")
        places = range(len(names))
        for shift, one, colour, name in (
            (-0.2, self.raw, _draw.ORANGE, "no scaling"),
            (0.2, self.scaled, _draw.BLUE, "scaled"),
        ):
            heights = (one.entropy, 100 * one.slope)
            bars = right.bar([at + shift for at in places], heights, 0.4, color=colour, label=name)
            right.bar_label(bars, [f"{height:.2f}" for height in heights], fontsize=9, padding=2)
        right.set_xticks(places, names)
        right.set_ylim(0, 4.3)
        right.legend(fontsize=9)
        _draw.tidy(right, x="", y="mean", title=f"over {self.queries} queries")
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
