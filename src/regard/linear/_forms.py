"""Runs a request by one of five forms, all of which mean the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from regard.backends._base import no_autocast
from regard.linear import _fused, _masking, _steps
from regard.linear._chunks import Part, Sums, attend
from regard.linear._guard import guarded
from regard.linear._request import Request

CHUNK = 64
# tokens times heads whose features and weights are alive at once: they stay in a core's cache
AT_ONCE = 1 << 13


class Segment(NamedTuple):
    """Neighbouring tokens of a call as they came, with what is known of them."""

    query: Tensor
    key: Tensor
    value: Tensor
    gates: Tensor | None
    hidden: Tensor | None
    runs: Tensor | None
    lost: Tensor | None


def run(request: Request, form: str) -> Tensor:
    """The result; a state of the request is moved behind its last token."""
    spec = request.spec
    if spec.batch * spec.queries * spec.value_dim == 0 or (spec.keys == 0 and request.state is None):
        kept = request.query.sum() * 0 + request.key.sum() * 0 + request.value.sum() * 0  # gradients of the right shape
        return request.query.new_zeros(spec.batch, spec.heads, spec.queries, spec.value_dim) + kept
    with no_autocast(spec.device):
        if form == "whole":
            return _whole(request)
        if form == "quadratic":
            return guarded(request, _quadratic)
        if form == "fused":
            return guarded(request, _by_kernels)
        return guarded(request, _by_steps if form == "recurrent" else _by_chunks)


def _finished(request: Request, found: Tensor, weight: Tensor, lost: Tensor | None = None) -> Tensor:
    """Normalised, rows that see nothing 0, in the call's dtype."""
    if request.normalize:
        found = found / weight.masked_fill(weight == 0, 1.0).unsqueeze(-1)
    if lost is not None:
        found = found.masked_fill(lost[:, None, :, None], 0.0)
    return found.to(request.spec.dtype)


def _key_side(request: Request, key: Tensor, value: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """Features of keys and values to sum, zeros where no row may look: before the map too, whose gradient at NaN is
    NaN."""
    key, value = key.to(request.work), value.to(request.work)
    if hidden is None:
        return request.features.of_key(key), value
    hide = hidden[:, None, :, None]
    return request.features.of_key(key.masked_fill(hide, 0.0)).masked_fill(hide, 0.0), value.masked_fill(hide, 0.0)


def _whole(request: Request) -> Tensor:
    seen = _masking.visible(request.reading, request.spec.queries, request.total, 0, request.query.device)
    key, value = _key_side(request, request.key, request.value, seen.hidden)
    query = request.features.of_query(request.query.to(request.work))
    return _finished(request, *_steps.whole(query, key, value))


def _quadratic(request: Request) -> Tensor:
    spec, device = request.spec, request.query.device
    L, S = spec.queries, spec.keys
    hidden = _masking.visible(request.reading, L, S, 0, device).hidden
    key, value = _key_side(request, request.key, request.value, hidden)
    seen = None
    if request.mask is not None:
        seen = request.mask.tile(range(L), range(S), L, S, offset=request.offset, device=device)
    remains = None
    if request.gates is not None:
        gates = request.gates if hidden is None else request.gates.masked_fill(hidden[:, None], 0.0)
        sums = gates.cumsum(-1).repeat_interleave(spec.heads // gates.shape[1], 1)
        places = torch.arange(request.offset, request.offset + L, device=device).clamp(0, S - 1)
        between = sums[:, :, places].unsqueeze(-1) - sums.unsqueeze(-2)
        remains = between.clamp(max=0.0).exp().to(request.work)
    query = request.features.of_query(request.query.to(request.work))
    return _finished(request, *_steps.quadratic(query, key, value, seen, remains))


def _by_steps(request: Request) -> Tensor:
    segment, before, rows = _laid_out(request)
    part = _part(request, segment)
    out, weight, after = _steps.recur(part, _started(part, before))
    _leave(request, after)
    return _finished(request, out, weight, segment.lost)[:, :, rows]


def _by_kernels(request: Request) -> Tensor:
    segment, before, rows = _laid_out(request)
    out, after = _fused.attend_by_kernels(request, segment, before)
    if after is not None:
        _leave(request, after)
    if segment.lost is not None:
        out = out.masked_fill(segment.lost[:, None, :, None], 0.0)
    return out[:, :, rows]


def _by_chunks(request: Request) -> Tensor:
    segment, before, rows = _laid_out(request)
    size = max(CHUNK, AT_ONCE // (request.spec.batch * request.spec.heads) // CHUNK * CHUNK)
    segments = list(_split(segment, size))
    light = len(segments) > 1 and request.spec.grad and request.spec.mode == "plain"
    if not request.reading.causal:
        return _both_ways(request, segments, light)[:, :, rows]

    def forward(segment: Segment, before: Sums | None) -> tuple[Tensor, Sums]:
        part = _part(request, segment)
        out, weight, after = attend(part, _started(part, before), CHUNK)
        return _finished(request, out, weight, segment.lost), after

    parts: list[Tensor] = []
    whole = None
    if len(segments) > 1 and not request.spec.grad and request.spec.mode == "plain":
        # the parts and their concatenation would both be alive
        whole = request.query.new_empty(*segment.query.shape[:3], request.spec.value_dim)
    at, sums = 0, before
    for (out,), after in _scanned(segments, forward, before, light):
        sums = after
        if whole is None:
            parts.append(out)
        else:
            whole[:, :, at : at + out.shape[2]] = out
            at += out.shape[2]
    assert sums is not None
    _leave(request, sums)
    found = whole if whole is not None else parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    return found[:, :, rows]


def _both_ways(request: Request, segments: list[Segment], light: bool) -> Tensor:
    """Documents without an order: what comes before a token and itself, and what comes after, from the other end."""

    def scan(segment: Segment, before: Sums | None, back: bool) -> tuple[Tensor, Tensor, Sums]:
        part = _part(request, segment)
        if back:
            query, key, value = (t.flip(2) for t in part[:3])
            part = Part(query, key, value, None, None if part.runs is None else part.runs.flip(1))
        out, weight, after = attend(part, _started(part, before), CHUNK, strict=back)
        return (out.flip(2), weight.flip(2), after) if back else (out, weight, after)

    before = [each for each, _ in _scanned(segments, partial(scan, back=False), None, light)]
    after = [each for each, _ in _scanned(segments[::-1], partial(scan, back=True), None, light)]
    joined = zip(before, after[::-1], segments, strict=True)
    outs = [_finished(request, o + p, w + x, segment.lost) for (o, w), (p, x), segment in joined]
    return torch.cat(outs, 2)


def _scanned(
    segments: list[Segment], scan: Callable[[Segment, Sums | None], tuple[Any, ...]], sums: Sums | None, light: bool
) -> Iterator[tuple[list[Tensor], Sums | None]]:
    """What ``scan`` gives of each segment, and the sums behind it, which the next begins with."""
    for segment in segments:
        if light:  # kept: only the inputs and the sums; the rest is computed again when gradients are
            *found, sums = checkpoint(scan, segment, sums, use_reentrant=False, preserve_rng_state=False)
        else:
            *found, sums = scan(segment, sums)
        yield found, sums


def _laid_out(request: Request) -> tuple[Segment, Sums | None, slice]:
    """Queries and keys over the positions they share, what to begin with, and where among them the queries are."""
    spec, device = request.spec, request.query.device
    L, S = spec.queries, spec.keys
    offset = _masking.clipped(request.offset, L, S)
    seen = _masking.visible(request.reading, L, request.total, request.first, device)
    query, key, value, gates = request.query, request.key, request.value, request.gates
    low, high = min(0, offset), max(S, offset + L)
    if (low, high) != (0, S):
        key, value = (F.pad(t, (0, 0, -low, high - S)) for t in (key, value))
        gates = None if gates is None else F.pad(gates, (-low, high - S))
        seen = _masking.aligned(seen, L, S, offset, device)
    if high - low != L:
        query = F.pad(query, (0, 0, offset - low, high - offset - L))
    if gates is not None and seen.hidden is not None:
        gates = gates.masked_fill(seen.hidden[:, None], 0.0)  # a token that is not there is no step
    before = None
    if request.state is not None and request.state.sums is not None and request.state.norms is not None:
        run = _masking.document_before(request.reading, request.total, request.first, device)
        before = Sums(request.state.sums, request.state.norms, run)
    return Segment(query, key, value, gates, *seen[1:]), before, slice(offset - low, offset - low + L)


def _split(whole: Segment, size: int) -> Iterator[Segment]:
    tokens = whole.query.shape[2]
    if tokens <= size:
        yield whole
        return
    # split, not sliced: the gradient of n slices would be n tensors of the whole size
    axes = (2, 2, 2, 2, 1, 1, 1)
    sizes = [min(size, tokens - start) for start in range(0, tokens, size)]
    split = [
        [None] * len(sizes) if t is None else torch.split_with_sizes(t, sizes, dim=axis)
        for t, axis in zip(whole, axes, strict=True)
    ]
    for parts in zip(*split, strict=True):
        yield Segment(*parts)


def _part(request: Request, segment: Segment) -> Part:
    key, value = _key_side(request, segment.key, segment.value, segment.hidden)
    group = request.state_heads // key.shape[1]
    if group > 1:  # gates of their own for heads that share keys
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    query = request.features.of_query(segment.query.to(request.work))
    return Part(query, key, value, segment.gates, segment.runs)


def _started(part: Part, before: Sums | None) -> Sums:
    batch, heads, _, features = part.key.shape
    if before is None:
        sums = part.key.new_zeros(batch, heads, features, part.value.shape[3])
        return Sums(sums, part.key.new_zeros(batch, heads, features))
    wanted = (batch, heads, features, part.value.shape[3])
    if before.values.shape != wanted or before.values.dtype != part.key.dtype:
        raise ValueError(
            f"the state holds {list(before.values.shape)} {before.values.dtype}, but this call needs "
            f"[batch, head, features, value dim] = {list(wanted)} {part.key.dtype}"
        )
    return before


def _leave(request: Request, sums: Sums) -> None:
    if request.state is not None:
        request.state.sums, request.state.norms = sums.values, sums.norms
        request.state.position += request.spec.keys
