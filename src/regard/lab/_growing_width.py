"""X1: what happens without √d_k as d_k grows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from regard.lab import _draw
from regard.lab._result import Result, Table, Words, check_counts
from regard.lab._sharpness import Sharpness, sharpness

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
SHOWN = {  # a number of Sharpness: what its panel is called, and its unit
    "entropy": ("entropy", "nats, mean over rows"),
    "largest": ("largest weight", "mean over rows"),
    "gradient": ("gradient that reaches the scores", "mean size"),
}


@dataclass(frozen=True)
class GrowingWidth(Result):
    widths: tuple[int, ...]
    keys: int
    raw: tuple[Sharpness, ...]  # one for each width
    scaled: tuple[Sharpness, ...]

    def _tables(self, say: Words) -> list[Table]:
        def small(value: float) -> str:
            return f"{value:.4f}" if value < 0.1 else f"{value:.2f}"

        columns = ("d_k", *(say(f"{key}_{how}") for key in SHOWN for how in ("raw", "scaled")))
        lines = (
            (str(width), *(small(getattr(one, key)) for key in SHOWN for one in pair))
            for width, *pair in zip(self.widths, self.raw, self.scaled, strict=True)
        )
        return [say.table("sizes", columns, lines, keys=self.keys)]

    def _figure(self) -> _draw.Figure:
        title = "Without √d_k, wider heads give nearly all weight to one key; with √d_k they do not"
        figure, panels = _draw.subplots(9.6, 3.5, title, 3)
        for axes, (key, (name, unit)) in zip(panels, SHOWN.items(), strict=True):
            for found, colour, mark, label in (
                (self.raw, _draw.ORANGE, "s", "no scaling"),
                (self.scaled, _draw.BLUE, "o", "divided by √d_k"),
            ):
                values = [getattr(one, key) for one in found]
                axes.plot(self.widths, values, color=colour, marker=mark, markersize=4, label=label)
            _draw.log_ticks(axes, self.widths[::2], 2, fontsize=8)
            axes.set_ylim(bottom=0)
            _draw.tidy(axes, x="d_k", y=unit, title=name)
        entropy, largest, gradient = panels
        entropy.axhline(math.log(self.keys), color=_draw.GREY, linestyle=":", linewidth=1.2)
        entropy.text(1, math.log(self.keys) + 0.06, f"equal weights: ln {self.keys}", fontsize=8, color=_draw.GREY)
        entropy.set_ylim(0, 4.7)
        largest.set_ylim(0, 1.02)
        gradient.legend(fontsize=9, loc="lower left")
        return figure


def growing_width(widths: tuple[int, ...] = WIDTHS, keys: int = 64, queries: int = 500, seed: int = 0) -> GrowingWidth:
    """Entropy, largest weight and gradient of attention over normal data, for heads of growing width."""
    check_counts(keys=keys, queries=queries, **{f"widths[{at}]": width for at, width in enumerate(widths)})
    raw = tuple(sharpness(width, keys, queries, scale=1.0, seed=seed) for width in widths)
    scaled = tuple(sharpness(width, keys, queries, scale=width**-0.5, seed=seed) for width in widths)
    return GrowingWidth(widths, keys, raw, scaled)
