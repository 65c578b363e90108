"""Decoding by the kernels of ``decode``: a few queries over many keys, of which each is read once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard._triton.inputs import Inputs, power, rows_of_unit_stride
from regard._triton.launcher import Launch, kept_launch, on

if TYPE_CHECKING:
    from regard._triton.encode import Band
    from regard.spec import Call, CallSpec

# keys from which splitting them is worth a second kernel
_FEWEST_KEYS = 512
# rows of a program at most, keys of its tiles, keys that a split has at least, and programs that fill a device
_MOST_ROWS, _BLOCK, _LEAST, _PROGRAMS = 64, 64, 256, 528
_MOST_SPLITS = 64


def is_decoding(spec: CallSpec) -> bool:
    """Whether the call, whose mask is a band, is decoding, and one that these kernels take."""
    rows = spec.queries * (spec.heads // spec.kv_heads)
    few = rows <= _MOST_ROWS and spec.queries * 16 <= spec.keys
    return few and spec.keys >= _FEWEST_KEYS and spec.bias is None and not spec.dropout


def decode(call: Call, band: Band) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    from regard._triton import decode as kernels

    spec, given = call.spec, Inputs(call)
    value = rows_of_unit_stride(call.value)
    items, group = spec.batch * spec.kv_heads, spec.heads // spec.kv_heads
    rows = max(16, power(spec.queries * group))
    splits = max(1, min(_MOST_SPLITS, -(-_PROGRAMS // items), spec.keys // _LEAST))
    wide, wide_v = max(16, power(spec.head_dim)), max(16, power(spec.value_dim))
    new = call.query.new_empty
    out = new(spec.batch, spec.heads, spec.queries, spec.value_dim)
    lse = new(spec.batch, spec.heads, spec.queries, dtype=torch.float32)
    parts = new(items * splits * rows * (wide_v + 2), dtype=torch.float32)
    sizes = [items * splits * rows * size for size in (wide_v, 1, 1)]
    acc, highest, total = parts.split(sizes)  # type: ignore[no-untyped-call]
    sinks = lse if call.sinks is None else call.sinks.detach().contiguous()
    lengths = lse if band.lengths is None else band.lengths
    offsets = lse if band.offsets is None else band.offsets

    def first() -> Launch:
        stages = 2 if max(wide, wide_v) > 128 or spec.dtype.itemsize == 4 else 4
        constants = {
            "HKV": spec.kv_heads, "GROUP": group, "HEAD": spec.head_dim, "D": wide, "VALUE": spec.value_dim,
            "DV": wide_v, "BM": rows, "BN": _BLOCK if spec.dtype.itemsize == 2 else 32,
            "SOFTCAP": spec.softcap is not None, "PADDED": band.lengths is not None,
            "PRECISION": given.precision, "num_warps": 4, "num_stages": stages,
        }  # fmt: skip
        strides = (*given.query.stride()[:3], *given.key.stride()[:3], *value.stride()[:3])
        numbers = (*strides, band.offset, band.left, band.right, band.given, spec.queries, spec.keys, splits)
        return Launch(kernels.decode, (splits, items), (*numbers, *given.natural_scales), constants)

    def second() -> Launch:
        constants = {
            "HKV": spec.kv_heads, "GROUP": group, "VALUE": spec.value_dim, "DV": wide_v, "BM": rows,
            "SPLITS": power(splits), "SINK": call.sinks is not None, "num_warps": 4,
        }  # fmt: skip
        return Launch(kernels.join_splits, (spec.queries * group, items), (spec.queries, splits), constants)

    with on(call.query.device):
        key = (band.offset, band.left, band.right, band.given)
        kept_launch(call, ("decode", *key), first)(
            [given.query, given.key, value, lengths, offsets, highest, total, acc]
        )
        kept_launch(call, ("join", *key), second)([highest, total, acc, sinks, out, lse])
    return out, lse
