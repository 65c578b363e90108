from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import regard
from core_calls import BACKENDS, check_against_oracle, differ, every_mask, oracle, tensors
from regard import masks

L, S = 13, 37


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", list(every_mask(2, 4, L, S)))
def test_auto_gives_the_oracles_values_and_gradients(kind: str) -> None:
    check_against_oracle("auto", tensors(2, 4, 2, L, S, grad=True), mask=every_mask(2, 4, L, S)[kind])


@pytest.mark.parametrize("kind", [None, "causal", "keep by head", "ids"])
def test_derivatives_of_the_second_order_under_auto(kind: str | None) -> None:
    inputs = tensors(1, 2, 1, 3, 4, 2, grad=True)
    mask = None if kind is None else every_mask(1, 2, 3, 4)[kind]
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)

    def run(q: Tensor, k: Tensor, v: Tensor, b: Tensor, s: Tensor) -> Tensor:
        return regard.attention(q, k, v, mask=mask, bias=b, sinks=s, softcap=2.0)

    assert torch.autograd.gradgradcheck(run, (*inputs, bias, sinks))


def test_the_second_derivative_drops_what_the_first_pass_dropped() -> None:
    q, k, v = tensors(1, 2, 1, 3, 4, 2, grad=True)
    torch.manual_seed(1)
    out = regard.attention(q, k, v, dropout=0.5)
    (create,) = torch.autograd.grad(out.square().sum(), q, create_graph=True, retain_graph=True)
    (plain,) = torch.autograd.grad(out.square().sum(), q, retain_graph=True)
    assert close(create, plain)


@pytest.mark.parametrize("backend", ["blockwise", "sdpa"])
def test_a_named_backend_refuses_the_second_derivative_by_name(backend: str) -> None:
    q, k, v = tensors(grad=True)
    out = regard.attention(q, k, v, mask=masks.causal(), backend=backend)
    with pytest.raises(regard.Refused, match=f"{backend!r} has no second derivative.*auto"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


@pytest.mark.parametrize("which", range(5))
def test_forward_derivatives_agree_with_differences(which: int) -> None:
    inputs = [*tensors(), torch.randn(5, 7, dtype=torch.float64), torch.randn(4, dtype=torch.float64)]

    def run(q: Tensor, k: Tensor, v: Tensor, b: Tensor, s: Tensor) -> Tensor:
        return regard.attention(q, k, v, bias=b, sinks=s, mask=masks.causal(), softcap=3.0)

    tangent = torch.randn_like(inputs[which])
    with forward_ad.dual_level():
        dual = [forward_ad.make_dual(t, tangent) if n == which else t for n, t in enumerate(inputs)]
        found = forward_ad.unpack_dual(run(*dual)).tangent
    step = 1e-6
    ahead, behind = ([t + sign * step * tangent if n == which else t for n, t in enumerate(inputs)] for sign in (1, -1))
    assert found is not None and close(found, (run(*ahead) - run(*behind)) / (2 * step), 1e-7)


@pytest.mark.parametrize("backend", ["blockwise", "sdpa", "reference"])
def test_a_named_backend_refuses_forward_derivatives_by_name(backend: str) -> None:
    q, k, v = tensors()
    with forward_ad.dual_level(), pytest.raises(regard.Refused, match="forward-mode"):
        regard.attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v, backend=backend)


@pytest.mark.parametrize("backend", ["auto", "eager", "sdpa"])
def test_under_autocast_the_result_is_that_of_rounded_inputs(backend: str) -> None:
    inputs = tensors(2, 4, 2, 63, 111, 16, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = regard.attention(*inputs, mask=masks.causal(), backend=backend)
    rounded = regard.attention(*(t.bfloat16() for t in inputs), mask=masks.causal(), backend=backend)
    assert out.dtype == torch.bfloat16 and torch.equal(out, rounded)


def test_float64_stays_under_autocast() -> None:
    inputs = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(regard.attention(*inputs), regard.attention(*inputs))
        assert regard.attention(*inputs).dtype == torch.float64


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_a_mask_used_in_inference_mode_serves_in_training_and_back(backend: str) -> None:
    inputs = tensors(2, 4, 2, 13, 13, 8, grad=True)
    with torch.inference_mode():
        made = masks.documents(lengths=[6, 7]), masks.padding([5, 13]), masks.keep(torch.rand(13, 13) > 0.3)
        first = [regard.attention(*inputs, mask=mask, backend=backend) for mask in made]
    for mask, expected in zip(made[:2], first, strict=False):
        out = regard.attention(*inputs, mask=mask, backend=backend)
        assert close(out, expected)
        out.sum().backward()
    with torch.inference_mode():
        assert torch.equal(regard.attention(*inputs, mask=made[2], backend=backend), first[2])


def test_tensors_of_inference_mode_are_taken() -> None:
    with torch.inference_mode():
        inputs = tensors()
        inside = regard.attention(*inputs, mask=masks.causal())
    assert torch.equal(regard.attention(*inputs, mask=masks.causal()), inside)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.padding([3, 7])], ids=str)
def test_checkpointing_recomputes_the_same_dropout(mask: masks.Mask | None, reentrant: bool) -> None:
    inputs = tensors(grad=True)

    def run(*given: Tensor) -> Tensor:
        return regard.attention(*given, mask=mask, dropout=0.4)

    torch.manual_seed(4)
    plain = torch.autograd.grad(run(*inputs).square().sum(), inputs)
    torch.manual_seed(4)
    out = checkpoint(run, *inputs, use_reentrant=reentrant)
    torch.manual_seed(9)
    out.square().sum().backward()
    assert all(torch.equal(t.grad, grad) for t, grad in zip(inputs, plain, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(left=5)], ids=str)
def test_views_and_expanded_inputs_give_the_contiguous_result_and_gradient(
    mask: masks.Mask | None, backend: str
) -> None:
    packed = torch.randn(2, 40, 4, 24, dtype=torch.float64, requires_grad=True)
    parts = [packed[..., n * 8 : n * 8 + 8].transpose(1, 2) for n in range(3)]
    shared = torch.randn(1, 1, 40, 8, dtype=torch.float64, requires_grad=True)
    for leaf, inputs in ((packed, parts), (shared, [shared.expand(2, 4, 40, 8)] * 3)):
        out = regard.attention(*inputs, mask=mask, backend=backend)
        plain = regard.attention(*(t.contiguous() for t in inputs), mask=mask, backend="eager")
        assert close(out, plain)
        (found,) = torch.autograd.grad(out.square().sum(), leaf, retain_graph=True)
        (expected,) = torch.autograd.grad(plain.square().sum(), leaf, retain_graph=True)
        assert close(found, expected, 1e-10)


def test_one_tensor_in_three_places_gets_the_sum_of_the_gradients() -> None:
    x = torch.randn(2, 4, 13, 8, dtype=torch.float64, requires_grad=True)
    grads = [
        torch.autograd.grad(regard.attention(x, x, x, mask=masks.causal(), backend=name).square().sum(), x)[0]
        for name in BACKENDS
    ]
    assert close(grads[0], grads[1]) and close(grads[0], grads[2])


@pytest.mark.parametrize("B, L, S, V", [(0, 5, 7, 3), (2, 0, 7, 3), (2, 5, 0, 3), (2, 5, 7, 0), (0, 0, 0, 0)])
@pytest.mark.parametrize("backend", ["auto", *BACKENDS, "reference"])
def test_empty_sizes_give_zeros_and_gradients_of_the_right_shape(B: int, L: int, S: int, V: int, backend: str) -> None:
    if backend == "sdpa" and V == 0:
        return
    for mask in (None, masks.causal(), masks.keep(torch.ones(1, 1, 1, 1, dtype=torch.bool))):
        inputs = tensors(B=B, L=L, S=S, V=V, grad=backend != "reference")
        out = regard.attention(*inputs, mask=mask, backend=backend)
        assert out.shape == (B, 4, L, V) and (S > 0 or not out.any())
        if backend != "reference":
            for t, grad in zip(inputs, torch.autograd.grad(out.sum(), inputs), strict=True):
                assert grad.shape == t.shape


def test_an_observed_call_gives_lse_and_weights_of_the_oracle() -> None:
    inputs = tensors(2, 4, 2, L, S)
    exact, _ = oracle(*inputs, mask=masks.causal())
    seen = regard.observe(*inputs, mask=masks.causal(), want=regard.Want.all())
    assert differ(seen.lse, exact.lse) < 1e-12 and differ(seen.weights, exact.weights) < 1e-12


@pytest.mark.parametrize("kind", list(every_mask(2, 4, L, S)))
def test_masks_survive_pickling_and_copying_after_use(kind: str) -> None:
    mask, inputs = every_mask(2, 4, L, S)[kind], tensors(2, 4, 2, L, S)
    out = regard.attention(*inputs, mask=mask)
    for twin in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask), copy.copy(mask)):
        assert twin == mask and torch.equal(regard.attention(*inputs, mask=twin), out)


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_a_subclass_of_tensor_comes_back_as_itself(backend: str) -> None:
    inputs = tensors(grad=True)
    out = regard.attention(*(t.as_subclass(Tagged) for t in inputs), mask=masks.causal(), backend=backend)
    assert type(out) is Tagged
    assert torch.equal(out.as_subclass(torch.Tensor), regard.attention(*inputs, mask=masks.causal(), backend=backend))


def test_uninitialised_memory_never_shows() -> None:
    torch.use_deterministic_algorithms(True)  # fills it with NaN
    try:
        for mask in every_mask(2, 4, 70, 90).values():
            for backend in BACKENDS:
                inputs = tensors(2, 4, 2, 70, 90, grad=True)
                seen = regard.observe(*inputs, mask=mask, backend=backend)
                grads = torch.autograd.grad(seen.out.sum(), inputs)
                assert not any(t.isnan().any() for t in (seen.out, seen.key_mass, *grads))
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_default_dtype_of_torch_does_not_matter() -> None:
    inputs = tensors(dtype=torch.float32)
    torch.manual_seed(2)
    expected = regard.attention(*inputs, mask=masks.causal(), dropout=0.5)
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(2)
        assert torch.equal(regard.attention(*inputs, mask=masks.causal(), dropout=0.5), expected)
        assert regard.observe(*inputs).map.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
