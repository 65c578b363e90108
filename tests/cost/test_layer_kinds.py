"""Attention, recurrence and convolution: the formulas equal what torch counts."""

from __future__ import annotations

import pytest
import torch
from tests.cost.small_bills import attention_by
from torch.utils.flop_counter import FlopCounterMode

from regard import cost
from regard.nn import MultiHeadAttention


@pytest.mark.parametrize("heads", [1, 3, 11])
def test_flops_of_each_kind_are_what_torch_counts(heads: int) -> None:
    length, dim, kernel = 63, 33, 5
    found = cost.layer_kinds(length, dim, heads=heads, kernel=kernel)
    x = torch.randn(1, length, dim)
    with attention_by("eager"), FlopCounterMode(display=False) as counted:
        MultiHeadAttention(dim, heads)(x)
    assert found["attention"].flops == counted.get_total_flops()
    with FlopCounterMode(display=False) as counted:
        torch.nn.Conv1d(dim, dim, kernel, padding=kernel // 2)(x.transpose(1, 2))
    assert found["convolution"].flops == counted.get_total_flops()
    cell, state = torch.nn.RNNCell(dim, dim), torch.zeros(1, dim)
    with FlopCounterMode(display=False) as counted:
        for token in range(length):
            state = cell(x[:, token], state)
    assert found["recurrent"].flops == counted.get_total_flops()


def test_attention_grows_with_the_square_of_the_length_and_the_others_with_the_length() -> None:
    short, long = (cost.layer_kinds(length, 64, heads=4) for length in (10**6, 2 * 10**6))
    assert long["attention"].flops / short["attention"].flops == pytest.approx(4, rel=1e-3)
    for kind in ("recurrent", "convolution"):
        assert long[kind].flops == 2 * short[kind].flops
    assert (long["attention"].steps, long["recurrent"].steps, long["convolution"].steps) == (1, 2 * 10**6, 1)
    assert long["attention"].scores == 4 * short["attention"].scores == 4 * (2 * 10**6) ** 2


@pytest.mark.parametrize(
    ("length", "kernel", "path"), [(1, 3, 1), (3, 3, 1), (4, 3, 2), (63, 5, 16), (1, 1, 1), (2, 1, None)]
)
def test_a_stack_of_convolutions_reaches_as_far_as_it_is_deep(length: int, kernel: int, path: int | None) -> None:
    assert cost.layer_kinds(length, 8, kernel=kernel)["convolution"].path == path


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="heads=3 must divide dim=8"):
        cost.layer_kinds(5, 8, heads=3)
    with pytest.raises(ValueError, match="kernel must be at least 1"):
        cost.layer_kinds(5, 8, kernel=0)
