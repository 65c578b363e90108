"""Masks made of blocks run in gathered pieces of equal shape: exact in values and gradients, head by head too."""

from __future__ import annotations

import pytest
import torch
from tests import forced
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from core_calls import check_against_oracle, tensors
from regard import masks

B, H, G, L, D, SIZE = 2, 4, 2, 211, 5, 16
BLOCKS = -(-L // SIZE)


def table(*lead, share=0.4, seed=0):
    drawn = torch.rand(*lead, BLOCKS, BLOCKS, generator=torch.Generator().manual_seed(seed))
    return drawn < share


def equal_rows():
    rows = table(share=0.3)
    rows[1:9] = rows[0]
    return rows


MASKS = {
    "blocks": masks.blocks(table(), SIZE),
    "equal rows": masks.blocks(equal_rows(), SIZE),
    "causal": masks.causal() & masks.blocks(table(), SIZE),
    "causal, the other way round": masks.blocks(table(), SIZE) & masks.causal(),
    "causal and padding": masks.causal() & masks.blocks(table(), SIZE) & masks.padding([L, 77]),
    "an item": masks.blocks(table(B, 1), SIZE),
    "a head": masks.blocks(table(1, H), SIZE),
    "an item and a head": masks.causal() & masks.blocks(table(B, H), SIZE),
    "a head, and padding and documents": masks.blocks(table(1, H), SIZE)
    & masks.padding([90, L])
    & masks.documents(ids=torch.arange(L).expand(B, L) // 100),
    "or a window": masks.blocks(table(share=0.1), SIZE) | masks.window(left=7),
    "not": ~masks.blocks(table(B, H, share=0.7), SIZE),
    "two grids": masks.blocks(table(share=0.6), SIZE) | masks.random_blocks(1, 48, seed=3),
    "columns": masks.blocks(table(share=0.2), SIZE) | masks.columns(5),
}


@pytest.fixture(autouse=True)
def _small_calls_go_by_steps_too(monkeypatch):
    forced.sizes(monkeypatch, numbers_of_a_dense_mask=0)


@pytest.mark.parametrize("backend", ["sdpa", "blockwise"])
@pytest.mark.parametrize("name", MASKS)
def test_values_and_gradients_equal_the_oracle(name, backend, monkeypatch):
    forced.sizes(monkeypatch, numbers_of_a_piece=5000)
    check_against_oracle(backend, tensors(B, H, G, L, L, D, grad=True), mask=MASKS[name])


@pytest.mark.parametrize("backend", ["sdpa", "blockwise"])
@pytest.mark.parametrize("given", [{"query_offset": 32}, {"query_offset": 7}, {"scale": -0.5}, {"sinks": True}])
def test_offsets_scales_and_sinks_join_them(given, backend):
    if "sinks" in given:
        given = {"sinks": torch.randn(H, dtype=torch.float64, requires_grad=True)}
    for mask in (MASKS["causal"], MASKS["an item and a head"]):
        check_against_oracle(backend, tensors(B, H, G, 97, L, D, grad=True), mask=mask, **given)


def test_lengths_that_blocks_divide_and_strided_tensors_agree_with_eager():
    mask = masks.causal() & masks.blocks(table(1, H)[..., :6, :6], 32)
    wide = [torch.randn(B, 192, H, D, dtype=torch.float64).transpose(1, 2).requires_grad_() for _ in range(3)]
    out = regard.attention(*wide, mask=mask, backend="sdpa")
    exact = regard.attention(*wide, mask=mask, backend="eager")
    assert torch.allclose(out, exact, rtol=0, atol=1e-12)
    for mine, truth in zip(torch.autograd.grad(out.sum(), wide), torch.autograd.grad(exact.sum(), wide), strict=True):
        assert torch.allclose(mine, truth, rtol=0, atol=1e-12)


class Pairs(TorchDispatchMode):
    """How many pairs of a query and a key a call computes, by matrix products and by the fused kernel, and in how many
    calls of either."""

    def __init__(self):
        super().__init__()
        self.products, self.kernels, self.rows = [], [], 0  # the most queries of one product

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition("::")[2].partition(".")[0]
        if "scaled_dot_product" in name:
            query, key = args[:2]
            self.kernels.append(query.shape[:3].numel() * key.shape[2])
        elif name in ("bmm", "baddbmm"):
            one, other = args[-2:]
            self.products.append(one.shape[0] * one.shape[1] * other.shape[2] * one.shape[2])
            self.rows = max(self.rows, one.shape[1])
        return func(*args, **(kwargs or {}))


def computed(mask, length):
    """Pairs by products, their calls and most queries, and pairs by the kernel. Keys and values have 8 numbers each."""
    with Pairs() as seen, torch.no_grad():
        regard.attention(*tensors(B, H, G, length, length, 8), mask=mask, backend="sdpa")
    assert sum(seen.products) % 16 == 0
    return sum(seen.products) // 16, len(seen.products), seen.rows, sum(seen.kernels)


def long_table():
    return torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) < 0.4


def test_blocks_are_computed_each_once_and_many_at_once():
    mask = masks.blocks(long_table(), SIZE)
    pairs, calls, _, others = computed(mask, 1024)
    assert (pairs, True) == mask.kept_pairs(1024, 1024, 0, B, H)
    assert others == 0 and calls < 40  # of 1600 blocks in 64 rows of them
    # eight equal rows of blocks go together
    assert computed(masks.blocks(equal_rows()[:13, :13], SIZE), 208)[2] >= 8 * SIZE


def test_causal_tables_are_triangles_and_whole_blocks_and_nothing_else():
    mask = masks.causal() & masks.blocks(long_table(), SIZE)
    whole, _, _, triangles = computed(mask, 1024)
    on_the_diagonal = B * H * int(long_table().diagonal().sum())
    assert triangles == on_the_diagonal * SIZE**2
    kept, _ = mask.kept_pairs(1024, 1024, 0, B, H)
    assert whole + on_the_diagonal * SIZE * (SIZE + 1) // 2 == kept


@pytest.mark.parametrize("mask", [masks.causal(), masks.window(left=9), masks.blocks(table(), 3)])
def test_masks_without_blocks_of_a_fair_size_are_not_gathered(mask):
    _, products, _, others = computed(mask, L)
    assert products == 0 and others > 0


def test_a_poisoned_key_does_not_leak_from_a_piece():
    query, key, value = tensors(B, H, G, L, L, D)
    mask = MASKS["an item and a head"]
    plain = regard.attention(query, key, value, mask=mask, backend="sdpa")
    key[:, :, 40] = torch.nan
    found = regard.attention(query, key, value, mask=mask, backend="sdpa")
    sees = mask.dense(L, L)[..., 40]
    assert torch.equal(found.isnan().all(-1), sees)
    assert torch.equal(found[~sees], plain[~sees])


def gradients(out, tensors):
    direction = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(7))
    return torch.autograd.grad(out, tensors, direction)


@pytest.mark.parametrize("seed", range(12))
def test_random_tables_equal_the_whole_matrix(seed, monkeypatch):
    draw = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high + 1, (), generator=draw))

    B, H, size = number(1, 2), number(1, 2) * 2, number(16, 24)
    S = number(2 * size, 7 * size)
    L = number(2 * size, S)
    forced.sizes(monkeypatch, numbers_of_a_piece=number(1, 1 << 14))
    lead = (B if number(0, 1) else 1, H if number(0, 1) else 1)
    table = torch.rand(*lead, -(-S // size), -(-S // size), generator=draw) < 0.4
    mask = masks.blocks(table, size)
    mask = masks.causal() & mask if number(0, 1) else mask
    offset = number(0, (S - L) // size) * size if number(0, 2) else None
    shapes = ((B, H, L, 5), (B, H // 2, S, 5), (B, H // 2, S, 5))
    tensors = [torch.randn(*s, dtype=torch.float64, generator=draw).requires_grad_() for s in shapes]
    exact = regard.attention(*tensors, mask=mask, query_offset=offset, backend="eager")
    truth = gradients(exact, tensors)
    for backend in ("sdpa", "blockwise"):
        out = regard.attention(*tensors, mask=mask, query_offset=offset, backend=backend)
        assert (out - exact).abs().max() <= 1e-11
        for mine, right in zip(gradients(out, tensors), truth, strict=True):
            assert (mine - right).abs().max() <= 1e-11 * max(1.0, float(right.abs().max()))


@pytest.mark.parametrize("backend", ["sdpa", "blockwise"])
@pytest.mark.parametrize("length", [L, 208])
def test_the_device_that_new_tensors_go_to_by_default_does_not_matter(length, backend):
    given = tensors(B, H, G, length, length, D, grad=True)
    # a mask of its own: what is worked out about it is to be worked out there
    mask = masks.causal() & masks.blocks(table(seed=length), SIZE)
    with torch.device("meta"):
        out = regard.attention(*given, mask=mask, backend=backend)
        grads = torch.autograd.grad(out.square().sum(), given)
    exact = regard.attention(*given, mask=mask, backend="eager")
    torch.testing.assert_close(out, exact)
    torch.testing.assert_close(grads, torch.autograd.grad(exact.square().sum(), given))
