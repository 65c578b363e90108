"""Decoding by the kernels of ``decode``: a few queries over many keys, of which each is read once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard._triton.encode import lengths_of, place_of_lengths
from regard._triton.inputs import Inputs, power, rows_of_unit_stride, widest
from regard._triton.launcher import Launch, maker
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
_WIDEST_KEY, _WIDEST_VALUE, _MOST_QUERIES, _MOST_WIDE_ROWS, _NEEDED_WHEN_WIDE = 640, 512, 16, 2048, 230_000
# of those, one program has a multiprocessor for itself, and leaves many numbers: two for each of Hopper's
_WIDE_PROGRAMS = 264


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


def split_keys(keys: int, items: int, wide_v: int) -> int:
    """Among how many programs the keys of each of ``items`` are split."""
    wanted = -(-_PROGRAMS // items) if wide_v <= 256 else _WIDE_PROGRAMS // items
    return max(1, min(_MOST_SPLITS, wanted, keys // _LEAST))


def decode_options(wide: int, wide_v: int, same: bool, dtype: torch.dtype) -> dict[str, int]:
    """Keys of a tile, warps and stages of the pipeline."""
    widest_part = max(wide, wide_v)
    if widest_part > 256:
        return {"BN": 64 if same else 32, "num_warps": 8, "num_stages": 2}
    stages = 2 if widest_part > 128 or dtype.itemsize == 4 else 4
    return {"BN": _BLOCK if dtype.itemsize == 2 else 32, "num_warps": 4, "num_stages": stages}


def _is_hopper(device: torch.device) -> bool:
    """Or what interprets kernels."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


class Decoding:
    """What decoding calls of one description, on tensors of the same strides, have in common: made from the first of
    them, and without its tensors. ``decoding(call)`` is (out, lse)."""

    def __init__(self, call: Call, band: Band) -> None:
        spec, given = call.spec, Inputs(call)
        tensors = (given.query, given.key, rows_of_unit_stride(call.value))
        self._has_unit_strides = all(tensor.stride(3) == 1 for tensor in (call.query, call.key, call.value))
        self._strides = (*tensors[0].stride()[:3], *tensors[1].stride()[:2], *tensors[2].stride()[:2])
        self._steps = {"K_STEP": tensors[1].stride(2), "V_STEP": tensors[2].stride(2)}
        self._scales, self._precision, self._numbers = given.natural_scales, given.precision, band.numbers
        self._padded, self._placed = band.lengths is not None, band.offsets is not None
        self._lengths_at = place_of_lengths(call)
        self._items, self._group = spec.batch * spec.kv_heads, spec.heads // spec.kv_heads
        self._block = min(_MOST_ROWS, max(16, power(spec.queries * self._group)))
        self._blocks = -(-spec.queries * self._group // self._block)
        self._rows = self._blocks * self._block
        self._wide, self._wide_v = _first_width(spec.head_dim), max(16, power(spec.value_dim))
        self._splits = split_keys(spec.keys, self._items * self._blocks, self._wide_v)
        # the values of latent attention are the first numbers of its keys
        self._may_be_same = tensors[1].stride() == tensors[2].stride() and spec.value_dim == self._wide <= spec.head_dim
        lead, device = (spec.batch, spec.heads, spec.queries), call.query.device
        self._apart = max(spec.head_dim, spec.value_dim) > _WHOLE and _is_hopper(device)
        self._new_out = maker((*lead, spec.value_dim), call.query.dtype, device)
        self._new_lse = maker(lead, torch.float32, device)
        size = self._items * self._splits * self._rows * (self._wide_v + 2)
        self._new_parts = maker((size,), torch.float32, device)
        self._launches: dict[tuple[bool, torch.dtype | None], tuple[Launch, Launch]] = {}

    def __call__(self, call: Call) -> tuple[Tensor, Tensor]:
        query, key, value = call.query, call.key, call.value
        if not self._has_unit_strides:
            query, key, value = (rows_of_unit_stride(tensor) for tensor in (query, key, value))
        same = self._may_be_same and key.data_ptr() == value.data_ptr()
        sinks = None if call.sinks is None else call.sinks.detach().contiguous()
        out, lse, parts = self._new_out(), self._new_lse(), self._new_parts()
        lengths = lengths_of(call, self._lengths_at) if self._padded else None
        offsets = call.offset.contiguous() if self._placed else None  # type: ignore[union-attr]
        kind = (same, None if sinks is None else sinks.dtype)
        launches = self._launches.get(kind)
        if launches is None:
            launches = self._launches[kind] = self._first(call.spec, same), self._second(call.spec)
        launches[0]((query, key, value, lengths, offsets, parts))
        launches[1]((parts, sinks, out, lse))
        return out, lse

    def _first(self, spec: CallSpec, same: bool) -> Launch:
        from regard._triton.decode import decode as kernel

        constants = {
            "HKV": spec.kv_heads, "GROUP": self._group, "HEAD": min(self._wide, spec.head_dim), "D": self._wide,
            "REST": max(0, spec.head_dim - self._wide), "D2": _second_width(spec.head_dim), "VALUE": spec.value_dim,
            "DV": self._wide_v, "BM": self._block, "ROWS": self._rows, "SOFTCAP": spec.softcap is not None,
            "PADDED": self._padded, "SAME": same, "APART": self._apart, "PRECISION": self._precision, **self._steps,
            **decode_options(self._wide, self._wide_v, same, spec.dtype),
        }  # fmt: skip
        numbers = (*self._strides, *self._numbers, spec.queries, spec.keys, self._splits, *self._scales)
        return Launch(kernel, (self._blocks, self._splits, self._items), numbers, constants)

    def _second(self, spec: CallSpec) -> Launch:
        launched = (spec.queries, self._splits, self._items, spec.kv_heads, self._group, spec.value_dim, self._wide_v)
        return joining(*launched, self._rows, spec.sinks, True)


def joining(
    queries: int, splits: int, items: int, heads: int, group: int, value_dim: int, wide_v: int, rows: int, sinks: bool,
    with_lse: bool,
) -> Launch:  # fmt: skip
    """The launch that makes the result of what ``items`` times ``splits`` programs left."""
    from regard._triton.decode import join_splits

    constants = {
        "HKV": heads, "GROUP": group, "VALUE": value_dim, "DV": wide_v, "ROWS": rows, "SPLITS": power(splits),
        "SINK": sinks, "WITH_LSE": with_lse, "num_warps": 4,
    }  # fmt: skip
    return Launch(join_splits, (queries * group, items), (queries, splits), constants)
