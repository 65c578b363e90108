"""Statistics against reductions of the oracle's whole matrix of weights."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from core_calls import array, bias_with_holes, differ, every_mask, oracle, tensors
from regard import masks

B, H, G, L, S = 2, 4, 2, 13, 37
EVERYTHING = regard.Want(map=(5, 7), top_k=6, first=3, queries=slice(2, -1), weights=(slice(1, 9), slice(-11, None)))
NAMES = (
    "lse",
    "entropy",
    "max_weight",
    "key_mass",
    "map",
    "top_keys",
    "top_weights",
    "distance",
    "first_mass",
    "weights",
)


def edges(size: int, cells: int) -> list[int]:
    return [c * size // cells for c in range(cells + 1)]


def reduce(weights: np.ndarray, lse: np.ndarray, allowed: np.ndarray, offset: Any, want: regard.Want) -> dict[str, Any]:
    """What ``want`` asks for, from the whole matrix [B, H, L, S], one plain definition each."""
    items, heads, rows, keys = weights.shape
    empty = lse == -np.inf
    with np.errstate(divide="ignore", invalid="ignore"):
        plogp = np.where(weights > 0, weights * np.log(weights), 0.0)
    some = weights[:, :, want.queries]
    grid = min(want.map[0], some.shape[2]), min(want.map[1], keys)
    down, across = edges(some.shape[2], grid[0]), edges(keys, grid[1])
    heat = np.empty((items, heads, *grid))
    for r in range(grid[0]):
        for c in range(grid[1]):
            heat[:, :, r, c] = some[:, :, down[r] : down[r + 1], across[c] : across[c + 1]].mean((-2, -1))
    order = np.argsort(np.where(allowed, -weights, np.inf), axis=-1, kind="stable")[..., : want.top_k]
    found = np.take_along_axis(allowed, order, -1)
    starts = np.broadcast_to(np.asarray(offset), (items,))
    far = np.abs(starts[:, None, None] + np.arange(rows)[:, None] - np.arange(keys))
    bucket = np.array([[[int(d).bit_length() for d in row] for row in item] for item in far])
    distance = np.stack([(weights * (bucket == n)[:, None]).sum((2, 3)) for n in range(32)], -1)
    return {
        "lse": lse,
        "entropy": np.where(empty, np.nan, -plogp.sum(-1)),
        "max_weight": np.where(empty, np.nan, weights.max(-1)),
        "key_mass": some.sum(2),
        "map": heat,
        "top_keys": np.where(found, order, -1),
        "top_weights": np.where(found, np.take_along_axis(weights, order, -1), 0.0),
        "distance": distance,
        "first_mass": weights[..., : want.first].sum(-1),
        "weights": weights[:, :, want.weights[0], want.weights[1]],
    }


def check(inputs: tuple[Tensor, ...], tolerance: float = 1e-12, **given: Any) -> None:
    seen = regard.observe(*inputs, want=EVERYTHING, **given)
    exact, _ = oracle(*inputs, **given)
    rows, keys = inputs[0].shape[2], inputs[1].shape[2]
    offset = given.get("query_offset", keys - rows)
    truth = reduce(exact.weights, exact.lse, exact.logits > -np.inf, offset, EVERYTHING)
    assert differ(seen.out, exact.out) < tolerance
    for name in NAMES:
        assert differ(getattr(seen, name), truth[name]) < tolerance * 100, name


@pytest.mark.parametrize("kind", list(every_mask(B, H, L, S)))
def test_every_statistic_is_a_reduction_of_the_weights_under_every_mask(kind: str) -> None:
    check(tensors(B, H, G, L, S), mask=every_mask(B, H, L, S)[kind])


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"sinks": torch.tensor([-2.0, 0.0, 1.0, 5.0]).double()},
        {"softcap": 1.3},
        {"scale": -0.4},
        {"bias": bias_with_holes(B, H, L, S)},
        {"bias": bias_with_holes(B, H, L, S), "mask": masks.causal(), "sinks": torch.zeros(H).double(), "softcap": 2.0},
        {"query_offset": 5, "mask": masks.causal()},
        {"query_offset": -6, "mask": masks.causal()},
        {"query_offset": torch.tensor([20, -3]), "mask": masks.window(left=4)},
        {"query_offset": torch.tensor([20, -3]), "mask": masks.padding([0, 30]), "sinks": torch.ones(H).double()},
    ],
    ids=lambda given: "+".join(given) or "plain",
)
@pytest.mark.parametrize("backend", ["auto", "eager", "blockwise"])
def test_every_statistic_is_a_reduction_of_the_weights_under_every_modifier(given: dict, backend: str) -> None:
    check(tensors(B, H, G, L, S), backend=backend, **given)


@pytest.mark.parametrize("mask", [None, masks.causal()], ids=str)
def test_so_many_keys_that_rows_are_taken_in_several_chunks(mask: masks.Mask | None) -> None:
    check(tensors(B, H, G, 211, 2111), mask=mask, query_offset=torch.tensor([1900, -3]))


def test_ties_go_to_the_lower_key() -> None:
    query, key, value = (torch.zeros(1, 1, n, 3) for n in (2, 9, 9))
    seen = regard.observe(query, key, value, want=regard.Want(top_k=4), mask=masks.keep(torch.arange(9) % 2 == 1))
    assert seen.top_keys.tolist() == [[[[1, 3, 5, 7]] * 2]]


def test_permitted_keys_of_weight_zero_stand_before_forbidden_ones() -> None:
    key = torch.tensor([0.0, -1e4, 5.0, 0.0]).view(1, 1, 4, 1)
    seen = regard.observe(torch.ones(1, 1, 1, 1), key, key, scale=1.0, want=regard.Want(top_k=4), mask=masks.columns(3))
    assert seen.top_keys.flatten().tolist() == [2, 0, 1, -1]


def test_entropy_stays_exact_at_large_logits() -> None:
    query = torch.ones(1, 1, 1, 1)
    key = torch.full((1, 1, 64, 1), 4000.0)
    seen = regard.observe(query, key, key, scale=1.0)
    assert abs(float(seen.entropy) - np.log(64)) < 1e-3


@pytest.mark.parametrize("want", [regard.Want(queries=slice(3, 3)), regard.Want(queries=slice(50, 90))], ids=str)
def test_an_empty_range_of_queries_gives_no_mass_and_no_rows_of_the_map(want: regard.Want) -> None:
    seen = regard.observe(*tensors(B, H, G, L, S), want=want)
    assert seen.map.shape == (B, H, 0, S) and not seen.key_mass.any()


def test_slices_count_from_the_end_and_are_cut_at_the_ends() -> None:
    want = regard.Want(weights=(slice(-3, None), slice(30, 99)), queries=slice(-3, None))
    inputs = tensors(B, H, G, L, S)
    whole = regard.observe(*inputs, want=regard.Want.all()).weights
    seen = regard.observe(*inputs, want=want)
    assert torch.equal(seen.weights, whole[:, :, -3:, 30:])
    assert torch.allclose(seen.key_mass, whole[:, :, -3:].sum(2), rtol=0, atol=1e-14)


@pytest.mark.parametrize("L, S, V", [(0, 7, 3), (5, 0, 3), (0, 0, 3), (1, 1, 3), (5, 7, 0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_empty_sizes_are_observed_without_complaint(L: int, S: int, V: int, dtype: torch.dtype) -> None:
    seen = regard.observe(*tensors(L=L, S=S, V=V, dtype=dtype), mask=masks.causal(), want=regard.Want.all())
    assert seen.weights.shape == (2, 4, L, S) and seen.out.shape == (2, 4, L, V)
    if S == 0:
        assert seen.entropy.isnan().all() and (seen.lse == -torch.inf).all() and not seen.first_mass.any()


@pytest.mark.parametrize("name", [n for n in NAMES if n != "lse"])
def test_what_was_not_asked_for_says_how_to_ask(name: str) -> None:
    seen = regard.observe(*tensors(), want=regard.Want.none())
    with pytest.raises(AttributeError, match=rf"{name} was not asked for: pass want=regard.Want\("):
        getattr(seen, name)
    assert not hasattr(seen, name)


def test_an_unknown_attribute_is_reported_as_such() -> None:
    with pytest.raises(AttributeError, match="no attribute 'entropie'"):
        regard.observe(*tensors()).entropie  # noqa: B018


def test_wanting_all_gives_all() -> None:
    seen = regard.observe(*tensors(), want=regard.Want.all())
    assert all(hasattr(seen, name) for name in NAMES)
    assert repr(seen).startswith("Observation(out [2, 4, 5, 3], lse, entropy")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_statistics_are_detached_and_in_accumulation_precision(dtype: torch.dtype) -> None:
    inputs = tensors(dtype=dtype, grad=True)
    seen = regard.observe(*inputs, mask=masks.causal(), want=regard.Want.all())
    assert seen.out.requires_grad and seen.out.dtype == dtype
    for name in NAMES:
        found = getattr(seen, name)
        assert not found.requires_grad
        expected = torch.int64 if name == "top_keys" else torch.float64 if dtype == torch.float64 else torch.float32
        assert found.dtype == expected
    assert (seen.weights.sum(-1) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("backend", ["auto", "eager", "blockwise", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_observing_changes_no_bit_of_the_output_and_no_gradient(
    dropout: float, dtype: torch.dtype, backend: str
) -> None:
    if dropout and backend == "sdpa":
        return
    inputs = tensors(2, 4, 2, 63, 111, 8, dtype=dtype, grad=True)
    given = {"mask": masks.causal(), "dropout": dropout, "backend": backend}
    torch.manual_seed(5)
    out = regard.attention(*inputs, **given)
    torch.manual_seed(5)
    seen = regard.observe(*inputs, **given)
    assert torch.equal(seen.out, out)
    pairs = [torch.autograd.grad(o.float().square().sum(), inputs) for o in (out, seen.out)]
    assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))


def test_statistics_are_those_before_dropout() -> None:
    inputs = tensors(B, H, G, L, S)
    plain, dropped = (regard.observe(*inputs, dropout=p, want=regard.Want.all()) for p in (0.0, 0.9))
    for name in NAMES:
        assert torch.allclose(getattr(plain, name), getattr(dropped, name), rtol=0, atol=1e-12)


def test_poison_behind_a_mask_does_not_reach_the_statistics() -> None:
    query, key, value = tensors(B, H, G, L, S)
    mask = masks.keep(torch.arange(S) != 20)
    clean = regard.observe(query, key, value, mask=mask, want=regard.Want.all())
    key[:, :, 20], value[:, :, 20] = torch.nan, torch.inf
    seen = regard.observe(query, key, value, mask=mask, want=regard.Want.all())
    for name in NAMES:
        assert torch.allclose(getattr(seen, name), getattr(clean, name), rtol=0, atol=1e-12), name


def test_the_plan_of_an_observation_names_what_ran() -> None:
    inputs = tensors()
    assert regard.observe(*inputs, backend="blockwise").plan.backend == "blockwise"
    assert regard.observe(*inputs).plan.backend == regard.explain(*inputs).backend


def test_an_observation_can_be_copied() -> None:
    seen = copy.deepcopy(regard.observe(*tensors(), mask=masks.causal()))
    with pytest.raises(AttributeError, match="first=4"):
        seen.first_mass  # noqa: B018
    assert array(seen.entropy).shape == (2, 4, 5)


@pytest.mark.parametrize("grad", [False, True])
def test_values_without_numbers_leave_the_statistics(grad: bool) -> None:
    query, key, _ = tensors(2, 4, 2, 5, 7, 8)
    value = key.new_empty(2, 2, 7, 0)
    for mask in (None, masks.causal() & masks.window(left=2), masks.padding([0, 3])):
        exact = regard.observe(query, key, value, mask=mask, backend="reference")
        for backend in ("auto", "blockwise", "eager"):
            seen = regard.observe(query.requires_grad_(grad), key, value, mask=mask, backend=backend)
            assert seen.out.shape == (2, 4, 5, 0)
            for name in ("lse", "entropy", "key_mass"):
                assert torch.allclose(getattr(seen, name), getattr(exact, name), rtol=0, atol=1e-12, equal_nan=True)
        query.requires_grad_(False)


def test_weights_that_no_memory_holds_are_refused_with_their_size_before_anything_runs() -> None:
    q = torch.zeros(1, 1, 1, 3).expand(1, 8, 10**6, 3)
    with pytest.raises(regard.Refused, match=r"1000000 × 1000000 weights of 8 heads take 29.1 TiB.* ask for a part"):
        regard.observe(q, q, q, want=regard.Want(weights="all"))
