"""Joins a fused backend to autograd: first derivatives by its own backward, higher ones through eager."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from regard._errors import Refused
from regard.backends._base import Backend, no_autocast
from regard.backends.eager import attend
from regard.spec import Call

if TYPE_CHECKING:
    from torch import Tensor


class FusedBackend(Backend):
    """A backend with a hand-written backward pass: two functions on plain tensors, no autograd inside.

    lse is [B, H, L] in accumulation precision, -inf for an empty row, sinks included.
    """

    @abstractmethod
    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """(out, lse) of the call's tensors; out may be in accumulation precision, which makes gradients more exact."""

    @abstractmethod
    def backward(
        self, call: Call, grad_out: Tensor, out: Tensor, lse: Tensor, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of (query, key, value, bias, sinks), None where ``needs`` is False."""

    def run(self, call: Call, *, named: bool) -> tuple[Tensor, Tensor]:
        with no_autocast(call.spec.device):
            if not call.spec.grad:
                out, lse = self.forward(call)
                return out if out.dtype == call.spec.dtype else out.to(call.spec.dtype), lse
            tensors = (call.query, call.key, call.value, call.bias, call.sinks)
            out = _Fused.apply(self, call, named, *tensors)  # type: ignore[no-untyped-call]
        assert call.lse is not None
        return out, call.lse


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, backend: FusedBackend, call: Call, named: bool, *tensors: Tensor | None) -> Tensor:
        out, lse = backend.forward(call)
        call.lse = lse
        ctx.backend, ctx.named = backend, named
        # the context must not hold the tensors beside autograd's own list: that would keep them alive in a cycle
        ctx.call = call.without_tensors()
        # saving the mask's too makes torch refuse a backward pass after one was changed in place
        ctx.save_for_backward(*tensors, out, lse, *held_tensors(call))
        return out if out.dtype == call.spec.dtype else out.to(call.spec.dtype)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call
        query, key, value, bias, sinks, out, lse = ctx.saved_tensors[:7]
        call = Call(call.spec, query, key, value, call.mask, bias, sinks, call.offset)
        call.seed = ctx.call.seed
        needs = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():
            return (None, None, None, *again(ctx.backend.name if ctx.named else None, call, grad_out, needs))
        with no_autocast(call.spec.device):
            return (None, None, None, *ctx.backend.backward(call, grad_out, out, lse, needs))


def held_tensors(call: Call) -> tuple[Tensor, ...]:
    """Tensors that a call depends on and that get no gradient: the mask's, and offsets."""
    offset = (call.offset,) if isinstance(call.offset, torch.Tensor) else ()
    return offset if call.mask is None else (*call.mask.tensors, *offset)


def again(named: str | None, call: Call, grad_out: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
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
