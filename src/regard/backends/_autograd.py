"""Joins a fused backend to autograd: first derivatives by its own backward, higher ones through eager."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from regard.backends._base import Backend, no_autocast
from regard.backends.eager import attend
from regard.masks._memo import versions
from regard.spec import Refused, Result

if TYPE_CHECKING:
    from torch import Tensor

    from regard.spec import Call


_make: Any = tuple.__new__  # a named tuple without the Python function that makes one


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
        made: list[Result] = []
        out = _apply(passes, call, named, made, call.query, call.key, call.value, call.bias, call.sinks)
        return _make(Result, (out, *made[0][1:]))  # type: ignore[no-any-return]


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, passes: Passes, call: Call, named: str | None, made: list[Result], *tensors: Tensor | None
    ) -> Tensor:
        found = passes.forward(call)
        made.append(found)  # what has no gradient need not pass through autograd
        ctx.passes, ctx.named = passes, named
        # the context must not hold the tensors next to autograd's own list: that would keep them alive in a cycle
        ctx.call = call.without_tensors()
        save(ctx, call, *tensors, found.out, found.lse)
        ctx.set_materialize_grads(False)
        return found.out if found.out.dtype == call.spec.dtype else found.out.to(call.spec.dtype)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, bias, sinks, out, lse, *_ = saved(ctx)
        if grad_out is None:
            return (None,) * 9
        call = ctx.call.of(query, key, value, bias, sinks)
        needs = ctx.needs_input_grad[4:]
        if torch.is_grad_enabled():
            return (None, None, None, None, *second_derivative(ctx.named, call, grad_out, needs))
        with no_autocast(call.spec.device):
            return (None, None, None, None, *ctx.passes.backward(call, grad_out, out, lse, needs))


# torch's own function of this name looks for wrappers of transforms among the arguments first: there are none here
_apply: Any = super(torch.autograd.Function, _Fused).apply


# Where a block says how autograd saves tensors: a checkpoint is such a block.
saved_elsewhere: Any = torch._C._autograd._top_saved_tensors_default_hooks


def save(ctx: Any, call: Call, *tensors: Tensor | None) -> None:
    """For a backward pass, which is refused after a tensor that the call depends on was changed in place: torch looks
    at those that it saves, but not where a block says how."""
    ctx.save_for_backward(*tensors, *held_tensors(call))
    ctx.versions = None if saved_elsewhere(False) is None else versions(held_tensors(call))


def saved(ctx: Any) -> Any:
    """The tensors that ``save`` was given, and then those that the call depends on; ``ctx`` has the ``call``."""
    if ctx.versions is not None:
        check_held(ctx.call, ctx.versions)
    return ctx.saved_tensors


def held_tensors(call: Call) -> tuple[Tensor, ...]:
    """Tensors that a call depends on and that get no gradient: the mask's, and offsets."""
    offset = (call.offset,) if isinstance(call.offset, torch.Tensor) else ()
    return offset if call.mask is None else (*call.mask.tensors, *offset)


def check_held(call: Call, before: tuple[int, ...]) -> None:
    """Raise where one of them was changed since the forward pass."""
    if versions(held_tensors(call)) != before:
        what = "query_offset" if call.mask is None or not call.mask.tensors else f"a tensor of {call.mask!r}"
        raise RuntimeError(f"{what} was changed in place between the forward and the backward pass")


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
    inputs = [None if t is None else t.view_as(t) for t in call.tensors]
    call = call.of(*inputs)
    wanted = [t for t, need in zip(inputs, needs, strict=True) if need and t is not None]
    made = iter(torch.autograd.grad(attend(call).out, wanted, grad_out, create_graph=True, allow_unused=True))
    return tuple(next(made) if need and t is not None else None for t, need in zip(inputs, needs, strict=True))
