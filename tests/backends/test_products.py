"""Gathered pieces by plain products: as exact as the kernel, whatever the logits, and row by row on their own."""

from __future__ import annotations

import weakref

import pytest
import torch
from tests import forced

import regard
from core_calls import Operators, check_against_oracle, tensors
from memory import peak_bytes
from regard import masks
from regard.backends import _steps
from regard.statistics import merge

H, L, D, SIZE = 2, 128, 8, 16


@pytest.fixture(autouse=True)
def _small_calls_go_by_steps_too(monkeypatch):
    forced.sizes(monkeypatch, numbers_of_a_dense_mask=0)


def table(share=0.4):
    drawn = torch.rand(L // SIZE, L // SIZE, generator=torch.Generator().manual_seed(3)) < share
    return drawn.fill_diagonal_(True)


MASK = masks.blocks(table(), SIZE)


def call(inputs, direction=None, mask=MASK):
    inputs = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = regard.attention(*inputs, mask=mask, backend="sdpa")
    return out.detach(), torch.autograd.grad(out, inputs, torch.ones_like(out) if direction is None else direction)


@pytest.mark.parametrize("most", [0, 1 << 20])
def test_they_are_used_up_to_so_many_weights(most, monkeypatch):
    forced.sizes(monkeypatch, weights_of_a_product=most)
    with Operators() as ran:
        call(tensors(1, H, H, L, L, D, dtype=torch.float32))
    kernels = [name for name in ran.names if "scaled_dot_product" in name]
    assert [any(name.endswith("backward") == later for name in kernels) for later in (False, True)] == [most == 0] * 2


@pytest.mark.parametrize("factor", [1e-3, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
def test_logits_of_any_size_equal_the_oracle(factor, scale, monkeypatch):
    forced.sizes(monkeypatch, numbers_of_a_piece=3000)
    inputs = tensors(2, 2 * H, H, L, L, D, grad=True)
    with torch.no_grad():
        inputs[0][:, :, 20:40] *= factor  # some rows of some pieces
    check_against_oracle("sdpa", inputs, mask=MASK, scale=scale)


@pytest.mark.parametrize("factor", [1.0, 30.0, 1e4])
def test_in_float32_they_are_about_as_exact_as_the_kernel(factor, monkeypatch):
    inputs = tensors(1, H, H, L, L, D, dtype=torch.float32)
    inputs[0][:, :, 20:40] *= factor
    exact_out, exact = call([tensor.double() for tensor in inputs])
    mine_out, mine = call(inputs)
    forced.sizes(monkeypatch, weights_of_a_product=0)
    kernel_out, kernel = call(inputs)
    for found, by_kernel, truth in zip((mine_out, *mine), (kernel_out, *kernel), (exact_out, *exact), strict=True):
        error, allowed = ((tensor - truth).abs().max() for tensor in (found, by_kernel))
        assert error <= 4 * allowed + 2e-6 * truth.abs().max()


def test_a_huge_key_changes_no_bit_of_pieces_that_do_not_see_it():
    inputs = tensors(1, H, H, L, L, D, dtype=torch.float32)
    plain_out, plain = call(inputs)
    spoilt = [tensor.clone() for tensor in inputs]
    spoilt[1][:, :, 2 * SIZE + 3] *= 1e5  # its logits are far
    out, grads = call(spoilt)
    blind = ~MASK.dense(L, L)[:, 2 * SIZE + 3]
    assert blind.any() and not torch.equal(out, plain_out)
    assert torch.equal(out[:, :, blind], plain_out[:, :, blind])
    assert torch.equal(grads[0][:, :, blind], plain[0][:, :, blind])


def test_a_huge_query_changes_no_bit_of_the_rows_beside_it():
    inputs = tensors(1, H, H, L, L, D, dtype=torch.float32)
    plain, _ = call(inputs)
    inputs[0][:, :, 5] *= 1e5
    out, _ = call(inputs)
    beside = torch.arange(L) != 5
    assert torch.equal(out[:, :, beside], plain[:, :, beside])


def test_a_gradient_may_be_huge():
    inputs = tensors(1, H, H, L, L, D, dtype=torch.float32)
    direction = torch.full((1, H, L, D), 1e30)
    _, grads = call(inputs, direction)
    _, small = call(inputs, direction / 1e30)
    for large, expected in zip(grads, small, strict=True):
        torch.testing.assert_close(large / 1e30, expected, rtol=1e-3, atol=1e-5)


def test_a_place_in_a_room_is_given_back_before_there_is_a_larger_one(monkeypatch):
    room, like = _steps.Room(), torch.empty(1)
    small = room.of("a", 2, 3, like)
    assert room.of("a", 1, 6, like).data_ptr() == small.data_ptr()
    kept = weakref.ref(room._kept["a"])
    del small
    alive = []
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda self, n: (alive.append(kept() is not None), torch.empty(n))[1]
    )
    assert room.of("a", 3, 3, like).shape == (3, 3)
    assert alive == [False]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("scale", [0.0, 1e-47, 0.3])
def test_nan_is_seen_at_any_scale(which, scale):
    inputs = tensors(1, H, H, L, L, D, dtype=torch.float32)
    inputs[which][0, 0, 40, 1] = torch.nan
    out = regard.attention(*inputs, mask=MASK, scale=scale, backend="sdpa")
    exact = regard.attention(*inputs, mask=MASK, scale=scale, backend="eager")
    assert exact.isnan().any() and torch.equal(out.isnan(), exact.isnan())


def test_logits_near_the_largest_number_are_finite():
    query = key = torch.full((1, 1, L, 16), 4.4e18)
    value = torch.randn(1, 1, L, 16)
    out = regard.attention(query, key, value, mask=MASK, scale=1.0, backend="sdpa")
    torch.testing.assert_close(out, regard.attention(query, key, value, mask=MASK, scale=1.0, backend="eager"))


@pytest.mark.parametrize("length", [L, L - 5])
def test_a_compiled_call_under_autocast_keeps_its_precision(length):
    inputs = tensors(1, H, H, length, length, D, dtype=torch.float32)
    compiled = torch.compile(lambda *given: regard.attention(*given, mask=MASK, backend="sdpa"), backend="eager")
    plain = regard.attention(*inputs, mask=MASK, backend="sdpa")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = [tensor.clone() for tensor in inputs]
        assert torch.equal(compiled(*given), regard.attention(*given, mask=MASK, backend="sdpa"))
    assert plain.dtype == torch.float32


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.causal() & MASK], ids=["none", "causal", "causal blocks"])
def test_compiled_calls_in_half_precision_have_gradients(mask):
    inputs = [tensor.requires_grad_() for tensor in tensors(1, H, H, L, L, D, dtype=torch.bfloat16)]
    compiled = torch.compile(lambda *given: regard.attention(*given, mask=mask, backend="sdpa"), backend="aot_eager")
    found = torch.autograd.grad(compiled(*inputs).sum(), inputs)
    truth = torch.autograd.grad(regard.attention(*inputs, mask=mask, backend="sdpa").sum(), inputs)
    for mine, right in zip(found, truth, strict=True):
        torch.testing.assert_close(mine, right, rtol=2e-2, atol=2e-2)


def test_the_bits_of_a_merged_row_do_not_hang_on_zeros_elsewhere():
    lse, part = torch.randn(64), torch.randn(2, 64)
    out = torch.randn(64, 4)
    made = []
    for shaped in (part[0].clone(), part.T.contiguous().T[0]):  # the same numbers, strided
        total, total_lse = out.clone(), lse.clone()
        merge(total, total_lse, out.clone(), shaped)
        made.append((total, total_lse))
    assert torch.equal(made[0][0], made[1][0]) and torch.equal(made[0][1], made[1][1])


SHAPES = [(1, 4, 4, 1024, 64), (2, 8, 2, 1000, 32)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("backend", ["sdpa", "blockwise"])
@pytest.mark.parametrize("kind", ["plain", "transposed", "a table a head"])
def test_peak_memory_is_told_for_small_blocks(kind, backend, shape, dtype, monkeypatch):
    monkeypatch.undo()
    B, H, G, length, dim = shape
    drawn = torch.rand(1, H, 16, 16, generator=torch.Generator().manual_seed(1)) < 0.4
    mask = masks.blocks(drawn if kind == "a table a head" else drawn[0, 0], 64)
    inputs = tensors(B, H, G, length, length, dim, dtype=dtype)
    if kind == "transposed":
        inputs = tuple(tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in inputs)
    measured = peak_bytes(lambda: regard.attention(*inputs, mask=mask, backend=backend))
    said = regard.explain(*inputs, mask=mask, backend=backend).cost.peak_bytes
    assert measured / 1.5 <= said <= measured * 1.5, (said, measured)
