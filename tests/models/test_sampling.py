"""Draws follow the softmax, and top-k and top-p take exactly the tokens they should."""

from __future__ import annotations

import pytest
import torch

from regard.models._sampling import NOTHING, Draws, Sampling

LOGITS = torch.tensor([2.0, -1.0, 0.5, 3.0, 0.5, -float("inf"), 1.0])


def reachable(sampling: Sampling, points: int = 20_011) -> dict[int, float]:
    """The share of [0, 1) that leads to each token."""
    uniform = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    tokens = sampling.choose(LOGITS.expand(points, -1), uniform)
    return {int(token): (tokens == token).double().mean().item() for token in tokens.unique()}


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_a_token_is_drawn_as_often_as_its_probability_says(temperature: float) -> None:
    wanted = (LOGITS.double() / temperature).softmax(0)
    found = reachable(Sampling(temperature))
    for token, probability in enumerate(wanted.tolist()):
        assert found.get(token, 0.0) == pytest.approx(probability, abs=2 / 20_011)
    assert 5 not in found


def test_top_k_takes_the_likeliest_and_divides_by_their_sum() -> None:
    found = reachable(Sampling(1.0, top_k=3))
    likely = LOGITS[[3, 0, 6]].double().softmax(0).tolist()
    assert found == {token: pytest.approx(p, abs=2 / 20_011) for token, p in zip([3, 0, 6], likely, strict=True)}
    assert reachable(Sampling(1.0, top_k=7)) == reachable(Sampling(1.0, top_k=99))


def test_top_p_takes_the_fewest_likeliest_that_reach_it() -> None:
    likely, order = LOGITS.double().softmax(0).sort(descending=True)
    summed = likely.cumsum(0)
    for count in range(1, 5):
        p = summed[count - 1].item()
        assert set(reachable(Sampling(1.0, top_p=p - 1e-9))) == set(order[:count].tolist())
        assert set(reachable(Sampling(1.0, top_p=p + 1e-9))) == set(order[: count + 1].tolist())
    assert set(reachable(Sampling(1.0, top_p=1.0))) == {0, 1, 2, 3, 4, 6}


def test_top_p_counts_within_top_k() -> None:
    inside = LOGITS[[3, 0, 6]].double().softmax(0)
    p = (inside[0] + inside[1]).item()
    assert set(reachable(Sampling(1.0, top_k=3, top_p=p - 1e-9))) == {3, 0}
    assert set(reachable(Sampling(1.0, top_k=3, top_p=p + 1e-9))) == {3, 0, 6}


def test_the_largest_draw_still_leads_to_a_token_that_has_weight() -> None:
    largest = torch.tensor([1 - 2.0**-40], dtype=torch.float64)
    for size in (5, 63, 50_257):
        logits = torch.randn(1, size)
        logits[0, size // 2 :] = -float("inf")
        assert Sampling(1.0).choose(logits, largest) < size // 2
        assert Sampling(1.0, top_p=0.5).choose(logits, largest) < size // 2


def test_temperatures_however_low_or_high_draw_what_they_mean() -> None:
    logits, uniform = torch.tensor([[3e4, -3e4, 2.9e4, -float("inf")]]), torch.tensor([0.7], dtype=torch.float64)
    assert Sampling(1e-308).choose(logits, uniform) == 0  # 3e4 / 1e-308 is more than a number holds
    assert [int(Sampling(1e300).choose(logits, torch.tensor([u]).double())) for u in (0.1, 0.5, 0.9)] == [0, 1, 2]


def test_logits_that_are_no_numbers_lead_to_no_token() -> None:
    uniform = torch.tensor([0.7, 0.1], dtype=torch.float64)
    for bad in (float("nan"), float("inf")):
        logits = torch.tensor([[1.0, bad, 2.0], [1.0, 2.0, 0.0]])
        for how in (Sampling(1.0), Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.5)):
            found = how.choose(logits, uniform)
            assert found[0] == NOTHING and found[1] >= 0
    assert Sampling().choose(torch.tensor([[1.0, float("nan")], [1.0, 2.0]]), None).tolist() == [NOTHING, 1]
    assert Sampling(1.0).choose(torch.full((1, 3), -float("inf")), uniform[:1]) == NOTHING


def test_draws_are_even_and_each_item_has_its_own() -> None:
    draws = Draws(3, 2)
    found = torch.stack([draws.next([0, 1]) for _ in range(2000)])
    assert found.min() >= 0 and found.max() < 1
    assert (found.mean(0) - 0.5).abs().max() < 5 * (1 / 12 / 2000) ** 0.5
    assert abs(torch.corrcoef(found.T)[0, 1]) < 5 / 2000**0.5
    alone = Draws(3, 2)
    assert torch.equal(torch.cat([alone.next([1]) for _ in range(7)]), found[:7, 1])
