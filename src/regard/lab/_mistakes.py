"""X5: what notes on attention state and what is so, each with a number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from regard import masks
from regard.lab._result import Result, Row, Table, check_counts
from regard.nn import MultiHeadAttention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEYS = ("softmax", "range", "single", "causal", "width", "matrices", "orthogonal", "shared", "linear", "overfits")


@dataclass(frozen=True)
class Mistakes(Result):
    name = "X5"
    topic = "mistakes"

    softmax: Row  # of [2.3, 9.1, 0.5]
    deviation: float  # of unscaled scores at d_k = 512
    outside: float  # share of them beyond ±22
    single: float  # softmax of one number
    causal: tuple[tuple[int, ...], ...]  # what a query of 4 may see
    grown: float  # parameters at twice the width, as a multiple
    head_shape: tuple[int, int]  # of one head's W^Q at d_model = 512, 8 heads
    angles: Row  # cosines between the subspaces of two heads of a drawn layer, largest first
    shared: int  # equal numbers in the W^Q of two heads
    bent: float  # |out(a + b) − out(a) − out(b)| of an output projection without bias, largest

    def tables(self, lang: str = "en") -> list[Table]:
        values = {
            "softmax": "[" + ", ".join(f"{weight:.5f}" for weight in self.softmax) + "]",
            "range": self.say("of_range", lang, deviation=f"{self.deviation:.1f}", outside=f"{self.outside:.0%}"),
            "single": f"softmax([22]) = [{self.single:g}]",
            "causal": " ".join("".join("■" if seen else "·" for seen in row) for row in self.causal),
            "width": self.say("of_width", lang, grown=f"{self.grown:g}"),
            "matrices": f"{self.head_shape[0]} × {self.head_shape[1]}",
            "orthogonal": self.say("of_angles", lang, most=f"{self.angles[0]:.2f}", least=f"{self.angles[-1]:.2f}"),
            "shared": self.say("of_shared", lang, shared=self.shared),
            "linear": self.say("of_linear", lang, bent=f"{self.bent:.0e}"),
            "overfits": self.say("of_overfits", lang),
        }
        rows = tuple((self.say(key, lang), values[key]) for key in KEYS)
        return [Table(self.say("both", lang), (self.say("stated", lang), self.say("found", lang)), rows)]

    def _figure(self) -> Figure:
        from regard.lab import _draw

        figure = _draw.figure(8.4, 3.4, "Nothing makes the heads' subspaces orthogonal")
        axes = figure.add_subplot()
        axes.plot(
            range(1, len(self.angles) + 1),
            self.angles,
            color=_draw.BLUE,
            marker="o",
            markersize=3,
            label="two heads of a drawn layer",
        )
        axes.axhline(0.0, color=_draw.ORANGE, linestyle="--", label="orthogonal")
        axes.set_ylim(-0.05, 1)
        axes.legend(fontsize=9)
        _draw.tidy(axes, x="direction", y="cosine of the angle between them")
        return figure


def mistakes(seed: int = 0, pairs: int = 20_000) -> Mistakes:
    """Ten statements of notes that are wrong or loose, each computed again."""
    check_counts(pairs=pairs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        scores = (torch.randn(pairs, 512) * torch.randn(pairs, 512)).sum(-1)
        layer = MultiHeadAttention(512, 8, qkv_bias=False, out_bias=False)
        one, other = torch.randn(2, 7, 512)
    first, second = layer.q_proj.weight.detach().view(8, 64, 512)[:2]  # [64, 512] each: W_i^Q, transposed
    bases = [torch.linalg.qr(block.T.double()).Q for block in (first, second)]
    with torch.no_grad():
        bent = (layer.out_proj(one + other) - layer.out_proj(one) - layer.out_proj(other)).abs().max().item()
    counts = [
        sum(p.numel() for p in MultiHeadAttention(width, 8, qkv_bias=False, out_bias=False, device="meta").parameters())
        for width in (512, 1024)
    ]
    return Mistakes(
        tuple(torch.tensor([2.3, 9.1, 0.5], dtype=torch.float64).softmax(0).tolist()),
        scores.std().item(),
        (scores.abs() > 22).double().mean().item(),
        torch.tensor([22.0]).softmax(0).item(),
        tuple(tuple(row) for row in masks.causal().dense(4, 4).int().tolist()),
        counts[1] / counts[0],
        (first.shape[1], first.shape[0]),
        tuple(torch.linalg.svdvals(bases[0].T @ bases[1]).tolist()),
        int((first == second).sum()),
        bent,
    )
