"""M21: the output of a layer is a sum over its heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from regard.lab import _draw
from regard.lab._result import Result, Row, Table, Words, check_counts, look
from regard.lab._train import seeded
from regard.nn import MultiHeadAttention


@dataclass(frozen=True)
class SumOverHeads(Result):
    heads: int
    head_dim: int
    width: int
    difference: float  # between Concat(heads) W^O and the sum of head_i W_i^O, largest
    without: float  # between the output without a head and the output less what it adds, largest over the heads
    sizes: Row  # length of what each head adds to a token, mean over the tokens
    whole: float  # length of the output, mean over the tokens

    def _tables(self, say: Words) -> list[Table]:
        checks = ((say(key), f"{getattr(self, key):.1e}") for key in ("difference", "without"))
        heads = ((str(head), f"{size:.4f}") for head, size in enumerate(self.sizes))
        return [
            say.table("checks", ("", ""), checks, head_dim=self.head_dim, width=self.width),
            say.table("adds", say.each("head", "size"), (*heads, (say("whole"), f"{self.whole:.4f}"))),
        ]

    def _figure(self) -> _draw.Figure:
        figure, axes = _draw.subplots(8.4, 3.4, f"The output is the sum of what each of {self.heads} heads adds")
        bars = axes.bar(range(self.heads), self.sizes, color=_draw.BLUE)
        axes.bar_label(bars, [f"{size:.2f}" for size in self.sizes], fontsize=9, padding=2)
        axes.axhline(self.whole, color=_draw.ORANGE, linestyle="--", label="the output, their sum")
        axes.set_xticks(range(self.heads), [f"head {head}" for head in range(self.heads)])
        axes.set_ylim(0, 1.3 * max(*self.sizes, self.whole))
        _draw.tidy(axes, x="", y="mean length of the vector added", legend="upper right")
        return figure


def sum_over_heads(tokens: int = 10, width: int = 64, heads: int = 8, seed: int = 0) -> SumOverHeads:
    """Concat(head_1 … head_h) W^O next to Σ head_i W_i^O, where W_i^O is a block of rows of W^O."""
    check_counts(tokens=tokens, width=width, heads=heads)
    with seeded(seed):
        layer = MultiHeadAttention(width, heads, qkv_bias=False, out_bias=False, dtype=torch.float64)
        x = torch.randn(1, tokens, width, dtype=torch.float64)
    with torch.no_grad():
        query, key, value = (
            line(x).view(1, tokens, heads, -1).transpose(1, 2) for line in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        found = look(query, key, value).out[0]  # [head, token, head dim]
        blocks = layer.out_proj.weight.T.reshape(heads, -1, width)  # [head, head dim, width]
        added = found @ blocks  # [head, token, width]
        out = layer(x)[0]
        without = []
        for head in range(heads):
            left = found.clone()
            left[head] = 0
            less = left.transpose(0, 1).flatten(1) @ layer.out_proj.weight.T
            without.append((out - added[head] - less).abs().max().item())
    return SumOverHeads(
        heads,
        width // heads,
        width,
        (added.sum(0) - out).abs().max().item(),
        max(without),
        tuple(added.norm(dim=-1).mean(-1).tolist()),
        out.norm(dim=-1).mean().item(),
    )
