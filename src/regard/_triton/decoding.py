"""Decoding by the kernels of ``decode``: a few queries over many keys, of which each is read once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard._triton.inputs import Inputs, power, rows_of_unit_stride, widest
from regard._triton.launcher import Launch, kept_launch, on
from regard._triton.tile_sizes import shared_memory

if TYPE_CHECKING:
    from regard._triton.encode import Band
    from regard.spec import Call, CallSpec

# keys from which splitting them is worth a second kernel
_FEWEST_KEYS = 512
# rows of a program at most, keys of its tiles, keys that a split has at least, and programs that fill a device
_MOST_ROWS, _BLOCK, _LEAST, _PROGRAMS = 64, 64, 256, 528
_MOST_SPLITS = 64
# keys up to here are made a power of two wide, and wider ones cut in two
_WHOLE = 256
# heads of latent attention, which no other kernel takes: how wide keys and values may be, how many queries and rows
# there are at most, and bytes of shared memory that a program needs
_WIDEST_KEY, _WIDEST_VALUE, _MOST_QUERIES, _MOST_WIDE_ROWS, _NEEDED_WHEN_WIDE = 640, 512, 16, 2048, 222_000


def is_decoding(spec: CallSpec) -> bool:
    """Whether the call, whose mask is a band, is decoding, and one that these kernels take."""
    rows = spec.queries * (spec.heads // spec.kv_heads)
    few = rows <= _MOST_ROWS and spec.queries * 16 <= spec.keys
    return few and spec.keys >= _FEWEST_KEYS and spec.bias is None and not spec.dropout


def takes_wide(spec: CallSpec) -> bool:
    """Whether the kernels take heads of this call that are too wide for the others: a few queries, no gradients."""
    if spec.dtype.itemsize != 2 or max(spec.head_dim, spec.value_dim) <= widest(spec.dtype):
        return False
    if spec.head_dim > _WIDEST_KEY or spec.value_dim > _WIDEST_VALUE or _second_width(spec.head_dim) > 128:
        return False
    if shared_memory(spec.device) < _NEEDED_WHEN_WIDE:
        return False
    banded = spec.mask is None or (spec.flags is not None and spec.flags[-1] is None)
    few = spec.queries * (spec.heads // spec.kv_heads) <= _MOST_WIDE_ROWS and spec.queries <= _MOST_QUERIES
    return banded and few and not spec.grad and spec.bias is None and not spec.dropout


def _first_width(head_dim: int) -> int:
    """Of keys that are wider than the kernels' widest power of two: a power of two, and the rest apart."""
    return max(16, power(head_dim)) if head_dim <= _WHOLE else 1 << head_dim.bit_length() - 1


def _second_width(head_dim: int) -> int:
    rest = head_dim - _first_width(head_dim)
    return max(16, power(rest)) if rest > 0 else 0


def split_keys(keys: int, items: int, most: int = _MOST_SPLITS) -> int:
    """Among how many programs the keys of each of ``items`` are split."""
    return max(1, min(most, -(-_PROGRAMS // items), keys // _LEAST))


def decode_options(wide: int, wide_v: int, same: bool, dtype: torch.dtype) -> dict[str, int]:
    """Keys of a tile, warps and stages of the pipeline."""
    widest_part = max(wide, wide_v)
    if widest_part > 256:
        return {"BN": 64 if same else 32, "num_warps": 8, "num_stages": 2}
    stages = 2 if widest_part > 128 or dtype.itemsize == 4 else 4
    return {"BN": _BLOCK if dtype.itemsize == 2 else 32, "num_warps": 4, "num_stages": stages}


def decode(call: Call, band: Band) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    from regard._triton import decode as kernels

    spec, given = call.spec, Inputs(call)
    value = rows_of_unit_stride(call.value)
    items, group = spec.batch * spec.kv_heads, spec.heads // spec.kv_heads
    block = min(_MOST_ROWS, max(16, power(spec.queries * group)))
    blocks = -(-spec.queries * group // block)
    rows = blocks * block
    wide, rest, wide_v = _first_width(spec.head_dim), _second_width(spec.head_dim), max(16, power(spec.value_dim))
    splits = split_keys(spec.keys, items * blocks, _MOST_SPLITS if wide_v <= 256 else _MOST_SPLITS // 2)
    # the values of latent attention are the first numbers of its keys
    same = (call.key.data_ptr(), call.key.stride()) == (value.data_ptr(), value.stride())
    same = same and spec.value_dim == wide <= spec.head_dim
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
        constants = {
            "HKV": spec.kv_heads, "GROUP": group, "HEAD": min(wide, spec.head_dim), "D": wide,
            "REST": max(0, spec.head_dim - wide), "D2": rest, "VALUE": spec.value_dim, "DV": wide_v, "BM": block,
            "SOFTCAP": spec.softcap is not None, "PADDED": band.lengths is not None, "SAME": same,
            "PRECISION": given.precision, **decode_options(wide, wide_v, same, spec.dtype),
        }  # fmt: skip
        strides = (*given.query.stride()[:3], *given.key.stride()[:3], *value.stride()[:3])
        numbers = (*strides, band.offset, band.left, band.right, band.given, spec.queries, spec.keys, splits)
        return Launch(kernels.decode, (splits, items, blocks), (*numbers, *given.natural_scales), constants)

    def second() -> Launch:
        constants = {
            "HKV": spec.kv_heads, "GROUP": group, "VALUE": spec.value_dim, "DV": wide_v, "ROWS": rows,
            "SPLITS": power(splits), "SINK": call.sinks is not None, "num_warps": 4,
        }  # fmt: skip
        return Launch(kernels.join_splits, (spec.queries * group, items), (spec.queries, splits), constants)

    with on(call.query.device):
        key = (band.offset, band.left, band.right, band.given, same)
        kept_launch(call, ("decode", *key), first)(
            [given.query, given.key, value, lengths, offsets, highest, total, acc]
        )
        kept_launch(call, ("join", sinks.dtype, *key), second)([highest, total, acc, sinks, out, lse])
    return out, lse
