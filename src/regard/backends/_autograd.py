"""Joins a fused backend to autograd: first derivatives by its own backward, higher ones through eager."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from regard._errors import Refused
from regard.backends._base import no_autocast
from regard.backends.eager import attend

if TYPE_CHECKING:
    from torch import Tensor

    from regard.backends._base import FusedBackend
    from regard.spec import Call


def run_fused(backend: FusedBackend, call: Call, *, named: bool) -> tuple[Tensor, Tensor]:
    with no_autocast(call.spec.device):
        return _run(backend, call, named=named)


def _run(backend: FusedBackend, call: Call, *, named: bool) -> tuple[Tensor, Tensor]:
    if not call.spec.grad:
        out, lse = backend.forward(call)
        return out if out.dtype == call.spec.dtype else out.to(call.spec.dtype), lse
    out, lse = _Fused.apply(backend, call, named, call.query, call.key, call.value, call.bias, call.sinks)  # type: ignore[no-untyped-call]
    return out, lse


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        backend: FusedBackend,
        call: Call,
        named: bool,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = backend.forward(call)
        ctx.mark_non_differentiable(lse)
        ctx.backend, ctx.named = backend, named
        # the context must not hold the tensors beside autograd's own list: that would keep them alive in a cycle
        ctx.call = call.replace(query=None, key=None, value=None, bias=None, sinks=None)
        # saving these too makes torch refuse a backward pass after one was changed in place
        held = held_tensors(call)
        ctx.save_for_backward(query, key, value, bias, sinks, out, lse, *held)
        return out if out.dtype == call.spec.dtype else out.to(call.spec.dtype), lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, bias, sinks, out, lse, *_ = ctx.saved_tensors
        needs = ctx.needs_input_grad[3:]
        if grad_out is None:
            return (None,) * 8
        call = ctx.call.replace(query=query, key=key, value=value, bias=bias, sinks=sinks)
        if torch.is_grad_enabled():
            if ctx.named:
                raise Refused(
                    f"backend {ctx.backend.name!r} has no second derivative (the backward pass ran with "
                    'create_graph=True); use backend="auto" or "eager"'
                )
            return (None, None, None, *differentiable(call, grad_out, needs))
        with no_autocast(call.spec.device):
            return (None, None, None, *ctx.backend.backward(call, grad_out, out, lse, needs))


def held_tensors(call: Call) -> tuple[Tensor, ...]:
    """Tensors that a call depends on and that get no gradient: the mask's, and offsets."""
    offset = (call.offset,) if isinstance(call.offset, torch.Tensor) else ()
    return offset if call.mask is None else (*call.mask.tensors, *offset)


def differentiable(call: Call, grad_out: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """First derivatives that can be differentiated again: plain operations, recorded by autograd."""
    inputs = (call.query, call.key, call.value, call.bias, call.sinks)
    wanted = [t for t, need in zip(inputs, needs, strict=True) if need and t is not None]
    made = iter(torch.autograd.grad(attend(call).out, wanted, grad_out, create_graph=True, allow_unused=True))
    return tuple(next(made) if need and t is not None else None for t, need in zip(inputs, needs, strict=True))
