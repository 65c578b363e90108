"""Calls as a few plain ones of a fused kernel. On a GPU that is cuDNN's; of tensors on a CPU it is the CPU's, which has
the same form, so that all else is tested here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests import forced
from tests.masks.mask_oracle import Rectangle
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from core_calls import differ, no_synchronisation, oracle, prepare, tensors
from regard import masks
from regard import plan as planning
from regard.backends import _areas, _cuda, _guard
from regard.backends.sdpa import Sdpa
from regard.spec import Call, Result

L = 150
LOG_2 = math.log(2)  # of this amount, a pair is there twice with the same logit
COLUMNS = {
    "first": ((0, 4),),
    "middle": ((60, 67),),
    "last": ((140, 150),),
    "next to each other": ((20, 30), (30, 31)),
    "single": ((0, 1), (5, 6), (50, 51)),
    "all but one": ((0, 7), (8, None)),
    "all": ((0, None),),
}
MASKS: dict[str, masks.Mask] = {
    **{f"causal without {name}": masks.causal() & ~Rectangle(None, columns) for name, columns in COLUMNS.items()},
    **{f"everything without {name}": ~Rectangle(None, columns) for name, columns in COLUMNS.items()},
    "late rows": masks.causal() & ~Rectangle(((75, None),), ((0, 1), (5, 6), (100, 102))),
    "some rows": masks.causal() & ~Rectangle(((40, 75),), ((3, 60),)),
    "prefix": masks.causal() | masks.prefix(63),
}


def on_cuda(*inputs: Tensor, mask: masks.Mask | None = None, areas: Any = None, **given: Any) -> Call:
    """The call, described as one on a GPU."""
    names = ("bias", "scale", "softcap", "sinks")
    call = prepare(*inputs, mask, *(given.get(name) for name in names), 0.0, given.get("query_offset"))
    if areas is None and mask is not None:
        areas = mask.areas(call.spec.queries, call.spec.keys, int(call.offset))
    assert areas is not None
    return call.replace(spec=call.spec._replace(device="cuda", areas=areas))


def run(call: Call, *, named: bool = False) -> Result:
    return _guard.run(Sdpa().program(call, named=named), call)


def check(inputs: tuple[Tensor, ...], tolerance: float, bias: Tensor | None = None, **given: Any) -> None:
    """``bias``: what the shifts of the areas stand for, as the oracle is told."""
    query, key, value = (t.requires_grad_() for t in inputs)
    call = on_cuda(query, key, value, **given)
    found = run(call)
    given.pop("areas", None)
    grad_out = torch.randn(found.out.shape, dtype=found.out.dtype)
    exact, gradients = oracle(query, key, value, grad_out, bias=bias, **given)
    assert differ(found.out, exact.out) < tolerance
    assert differ(found.lse, exact.lse) < tolerance and found.lse.dtype == exact_dtype(query)
    for grad, meant, given_tensor in zip(
        torch.autograd.grad(found.out, (query, key, value), grad_out), gradients, inputs, strict=False
    ):
        assert grad.dtype == given_tensor.dtype
        assert differ(grad, meant) < tolerance * max(1.0, np.abs(meant).max(initial=0.0))
    with torch.no_grad():
        assert torch.equal(run(call.replace(spec=call.spec._replace(grad=False))).out, found.out)


def exact_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("dim", [11, 64, 128])
def test_values_lse_and_gradients_are_the_oracles(name: str, heads: tuple[int, int], dim: int) -> None:
    check(tensors(2, *heads, L, L, dim), 1e-11, mask=MASKS[name])


@pytest.mark.parametrize("name", MASKS)
def test_in_float32_too(name: str) -> None:
    check(tensors(1, 4, 2, L, L, 64, dtype=torch.float32), 1e-5, mask=MASKS[name])


@pytest.mark.parametrize("offset", [None, 0, 13])
def test_queries_and_keys_may_be_different_in_number(offset: int | None) -> None:
    for mask in (masks.causal() & ~masks.columns(4), masks.causal() & ~Rectangle(((75, None),), ((3, 9), (155, 160)))):
        check(tensors(1, 4, 2, L, 177, 11), 1e-11, mask=mask, query_offset=offset)


def naive(query: Tensor, key: Tensor, value: Tensor, added: Tensor) -> Tensor:
    """Every step rounded to the dtype of the tensors."""
    group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    logits = query @ key.transpose(2, 3) * query.shape[3] ** -0.5 + added.to(query.dtype)
    return torch.nan_to_num(torch.softmax(logits, -1)) @ value


STEERED = (None, Rectangle(((20, 120),), ((0, 1), (5, 6), (50, 51))), Rectangle(None, ((0, 1), (30, 70))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["causal without single", "everything without middle", "late rows", "prefix"])
@pytest.mark.parametrize("where", STEERED, ids=str)
def test_half_precision_has_errors_of_its_own_size(name: str, dtype: torch.dtype, where: masks.Mask | None) -> None:
    mask = MASKS[name]
    inputs = [t.requires_grad_() for t in tensors(1, 4, 2, L, L, 64, dtype=dtype)]
    bias = torch.zeros(1, 1, L, L) if where is None else 1.7 * where.dense(L, L).float()[None, None]
    areas = None if where is None else steered_areas(mask, where, 1.7)
    found = run(on_cuda(*inputs, mask=mask, areas=areas)).out
    plain = naive(*inputs, torch.where(mask.dense(L, L), bias, -torch.inf))
    grad_out = torch.randn(found.shape, dtype=dtype)
    exact, gradients = oracle(*inputs, grad_out, mask=mask, bias=bias)
    assert differ(found, exact.out) <= 2 * differ(plain, exact.out) + 1e-5
    made, rounded = (torch.autograd.grad(out, inputs, grad_out) for out in (found, plain))
    for ours, theirs, meant in zip(made, rounded, gradients, strict=False):
        assert differ(ours, meant) <= 3 * differ(theirs, meant) + 1e-5


def by_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels written out, for value dims that the CPU's does not take."""

    def weights(query: Tensor, key: Tensor, lse: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        logits = query @ key.transpose(2, 3) * scale
        if causal:
            logits = logits.masked_fill(~torch.ones(logits.shape[2:], dtype=torch.bool).tril(), -torch.inf)
        lse = torch.logsumexp(logits, -1) if lse is None else lse
        return torch.exp(logits - lse.unsqueeze(-1)), lse

    def forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        share, lse = weights(query, key, None, causal, scale)
        return share @ value, lse

    def backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, ...]:
        share, _ = weights(query, key, lse, causal, scale)
        change = share * (grad @ value.transpose(2, 3) - (grad * out).sum(-1, keepdim=True)) * scale
        return change @ key, change.transpose(2, 3) @ query, share.transpose(2, 3) @ grad

    forced.kernels_of_areas(monkeypatch, forward, backward)


@pytest.mark.parametrize("name", ["causal without single", "everything without last", "late rows"])
def test_values_may_be_narrower_than_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_formulas(monkeypatch)
    check(tensors(2, 3, 3, L, L, 24, V=16), 1e-11, mask=MASKS[name])


class Keys(TorchDispatchMode):
    """How many keys each call of the fused kernel is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[bool, list[int]] = {False: [], True: []}  # forward and backward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" in func.name():
            backward = func.name().endswith("backward")
            self.given[backward].append(args[2 if backward else 1].shape[2])
        return func(*args, **(kwargs or {}))


def test_the_kernel_is_given_two_keys_at_least() -> None:
    """As cuDNN wants them."""
    with Keys() as seen:
        check(tensors(1, 4, 2, L, L, 11), 1e-11, mask=masks.causal() & ~Rectangle(None, ((1, 9), (100, 101))))
        check(tensors(1, 4, 2, L, L, 11), 1e-11, mask=masks.columns(1) & ~Rectangle(((40, 60),), ((0, 1),)))
        bias = 3.0 * Rectangle(None, ((7, 8),)).dense(L, L).double()[None, None]
        areas = steered_areas(masks.everything(), Rectangle(None, ((7, 8),)), 3.0)
        check(tensors(1, 4, 2, L, L, 11), 1e-11, mask=masks.everything(), bias=bias, areas=areas)
    assert [min(seen.given[backward]) for backward in (False, True)] == [2, 2]


def test_rows_without_keys_are_zero_and_pass_no_gradient() -> None:
    inputs = tensors(1, 2, 2, L, L, 8, grad=True)
    mask = masks.causal() & ~Rectangle(None, ((0, 4), (9, 11)))
    found = run(on_cuda(*inputs, mask=mask))
    assert not found.out[:, :, :4].any() and (found.lse[:, :, :4] == -torch.inf).all()
    grads = torch.autograd.grad(found.out.square().sum(), inputs)
    assert not grads[0][:, :, :4].any()
    assert all(not grad[:, :, 9:11].any() for grad in grads[1:])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_keys_that_are_cut_are_never_read(bad: float) -> None:
    mask = masks.causal() & ~Rectangle(None, ((0, 4), (60, 67)))
    clean = tensors(1, 4, 2, L, L, 64, grad=True)
    dirty = [t.detach().clone() for t in clean]
    for t in dirty[1:]:
        t[:, :, :4] = t[:, :, 60:67] = bad
    first, second = run(on_cuda(*clean, mask=mask)), run(on_cuda(*(t.requires_grad_() for t in dirty), mask=mask))
    assert torch.equal(first.out, second.out) and torch.equal(first.lse, second.lse)
    grad_out = torch.randn_like(first.out)
    for one, other in zip(
        torch.autograd.grad(first.out, clean, grad_out), torch.autograd.grad(second.out, dirty, grad_out), strict=True
    ):
        assert torch.equal(one, other)


def test_sinks_join_after_the_areas_with_their_gradient() -> None:
    query, key, value = tensors(2, 4, 2, L, L, 8, grad=True)
    sinks = torch.tensor([-3.0, 0.0, 2.0, 9.0], dtype=torch.float64, requires_grad=True)
    mask = MASKS["late rows"]
    found = run(on_cuda(query, key, value, mask=mask, sinks=sinks))
    grad_out = torch.randn_like(found.out)
    exact, gradients = oracle(query, key, value, grad_out, mask=mask, sinks=sinks)
    assert differ(found.out, exact.out) < 1e-11 and differ(found.lse, exact.lse) < 1e-11
    made = torch.autograd.grad(found.out, (query, key, value, sinks), grad_out)
    for grad, meant in zip(made, (*gradients[:3], gradients[4]), strict=True):
        assert differ(grad, meant) < 1e-10


def steered_areas(mask: masks.Mask, where: masks.Mask, amount: float) -> Any:
    areas = _areas.steered(mask, where, amount, L, L, 0)
    assert areas is not None
    return areas


@pytest.mark.parametrize("amount", [2.0, -4.0, 300.0, LOG_2])
@pytest.mark.parametrize("where", STEERED[1:], ids=str)
@pytest.mark.parametrize("mask", [masks.causal(), masks.everything(), MASKS["causal without single"]], ids=str)
@pytest.mark.parametrize("dim", [11, 128])
def test_an_amount_joins_the_logits_of_some_areas(mask: masks.Mask, where: masks.Mask, amount: float, dim: int) -> None:
    bias = amount * where.dense(L, L).double()[None, None]
    areas = steered_areas(mask, where, amount)
    check(tensors(1, 4, 2, L, L, dim), 2e-11, mask=mask, bias=bias, areas=areas)


@pytest.mark.parametrize("amount", [-1.3, 2.0, LOG_2])
@pytest.mark.parametrize("where", STEERED, ids=str)
def test_a_second_derivative_goes_through_eager_unless_sdpa_was_named(where: masks.Mask | None, amount: float) -> None:
    inputs = tensors(1, 2, 2, L, L, 8, grad=True)
    mask = MASKS["late rows"]
    bias = None if where is None else amount * where.dense(L, L).double()[None, None]
    call = on_cuda(*inputs, mask=mask, areas=None if where is None else steered_areas(mask, where, amount))
    outs = run(call).out, regard.attention(*inputs, mask=mask, bias=bias, backend="eager")
    first = [torch.autograd.grad(out.square().sum(), inputs, create_graph=True) for out in outs]
    for one, other in zip(*first, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    again = [torch.autograd.grad(sum(g.square().sum() for g in grads), inputs) for grads in first]
    for one, other in zip(*again, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
    with pytest.raises(regard.Refused, match="no second derivative"):
        torch.autograd.grad(run(call, named=True).out.sum(), inputs, create_graph=True)


def test_strided_tensors_and_a_strided_gradient_give_the_same() -> None:
    shape = (1, L, 3, 4, 8)
    packed = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    apart = [part.transpose(1, 2) for part in packed.unbind(2)]
    mask = MASKS["causal without single"]
    grad_out = torch.randn(1, L, 4, 8, dtype=torch.float64).transpose(1, 2)
    outs = run(on_cuda(*apart, mask=mask)).out, regard.attention(*apart, mask=mask, backend="eager")
    for one, other in zip(*(torch.autograd.grad(out, packed, grad_out) for out in outs), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["causal without single", "late rows"])
def test_half_precision_is_copied_right_however_it_lies(name: str) -> None:
    clean = tensors(1, 4, 2, L, L, 16, dtype=torch.bfloat16)
    grad_out, results = torch.randn(1, 4, L, 16, dtype=torch.bfloat16), []
    layouts: list[Callable[[Tensor], Tensor]] = [
        lambda t: t.clone(),
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: torch.cat((t, t[..., :3]), 3)[..., :16],
        lambda t: torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape),
    ]
    for layout in layouts:
        inputs = [layout(t).requires_grad_() for t in clean]
        assert all(torch.equal(one, other) for one, other in zip(inputs, clean, strict=True))
        out = run(on_cuda(*inputs, mask=MASKS[name])).out
        results.append((out, *torch.autograd.grad(out, inputs, layout(grad_out))))
    for found in results[1:]:
        for one, other in zip(found, results[0], strict=True):
            assert torch.equal(one, other)


def test_the_result_lies_as_the_query_does() -> None:
    packed = torch.randn(1, L, 3, 4, 8)
    out = run(on_cuda(*(part.transpose(1, 2) for part in packed.unbind(2)), mask=MASKS["causal without single"])).out
    assert out.transpose(1, 2).is_contiguous() and out._base is None
    assert run(on_cuda(*tensors(1, 4, 4, L, L, 8), mask=MASKS["causal without single"])).out.is_contiguous()


def described(tokens: int, heads: int = 16, dtype: torch.dtype = torch.bfloat16, **given: Any) -> Any:
    """As it would be on CUDA."""
    inputs = [torch.empty(1, heads, tokens, given.pop("dim", 128), dtype=dtype, device="meta")] * 3
    names = ("mask", "bias", "scale", "softcap", "sinks")
    call = prepare(*inputs, *(given.get(name) for name in names), given.get("dropout", 0.0), None)
    return call.spec._replace(device="cuda")


@pytest.mark.parametrize("mask", [masks.causal() & ~masks.columns(4), ~Rectangle(None, ((0, 1), (9, 70)))], ids=str)
def test_long_calls_on_cuda_run_in_areas_and_short_ones_in_one_launch(mask: masks.Mask) -> None:
    of_one_area = len(described(8192, mask=mask).areas) == 1
    for grad, least in ((False, 4096 if of_one_area else 8192), (True, 8192)):
        for tokens in (1024, 4096, 8192, 32768):
            spec = described(tokens, mask=mask)._replace(grad=grad)
            wanted = "sdpa" if tokens >= least else "triton"
            assert planning.choose(spec, "auto").backend.name == wanted, (tokens, grad)
            assert _cuda.recipe(spec)[0] == "areas" and not Sdpa().refuse(spec)


def test_what_areas_do_not_take_is_refused() -> None:
    mask = masks.causal() & ~masks.columns(4)
    for given in ({"dtype": torch.float32}, {"softcap": 9.0}, {"dropout": 0.1}, {"scale": -1.0}, {"dim": 100}):
        spec = described(8192, mask=mask, **given)
        assert Sdpa().refuse(spec)
        assert planning.choose(spec, "auto").backend.name != "sdpa"


def test_a_plain_causal_call_has_no_areas() -> None:
    for mask in (masks.causal(), masks.window(left=50), masks.documents(lengths=[4096, 4096])):
        assert described(8192, mask=mask).areas is None


def test_the_peak_counts_copies_of_tokens_that_are_apart() -> None:
    apart, together = (
        described(8192, mask=masks.causal() & ~Rectangle(None, columns)) for columns in (((0, 1), (5, 6)), ((0, 4),))
    )
    numbers = 16 * 8190 * 128
    assert _areas.extra_bytes(apart) == 2 * 4 * numbers + 4 * 16 * 8190
    assert _areas.extra_bytes(together) == 2 * 16 * 8188 * 128 + 4 * 16 * 8188


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", MASKS)
def test_calls_of_cudnn_on_a_gpu(name: str, dim: int) -> None:
    """Values, log-sum-exp and gradients against float32, and no wait for the device."""
    inputs = [t.cuda().requires_grad_() for t in tensors(2, 4, 2, 1100, 1100, dim, dtype=torch.bfloat16)]
    exact = [t.detach().float().requires_grad_() for t in inputs]
    grad_out, results = torch.randn(2, 4, 1100, dim, device="cuda"), []
    for given, backend in ((inputs, "sdpa"), (exact, "eager")):
        assert regard.explain(*given, mask=MASKS[name], backend=backend).backend == backend
        seen = regard.observe(*given, mask=MASKS[name], backend=backend, want=regard.Want.none())
        grads = torch.autograd.grad(seen.out, given, grad_out.to(seen.out.dtype))
        results.append((seen.out, *grads, seen.lse.nan_to_num(neginf=0.0)))
        assert (seen.lse == -torch.inf).equal(~MASKS[name].dense(1100, 1100, device="cuda").any(-1).expand(2, 4, 1100))
    for ours, meant in zip(*results, strict=True):
        # of a row with one key, the query's gradient is 0, and in half precision nearly so
        assert (ours.float() - meant).norm() <= 0.02 * meant.norm() + 1e-2
    with no_synchronisation():
        out = regard.attention(*inputs, mask=MASKS[name], backend="sdpa")
        torch.autograd.grad(out, inputs, grad_out.to(out.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("where", STEERED[1:], ids=str)
def test_steered_areas_on_a_gpu(where: masks.Mask) -> None:
    inputs = [t.cuda().requires_grad_() for t in tensors(1, 4, 2, L, L, 64, dtype=torch.bfloat16)]
    exact = [t.detach().float().requires_grad_() for t in inputs]
    bias = 1.7 * where.dense(L, L, device="cuda").float()[None, None]
    call = on_cuda(*inputs, mask=masks.causal(), areas=steered_areas(masks.causal(), where, 1.7))
    outs = run(call).out, regard.attention(*exact, mask=masks.causal(), bias=bias, backend="eager")
    grad_out = torch.randn_like(outs[1])
    for ours, meant in zip(
        (outs[0], *torch.autograd.grad(outs[0], inputs, grad_out.bfloat16())),
        (outs[1], *torch.autograd.grad(outs[1], exact, grad_out)),
        strict=True,
    ):
        assert (ours.float() - meant).norm() <= 0.02 * meant.norm()
