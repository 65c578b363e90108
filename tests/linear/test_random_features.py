"""Positive random features approximate softmax attention, the better the more of them there are."""

from __future__ import annotations

import pytest
import torch

import regard
from regard import linear_attention, masks
from regard.linear import RandomFeatures

D = 16


def tensors(length=63):
    """Queries and keys of half the usual length: the variance of a feature grows as exp(scale · |q + k|²)."""
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, 2, length, D, generator=generator, dtype=torch.float64) for _ in range(3))
    return query / 2, key / 2, value


def error(count, orthogonal, mask, seeds=12):
    given = tensors()
    exact = regard.attention(*given, mask=mask)
    found = []
    for seed in range(seeds):
        features = RandomFeatures(D, count, orthogonal=orthogonal, seed=seed, dtype=torch.float64)
        out = linear_attention(*given, mask=mask, feature_map=features)
        found.append((out - exact).square().mean())
    return torch.stack(found).mean().sqrt().item()


@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["whole", "causal"])
def test_the_error_against_softmax_halves_with_four_times_the_features(mask):
    errors = [error(count, True, mask) for count in (64, 256, 1024, 4096)]
    for more, fewer in zip(errors[1:], errors, strict=False):
        assert 1.5 < fewer / more < 3.0
    assert errors[-1] < 0.05


def test_orthogonal_rows_err_less_than_independent_ones():
    assert error(64, True, None, seeds=40) < 0.97 * error(64, False, None, seeds=40)


def test_the_kernel_is_exp_of_the_scaled_product_on_average():
    query, key, _ = tensors(5)
    scale = 0.2
    features = RandomFeatures(D, 200_000, dtype=torch.float64)
    exact = torch.exp(scale * query @ key.transpose(-1, -2))
    found = features.query_features(query, scale) @ features.key_features(key, scale).transpose(-1, -2)
    # a factor of each row is free
    found, exact = (x / x.sum(-1, keepdim=True) for x in (found, exact))
    assert (found - exact).abs().max() < 0.01


def test_rows_are_at_right_angles_within_a_group_and_the_draw_is_the_seeds():
    rows = RandomFeatures(5, 13, seed=4, dtype=torch.float64).projection
    for start in (0, 5, 10):
        group = torch.nn.functional.normalize(rows[start : start + 5], dim=-1)
        assert torch.allclose(group @ group.T, torch.eye(len(group), dtype=torch.float64), atol=1e-12)
    assert torch.equal(rows, RandomFeatures(5, 13, seed=4, dtype=torch.float64).projection)
    assert not torch.equal(rows, RandomFeatures(5, 13, seed=5, dtype=torch.float64).projection)


def test_large_queries_and_keys_do_not_overflow():
    query, key, value = (x.float() for x in tensors())
    features = RandomFeatures(D, 64)
    for factor in (10.0, 100.0):
        out = linear_attention(query * factor, key, value, feature_map=features, mask=masks.causal())
        assert torch.isfinite(out).all()
        # rows are still means of values
        assert out.abs().max() <= value.abs().max() * 1.001


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((0, 4), ValueError, "head_dim must be at least 1"),
        ((4, -1), ValueError, "count must be at least 1"),
        ((4, 2.5), TypeError, "count must be an int"),
        ((True, 4), TypeError, "head_dim must be an int"),
    ],
)
def test_wrong_sizes_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        RandomFeatures(*arguments)


@pytest.mark.parametrize(
    ("given", "words"),
    [({"normalize": False}, "normalised"), ({"scale": 0.0}, "scale must be above 0"), ({"scale": -1.0}, "above 0")],
)
def test_what_a_softmax_is_not_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        linear_attention(*tensors(), feature_map=RandomFeatures(D, 3), **given)


def test_features_of_another_width_are_refused():
    with pytest.raises(ValueError, match="head_dim 5, but query has head dim 16"):
        linear_attention(*tensors(), feature_map=RandomFeatures(5, 3))
