"""Corners of caches that were once wrong: each test is one of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cache.kinds import EXACT, INT8, module, random

import regard
from regard import masks
from regard.cache import BlockPool, CacheFull, KVCache, PagedCache, RollingCache
from regard.nn import MultiHeadAttention

CACHES = {f"{name}, exact": make for name, make in EXACT.items()} | {
    f"{name}, int8": make for name, make in INT8.items()
}


def heads(*sizes: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("make", [lambda: KVCache(5), lambda: PagedCache(BlockPool(5, 3))], ids=["kv", "paged"])
def test_a_first_call_that_overflows_leaves_the_cache_as_new(make: Any) -> None:
    cache = make()
    with pytest.raises(CacheFull):
        cache.update(heads(3, 2, 10, 4), heads(3, 2, 10, 4))
    assert cache.lengths == [] and cache.bytes == 0
    if isinstance(cache, PagedCache):
        assert cache.pool.bytes == 0 and cache.pool.free_blocks == 5
    cache.update(heads(2, 1, 3, 7), heads(2, 1, 3, 7))
    assert cache.lengths == [3, 3]


def test_a_pool_of_another_layer_is_refused_before_anything_changes() -> None:
    pool = BlockPool(11, 3)
    PagedCache(pool).update(heads(1, 2, 3, 4), heads(1, 2, 3, 4))
    cache = PagedCache(pool)
    with pytest.raises(ValueError, match="pool of its own"):
        cache.update(heads(3, 2, 3, 5), heads(3, 2, 3, 5))
    cache.update(heads(2, 2, 3, 4), heads(2, 2, 3, 4))
    assert cache.lengths == [3, 3]


BAD: dict[str, dict[str, Any]] = {
    "unknown backend": {"backend": "nothing"},
    "scale": {"scale": float("nan")},
    "softcap": {"softcap": -1.0},
    "sinks": {"sinks": torch.zeros(3)},
    "value_dim": {"value_dim": 99},
    "query heads": {"query": heads(2, 3, 5, 12)},
    "query batch": {"query": heads(3, 4, 5, 12)},
    "query dim": {"query": heads(2, 4, 5, 11)},
    "query dtype": {"query": heads(2, 4, 5, 12).double()},
    "query rank": {"query": heads(2, 4, 12)},
    "query kind": {"query": "query"},
}


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("before", [0, 3])
def test_attend_refuses_before_it_stores(name: str, bad: str, before: int) -> None:
    make, mask = CACHES[name]
    cache = make()
    if before:
        cache.update(heads(2, 2, before, 12), heads(2, 2, before, 10))
    held = cache.lengths
    given: dict[str, Any] = {"query": heads(2, 4, 5, 12), "mask": mask, **BAD[bad]}
    with pytest.raises((TypeError, ValueError), match=bad.split()[-1] if " " not in bad else None):
        cache.attend(given.pop("query"), heads(2, 2, 5, 12), heads(2, 2, 5, 10), **given)
    assert cache.lengths == held
    cache.attend(heads(2, 4, 5, 12), heads(2, 2, 5, 12), heads(2, 2, 5, 10), mask=mask)
    assert cache.lengths == [before + 5] * 2


@pytest.mark.parametrize("name", ["kv, exact", "paged, exact", "paged, not relative, exact", "kv, int8"])
def test_a_named_backend_that_refuses_leaves_the_tokens_out(name: str) -> None:
    make, mask = CACHES[name]
    cache = make()
    odd = mask & masks.keep(heads(2, 1, 5, 5) > -9)
    # the triton backend runs on CUDA devices only
    with pytest.raises(regard.Refused):
        cache.attend(heads(2, 4, 5, 12), heads(2, 2, 5, 12), heads(2, 2, 5, 10), mask=odd, backend="triton")
    assert cache.lengths == []


def test_a_query_of_another_batch_is_refused_before_the_module_stores() -> None:
    mha, cache = module(rotary=False).train(), KVCache(11)
    mha.dropout = 0.5
    with torch.no_grad(), pytest.raises(ValueError, match="batch"):
        mha(random(3, 5, 48), random(2, 5, 48), cache=cache)
    assert cache.lengths == []


def test_observe_checks_want_before_it_stores() -> None:
    mha, cache = module(), KVCache(11)
    with torch.no_grad(), pytest.raises(TypeError, match="want"):
        mha.observe(random(2, 3, 48), mask=masks.causal(), cache=cache, want="entropy")
    assert cache.lengths == []


def test_a_refused_or_explained_call_with_left_padding_does_not_bind_the_next() -> None:
    mha, cache = module(), KVCache(5)
    padded = masks.causal() & masks.padding(torch.tensor([7, 4]), side="left")
    with torch.no_grad():
        with pytest.raises(CacheFull):
            mha(random(2, 7, 48), mask=padded, cache=cache)
        mha.explain(random(2, 5, 48), mask=masks.causal() & masks.padding([5, 4], side="left"), cache=cache)
        mha(random(2, 3, 48), mask=masks.causal(), cache=cache)
    assert cache.lengths == [3, 3]


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("observed", [False, True])
def test_gradients_through_two_calls_with_frozen_keys_and_values(name: str, observed: bool) -> None:
    make, mask = CACHES[name]
    torch.manual_seed(3)
    mha = MultiHeadAttention(16, 4, dtype=torch.float64)
    for parameter in mha.parameters():
        parameter.requires_grad_(parameter is mha.q_proj.weight)
    x = random(2, 7, 16)

    def gradient(cache: Any) -> torch.Tensor:
        parts = (x[:, :4], x[:, 4:])
        outs = [
            mha.observe(part, mask=mask, cache=cache).out if observed else mha(part, mask=mask, cache=cache)
            for part in parts
        ]
        (found,) = torch.autograd.grad(sum(out.sum() for out in outs), mha.q_proj.weight)
        return found

    (expected,) = torch.autograd.grad(mha(x, mask=mask).sum(), mha.q_proj.weight)
    found = gradient(make())
    if name.endswith("exact"):
        torch.testing.assert_close(found, expected)
    else:
        assert (found - expected).norm() < 0.05 * expected.norm()


def test_errors_name_the_argument() -> None:
    cache = KVCache(5)
    with pytest.raises(TypeError, match="key must be a floating-point tensor"):
        cache.update("a", "b")
    with pytest.raises(TypeError, match="value must be a floating-point tensor"):
        cache.update(heads(1, 1, 1, 4), "b")
    with pytest.raises(TypeError, match="key and value must have one dtype"):
        cache.update(heads(1, 1, 1, 4), heads(1, 1, 1, 4).double())
    with pytest.raises(TypeError, match=r"key must be a floating-point .*int64"):
        cache.update(torch.ones(1, 1, 1, 4, dtype=torch.int64), torch.ones(1, 1, 1, 4, dtype=torch.int64))
    assert cache.lengths == []
    with pytest.raises(TypeError, match="caches must hold PagedCaches"):
        PagedCache.join([KVCache(3)])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="caches must be a sequence"):
        PagedCache.join(PagedCache(BlockPool(3)))  # type: ignore[arg-type]


def test_a_rolling_cache_that_refuses_has_forgotten_nothing() -> None:
    cache = RollingCache(3, sinks=1)
    k = heads(1, 2, 67, 4)
    cache.update(k, k)
    with pytest.raises(ValueError, match="softcap"):
        cache.attend(heads(1, 2, 5, 4), heads(1, 2, 5, 4), heads(1, 2, 5, 4), mask=cache.mask, softcap=0.0)
    assert cache.lengths == [67]
    query, new = heads(1, 2, 5, 4, seed=7), heads(1, 2, 5, 4, seed=8)
    out = cache.attend(query, new, new, mask=cache.mask)
    whole = torch.cat([k, new], 2)
    torch.testing.assert_close(out, regard.attention(query, whole, whole, mask=cache.mask))


def test_numbers_that_attention_cannot_take_are_refused_before_they_are_stored() -> None:
    cache = KVCache(11)
    small = heads(1, 2, 3, 4).to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="float8"):
        cache.attend(small, small, small)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match="one dtype|dtype"):
        cache.attend(heads(1, 2, 3, 4).double(), heads(1, 2, 3, 4).double(), heads(1, 2, 3, 4))
    assert cache.lengths == []
