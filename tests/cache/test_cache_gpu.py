"""Caches on a CUDA device: the same numbers, and a step of decoding never waits for the device."""

from __future__ import annotations

import contextlib

import pytest
import torch
from tests.nn.helpers import build, random

from core_calls import no_synchronisation
from regard import masks
from regard.cache import BlockPool, KVCache, LatentCache, PagedCache, RollingCache
from regard.nn import LatentAttention

pytestmark = pytest.mark.gpu
CAUSAL = masks.causal()
KINDS = {
    "kv": lambda: KVCache(99),
    "kv int8": lambda: KVCache(99, int8=True),
    "rolling": lambda: RollingCache(7, sinks=3),
    "paged": lambda: PagedCache(BlockPool(99, 7)),
}


def mask_of(cache):
    return cache.mask if isinstance(cache, RollingCache) else CAUSAL


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_numbers_as_on_the_cpu_without_waiting(kind, ragged):
    mha = build(64, 4, num_kv_heads=2).eval()  # rotary tables are float32, and differ between devices
    x = random(3, 90, 64)
    outs = {}
    with torch.no_grad():
        for device in ("cpu", "cuda"):
            cache, here = KINDS[kind](), mha.to(device)
            given = cache.padded([50, 3, 31]) if ragged else cache
            parts = [here(x[:, :50].to(device), mask=mask_of(cache), cache=given)]
            cache.fill_unused(torch.nan)
            here(x[:, 50:51].to(device), mask=mask_of(cache), cache=cache)
            rest = x[:, 51:].to(device)
            with no_synchronisation() if device == "cuda" else contextlib.nullcontext():
                parts += [here(part, mask=mask_of(cache), cache=cache) for part in rest.split(1, 1)]
            outs[device] = torch.cat(parts, 1).cpu()
    apart = (outs["cuda"] - outs["cpu"]).norm() / outs["cpu"].norm()
    assert apart <= (0.01 if "int8" in kind else 1e-10)  # a number between two codes may go either way


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_is_moved_goes_on(kind):
    mha, cache, x = build(64, 4, num_kv_heads=2).eval(), KINDS[kind](), random(3, 51, 64)
    with torch.no_grad():
        mha(x[:, :50], mask=mask_of(cache), cache=cache)
        expected = mha(x[:, 50:], mask=mask_of(cache), cache=cache.fork())
        found = mha.cuda()(x[:, 50:].cuda(), mask=mask_of(cache), cache=cache.to("cuda"))
    assert (found.cpu() - expected).norm() <= 1e-2 * expected.norm()


def test_latents_too():
    sizes = {"kv_lora_rank": 32, "nope_dim": 16, "rope_dim": 8, "q_lora_rank": 24, "dtype": torch.float64}
    mla = LatentAttention(64, 4, **sizes, positions=lambda query, key, *, query_offset: (query, key)).eval()
    x, outs = random(3, 60, 64), {}
    with torch.no_grad():
        for device in ("cpu", "cuda"):
            cache, here = LatentCache(64), mla.to(device)
            parts = [here(part, mask=CAUSAL, cache=cache) for part in x.to(device).split([40, *[1] * 20], 1)]
            outs[device] = torch.cat(parts, 1).cpu()
    assert torch.allclose(outs["cuda"], outs["cpu"], rtol=0, atol=1e-9)
