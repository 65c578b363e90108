"""Chunked linear attention by our Triton kernels, joined to autograd; higher derivatives by plain operations."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.backends._base import has_triton, no_autocast
from regard.linear._chunks import Part, Sums, attend
from regard.linear._features import NAMED

if TYPE_CHECKING:
    from regard._triton.scanning import Given
    from regard.linear._forms import Segment
    from regard.linear._request import Request

# heads of all items: what the grid of a kernel holds on an axis, less than half
_MOST_HEADS = 32_767
_CHUNK = 64


def refuse(request: Request) -> list[str]:
    """Why the kernels cannot run a request whose mask a sum over keys can honour."""
    spec = request.spec
    if spec.mode != "plain":
        return [f"the Triton kernels cannot be traced ({spec.mode} mode)"]
    if not has_triton():
        return ["triton is not installed"]
    if spec.device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return [f"the Triton kernels run on CUDA devices, the call is on {spec.device}"]
    from regard._triton.scanning import widest

    reasons = [] if request.reading.causal else ["the mask is not causal"]
    if spec.dtype == torch.float64:
        reasons.append("the Triton kernels accumulate in float32")
        return reasons
    most = widest(spec.dtype, spec.device)
    features = request.features.count(request.query)
    if max(features, spec.value_dim) > most:
        reasons.append(f"{features} features and values of {spec.value_dim}: the kernels' states hold {most}")
    if spec.batch * spec.heads > _MOST_HEADS:
        reasons.append(f"more than {_MOST_HEADS:,} heads of all items: the grid of a kernel has no more room")
    state = request.state
    if state is not None and (spec.grad or (state.sums is not None and state.sums.requires_grad)):
        reasons.append("gradients through a state are for plain operations")
    return reasons


def attend_by_kernels(request: Request, segment: Segment, before: Sums | None) -> tuple[Tensor, Sums | None]:
    """The result over the positions of ``segment``, and the sums behind the last one where the request has a state."""
    from regard._triton import scanning

    spec, features = request.spec, request.features
    query, key, value = segment.query, segment.key, segment.value
    named = isinstance(features.given, str)
    if not named:  # a map of the caller's: in the precision that sums have
        hide = None if segment.hidden is None else segment.hidden[:, None, :, None]
        query = features.of_query(query.to(request.work))
        # hidden keys before the map: its gradient at NaN is NaN
        key = features.of_key(key.to(request.work) if hide is None else key.to(request.work).masked_fill(hide, 0.0))
    query, key, value = (t if t.stride(3) == 1 else t.contiguous() for t in (query, key, value))
    which = scanning.MAPS[features.given] if isinstance(features.given, str) else 0
    scale = features.scale if named else 1.0
    given = scanning.Given(
        query, key, value, segment.gates, _marks(segment), spec.dtype, which, scale, request.normalize
    )
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given[:4]):
        bare = given._replace(query=None, key=None, value=None, gates=None, marks=None)  # type: ignore[arg-type]
        found: Tensor = _Fused.apply(bare, *given[:5])  # type: ignore[no-untyped-call]
        return found, None
    start = None if before is None else scanning.packed(before.values, before.norms)
    if before is not None and before.run is not None and given.marks is not None:
        start = _of_the_same_document(given.marks, before.run, start)
    out, _, after = scanning.attend(given, start, request.state is not None)
    if after is None:
        return out, None
    shape = (spec.batch, given.state_heads, key.shape[3], value.shape[3])
    return out, Sums(*scanning.unpacked(after, shape))


def _marks(segment: Segment) -> Tensor | None:
    """What ``scanning.Given`` wants to know of tokens."""
    hidden, runs = segment.hidden, segment.runs
    if hidden is None:
        return None if runs is None else (runs * 2).to(torch.int32)
    if runs is None:
        return hidden.to(torch.int32)
    return (runs * 2 + hidden).to(torch.int32)


def _of_the_same_document(marks: Tensor, run: Tensor, start: Tensor | None) -> Tensor | None:
    """A state to begin with, 0 where it is of another document than the first token: the kernels take it for theirs."""
    if start is None:
        return None
    same = (marks[:, :1] >> 1) == run  # [B or 1, 1]
    heads = start.shape[0] // same.shape[0]
    return start * same.repeat_interleave(heads, 0)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bare: Given, *tensors: Tensor | None) -> Tensor:
        from regard._triton import scanning

        given = _joined(bare, tensors)
        out, weight, _ = scanning.attend(given, None, False)
        ctx.bare = bare
        ctx.save_for_backward(*tensors, out, weight)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        from regard._triton import scanning

        *tensors, out, weight = ctx.saved_tensors
        given, needs = _joined(ctx.bare, tensors), ctx.needs_input_grad[1:5]
        with no_autocast(out.device.type):
            if torch.is_grad_enabled():
                return (None, *_differentiable(given, grad_out, needs), None)
            grad_out = grad_out if grad_out.stride(3) == 1 else grad_out.contiguous()
            return (None, *scanning.gradients(given, grad_out, out, weight, needs), None)


def _joined(bare: Given, tensors: Any) -> Given:
    query, key, value, gates, marks = tensors
    return bare._replace(query=query, key=key, value=value, gates=gates, marks=marks)


def _differentiable(given: Given, grad_out: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """First derivatives that can be differentiated again."""
    # views: where one input is made from another, or is the same tensor, a gradient must not run on into the other
    inputs = [None if t is None else t.view_as(t) for t in given[:4]]
    wanted = [t for t, need in zip(inputs, needs, strict=True) if need and t is not None]
    made = iter(
        torch.autograd.grad(_plain(_joined(given, (*inputs, given.marks))), wanted, grad_out, create_graph=True)
    )
    return tuple(next(made) if need and t is not None else None for t, need in zip(inputs, needs, strict=True))


def _plain(given: Given) -> Tensor:
    """The same by operations that torch records."""
    from regard._triton.scanning import MAPS

    phi = NAMED[next(name for name, number in MAPS.items() if number == given.map)]
    query, key, value = (t.float() for t in given[:3])
    hidden = None if given.marks is None else (given.marks & 1).bool()[:, None, :, None]
    if hidden is not None:
        key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)
    key = phi(key) if hidden is None else phi(key).masked_fill(hidden, 0.0)
    group = given.state_heads // key.shape[1]
    key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    runs = None if given.marks is None else given.marks >> 1
    part = Part(phi(query) * given.scale, key, value, given.gates, runs)
    nothing = key.new_zeros(*key.shape[:2], key.shape[3], value.shape[3])
    out, weight, _ = attend(part, Sums(nothing, nothing[..., 0]), _CHUNK)
    if given.normalize:
        out = out / weight.masked_fill(weight == 0, 1.0).unsqueeze(-1)
    return out.to(given.dtype)
