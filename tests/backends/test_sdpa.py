from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from core_calls import differ, oracle, prepare, tensors
from regard import masks
from regard.backends._cuda import CudnnCall
from regard.backends.sdpa import Sdpa
from regard.spec import Call

KERNEL = "_scaled_dot_product_flash_attention_for_cpu"


class Seen(TorchDispatchMode):
    """Records the fused kernel's calls: (causal flag, whether a mask was added, rows, keys)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[bool, bool, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.name() == f"aten::{KERNEL}":
            causal = args[4] if len(args) > 4 else False
            self.calls.append((causal, kwargs.get("attn_mask") is not None, args[0].shape[2], args[1].shape[2]))
        return func(*args, **kwargs)


def kernel_calls(L: int, S: int, **given: Any) -> list[tuple[bool, bool, int, int]]:
    inputs = tensors(2, 4, 2, L, S, 16, dtype=torch.float32)
    with Seen() as seen:
        regard.attention(*inputs, backend="sdpa", **given)
    return seen.calls


def test_no_mask_is_one_plain_kernel_call() -> None:
    assert kernel_calls(63, 111) == [(False, False, 63, 111)]


def test_square_causal_is_the_kernels_flag() -> None:
    assert kernel_calls(300, 300, mask=masks.causal()) == [(True, False, 300, 300)]


def test_causal_documents_are_a_flagged_call_each() -> None:
    mask = masks.documents(lengths=[600, 700]) & masks.causal()
    assert kernel_calls(1300, 1300, mask=mask) == [(True, False, 600, 600), (True, False, 700, 700)]


def test_holes_in_a_causal_call_are_left_out_of_the_keys_and_need_no_mask() -> None:
    holes = masks.columns(70) & ~masks.columns(60) | masks.columns(1)
    flagged = [(True, False, 59, 59), (True, False, 1230, 1230)]
    in_the_hole, beyond = (False, False, 10, 59), (False, False, 1230, 59)
    calls = kernel_calls(1300, 1300, mask=masks.causal() & ~holes)
    assert sorted(calls) == sorted([*flagged, in_the_hole, beyond])


def test_heads_with_masks_of_their_own_are_computed_apart() -> None:
    first = torch.tensor([True, False, False, False])[None, :, None, None]
    calls = kernel_calls(1300, 1300, mask=masks.causal() & (~masks.columns(4) | masks.drop(first)))
    assert sorted(calls) == [(True, False, 1296, 1296)] * 2 + [(True, False, 1300, 1300)] * 6


def test_a_bias_of_one_row_goes_next_to_the_causal_flag_and_stays_one_row() -> None:
    bias = torch.randn(1, 4, 1, 300)
    assert kernel_calls(300, 300, mask=masks.causal(), bias=bias) == [(True, True, 300, 300)]


@pytest.mark.parametrize("shape", [(1, 4, 1, 111), (2, 1, 1, 111), (2, 4, 1, 1)])
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.causal() & ~(masks.columns(60) & ~masks.columns(50))])
def test_a_bias_of_one_row_hides_keys_and_empties_rows(shape: tuple[int, ...], mask: masks.Mask | None) -> None:
    query, key, value = (x.requires_grad_() for x in tensors(2, 4, 2, 111, 111, 16))
    bias = torch.randn(shape, dtype=torch.float64)
    bias[0, 0, 0, : min(5, shape[3])] = -torch.inf
    bias[-1, -1, 0, 40 : 40 + 7 * (shape[3] > 1)] = -torch.inf
    outs = [regard.attention(query, key, value, mask=mask, bias=bias, backend=name) for name in ("sdpa", "eager")]
    torch.testing.assert_close(*outs, rtol=0, atol=1e-12)
    assert not outs[0][0, 0, 0].any() or mask is None
    grad = torch.randn_like(outs[0])
    for one, other in zip(*(torch.autograd.grad(out, (query, key, value), grad) for out in outs), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_small_calls_are_one_kernel_call_whatever_the_mask() -> None:
    for mask in (masks.causal(), masks.window(left=2), masks.documents(lengths=[3, 4]), masks.strided(2)):
        assert len(kernel_calls(5, 7, mask=mask)) == 1


def test_a_square_causal_call_is_bitwise_torchs_own() -> None:
    q, k, v = tensors(2, 4, 4, 111, 111, 16, dtype=torch.float32)
    own = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(regard.attention(q, k, v, mask=masks.causal(), backend="sdpa"), own)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "softcap": ({"softcap": 2.0}, "softcap"),
    "dropout": ({"dropout": 0.5}, "dropout"),
    "learned bias": ({"bias": torch.zeros(5, 7, dtype=torch.float64, requires_grad=True)}, "bias requires grad"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_would_hand_to_its_math_path_is_refused(name: str) -> None:
    given, reason = REFUSED[name]
    inputs = tensors()
    with pytest.raises(regard.Refused, match=reason) as raised:
        regard.attention(*inputs, backend="sdpa", **given)
    assert "blockwise" in str(raised.value)
    assert regard.explain(*inputs, **given).backend != "sdpa"


def test_another_value_dim_is_refused() -> None:
    with pytest.raises(regard.Refused, match="value dim 11 differs from head dim 3"):
        regard.attention(*tensors(V=11), backend="sdpa")


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_strided_last_dim_is_refused_and_auto_does_it(which: int) -> None:
    inputs = list(tensors(D=6))
    plain = regard.attention(*inputs)
    inputs[which] = inputs[which].transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(regard.Refused, match="strided"):
        regard.attention(*inputs, backend="sdpa")
    assert torch.allclose(regard.attention(*inputs), plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", [-1.3, -1e-3, 0.0])
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.causal() & masks.window(left=40)], ids=str)
def test_a_scale_that_is_not_positive_is_right_with_the_causal_flag(scale: float, mask: masks.Mask | None) -> None:
    q, k, v = tensors(2, 4, 2, 411, 411, 8)
    exact, _ = oracle(q, k, v, mask=mask, scale=scale)
    assert differ(regard.attention(q, k, v, mask=mask, scale=scale, backend="sdpa"), exact.out) < 1e-12


@pytest.mark.parametrize("mask", [masks.causal(), masks.padding([0, 3]), masks.window(left=1)], ids=str)
def test_empty_rows_are_zero_with_lse_minus_infinity_and_no_gradient(mask: masks.Mask) -> None:
    inputs = tensors(2, 4, 2, 11, 7, 8, grad=True)
    offset = torch.tensor([-4, 9])
    seen = regard.observe(*inputs, mask=mask, query_offset=offset, backend="sdpa")
    empty = ~mask.dense(11, 7, query_offset=offset).expand(2, 4, 11, 7).any(-1)
    assert empty.any() and not seen.out[empty].any() and (seen.lse[empty] == -torch.inf).all()
    grads = torch.autograd.grad(seen.out.square().sum(), inputs)
    assert not grads[0][empty].any() and all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sinks_join_after_the_kernel(dtype: torch.dtype) -> None:
    q, k, v = tensors(2, 4, 2, 63, 111, 8, dtype=dtype)
    sinks = torch.tensor([-3.0, 0.0, 2.0, 9.0], dtype=dtype)
    exact, _ = oracle(q, k, v, mask=masks.causal(), sinks=sinks)
    seen = regard.observe(q, k, v, mask=masks.causal(), sinks=sinks, backend="sdpa")
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert differ(seen.out, exact.out) < tolerance and differ(seen.lse, exact.lse) < tolerance


def test_the_lse_of_many_steps_is_the_oracles() -> None:
    q, k, v = tensors(1, 2, 1, 1000, 1111, 8)
    for mask in (masks.causal(), masks.causal() & masks.window(left=100), masks.padding([700])):
        exact, _ = oracle(q, k, v, mask=mask)
        lse = regard.observe(q, k, v, mask=mask, backend="sdpa", want=regard.Want.none()).lse
        assert differ(lse, exact.lse) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_steps_merge_within_twice_the_error_of_one_rounding(dtype: torch.dtype) -> None:
    q, k, v = tensors(1, 4, 2, 300, 411, 16, dtype=dtype)
    exact, _ = oracle(q, k, v, mask=masks.causal())
    out = regard.attention(q, k, v, mask=masks.causal(), backend="sdpa")
    assert differ(out, exact.out) <= 2 * torch.finfo(dtype).eps * np.abs(exact.out).max()


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Torch's CPU kernel in the place of cuDNN's; the tensors that it was given."""
    given: list[Tensor] = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, *more: Any, scale: float) -> tuple[Any, ...]:
        assert more[:2] == (None, True) and more[4] is False
        given[:] = [query, key, value]
        out, lse = getattr(torch, KERNEL)(query, key, value, more[2], more[3], scale=scale)
        return (out, lse.unsqueeze(3), *[None] * 7)

    monkeypatch.setattr(torch, "_scaled_dot_product_cudnn_attention", kernel)
    return given


def on_cuda(*inputs: Tensor, **given: Any) -> Call:
    """The call, described as one of half precision on a GPU."""
    names = ("mask", "bias", "scale", "softcap", "sinks")
    call = prepare(*inputs, *(given.get(name) for name in names), 0.0, given.get("query_offset"))
    flags = (True, None, 0, False, None) if given.get("mask") is not None else None
    return call.replace(spec=call.spec._replace(device="cuda", dtype=torch.bfloat16, flags=flags))


@pytest.mark.parametrize("mask", [None, masks.causal()])
@pytest.mark.parametrize("grad", [False, True])
def test_a_plain_call_on_cuda_is_one_call_of_cudnn(cudnn: list[Tensor], mask: Any, grad: bool) -> None:
    program = Sdpa().program(on_cuda(*tensors(2, 4, 4, 11, 11, 8, dtype=torch.float32), mask=mask), named=False)
    for _ in range(2):
        cudnn.clear()
        inputs = [t.requires_grad_(grad) for t in tensors(2, 4, 4, 11, 11, 8, dtype=torch.float32)]
        found = program.run(on_cuda(*inputs, mask=mask))
        assert [given.shape for given in cudnn] == [t.shape for t in inputs]
        grad_out = torch.randn(found.out.shape)
        exact, gradients = oracle(*inputs, grad_out, mask=mask)
        assert differ(found.out, exact.out) < 1e-5
        assert differ(found.lse, exact.lse) < 1e-5 and not found.lse.requires_grad
        if grad:
            made = torch.autograd.grad(found.out, inputs, grad_out)
            assert all(differ(one, other) < 1e-5 for one, other in zip(made, gradients[:3], strict=True))


def test_cudnn_is_given_rows_that_begin_at_multiples_of_16_bytes(cudnn: list[Tensor]) -> None:
    query, key, value = tensors(2, 4, 4, 11, 11, 8, dtype=torch.float32)
    odd = torch.zeros(key.numel() + 1)[1:].view(key.shape).copy_(key)
    apart = torch.zeros(*value.shape[:3], 9)[..., :8].copy_(value)
    call = on_cuda(query, odd, apart)
    found = Sdpa().program(call, named=False).run(call)
    assert differ(found.out, oracle(query, key, value)[0].out) < 1e-5
    assert cudnn[0] is query
    assert all(t.data_ptr() % 16 == 0 and not any(n % 4 for n in t.stride()[:3]) for t in cudnn)


def test_a_call_of_cudnn_has_a_second_derivative_unless_sdpa_was_named(cudnn: list[Tensor]) -> None:
    inputs = [t.requires_grad_() for t in tensors(1, 2, 2, 5, 5, 8, dtype=torch.float32)]
    call = on_cuda(*inputs, mask=masks.causal())
    first = torch.autograd.grad(Sdpa().program(call, named=False).run(call).out.sum(), inputs[0], create_graph=True)
    meant = torch.autograd.grad(regard.attention(*inputs, mask=masks.causal(), backend="eager").sum(), inputs[0],
                                create_graph=True)  # fmt: skip
    for one, other in zip(*(torch.autograd.grad(g[0].square().sum(), inputs) for g in (first, meant)), strict=True):
        assert (one - other).abs().max() < 1e-5
    with pytest.raises(regard.Refused, match="no second derivative"):
        torch.autograd.grad(Sdpa().program(call, named=True).run(call).out.sum(), inputs, create_graph=True)


def test_what_cudnn_cannot_do_alone_is_no_single_call() -> None:
    inputs = tensors(1, 2, 2, 5, 9, 8, dtype=torch.float32)
    for given in ({"mask": masks.causal(), "query_offset": 2}, {"sinks": torch.zeros(2)}, {"bias": torch.zeros(5, 9)}):
        assert not isinstance(Sdpa().program(on_cuda(*inputs, **given), named=False), CudnnCall)
