"""Items of unequal lengths in one call, as on a GPU and with gradients, give what they give piece by piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regard import masks
from regard.cache import KVCache, LatentCache, RollingCache

COUNTS = [11, 3, 0]
KINDS = {"all": lambda: KVCache(30), "rolling": lambda: RollingCache(window=6, sinks=1)}


def decoded(tokens: int, kind: str, *, at_once: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    cache: Any = KINDS[kind]()
    mask = cache.mask if kind == "rolling" else masks.causal()
    with torch.set_grad_enabled(at_once):
        cache.padded(COUNTS).update(normal(3, 2, 11, 5), normal(3, 2, 11, 7))
        cache.fill_unused(torch.nan)
        new = [(normal(3, 4, tokens, 5), normal(3, 2, tokens, 5), normal(3, 2, tokens, 7)) for _ in range(3)]
        return [cache.attend(query.requires_grad_(at_once), *keys, mask=mask).detach() for query, *keys in new]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_mask_hides_empty_slots_as_pieces_leave_them_out(tokens: int, kind: str) -> None:
    wanted, found = (decoded(tokens, kind, at_once=at_once) for at_once in (False, True))
    for one, other in zip(found, wanted, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_latent_cache_of_unequal_lengths_is_one_call_too() -> None:
    found = []
    for at_once in (False, True):
        torch.manual_seed(1)
        cache = LatentCache(30)
        with torch.set_grad_enabled(at_once):
            cache.padded(COUNTS).update(torch.randn(3, 1, 11, 9))
            cache.fill_unused(torch.nan)
            query = torch.randn(3, 6, 1, 9, requires_grad=at_once)
            found.append(cache.attend(query, torch.randn(3, 1, 1, 9), value_dim=5).detach())
    assert found[0].isfinite().all()
    torch.testing.assert_close(*found)
