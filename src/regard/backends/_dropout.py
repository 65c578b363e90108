"""Which weights are dropped: a draw that depends on the seed and the element alone, so that it can be repeated."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from regard._hash import FIRST, SECOND, keys, uniform
from regard.spec import Call, CallSpec

ALL = slice(None)


def kept_scale(spec: CallSpec) -> float:
    """What a kept weight is multiplied by."""
    return 0.0 if spec.dropout == 1 else 1.0 / (1.0 - spec.dropout)


def dropout_factor(seed: Tensor, spec: CallSpec, rows: range, cols: range, like: Tensor) -> Tensor:
    """0 where a weight is dropped, 1/(1-p) where it is kept, [B, H, l, s]."""
    kept = uniform(seed, _elements(spec, rows, cols, ALL, ALL, like.device)) >= spec.dropout
    return kept.to(like.dtype) * kept_scale(spec)


class Draw:
    """What is kept of a tile [items, heads, rows, columns]; drawn once, and put on several tensors."""

    def __init__(self, call: Call, rows: range, cols: range, items: slice, heads: slice, like: Tensor) -> None:
        assert call.seed is not None
        spec, seed = call.spec, call.seed
        self.bits: Tensor | None = None
        if _is_fast(spec, seed, like):
            self.bits = _kept_bits(seed, spec, rows, cols, items, heads, like.device)
        else:
            kept = uniform(seed, _elements(spec, rows, cols, items, heads, like.device)) >= spec.dropout
            self.kept = kept.to(like.dtype)

    def put_on(self, weights: Tensor) -> Tensor:
        """Zeros in place of what is dropped; what is kept is not multiplied."""
        if self.bits is None:
            return weights.mul_(self.kept.reshape(weights.shape))
        weights.view(torch.int32).bitwise_and_(self.bits.view(weights.shape))
        return weights


def _elements(
    spec: CallSpec, rows: range, cols: range, items: slice, heads: slice, device: torch.device | None = None
) -> Tensor:
    """The number of each element of a tile among all of the call."""
    lead = torch.arange(spec.batch * spec.heads, device=device).view(spec.batch, spec.heads, 1, 1)[items, heads]
    i = torch.arange(rows.start, rows.stop, device=device).view(-1, 1)
    j = torch.arange(cols.start, cols.stop, device=device)
    return (lead * spec.queries + i) * spec.keys + j


def _is_fast(spec: CallSpec, seed: Tensor, like: Tensor) -> bool:
    """Whether elements have numbers of 32 bits, and floats of 32 bits meet them on a CPU."""
    plain = type(seed) is Tensor and spec.device == "cpu" and like.dtype == torch.float32
    return plain and spec.mode in ("plain", "compile") and spec.pairs < 2**32


def _kept_bits(
    seed: Tensor,
    spec: CallSpec,
    rows: range,
    cols: range,
    items: slice,
    heads: slice,
    device: torch.device | None = None,
) -> Tensor:
    """The draw of ``uniform(…) >= dropout`` in words of 32 bits, which wrap around: -1 where kept, 0 where dropped."""
    low, high = (np.uint32(int(key)).astype(np.int32).item() for key in keys(int(seed)))
    first = _elements(spec, rows, range(cols.start, cols.start + 1), items, heads, device)
    word = first.to(torch.int32) + torch.arange(len(cols), dtype=torch.int32, device=device)
    other = torch.empty_like(word)
    _mix(word.bitwise_xor_(low), other)
    _mix(word.add_(high), other)
    torch.bitwise_right_shift(word, 8, out=word).bitwise_and_(0xFFFFFF)
    # kept from here on, as a float of 32 bits is compared with
    least = math.ceil(float(np.float32(spec.dropout)) * 2**24)
    word.sub_(least)
    return torch.bitwise_right_shift(word, 31, out=word).bitwise_not_()


def _mix(word: Tensor, other: Tensor) -> None:
    """``_hash.mix`` in place."""
    for shift, mask, factor in ((16, 0xFFFF, FIRST), (15, 0x1FFFF, SECOND), (15, 0x1FFFF, None)):
        # shifts repeat the sign: what they put in front is taken away
        word.bitwise_xor_(torch.bitwise_right_shift(word, shift, out=other).bitwise_and_(mask))
        if factor is not None:
            word.mul_(factor)
