"""The k largest weights are exact on data made to break the choice."""

from __future__ import annotations

import pytest
import torch
from tests._triton.calls import DEVICE, found_and_wrong, tensors

from regard import Want, masks

TOP = Want.none().but(top_k=8)


def spread(L: int, S: int, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A query and keys whose logits are the given numbers, [S], in every row."""
    query = torch.ones(1, 1, L, 1, device=DEVICE)
    return query, weights.to(DEVICE).view(1, 1, S, 1)


@pytest.mark.parametrize("k", [1, 9, 40])
def test_random_weights(k: int) -> None:
    query, key = tensors(H=1, L=37, S=143)
    assert found_and_wrong(query, key, TOP.but(top_k=k))[1] == []


def test_equal_weights_go_to_the_lowest_keys() -> None:
    query, key = tensors(H=1, L=17, S=63 * 64 + 5, D=3)
    found, wrong = found_and_wrong(query * 0, key, TOP)
    assert wrong == []
    assert torch.equal(found["top_keys"], torch.arange(8, device=DEVICE).expand_as(found["top_keys"]))


def test_equal_weights_under_a_causal_mask_with_fewer_keys_than_places() -> None:
    query, key = tensors(H=1, L=37, S=37)
    found, wrong = found_and_wrong(query * 0, key, TOP, mask=masks.causal())
    assert wrong == []
    assert (found["top_keys"][0, 0, 2]).tolist() == [0, 1, 2, -1, -1, -1, -1, -1]


def test_duplicated_keys_are_told_apart_by_position() -> None:
    # multiples of an eighth: their products are exact, so that equal keys have equal weights whatever multiplies them
    query, key = ((8 * each).round() / 8 for each in tensors(H=1, L=5, S=11))
    found, wrong = found_and_wrong(query, key.repeat(1, 1, 200, 1), TOP)
    assert wrong == []
    best = found["top_keys"][0, 0]
    assert torch.equal(best - best[:, :1], 11 * torch.arange(8, device=DEVICE).expand(5, 8))


@pytest.mark.parametrize("order", [1, -1])
def test_sorted_keys(order: int) -> None:
    S = 1111
    found, wrong = found_and_wrong(*spread(3, S, order * torch.linspace(-3, 3, S)), TOP, scale=1.0)
    assert wrong == []
    last = torch.arange(S - 1, S - 9, -1) if order > 0 else torch.arange(8)
    assert found["top_keys"][0, 0, 1].tolist() == last.tolist()


def test_one_giant_weight_leaves_the_lowest_keys_among_those_that_vanish() -> None:
    S = 1111
    weights = torch.zeros(S)
    weights[1001] = 500.0
    found, wrong = found_and_wrong(*spread(3, S, weights), TOP, scale=1.0)
    assert wrong == []
    assert found["top_keys"][0, 0, 0].tolist() == [1001, 0, 1, 2, 3, 4, 5, 6]


def test_all_large_weights_in_one_group_of_keys() -> None:
    S = 333
    weights = torch.zeros(S)
    weights[7::16] = torch.linspace(1, 2, len(weights[7::16]))
    assert found_and_wrong(*spread(3, S, weights), TOP, scale=1.0)[1] == []


@pytest.mark.parametrize("mask", [masks.strided(16), masks.window(left=9), masks.columns(3)])
def test_masks_that_leave_few_keys(mask: masks.Mask) -> None:
    query, key = tensors(H=1, L=37, S=700)
    assert found_and_wrong(query, key, TOP, mask=mask)[1] == []


@pytest.mark.parametrize("modifier", ["bias", "softcap", "scale"])
def test_modifiers_enter_the_order(modifier: str) -> None:
    query, key = tensors(H=1, L=21, S=143)
    given = {"bias": torch.randn(21, 143, device=DEVICE), "softcap": 1.5, "scale": -0.5}[modifier]
    assert found_and_wrong(query, key, TOP, **{modifier: given})[1] == []
