from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from core_calls import differ, oracle, tensors
from regard import masks

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
