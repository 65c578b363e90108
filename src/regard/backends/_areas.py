"""A call as a few plain ones: the areas of its mask, each a call without a mask or a square causal one of a fused
kernel, joined by their log-sum-exp.

Rows and keys of an area are copied next to each other where they are several ranges; keys that no row may see are never
read. Gradients of an area are what the kernel gives for the output and the log-sum-exp of the whole call: a weight is
exp(logit − lse), whatever other keys its row sees.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from regard.backends._base import accumulation
from regard.backends._kernels import plain_backward, plain_forward
from regard.backends._steps import side_by_side, tokens_of
from regard.masks import Mask
from regard.masks._areas import Area, Ranges, joined, outside, size
from regard.spec import BiasSpec, Call, CallSpec
from regard.statistics import merge


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call whose description has areas; without sinks."""
    spec, areas = call.spec, call.spec.areas
    assert areas is not None
    if areas and areas[0].rows == ((0, spec.queries),) and areas[0].shift is None:  # all others join it
        out, lse = _forward(call.query, *_keys_of(call, areas[0]), areas[0].causal, spec.scale)
        areas = areas[1:]
    else:
        out = result_like(call.query, spec.value_dim, spec.dtype)
        lse = call.query.new_empty(out.shape[:3], dtype=accumulation(spec.dtype))
        written = joined(tuple(each for area in areas if not area.merges for each in area.rows))
        for start, stop in outside(written, spec.queries):
            out[:, :, start:stop] = 0
            lse[:, :, start:stop] = -torch.inf
    for area in areas:
        query = _take(call.query, area.rows)
        found, found_lse = _forward(query, *_keys_of(call, area), area.causal, spec.scale)
        if area.shift is not None:
            found_lse = found_lse + area.shift
        for rows, own in side_by_side(area.rows):
            if area.merges:
                merge(out[:, :, rows], lse[:, :, rows], found[:, :, own], found_lse[:, :, own])
            else:
                _copy(out[:, :, rows], found[:, :, own])
                lse[:, :, rows] = found_lse[:, :, own]
    return out, lse


def backward(call: Call, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; ``out`` and ``lse`` are those of the whole call."""
    spec, areas = call.spec, call.spec.areas
    assert areas is not None
    found = []
    for area in areas:
        d_out, query, own_out = (_take(tensor, area.rows, copy=True) for tensor in (grad_out, call.query, out))
        key, value = _keys_of(call, area, copy=True)
        own_lse = tokens_of(lse, area.rows) - (area.shift or 0.0)
        found.append(_backward(d_out, query, key, value, own_out, own_lse, area.causal, spec.scale))
    rows, keys = [area.rows for area in areas], [area.keys for area in areas]
    return (
        _summed(call.query, rows, [grads[0] for grads in found]),
        _summed(call.key, keys, [grads[1] for grads in found]),
        _summed(call.value, keys, [grads[2] for grads in found]),
    )


def result_like(query: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Memory for [batch, head, query, width], where heads and queries lie as those of ``query`` do. So torch's kernels
    have it: a model that puts the heads of a token side by side again then needs no copy."""
    batch, heads, rows, _ = query.shape
    by_token = query.stride(1) < query.stride(2)
    strides = (heads * rows * width, *((width, heads * width) if by_token else (rows * width, width)), 1)
    return query.new_empty_strided((batch, heads, rows, width), strides, dtype=dtype)


def _forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if key.shape[2] > 1:
        return plain_forward(query, key, value, causal, scale)
    # cuDNN takes two keys at least: the same one twice, each with half of its weight
    out, lse = plain_forward(query, _twice(key), _twice(value), causal, scale)
    return out, lse - math.log(2)


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if key.shape[2] > 1:
        return plain_backward(grad_out, query, key, value, out, lse, causal, scale)
    halves = plain_backward(grad_out, query, _twice(key), _twice(value), out, lse + math.log(2), causal, scale)
    return halves[0], halves[1].sum(2, keepdim=True), halves[2].sum(2, keepdim=True)


def _twice(tensor: Tensor) -> Tensor:
    return torch.cat((tensor, tensor), 2)


def _summed(tensor: Tensor, tokens: list[Ranges], grads: list[Tensor]) -> Tensor:
    """The gradient of a tensor from those of some of its tokens each; zeros where there are none."""
    every = sorted(each for ranges in tokens for each in ranges)
    apart = all(one[1] <= other[0] for one, other in itertools.pairwise(every))
    dtype = tensor.dtype if apart else accumulation(tensor.dtype)
    total = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    if apart:
        for start, stop in outside(tuple(every), tensor.shape[2]):
            total[:, :, start:stop] = 0
    else:
        total.zero_()
    for ranges, grad in zip(tokens, grads, strict=True):
        for place, own in side_by_side(ranges):
            if apart:
                _copy(total[:, :, place], grad[:, :, own])
            else:
                total[:, :, place] += grad[:, :, own]
    return total.to(tensor.dtype)


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
    if all(area.shift is None for area in areas):
        return call
    bias = torch.full(
        (1, 1, spec.queries, spec.keys), -torch.inf, dtype=accumulation(spec.dtype), device=call.query.device
    )
    for area in areas:
        shift = bias.new_tensor(area.shift or 0.0)
        for (top, bottom), (left, right) in itertools.product(area.rows, area.keys):
            there = bias[:, :, top:bottom, left:right]
            there.copy_(torch.logaddexp(there, shift))  # a pair may be in two areas
    described = BiasSpec(tuple(bias.shape), bias.dtype, needs_grad=False)
    return call.replace(spec=spec._replace(bias=described, areas=None), bias=bias)


def steered(mask: Mask, where: Mask, amount: float, queries: int, keys: int, offset: int) -> tuple[Area, ...] | None:
    """The areas of a call to the logits of whose pairs ``where`` an amount is added; None where they are not few.

    To add a positive amount is to have each of those pairs once more, with a logit that is larger by log(eᵃ − 1): the
    call stays whole, where cutting pairs out of it takes copies. To add a negative one is to have them apart."""
    whole = amount > 0
    rest = (mask if whole else mask & ~where).areas(queries, keys, offset)
    more = (mask & where).areas(queries, keys, offset)
    if rest is None or more is None:
        return None
    shift = amount + math.log(-math.expm1(-amount)) if whole else amount
    return (*rest, *(area._replace(merges=True, shift=shift) for area in more))


def _keys_of(call: Call, area: Area, copy: bool = False) -> tuple[Tensor, Tensor]:
    return _take(call.key, area.keys, copy), _take(call.value, area.keys, copy)


def _take(tensor: Tensor, ranges: Ranges, copy: bool = False) -> Tensor:
    """Tokens of [batch, head, token, dim], a view where they are one range and no copy is asked for."""
    if len(ranges) == 1 and not copy:
        return tensor[:, :, ranges[0][0] : ranges[0][1]]
    words = _words(tensor)
    return torch.cat([words[:, :, start:stop] for start, stop in ranges], 2).view(tensor.dtype)


def _copy(into: Tensor, found: Tensor) -> None:
    large, other = _words(into), _words(found)
    if large.dtype == other.dtype:
        large.copy_(other)
    else:
        into.copy_(found)


def _words(tensor: Tensor) -> Tensor:
    """The same memory as numbers of 8 bytes, to be copied: torch copies strided tensors of a GPU number by number, few
    large ones in less time than many small ones."""
    if tensor.dtype.itemsize != 2 or tensor.stride(3) != 1:
        return tensor
    sizes = (tensor.shape[3], tensor.storage_offset(), *tensor.stride()[:3])
    return tensor if any(each % 4 for each in sizes) else tensor.view(torch.int64)
