"""Masks that are added as large negative numbers, in torch's function: the same as where attention is written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard import edits

LEAST = torch.finfo(torch.float32).min
BELOW = torch.ones(5, 5, dtype=torch.bool).tril()


class Attention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused

    def forward(self, q: Tensor, mask: Tensor) -> Tensor:
        written = (q @ q.mT / 2 + mask).softmax(-1) @ q if not self.fused else None
        out = F.scaled_dot_product_attention(q, q, q, mask) if written is None else written
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("fill", [-1e4, -1e9, -1e30, LEAST])
@pytest.mark.parametrize("fused", [True, False])
def test_a_row_that_loses_its_only_key_does_not_look_at_hidden_ones(fused: bool, fill: float) -> None:
    mask = torch.zeros(5, 5).masked_fill(~BELOW, fill)
    model, q = Attention(fused), torch.randn(1, 2, 5, 4)
    with regard.edit(model, edits.cut(keys=0)):
        out = model(q, mask)
    assert not out[0, 0].any() and out[0, 1:].any(-1).all()
    hidden = (~BELOW).index_fill(1, torch.tensor([0]), True)
    wanted = Attention(False)(q, torch.zeros(5, 5).masked_fill(hidden, -torch.inf))
    torch.testing.assert_close(out[:, 1:], wanted[:, 1:])


@pytest.mark.parametrize("fused", [True, False])
def test_a_row_in_which_all_is_hidden_stays_as_the_model_has_it(fused: bool) -> None:
    mask = torch.zeros(5, 5).masked_fill(~BELOW, LEAST)
    mask[2] = LEAST
    model, q = Attention(fused), torch.randn(1, 2, 5, 4)
    with regard.edit(model, edits.cut(keys=1), heads=[0]):
        out = model(q, mask)
    plain = model(q, mask)
    torch.testing.assert_close(out.unflatten(-1, (2, 4))[:, :, 1], plain.unflatten(-1, (2, 4))[:, :, 1])
