"""A call as a few plain ones: the areas of its mask, each a call without a mask or a square causal one of a fused
kernel, joined by their log-sum-exp.

Rows and keys of an area are copied next to each other where they are several ranges; keys that no row may see are never
read. Gradients of an area are what the kernel gives for the output and the log-sum-exp of the whole call: a weight is
exp(logit − lse), whatever other keys its row sees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.backends._base import accumulation
from regard.backends._kernels import plain_backward, plain_forward
from regard.masks._areas import joined, outside, size
from regard.spec import BiasSpec
from regard.statistics import merge

if TYPE_CHECKING:
    from regard.masks._areas import Area, Ranges
    from regard.spec import Call, CallSpec


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call whose description has areas; without sinks."""
    spec, areas = call.spec, call.spec.areas
    assert areas is not None
    everything = ((0, spec.queries),)
    if len(areas) == 1 and areas[0].rows == everything and not areas[0].shift:
        return plain_forward(call.query, *_keys_of(call, areas[0]), areas[0].causal, spec.scale)
    out = call.query.new_empty(spec.batch, spec.heads, spec.queries, spec.value_dim)
    lse = call.query.new_empty(out.shape[:3], dtype=accumulation(spec.dtype))
    for start, stop in _unwritten(areas, spec.queries):
        out[:, :, start:stop] = 0
        lse[:, :, start:stop] = -torch.inf
    for area in areas:
        query = _take(call.query, area.rows)
        found, found_lse = plain_forward(query, *_keys_of(call, area), area.causal, spec.scale)
        if area.shift:
            found_lse = found_lse + area.shift
        at = 0
        for start, stop in area.rows:
            piece = slice(at, at + stop - start)
            at = piece.stop
            rows, own, own_lse = slice(start, stop), found[:, :, piece], found_lse[:, :, piece]
            if area.merges:
                merge(out[:, :, rows], lse[:, :, rows], own, own_lse)
            else:
                out[:, :, rows] = own
                lse[:, :, rows] = own_lse
    return out, lse


def backward(call: Call, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; ``out`` and ``lse`` are those of the whole call."""
    spec, areas = call.spec, call.spec.areas
    assert areas is not None
    work = accumulation(spec.dtype)
    of_query = work if any(area.merges for area in areas) else spec.dtype  # else every row is in one area only
    query, key, value = (
        torch.zeros_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)
        for tensor, dtype in ((call.query, of_query), (call.key, work), (call.value, work))
    )
    for area in areas:
        d_out, own, own_out, own_lse = (
            _take(tensor, area.rows).contiguous() for tensor in (grad_out, call.query, out, lse - area.shift)
        )
        keys, values = (tensor.contiguous() for tensor in _keys_of(call, area))
        found = plain_backward(d_out, own, keys, values, own_out, own_lse, area.causal, spec.scale)
        for total, ranges, part in zip((query, key, value), (area.rows, area.keys, area.keys), found, strict=True):
            at = 0
            for start, stop in ranges:
                total[:, :, start:stop] += part[:, :, at : at + stop - start]
                at += stop - start
    return query.to(spec.dtype), key.to(spec.dtype), value.to(spec.dtype)


def extra_bytes(spec: CallSpec) -> int:
    """Of what the widest area takes in a forward pass next to the call's result: copies, and a result of its own."""
    assert spec.areas is not None
    per_key = (spec.head_dim + spec.value_dim) * spec.dtype.itemsize
    per_row = spec.head_dim * spec.dtype.itemsize
    own = spec.value_dim * spec.dtype.itemsize + accumulation(spec.dtype).itemsize
    return max(
        (
            spec.batch * spec.heads * size(area.rows) * (own + per_row * (len(area.rows) > 1))
            + spec.batch * spec.kv_heads * size(area.keys) * per_key * (len(area.keys) > 1)
            for area in spec.areas
        ),
        default=0,
    )


def with_shifts_as_bias(call: Call) -> Call:
    """The call with a bias of all pairs in place of shifts: for plain operations, which have all pairs anyway."""
    spec = call.spec
    areas = spec.areas or ()
    if not any(area.shift for area in areas):
        return call
    bias = torch.zeros(1, 1, spec.queries, spec.keys, dtype=accumulation(spec.dtype), device=call.query.device)
    for area in areas:
        for top, bottom in area.rows if area.shift else ():
            for left, right in area.keys:
                bias[:, :, top:bottom, left:right] = area.shift
    described = BiasSpec(tuple(bias.shape), bias.dtype, needs_grad=False)
    return call.replace(spec=spec._replace(bias=described, areas=None), bias=bias)


def steered(areas: tuple[Area, ...], more: tuple[Area, ...], amount: float) -> tuple[Area, ...]:
    """The areas of a call, and ``more`` of other pairs, to whose logits ``amount`` is added."""
    return (*areas, *(area._replace(merges=True, shift=amount) for area in more))


def _unwritten(areas: tuple[Area, ...], rows: int) -> Ranges:
    """Rows that no area writes, but for those that merge with what is there."""
    return outside(joined(tuple(each for area in areas if not area.merges for each in area.rows)), rows)


def _keys_of(call: Call, area: Area) -> tuple[Tensor, Tensor]:
    return _take(call.key, area.keys), _take(call.value, area.keys)


def _take(tensor: Tensor, ranges: Ranges) -> Tensor:
    """Tokens of [batch, head, token, ...], a view where they are one range."""
    found = [tensor[:, :, start:stop] for start, stop in ranges]
    return found[0] if len(found) == 1 else torch.cat(found, 2)
