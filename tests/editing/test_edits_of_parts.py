"""Parts of a model that are called by themselves, and what of a pass lives on after it."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import edits

TOKENS = 61


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core, self.qkv, self.out, self.num_heads = Core(), nn.Linear(24, 72), nn.Linear(24, 24), 3

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (3, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        made: Tensor = self.out(self.core(q, k, v).transpose(1, 2).flatten(2))
        return made


@torch.no_grad()
@pytest.mark.parametrize("then", [lambda out: out, lambda out: out * 2])
def test_a_part_that_gives_its_product_as_it_is_is_not_left_unedited(then: object) -> None:
    torch.manual_seed(0)
    model, q = Layer(), torch.randn(2, 3, 5, 8)
    with (
        pytest.raises(edits.CannotEdit, match="core .*its output leaves the model before any use"),
        regard.edit(model, edits.cut(keys=1)),
    ):
        model(torch.randn(2, 5, 24))
        assert callable(then)
        then(model.core(q, q, q))


def weights_that_live() -> int:
    return sum(type(one) is Tensor and one.shape[-2:] == (TOKENS, TOKENS) for one in gc.get_objects())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_weights_of_an_edited_pass_live_no_longer_than_it(mode: type) -> None:
    model = nn.Sequential(*(Layer() for _ in range(4)))
    most: list[int] = []
    model[-1].register_forward_pre_hook(lambda *_: most.append(weights_that_live()))
    gc.collect()
    before = weights_that_live()
    with mode(), regard.edit(model, edits.cut(keys=1)):
        for _ in range(2):
            out = model(torch.randn(1, TOKENS, 24))
            del out
            assert weights_that_live() == before
    if mode is torch.no_grad:
        assert max(most) - before <= 8  # of one layer, not of three
