"""Items of unequal lengths in one call, as on a GPU, give what they give piece by piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regard import masks
from regard.cache import KVCache, LatentCache, RollingCache, _base

COUNTS = [11, 3, 0]
KINDS = {"all": lambda: KVCache(30), "rolling": lambda: RollingCache(window=6, sinks=1)}


def decoded(tokens: int, kind: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    cache: Any = KINDS[kind]()
    mask = cache.mask if kind == "rolling" else masks.causal()
    with torch.no_grad():
        cache.padded(COUNTS).update(normal(3, 2, 11, 5), normal(3, 2, 11, 7))
        cache.fill_unused(torch.nan)
        new = [(normal(3, 4, tokens, 5), normal(3, 2, tokens, 5), normal(3, 2, tokens, 7)) for _ in range(3)]
        return [cache.attend(*each, mask=mask) for each in new]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_mask_hides_empty_slots_as_pieces_leave_them_out(
    tokens: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = decoded(tokens, kind)
    monkeypatch.setattr(_base, "_hides_for_nothing", lambda like: True)
    found = decoded(tokens, kind)
    for one, other in zip(found, wanted, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_latent_cache_of_unequal_lengths_is_one_call_too(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for at_once in (False, True):
        monkeypatch.setattr(_base, "_hides_for_nothing", lambda like, at_once=at_once: at_once)
        torch.manual_seed(1)
        cache = LatentCache(30)
        with torch.no_grad():
            cache.padded(COUNTS).update(torch.randn(3, 1, 11, 9))
            cache.fill_unused(torch.nan)
            found.append(cache.attend(torch.randn(3, 6, 1, 9), torch.randn(3, 1, 1, 9), value_dim=5))
    assert found[0].isfinite().all()
    torch.testing.assert_close(*found)
