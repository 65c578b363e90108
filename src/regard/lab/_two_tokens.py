"""E1: two tokens, every number by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from regard._walk._examples import E1_X
from regard.lab import _draw
from regard.lab._result import Matrix, Result, Table, Words, look, named_rows, rows

TOKENS = ("x1", "x2")


@dataclass(frozen=True)
class TwoTokens(Result):
    scores: Matrix
    weights: Matrix
    out: Matrix
    scaled_weights: Matrix  # the scores divided by √4 first
    scaled_out: Matrix

    def _tables(self, say: Words) -> list[Table]:
        entries = ("", *(say("entry", number=at) for at in range(1, 5)))
        columns: dict[str, tuple[str, ...]] = dict.fromkeys(("scores", "weights", "scaled_weights"), ("", *TOKENS))
        columns |= dict.fromkeys(("out", "scaled_out"), entries)
        return [say.table(key, names, named_rows(TOKENS, getattr(self, key))) for key, names in columns.items()]

    def _figure(self) -> _draw.Figure:
        title = "Both tokens reach both outputs: no entry is zero"
        figure, panels = _draw.subplots(9.2, 3.2, title, 4, width_ratios=(5, 5, 6, 6))
        weights, scaled_weights, out, scaled_out = panels
        _draw.heatmap(weights, self.weights, "weights, no scaling", tokens=TOKENS, digits=4, y="query")
        _draw.heatmap(scaled_weights, self.scaled_weights, "weights, scaled by √4", tokens=TOKENS, digits=4)
        entries: Any = {"tokens": TOKENS, "columns": ("1", "2", "3", "4"), "x": "entry"}
        _draw.heatmap(out, self.out, "outputs, no scaling", **entries)
        _draw.heatmap(scaled_out, self.scaled_out, "outputs, scaled", **entries)
        return figure


def two_tokens() -> TwoTokens:
    """x1 = [1, 0, 1, 0] and x2 = [0, 1, 0, 1] attend to each other; the projections are the identity."""
    x = torch.tensor(E1_X, dtype=torch.float64)[None, None]
    plain, scaled = look(x, x, x, scale=1.0), look(x, x, x)
    return TwoTokens(rows(x @ x.mT), rows(plain.weights), rows(plain.out), rows(scaled.weights), rows(scaled.out))
