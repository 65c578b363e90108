"""X5: what notes on attention state and what is so, each with a number."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from regard import masks
from regard.lab import _draw
from regard.lab._result import Result, Row, Table, Words, check_counts, parameter_count
from regard.lab._train import seeded
from regard.nn import MultiHeadAttention


@dataclass(frozen=True)
class Mistakes(Result):
    softmax: Row  # of [2.3, 9.1, 0.5]
    deviation: float  # of unscaled scores at d_k = 512
    outside: float  # share of them beyond ±22
    single: float  # softmax of one number
    causal: tuple[tuple[int, ...], ...]  # what a query of 4 may see
    grown: float  # parameters at twice the width, as a multiple
    head_shape: tuple[int, int]  # of one head's W^Q at d_model = 512, 8 heads
    angles: Row  # cosines between the subspaces of two heads of a random layer, largest first
    shared: int  # equal numbers in the W^Q of two heads
    bent: float  # |out(a + b) − out(a) − out(b)| of an output projection without bias, largest

    def _tables(self, say: Words) -> list[Table]:
        found = {
            "softmax": "[" + ", ".join(f"{weight:.5f}" for weight in self.softmax) + "]",
            "range": say("of_range", deviation=f"{self.deviation:.1f}", outside=f"{self.outside:.0%}"),
            "single": f"softmax([22]) = [{self.single:g}]",
            "causal": " ".join("".join("■" if seen else "·" for seen in row) for row in self.causal),
            "width": say("of_width", grown=f"{self.grown:g}"),
            "matrices": f"{self.head_shape[0]} × {self.head_shape[1]}",
            "orthogonal": say("of_angles", most=f"{self.angles[0]:.2f}", least=f"{self.angles[-1]:.2f}"),
            "shared": say("of_shared", shared=self.shared),
            "linear": say("of_linear", bent=f"{self.bent:.0e}"),
            "overfits": say("of_overfits"),
        }
        return [say.table("both", say.each("stated", "found"), ((say(key), text) for key, text in found.items()))]

    def _figure(self) -> _draw.Figure:
        figure, axes = _draw.subplots(8.4, 3.4, "Nothing makes the heads' subspaces orthogonal")
        look = {"color": _draw.BLUE, "marker": "o", "markersize": 3}
        axes.plot(range(1, len(self.angles) + 1), self.angles, label="two heads of a random layer", **look)
        axes.axhline(0.0, color=_draw.ORANGE, linestyle="--", label="orthogonal")
        axes.set_ylim(-0.05, 1)
        _draw.tidy(axes, x="direction", y="cosine of the angle between them", legend="best")
        return figure


def mistakes(seed: int = 0, pairs: int = 20_000) -> Mistakes:
    """Ten statements of notes that are wrong or loose, each computed again."""
    check_counts(pairs=pairs)
    with seeded(seed):
        scores = (torch.randn(pairs, 512) * torch.randn(pairs, 512)).sum(-1)
        layer = MultiHeadAttention(512, 8, qkv_bias=False, out_bias=False)
        one, other = torch.randn(2, 7, 512)
    first, second = layer.q_proj.weight.detach().view(8, 64, 512)[:2]  # [64, 512] each: W_i^Q, transposed
    bases = [torch.linalg.qr(block.T.double()).Q for block in (first, second)]
    with torch.no_grad():
        bent = (layer.out_proj(one + other) - layer.out_proj(one) - layer.out_proj(other)).abs().max().item()
    counts = [
        parameter_count(MultiHeadAttention(width, 8, qkv_bias=False, out_bias=False, device="meta"))
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
