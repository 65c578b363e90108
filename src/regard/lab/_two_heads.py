"""E2: two heads project one input, each in its own way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from regard._walk._examples import E2_OUT, E2_W1, E2_W2, E2_X
from regard.lab._result import Matrix, Result, Table, look, numbers, rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOKENS = ("x1", "x2")


@dataclass(frozen=True)
class TwoHeads(Result):
    name = "E2"
    topic = "two_heads"

    q1: Matrix
    q2: Matrix
    weights1: Matrix
    weights2: Matrix
    concat: Matrix
    output: Matrix
    packed_difference: float  # largest difference to one product with the two projections side by side

    def tables(self, lang: str = "en") -> list[Table]:
        shown = [("q1", self.q1), ("q2", self.q2), ("weights1", self.weights1), ("weights2", self.weights2)]
        shown += [("concat", self.concat), ("output", self.output)]
        made = []
        for key, values in shown:
            columns = TOKENS if key.startswith("weights") else tuple(str(at) for at in range(1, len(values[0]) + 1))
            named = tuple(numbers(token, row) for token, row in zip(TOKENS, values, strict=True))
            made.append(Table(self.say(key, lang), ("", *columns), named))
        return made

    def _figure(self) -> Figure:
        from regard.lab import _draw

        figure = _draw.figure(8.4, 3.2, "One input, two heads: other queries, other weights")
        left, *maps = figure.subplots(1, 3, width_ratios=(2, 1, 1))
        for values, colour, mark, head in ((self.q1, _draw.BLUE, "o", 1), (self.q2, _draw.ORANGE, "s", 2)):
            left.scatter(*zip(*values, strict=True), color=colour, marker=mark, s=60, label=f"head {head}", zorder=3)
            for token, place in zip(TOKENS, values, strict=True):
                left.annotate(
                    f"{token} ({place[0]:.2f}, {place[1]:.2f})".replace("-", "−"),
                    place,
                    (7, 5),
                    textcoords="offset points",
                    fontsize=9,
                )
        _draw.tidy(left, x="first entry of the query", y="second entry", title="the queries of both heads")
        left.axhline(0, color="0.85", zorder=0)
        left.axvline(0, color="0.85", zorder=0)
        left.set(xlim=(-1.5, 4.4), ylim=(-1.0, 2.0))
        left.legend(loc="upper right", fontsize=9)
        for axes, values, head in zip(maps, (self.weights1, self.weights2), (1, 2), strict=True):
            _draw.heatmap(axes, values, f"weights, head {head}", columns=TOKENS, names=TOKENS)
            axes.set_xlabel("key")
        maps[0].set_ylabel("query")
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
