"""X1: what happens without √d_k as d_k grows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from regard.lab._result import Result, Table, check_counts
from regard.lab._sharpness import Sharpness, sharpness

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
SHOWN = ("entropy", "largest", "gradient")


@dataclass(frozen=True)
class GrowingWidth(Result):
    name = "X1"
    topic = "growing_width"

    widths: tuple[int, ...]
    keys: int
    raw: tuple[Sharpness, ...]  # one for each width
    scaled: tuple[Sharpness, ...]

    def tables(self, lang: str = "en") -> list[Table]:
        columns = ("d_k", *(self.say(f"{key}_{how}", lang) for key in SHOWN for how in ("raw", "scaled")))
        lines = []
        for width, raw, scaled in zip(self.widths, self.raw, self.scaled, strict=True):
            values = [(getattr(raw, key), getattr(scaled, key)) for key in SHOWN]
            lines.append(
                (str(width), *(f"{one:.4f}" if one < 0.1 else f"{one:.2f}" for pair in values for one in pair))
            )
        return [Table(self.say("sizes", lang, keys=self.keys), columns, tuple(lines))]

    def _figure(self) -> Figure:
        from regard.lab import _draw

        figure = _draw.figure(9.6, 3.5, "Without √d_k attention hardens as heads grow wider; with it, it does not")
        titles = ("entropy", "largest weight", "gradient that reaches the scores")
        for axes, key, title in zip(figure.subplots(1, 3), SHOWN, titles, strict=True):
            for values, colour, mark, name in (
                (self.raw, _draw.ORANGE, "s", "no scaling"),
                (self.scaled, _draw.BLUE, "o", "divided by √d_k"),
            ):
                axes.plot(
                    self.widths,
                    [getattr(one, key) for one in values],
                    color=colour,
                    marker=mark,
                    markersize=4,
                    label=name,
                )
            axes.set_xscale("log", base=2)
            axes.set_xticks(self.widths[::2], [str(width) for width in self.widths[::2]], fontsize=8)
            axes.minorticks_off()
            axes.set_ylim(bottom=0)
            units = {"entropy": "nats, mean over rows", "largest": "mean over rows", "gradient": "mean size"}
            _draw.tidy(axes, x="d_k", y=units[key], title=title)
            if key == "entropy":
                axes.axhline(math.log(self.keys), color=_draw.GREY, linestyle=":", linewidth=1.2)
                axes.text(1, math.log(self.keys) + 0.06, f"all alike: ln {self.keys}", fontsize=8, color=_draw.GREY)
                axes.set_ylim(0, 4.7)
            if key == "largest":
                axes.set_ylim(0, 1.02)
            if key == "gradient":
                axes.legend(fontsize=9, loc="lower left")
        return figure


def growing_width(widths: tuple[int, ...] = WIDTHS, keys: int = 64, queries: int = 500, seed: int = 0) -> GrowingWidth:
    """Entropy, largest weight and gradient of attention over normal data, for heads of growing width."""
    check_counts(keys=keys, queries=queries, **{f"widths[{at}]": width for at, width in enumerate(widths)})
    raw = tuple(sharpness(width, keys, queries, scale=1.0, seed=seed) for width in widths)
    scaled = tuple(sharpness(width, keys, queries, scale=width**-0.5, seed=seed) for width in widths)
    return GrowingWidth(widths, keys, raw, scaled)
