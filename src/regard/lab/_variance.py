"""E3: the variance of a dot product is its width."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from regard._display.units import whole
from regard.lab import _draw
from regard.lab._result import Result, Row, Table, Words, check_counts

BINS = 81
REACH = 32.5  # four standard deviations of a dot product of width 64, in bins of 0.8


@dataclass(frozen=True)
class Variance(Result):
    head_dim: int
    pairs: int
    raw: float
    scaled: float
    raw_histogram: Row  # share of the pairs in each of the bins, which are equally wide from −reach to reach
    scaled_histogram: Row
    reach: float

    def _tables(self, say: Words) -> list[Table]:
        rows = (
            (say("raw"), f"{self.raw:.3f}", str(self.head_dim)),
            (say("scaled", head_dim=self.head_dim), f"{self.scaled:.6f}", "1"),
        )
        columns = ("", *say.each("variance", "expected"))
        return [say.table("pairs", columns, rows, pairs=self.pairs, head_dim=self.head_dim)]

    def _figure(self) -> _draw.Figure:
        width = self.head_dim
        title = f"A dot product of width {width} has variance {self.raw:.1f}; divided by √{width}, {self.scaled:.3f}"
        figure, axes = _draw.subplots(8.4, 3.6, title)
        step = 2 * self.reach / len(self.raw_histogram)
        middles = [-self.reach + step * (at + 0.5) for at in range(len(self.raw_histogram))]
        for shares, colour, name, variance in (
            (self.raw_histogram, _draw.ORANGE, "as it is", self.raw),
            (self.scaled_histogram, _draw.BLUE, f"divided by √{width}", self.scaled),
        ):
            label = f"{name}: standard deviation {variance**0.5:.2f}"
            axes.fill_between(middles, shares, step="mid", color=colour, label=label)
        axes.set_yscale("log")
        axes.set_ylim(1e-4, 1)
        axes.set_xlim(-self.reach, self.reach)
        _draw.tidy(axes, x="score", y=f"share of {whole(self.pairs)} pairs", legend="upper right")
        return figure


def variance(head_dim: int = 64, pairs: int = 100_000, seed: int = 0) -> Variance:
    """The population variance of q·k for normal q and k, as it is and divided by √head_dim."""
    check_counts(head_dim=head_dim, pairs=pairs)
    draw = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(pairs, head_dim, generator=draw) for _ in range(2))
    dots = (query * key).sum(-1)
    scaled = dots / head_dim**0.5
    return Variance(
        head_dim,
        pairs,
        raw=dots.var(correction=0).item(),
        scaled=scaled.var(correction=0).item(),
        raw_histogram=_shares(dots),
        scaled_histogram=_shares(scaled),
        reach=REACH,
    )


def _shares(values: torch.Tensor) -> Row:
    counts = torch.histc(values, BINS, -REACH, REACH)
    return tuple((counts / len(values)).tolist())
