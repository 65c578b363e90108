"""Half-precision queries over int8 caches: codes are multiplied as they are, and the result is that of the numbers they
stand for, as the reference computes it in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests import forced
from tests._triton.calls import DEVICE, multiply_bfloat16, sample
from tests._triton.inside import stored_caches, stored_decoding
from torch import Tensor

import regard
from regard import masks, reference
from regard.cache import BlockPool, KVCache, PagedCache
from regard.cache._storage import decode, encode

COUNTS = [150, 67, 0]
# head dim, value dim, heads, heads of keys; heads of 40 have a group of scales that is not full
SHAPES = [(128, 128, 8, 2), (64, 64, 4, 4), (40, 48, 6, 2), (64, 128, 8, 1), (256, 256, 4, 1)]
EVERY = [(dtype, paged, shape) for shape in SHAPES for dtype in (torch.bfloat16, torch.float16) for paged in (0, 1)]


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """Several splits of few keys; and the launches that are remembered of a test."""
    forced.sizes(monkeypatch, keys_of_a_split=64)
    if DEVICE == "cpu":
        multiply_bfloat16(monkeypatch)
    return forced.fresh_launches(monkeypatch)


def made(dtype: torch.dtype, paged: bool, shape: tuple[int, ...], spread: float = 1.0) -> tuple[Any, list[Tensor]]:
    """A cache of unequal lengths, and the query, keys and values that it stands for, in float64."""
    D, DV, H, HKV = shape
    generator = torch.Generator().manual_seed(7)

    def normal(*sizes: int) -> Tensor:
        return (torch.randn(sizes, generator=generator) * spread).to(dtype)

    query = torch.randn(len(COUNTS), H, 1, D, generator=generator).to(dtype)
    # values of very different sizes: their scales take part in the weights
    sizes = torch.logspace(-6, 3, max(COUNTS))[torch.randperm(max(COUNTS), generator=generator)].view(1, 1, -1, 1)
    key = normal(len(COUNTS), HKV, max(COUNTS), D)
    value = (normal(len(COUNTS), HKV, max(COUNTS), DV) * sizes).to(dtype)
    cache = PagedCache(BlockPool(60, block_size=5, int8=True)) if paged else KVCache(160, int8=True)
    cache.padded(COUNTS).update(key.to(DEVICE), value.to(DEVICE))
    cache.fill_unused(torch.nan)
    return cache, [query.double(), *(decode(encode(part), torch.float64) for part in (key, value))]


def exact(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
    keep = torch.arange(max(COUNTS)) < torch.tensor(COUNTS)[:, None]
    arrays = [tensor.numpy() for tensor in (query, key, value)]
    return torch.from_numpy(reference.attention(*arrays, mask=keep[:, None, None].numpy(), **how))


def bound(dtype: torch.dtype, tensors: list[Tensor], truth: Tensor, **how: Any) -> float:
    """Twice the error of plain arithmetic in that precision, and the rounding of the result."""
    query, key, value = (tensor.to(dtype) for tensor in tensors)
    plain = regard.attention(query, key, value, mask=masks.padding(COUNTS), backend="eager", **how)
    rounding = torch.finfo(dtype).eps * truth.abs().max().item()
    return 2 * (plain.double() - truth).abs().max().item() + rounding


def found(cache: Any, query: Tensor, dtype: torch.dtype, **how: Any) -> Tensor:
    query, stored = query.to(DEVICE, dtype), cache._as_stored()
    assert stored_caches.can_decode(query, stored) and stored_decoding.takes_codes(query, stored)
    with torch.no_grad():
        given = stored_caches.decode(query, stored, how.get("scale"), how.get("softcap"), how.get("sinks"))
    return given.double().cpu()


@pytest.mark.parametrize(("dtype", "paged", "shape"), sample(EVERY, slice(None, None, 3)))
def test_codes_give_what_the_numbers_they_stand_for_give(
    dtype: torch.dtype, paged: bool, shape: tuple[int, ...]
) -> None:
    cache, tensors = made(dtype, paged, shape)
    truth = exact(*tensors)
    out = found(cache, tensors[0], dtype)
    assert (out[2] == 0).all()  # nothing is held for it
    assert (out - truth).abs().max() <= bound(dtype, tensors, truth)


@pytest.mark.parametrize("spread", [1e-3, 300.0])
def test_logits_of_any_size_give_their_weights(spread: float) -> None:
    cache, tensors = made(torch.bfloat16, False, (64, 64, 4, 2), spread)
    truth = exact(*tensors)
    assert (found(cache, tensors[0], torch.bfloat16) - truth).abs().max() <= bound(torch.bfloat16, tensors, truth)


def test_scale_softcap_and_sinks_count() -> None:
    cache, tensors = made(torch.bfloat16, True, (64, 64, 4, 2))
    sinks = torch.linspace(-2, 2, 4)
    how: dict[str, Any] = {"scale": 0.3, "softcap": 3.0}
    truth = exact(*tensors, **how, sinks=sinks.double().numpy())
    out = found(cache, tensors[0], torch.bfloat16, **how, sinks=sinks.to(DEVICE))
    assert (out - truth).abs().max() <= bound(torch.bfloat16, tensors, truth, **how, sinks=sinks)


@pytest.mark.parametrize("size", [2.0**-80, 2.0**80])
def test_queries_of_any_size_keep_their_digits(size: float) -> None:
    """In float16, in which they are multiplied, neither would be a number."""
    cache, tensors = made(torch.bfloat16, False, (64, 64, 4, 2))
    scale = 1 / (8 * size)
    once = found(cache, tensors[0], torch.bfloat16, scale=1 / 8)
    assert torch.equal(found(cache, tensors[0] * size, torch.bfloat16, scale=scale), once)


@pytest.mark.filterwarnings("ignore:All-NaN", "ignore:invalid value")  # NumPy's, which interprets
def test_a_query_that_is_no_number_spoils_its_own_head_alone() -> None:
    cache, tensors = made(torch.bfloat16, False, (64, 64, 4, 2))
    clean = found(cache, tensors[0], torch.bfloat16)
    for bad in (math.nan, math.inf):
        query = tensors[0].clone()
        query[0, 1, 0, 5] = bad
        out = found(cache, query, torch.bfloat16)
        assert out[0, 1].isnan().all()
        out[0, 1] = clean[0, 1]
        assert (out - clean).abs().max() <= 2**-8 * clean.abs().max()


def test_a_group_that_was_no_number_is_none() -> None:
    cache, _ = made(torch.bfloat16, False, (64, 64, 4, 2))
    key, value = (torch.zeros(3, 2, 1, 64, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    value[1, 0, 0, 40] = math.nan
    with torch.no_grad():
        cache.update(key, value)
    out = found(cache, torch.ones(3, 4, 1, 64), torch.bfloat16)
    assert out[1, :2, 0, 32:].isnan().all()
    assert out[1, :2, 0, :32].isfinite().all() and out[1, 2:].isfinite().all() and out[0].isfinite().all()


@pytest.mark.parametrize("shape", [(41, 41, 4, 2), (32, 32, 2, 2), (64, 64, 9, 1)])
def test_what_is_not_in_pairs_or_has_too_many_rows_is_left_to_the_other_kernel(shape: tuple[int, ...]) -> None:
    cache, tensors = made(torch.bfloat16, False, shape)
    query, stored = tensors[0].to(DEVICE, torch.bfloat16), cache._as_stored()
    assert stored_caches.can_decode(query, stored) and not stored_decoding.takes_codes(query, stored)
    truth = exact(*tensors)
    out = stored_caches.decode(query, stored, None, None, None).double().cpu()
    assert (out - truth).abs().max() <= bound(torch.bfloat16, tensors, truth)


def test_like_steps_have_their_own_results(kept: dict[Any, Any]) -> None:
    for spread in (1.0, 2.0):
        cache, tensors = made(torch.bfloat16, True, (64, 64, 4, 2), spread)
        truth = exact(*tensors)
        assert (found(cache, tensors[0], torch.bfloat16) - truth).abs().max() <= bound(torch.bfloat16, tensors, truth)
    assert len(kept) == 1
