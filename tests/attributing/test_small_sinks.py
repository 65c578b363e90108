"""A written-out sink counts, however small: where a key has nearly all of the weight, the rest is the sink's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import edits


class Sink(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.base = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        value = self.linear(x).unflatten(-1, (2, 4)).transpose(1, 2)
        logits = self.base + torch.tensor([0.0, -11.0, -11.0], dtype=x.dtype).expand(1, 2, 3, 3)
        sink = torch.full((1, 2, 3, 1), -10.0, dtype=x.dtype)
        weights = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
        return (weights @ value).transpose(1, 2).flatten(2)


def test_the_effect_of_a_cut_counts_a_sink_of_little_weight() -> None:
    torch.manual_seed(0)
    model, x, to = Sink(), torch.randn(1, 3, 8).double(), torch.randn(1, 3, 8).double()
    found = regard.attribute(model, (x,), loss=lambda out: (out * to).sum(), top_k=2)
    base = float((model(x) * to).sum().detach())
    for edge in found.top(4):
        with regard.edit(model, edits.cut(queries=edge.query, keys=edge.key), heads=[edge.head]):
            really = float((model(x) * to).sum().detach()) - base
        assert edge.effect == pytest.approx(really, rel=1e-9)
