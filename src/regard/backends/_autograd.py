"""Joins a fused backend to autograd: first derivatives by its own backward, higher ones through eager."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from regard.backends._base import Backend, no_autocast
from regard.backends.eager import attend
from regard.spec import Refused, Result

if TYPE_CHECKING:
    from torch import Tensor

    from regard.spec import Call


class FusedBackend(Backend):
    """A backend with a hand-written backward pass: two functions on plain tensors, no autograd inside.

    lse is [B, H, L] in accumulation precision, -inf for an empty row, sinks included.
    """

    @abstractmethod
    def forward(self, call: Call) -> Result:
        """The call's result; out may be in accumulation precision, which makes gradients more exact."""

    @abstractmethod
    def backward(
        self, call: Call, grad_out: Tensor, out: Tensor, lse: Tensor, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of (query, key, value, bias, sinks), None where ``needs`` is False."""

    def run(self, call: Call, *, named: bool) -> Result:
        return run_fused(self, call, named=self.name if named else None)


@runtime_checkable
class Passes(Protocol):
    """What has the two passes: a backend, or a program of one."""

    def forward(self, call: Call) -> Result: ...

    def backward(
        self, call: Call, grad_out: Tensor, out: Tensor, lse: Tensor, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]: ...


def run_fused(passes: Passes, call: Call, *, named: str | None) -> Result:
    """The forward pass; where gradients may be asked for, joined to autograd. ``named``: the backend, if it was."""
    spec = call.spec
    with no_autocast(spec.device):
        if not spec.grad:
            found = passes.forward(call)
            return found if found.out.dtype == spec.dtype else found._replace(out=found.out.to(spec.dtype))
        tensors = (call.query, call.key, call.value, call.bias, call.sinks)
        out, lse, *rows = _apply(passes, call, named, *tensors)
    return Result(out, lse, dict(zip(_ROWS, rows, strict=True)) if rows else None)


# the statistics of rows that a forward pass may have
_ROWS = ("entropy", "max_weight")


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: Passes, call: Call, named: str | None, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        found = passes.forward(call)
        ctx.passes, ctx.named = passes, named
        # the context must not hold the tensors next to autograd's own list: that would keep them alive in a cycle
        ctx.call = call.without_tensors()
        # saving the mask's too makes torch refuse a backward pass after one was changed in place
        ctx.save_for_backward(*tensors, found.out, found.lse, *held_tensors(call))
        rows = () if found.rows is None else tuple(found.rows[name] for name in _ROWS)
        ctx.mark_non_differentiable(found.lse, *rows)
        ctx.set_materialize_grads(False)
        return (found.out if found.out.dtype == call.spec.dtype else found.out.to(call.spec.dtype), found.lse, *rows)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, *others: None) -> tuple[Tensor | None, ...]:
        query, key, value, bias, sinks, out, lse = ctx.saved_tensors[:7]
        if grad_out is None:
            return (None,) * 8
        call = ctx.call.of(query, key, value, bias, sinks)
        needs = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():
            return (None, None, None, *second_derivative(ctx.named, call, grad_out, needs))
        with no_autocast(call.spec.device):
            return (None, None, None, *ctx.passes.backward(call, grad_out, out, lse, needs))


# torch's own function of this name looks for wrappers of transforms among the arguments first: there are none here
_apply: Any = super(torch.autograd.Function, _Fused).apply


def held_tensors(call: Call) -> tuple[Tensor, ...]:
    """Tensors that a call depends on and that get no gradient: the mask's, and offsets."""
    offset = (call.offset,) if isinstance(call.offset, torch.Tensor) else ()
    return offset if call.mask is None else (*call.mask.tensors, *offset)


def second_derivative(
    named: str | None, call: Call, grad_out: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients for a backward pass with create_graph=True: through eager, unless a backend was named."""
    if named is not None:
        raise Refused(
            f"backend {named!r} has no second derivative (the backward pass ran with create_graph=True); "
            'use backend="auto" or "eager"'
        )
    return differentiable(call, grad_out, needs)


def differentiable(call: Call, grad_out: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """First derivatives that can be differentiated again: plain operations, recorded by autograd."""
    # views: where one input is made from another, or is the same tensor, a gradient must not run on into the other
    names = ("query", "key", "value", "bias", "sinks")
    inputs = [None if t is None else t.view_as(t) for t in (getattr(call, name) for name in names)]
    call = call.replace(**dict(zip(names, inputs, strict=True)))
    wanted = [t for t, need in zip(inputs, needs, strict=True) if need and t is not None]
    made = iter(torch.autograd.grad(attend(call).out, wanted, grad_out, create_graph=True, allow_unused=True))
    return tuple(next(made) if need and t is not None else None for t, need in zip(inputs, needs, strict=True))
