"""What surrounds torch's own derivative of a kernel call: callers see nothing of it, and it holds no memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import regard
from core_calls import prepare, tensors
from regard import masks
from regard.backends import ALL
from regard.backends._cuda import CudnnCall

MASKS = pytest.mark.parametrize("mask", [None, masks.causal()])


def few(grad: bool = True) -> list[Tensor]:
    """Of so few numbers that a call's derivative is torch's own."""
    return tensors(1, 2, 2, 5, 5, 8, grad=grad)


def derivatives(run: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The first ones, and those of the sum of their squares."""
    first = torch.autograd.grad(run(*inputs).square().sum(), inputs, create_graph=True)
    return [*first, *torch.autograd.grad(sum(each.square().sum() for each in first), inputs)]


def near(found: Sequence[Tensor], meant: Sequence[Tensor]) -> bool:
    return all(torch.allclose(one, other, rtol=0, atol=1e-11) for one, other in zip(found, meant, strict=True))


def exact(*inputs: Tensor, **given: Any) -> Tensor:
    return regard.attention(*inputs, **given, backend="eager")


@MASKS
def test_one_graph_gives_derivatives_of_both_kinds_in_any_order(mask: Any) -> None:
    inputs = few()
    out = regard.attention(*inputs, mask=mask).square().sum()
    meant = torch.autograd.grad(exact(*inputs, mask=mask).square().sum(), inputs, create_graph=True)
    twice = torch.autograd.grad(sum(each.square().sum() for each in meant), inputs)
    for create in (False, True, True, False, True):
        made = torch.autograd.grad(out, inputs, create_graph=create, retain_graph=True)
        assert near(made, meant) and all(each.requires_grad == create for each in made)
        if create:
            total = sum(each.square().sum() for each in made)
            assert near(torch.autograd.grad(total, inputs, retain_graph=True), twice)


@MASKS
@pytest.mark.parametrize("number", [0.0, torch.nan])
def test_second_derivatives_where_a_row_could_be_taken_for_an_empty_one(mask: Any, number: float) -> None:
    # a row whose log-sum-exp is 0, as that of a query of zeros that sees one key, and a row that is NaN
    inputs = few()
    with torch.no_grad():
        inputs[0][0, 0, 0], inputs[0][0, 1, 2:], inputs[1][0, 0, 0] = number, 0.0, 0.0
    found, meant = (derivatives(partial(run, mask=mask), inputs) for run in (regard.attention, exact))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-11, equal_nan=True) for a, b in zip(found, meant, strict=True))


def test_programs_for_any_number_of_keys_have_the_second_derivative_of_each() -> None:
    for keys in (5, 3, 7):
        inputs = tensors(1, 2, 2, 5, keys, 8, grad=True)
        assert near(derivatives(regard.attention, inputs), derivatives(exact, inputs))


def test_hooks_of_the_caller_are_of_one_call_and_see_no_other() -> None:
    inputs, seen = few(), []
    first, second = (regard.attention(*inputs) for _ in range(2))
    assert first._backward_hooks is None
    first.register_hook(lambda grad: seen.append(1) or 2 * grad)
    (doubled,), (plain,) = (torch.autograd.grad(out.sum(), inputs[:1]) for out in (first, second))
    assert seen == [1] and torch.equal(doubled, 2 * plain)


def test_the_gradient_of_the_output_needs_no_inputs() -> None:
    """They may be gone: torch runs the hooks of an output whose own derivative is not asked for."""
    inputs = few()
    out = regard.attention(*inputs)
    out.sum().backward()
    (made,) = torch.autograd.grad(out.square().sum(), out, create_graph=True)
    assert torch.equal(made, 2 * out)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), inputs, create_graph=True)


@pytest.mark.parametrize("create", [False, True])
def test_inputs_that_were_changed_in_place_are_refused(create: bool) -> None:
    inputs = few()
    changed = inputs[1] * 1
    out = regard.attention(inputs[0], changed, inputs[2])
    with torch.no_grad():
        changed += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), inputs, create_graph=create)


@pytest.mark.parametrize("tokens", [5, 600])
def test_a_mask_that_was_changed_in_place_is_refused_however_tensors_are_saved(tokens: int) -> None:
    inputs, lengths = tensors(1, 2, 2, tokens, tokens, 8, grad=True), torch.tensor([3])
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        out = regard.attention(*inputs, mask=masks.padding(lengths))
        seen = regard.observe(*inputs, mask=masks.padding(lengths), differentiable=True)
    held = checkpoint(regard.attention, *inputs, mask=masks.padding(lengths), use_reentrant=False)
    lengths += 1
    for made in (out, seen.out, seen.entropy, held):
        with pytest.raises(RuntimeError, match="a tensor of padding.* was changed in place"):
            torch.autograd.grad(made.sum(), inputs, allow_unused=True)


@MASKS
def test_a_checkpoint_holds_no_inputs_of_a_call(mask: Any) -> None:
    leaves, made = few(), []

    def block(*inputs: Tensor) -> Tensor:
        scaled = [tensor * 2 for tensor in inputs]
        made.extend(weakref.ref(tensor) for tensor in scaled)
        return regard.attention(*scaled, mask=mask)

    out = checkpoint(block, *leaves, use_reentrant=False)
    assert [tensor() for tensor in made] == [None] * 3
    found = torch.autograd.grad(out.square().sum(), leaves)
    meant = torch.autograd.grad(block(*leaves).square().sum(), leaves)
    assert near(found, meant)


@MASKS
def test_a_checkpoint_has_second_derivatives(mask: Any) -> None:
    def block(*inputs: Tensor) -> Tensor:
        scaled = [tensor * 2 for tensor in inputs]
        return regard.attention(*scaled, mask=mask)

    def checked(*inputs: Tensor) -> Tensor:
        out: Tensor = checkpoint(block, *inputs, use_reentrant=False)
        return out

    leaves = few()
    assert near(derivatives(checked, leaves), derivatives(block, leaves))


def test_autograd_saves_the_inputs_of_cudnns_kernel_by_the_names_that_are_asked_for() -> None:
    query, key, value = (torch.empty(1, 2, 8, 16, dtype=torch.float16, device="meta").requires_grad_() for _ in "qkv")
    out, *_ = torch._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, False, False)
    node: Any = out.grad_fn
    assert (node._saved_query is query) and (node._saved_key is key) and (node._saved_value is value)


def test_cudnns_kernel_has_second_derivatives_where_positions_are_tensors() -> None:
    inputs = [torch.empty(1, 2, 8, 16, dtype=torch.float16, device="meta").requires_grad_() for _ in "qkv"]
    offset = torch.empty(1, dtype=torch.int64, device="meta")
    call = prepare(*inputs, None, None, None, None, None, 0.0, offset)  # of no mask, to which they say nothing
    out = CudnnCall(ALL["sdpa"], call.spec, named=False).run(call).out
    first = torch.autograd.grad(out.sum(), inputs, create_graph=True)
    assert all(each.requires_grad and each.shape == out.shape for each in first)
