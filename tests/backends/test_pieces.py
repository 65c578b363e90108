"""Steps of equal shape that are computed as one: bands, equal documents, strided masks; values and gradients."""

from __future__ import annotations

import pytest
import torch
from tests import forced

import regard
from core_calls import Operators, tensors
from regard import masks, sparse

S = 211
MASKS = {
    "band": masks.causal() & masks.window(left=37),
    "band to both sides": masks.window(left=20, right=11),
    "band and first keys": masks.causal() & (masks.window(left=40) | masks.columns(5)),
    "every seventh": masks.causal() & masks.strided(7),
    "every fifth, both ways": masks.strided(5),
    "strided pattern": sparse.strided(16),
    "dilated": sparse.dilated(left=50, step=5, right=10),
    "strided or window": masks.strided(3) | masks.window(left=40, right=2),
    "equal documents": masks.documents(lengths=[42] * 5 + [1]),
    "causal documents": masks.causal() & masks.documents(lengths=[70, 70, 71]),
    "padded band": masks.causal() & masks.window(left=33) & masks.padding([S - 50, S]),
    "fixed pattern": sparse.fixed(S, stride=16, summary=3),
    "padded fixed pattern": sparse.fixed(S, stride=13) & masks.padding([S - 70, S]),
    "scattered keys": masks.keep(torch.arange(S) % 7 == 3),
    "scattered keys, causal": masks.causal() & masks.keep(torch.arange(S) % 5 == 1),
    "all but most keys": masks.causal() & ~masks.keep(torch.arange(S) % 9 < 6),
    "scattered keys or a band": masks.keep(torch.arange(S) % 8 == 2) | masks.window(left=9, right=4),
    "padded strides": sparse.strided(13) & masks.padding([S, S - 70]),
}


@pytest.fixture(autouse=True)
def _small_calls_go_by_steps_too(monkeypatch: pytest.MonkeyPatch) -> None:
    forced.sizes(monkeypatch, numbers_of_a_dense_mask=0)


@pytest.mark.parametrize("backend", ["sdpa", "blockwise"])
@pytest.mark.parametrize("kind", MASKS)
def test_values_and_gradients_are_those_of_plain_operations(kind: str, backend: str) -> None:
    for rows, offset in ((S, None), (150, None), (S, -20), (97, 33)):
        inputs = tensors(2, 4, 2, rows, S, 8, grad=True)
        given = {"mask": MASKS[kind], "query_offset": offset}
        exact, found = (regard.attention(*inputs, backend=name, **given) for name in ("eager", backend))
        assert torch.allclose(exact, found, rtol=0, atol=1e-12)
        grad_out = torch.randn_like(exact)
        pairs = zip(*(torch.autograd.grad(out, inputs, grad_out) for out in (exact, found)), strict=True)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-11) for a, b in pairs)
        lse = regard.observe(*inputs, backend=backend, want=regard.Want.none(), **given).lse
        assert torch.allclose(lse, regard.observe(*inputs, backend="eager", want=regard.Want.none(), **given).lse)


@pytest.mark.parametrize("layout", ["transposed", "expanded"])
def test_any_layout_will_do(layout: str) -> None:
    query, key, value = tensors(3, 4, 2, S, S, 8)
    if layout == "transposed":
        query, key, value = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value))
    else:
        key, value = (t[:1].expand(3, -1, -1, -1) for t in (key, value))
    mask = masks.causal() & masks.window(left=37)
    exact = regard.attention(query, key, value, mask=mask, backend="eager")
    assert torch.allclose(regard.attention(query, key, value, mask=mask, backend="sdpa"), exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("mask", "most"),
    [
        (masks.causal() & masks.window(left=256), 12),
        (masks.documents(lengths=[512] * 16), 4),
        (masks.causal() & masks.documents(lengths=[512] * 16), 4),
        (masks.causal() & masks.strided(64), 4),
        (sparse.strided(64), 8),
        (masks.keep(torch.arange(8192) % 50 == 3), 1),
    ],
    ids=str,
)
def test_a_long_call_is_a_few_calls_of_the_kernel(mask: masks.Mask, most: int) -> None:
    query = torch.randn(1, 1, 8192, 8)
    with Operators() as ran:
        regard.attention(query, query, query, mask=mask)
    assert 0 < sum("scaled_dot_product" in name for name in ran.names) <= most
