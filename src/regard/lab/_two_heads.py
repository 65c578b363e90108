"""E2: two heads project one input, each in its own way."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from regard._walk._examples import E2_OUT, E2_W1, E2_W2, E2_X
from regard.lab import _draw
from regard.lab._result import Matrix, Result, Table, Words, look, named_rows, rows

TOKENS = ("x1", "x2")


@dataclass(frozen=True)
class TwoHeads(Result):
    q1: Matrix
    q2: Matrix
    weights1: Matrix
    weights2: Matrix
    concat: Matrix
    output: Matrix
    packed_difference: float  # largest difference to one product with the two projections side by side

    def _tables(self, say: Words) -> list[Table]:
        entries = ("1", "2", "3", "4")
        return [
            *(say.table(key, ("", *entries[:2]), named_rows(TOKENS, getattr(self, key))) for key in ("q1", "q2")),
            *(
                say.table(key, ("", *TOKENS), named_rows(TOKENS, getattr(self, key)))
                for key in ("weights1", "weights2")
            ),
            *(say.table(key, ("", *entries), named_rows(TOKENS, getattr(self, key))) for key in ("concat", "output")),
        ]

    def _figure(self) -> _draw.Figure:
        title = "One input, two heads: other queries, other weights"
        figure, (left, *maps) = _draw.subplots(8.4, 3.2, title, 3, width_ratios=(2, 1, 1))
        for values, colour, mark, head in ((self.q1, _draw.BLUE, "o", 1), (self.q2, _draw.ORANGE, "s", 2)):
            left.scatter(*zip(*values, strict=True), color=colour, marker=mark, s=60, label=f"head {head}", zorder=3)
            for token, place in zip(TOKENS, values, strict=True):
                said = f"{token} ({place[0]:.2f}, {place[1]:.2f})".replace("-", "−")
                left.annotate(said, place, (7, 5), textcoords="offset points", fontsize=9)
        left.axhline(0, color="0.85", zorder=0)
        left.axvline(0, color="0.85", zorder=0)
        left.set(xlim=(-1.5, 4.4), ylim=(-1.0, 2.0))
        names = {"x": "first entry of the query", "y": "second entry", "title": "the queries of both heads"}
        _draw.tidy(left, **names, legend="upper right")
        _draw.heatmap(maps[0], self.weights1, "weights, head 1", tokens=TOKENS, y="query")
        _draw.heatmap(maps[1], self.weights2, "weights, head 2", tokens=TOKENS)
        return figure


def two_heads() -> TwoHeads:
    """Q_i = X W_i for two heads. The note gives no W^K and W^V: here each head uses its W_i for them too."""
    x, w1, w2, w_out = (torch.tensor(given, dtype=torch.float64) for given in (E2_X, E2_W1, E2_W2, E2_OUT))
    heads = torch.stack([x @ w1, x @ w2])[None]  # [batch, head, token, dim]
    seen = look(heads, heads, heads)
    concat = seen.out.transpose(1, 2).flatten(2)
    packed = (x @ torch.cat([w1, w2], dim=1)).reshape(2, 2, 2).transpose(0, 1)
    return TwoHeads(
        q1=rows(heads[0, 0]),
        q2=rows(heads[0, 1]),
        weights1=rows(seen.weights[0, 0]),
        weights2=rows(seen.weights[0, 1]),
        concat=rows(concat),
        output=rows(concat @ w_out),
        packed_difference=(packed - heads[0]).abs().max().item(),
    )
