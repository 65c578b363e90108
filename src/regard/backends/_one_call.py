"""Calls that are one call of torch's CPU kernel and nothing else, joined to autograd with little Python beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from regard.backends import _kernels
from regard.backends._autograd import again
from regard.backends._base import reads_values
from regard.masks._memo import versions

if TYPE_CHECKING:
    from torch import Tensor

    from regard.spec import Call

# of a logit that is far from overflowing in float32
LARGE = 1e30

_norm = torch.linalg.vector_norm
_record = torch._C._set_grad_enabled


def recorded_by_torch(call: Call, named: bool, causal: bool, added: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """One call of the kernel, its derivative recorded by torch: at a few tokens, Python costs more than the kernel.

    None where a number is NaN or infinite, or a logit might overflow; ``call.clean`` then says so.
    """
    query, scale = call.query, call.spec.scale
    out, lse = _kernels.forward(query, call.key, call.value, causal, added, scale)
    if call.mask is not None:
        _record(False)
        largest = _norm(query).item() * _norm(call.key).item() * scale
        call.clean = largest + _norm(call.value).item() < LARGE
        _record(True)
        if not call.clean:
            return None
    elif torch.count_nonzero(lse).item() != lse.numel():
        return None
    assert out.grad_fn is not None
    out.grad_fn.register_hook(_Again(call, named))
    return out, lse


class _Again:
    """Torch's own derivative cannot be differentiated again. Where that is to come, plain operations take its place.

    Keeps the inputs alive as long as the graph, so that it is for small calls only.
    """

    __slots__ = ("call", "named", "versions")

    def __init__(self, call: Call, named: bool) -> None:
        self.call, self.named = call, named
        self.versions = None if call.mask is None else versions(call.mask.tensors)

    def __call__(
        self, grads: tuple[Tensor | None, ...], grad_out: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...] | None:
        # no gradient at all may come, which stands for zeros
        if not torch.is_grad_enabled() or grad_out[0] is None:
            return None
        call = self.call
        if call.mask is not None and versions(call.mask.tensors) != self.versions:
            raise RuntimeError(
                f"a tensor of {call.mask!r} was changed in place between the forward and the backward pass"
            )
        # None: nobody asked for that one
        needs = (*(grad is not None for grad in grads), False, False)
        return again("sdpa" if self.named else None, call, grad_out[0], needs)[: len(grads)]


class OneKernelCall(torch.autograd.Function):
    """The same for large calls."""

    @staticmethod
    def forward(ctx: Any, call: Call, how: tuple[Any, ...], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        _, causal, added = how
        out, lse = _kernels.forward(query, key, value, causal, added, call.spec.scale)
        if added is None:
            out, lse = show_nan(call, query, key, out, lse)
        call.lse = lse
        ctx.call, ctx.how = call.without_tensors(), how
        # the mask's too: torch then refuses a second derivative after one was changed in place
        ctx.save_for_backward(query, key, value, out, lse, *(() if call.mask is None else call.mask.tensors))
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors[:5]
        named, causal, added = ctx.how
        if torch.is_grad_enabled():
            call = ctx.call.replace(query=query, key=key, value=value)
            needs = (*ctx.needs_input_grad[2:], False, False)
            return (None, None, *again("sdpa" if named else None, call, grad_out, needs)[:3])
        scale = ctx.call.spec.scale
        return None, None, *_kernels.backward(grad_out, query, key, value, out, lse, causal, added, scale)


def show_nan(call: Call, query: Tensor, key: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """NaN for rows whose logits are all NaN. Without a mask to add, the CPU kernel takes those for empty rows: output
    0, and a lse of exactly 0. Every row sees the first key, so that its logit tells."""
    if reads_values(call.spec) and torch.count_nonzero(lse).item() == lse.numel():
        return out, lse
    first = key[:, :, :1].repeat_interleave(query.shape[1] // key.shape[1], 1)
    lost = (lse == 0) & (query * first).sum(-1).isnan()
    return out.masked_fill(lost.unsqueeze(-1), torch.nan), lse.masked_fill(lost, torch.nan)
