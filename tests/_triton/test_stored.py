"""Decoding over caches as they are stored gives what decoding over their pieces gives."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from tests import forced
from tests._triton.inside import stored_caches

from regard.cache import BlockPool, KVCache, PagedCache, TokenCache

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
COUNTS = [70, 3, 0]
B, H, HKV, D, DV = 3, 6, 2, 40, 24
# on a GPU a plain cache is one call, which other kernels take
PLAIN = {"plain": lambda: KVCache(90)} if DEVICE == "cpu" else {}
CACHES = {
    **PLAIN,
    "int8": lambda: KVCache(90, int8=True),
    "paged": lambda: PagedCache(BlockPool(40, block_size=5)),
    "paged int8": lambda: PagedCache(BlockPool(40, block_size=5, int8=True)),
}


def decoded(
    make: Any, by_kernels: bool, patch: pytest.MonkeyPatch, **how: Any
) -> tuple[list[torch.Tensor], TokenCache]:
    """Three tokens after prompts of unequal lengths, where memory that no token has been written to holds NaN."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    cache = make()
    longest = max(COUNTS)
    done: list[int] = []
    decode = stored_caches.decode

    def noted(*given: Any) -> torch.Tensor:
        done.append(1)
        return decode(*given)

    with torch.no_grad(), patch.context() as own:
        own.setattr(stored_caches, "decode", noted)
        if not by_kernels:
            own.setattr(stored_caches, "can_decode", lambda query, stored: False)
        cache.padded(COUNTS).update(normal(B, HKV, longest, D), normal(B, HKV, longest, DV))
        cache.fill_unused(torch.nan)
        found = [cache.attend(normal(B, H, 1, D), normal(B, HKV, 1, D), normal(B, HKV, 1, DV), **how) for _ in range(3)]
    assert len(done) == 3 * by_kernels
    return found, cache


@pytest.mark.parametrize("kind", CACHES)
def test_kernels_read_what_a_cache_holds_as_it_holds_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    how: dict[str, Any] = {}
    if kind == "paged int8":
        how = {"softcap": 3.0, "scale": 0.3, "sinks": torch.linspace(-2, 2, H, device=DEVICE)}
    found, cache = decoded(CACHES[kind], True, monkeypatch, **how)
    wanted, _ = decoded(CACHES[kind], False, monkeypatch, **how)
    assert cache.lengths == [count + 3 for count in COUNTS]
    for one, other in zip(found, wanted, strict=True):
        assert one.isfinite().all()
        assert (one - other).abs().max() < 2e-5


def test_keys_are_split_among_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    forced.sizes(monkeypatch, keys_of_a_split=16)
    found, _ = decoded(CACHES["paged"], True, monkeypatch)
    wanted, _ = decoded(CACHES["paged"], False, monkeypatch)
    assert max((one - other).abs().max() for one, other in zip(found, wanted, strict=True)) < 2e-5
