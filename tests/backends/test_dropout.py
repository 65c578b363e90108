"""What is dropped is what the hash draws, and every backend that takes it drops the same weights."""

from __future__ import annotations

import pytest
import torch

import regard
from core_calls import check_against_oracle, tensors
from regard import masks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("p", [1e-9, 0.1, 0.25, 0.5, 0.9, 1.0])
def test_what_is_dropped_is_what_the_hash_draws(p: float, dtype: torch.dtype) -> None:
    for rows, keys in ((33, 37), (130, 65)):
        inputs = tensors(2, 6, 3, rows, keys, 8, dtype=dtype, grad=True)
        if p == 1.0:
            assert not regard.attention(*inputs, dropout=p, backend="blockwise").any()
            continue
        check_against_oracle("blockwise", inputs, 1e-4 if dtype == torch.float32 else 1e-11, dropout=p)


@pytest.mark.parametrize("mask", [None, masks.causal() & masks.window(left=9), masks.padding([5, 37])], ids=str)
def test_eager_and_blockwise_drop_the_same_weights(mask: masks.Mask | None) -> None:
    inputs = tensors(2, 6, 3, 33, 37, 8, dtype=torch.float32, grad=True)
    found = []
    for backend in ("eager", "blockwise"):
        torch.manual_seed(5)
        out = regard.attention(*inputs, mask=mask, dropout=0.3, backend=backend)
        found.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-4) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("cap", [0.5, 20.0, 63.0, 1e4])
def test_softcaps_of_any_size_are_as_exact_as_plain_operations(cap: float) -> None:
    query, key, value = tensors(2, 6, 3, 63, 111, 8)
    exact = regard.attention(query, key, value, softcap=cap, backend="reference")
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        inputs = [t.to(dtype) for t in (query, key, value)]
        found = regard.attention(*inputs, softcap=cap, backend="blockwise").double()
        assert torch.allclose(found, exact, rtol=0, atol=tolerance)
