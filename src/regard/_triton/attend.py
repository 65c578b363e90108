"""Attention by the kernels of this package: out and lse, and row statistics in the same pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard._triton import decoding, inputs
from regard._triton.encode import (
    BAND,
    DENSE,
    INTERVALS,
    Band,
    TileLists,
    band_of,
    dense_piece,
    intervals,
    lengths_of,
    pieces,
    place_of_lengths,
    tile_lists,
)
from regard._triton.form import Form
from regard._triton.inputs import PRECISION, Inputs, can_be_copied, described, has_copy_engine, rows_of_unit_stride
from regard._triton.launcher import Launch, can_compile_ahead, kept, maker, run_on
from regard._triton.tile_sizes import tiles_of, widths

if TYPE_CHECKING:
    from regard._triton.tile_sizes import Tiles
    from regard.spec import Call, CallSpec

# forms of a bias, as in tiles.py
MATRIX, LINE, SLOPES, ALIGNED = 1, 2, 3, 4
# bytes that the compiler can be told to divide addresses and strides
_UNIT = 16
# tiles are no larger than this
_MARGIN = 256
_make: Any = tuple.__new__  # a named tuple without the Python function that makes one
# float32 counts to here
_EXACT = 1 << 24
# queries from which the copy engine is worth its descriptors
_LONG = 1024


def refuse(spec: CallSpec) -> list[str]:
    """Why the kernels cannot run such a call; nothing when they can."""
    if decoding.takes_wide(spec):
        return inputs.refuse(spec._replace(head_dim=1))  # whatever the width
    reasons = inputs.refuse(spec)
    if spec.value_dim > inputs.widest(spec.dtype):
        reasons.append(f"value dim {spec.value_dim} does not fit the Triton kernels' tiles")
    return reasons


def table_bytes(call: Call) -> int:
    """Bytes of the tables of the call's mask, and of its largest piece where pairs are tested one by one."""
    if band_of(call) is not None:
        return 0
    tiles = tiles_of(call.spec)
    found = tile_lists(call, tiles["BM"], tiles["BN"], False).nbytes
    sides = intervals(call)
    if sides is not None:
        return found + sum(side.nbytes for side in sides)
    spec = call.spec
    rows = max(len(piece) for piece in pieces(call, tiles["BM"]))
    items = spec.batch if isinstance(call.offset, Tensor) else call.mask.batch  # type: ignore[union-attr]
    return found + rows * spec.keys * items * call.mask.heads  # type: ignore[union-attr]


class Attended(NamedTuple):
    out: Tensor  # [B, H, L, Dv]
    lse: Tensor  # [B, H, L], float32, likewise the rest
    entropy: Tensor | None
    max_weight: Tensor | None


class Test(NamedTuple):
    """How the kernels tell which pairs of some rows are permitted: two tensors and four numbers."""

    rows: range
    lo: Tensor | None
    hi: Tensor | None
    numbers: tuple[int, ...]
    constants: dict[str, int | bool]


def test_of_band(band: Band, queries: int) -> Test:
    constants = {"PREDICATE": BAND, "SLOTS": 0, "PADDED": band.lengths is not None}
    return Test(range(queries), band.lengths, band.offsets, band.numbers, constants)


def tests_of(call: Call, block_q: int) -> Iterator[Test]:
    """One for all rows; of a mask that is neither a band nor intervals, one after the other as they fit the memory."""
    rows = range(call.spec.queries)
    band = band_of(call)
    if band is not None:
        yield test_of_band(band, len(rows))
        return
    found = intervals(call)
    if found is not None:
        lo, hi = found
        numbers = (lo.stride(0) if lo.shape[0] > 1 else 0, 0, 1, lo.stride(1))
        yield Test(rows, lo, hi, numbers, {"PREDICATE": INTERVALS, "SLOTS": lo.shape[1], "PADDED": False})
        return
    for rows in pieces(call, block_q):
        seen = dense_piece(call, rows).view(torch.uint8)
        yield Test(rows, seen, seen, seen.stride(), {"PREDICATE": DENSE, "SLOTS": 0, "PADDED": False})


def lists_of(call: Call, tiles: Tiles, predicate: int, of_keys: bool = False) -> TileLists | None:
    return None if predicate == BAND else tile_lists(call, tiles["BM"], tiles["BN"], of_keys)


@lru_cache(64)
def dropping(p: float) -> tuple[int, float]:
    """Draws of 24 bits below the first number are dropped; the second is what the others are multiplied by."""
    # what a comparison with a float32 draw makes of the probability
    threshold = math.ceil(torch.tensor(p, dtype=torch.float32).item() * 2**24)
    return threshold, 0.0 if p == 1 else 1.0 / (1.0 - p)


def attend(call: Call, rows: bool) -> Attended:
    """The call's result; ``rows`` asks for entropy and largest weight too. Reads nothing from the device."""
    query, key, value = call.query, call.key, call.value
    kind = ("attend", rows, call.spec, query.device, query.stride(), key.stride(), value.stride())
    way: Callable[[Call], Attended] = kept(kind, lambda: _way_of(call, rows))
    return run_on(query.device, way, call)


def _way_of(call: Call, rows: bool) -> Callable[[Call], Attended]:
    """What runs the call, and all others of its description and strides."""
    spec = call.spec
    if spec.empty:
        return partial(_nothing, rows=rows)
    if decoding.takes_wide(spec) or (not rows and decoding.is_decoding(spec)):
        band = band_of(call)
        if band is not None:
            return partial(_decode, decoding.Decoding(call, band))
    way = _Forward(call, rows)
    if spec.grad and can_compile_ahead(call.query.device):
        from regard._triton.gradients import compile_ahead

        compile_ahead(call, way.out_dtype)
    return way


def _decode(way: decoding.Decoding, call: Call) -> Attended:
    made: Attended = _make(Attended, (*way(call), None, None))
    return made


class Recipe:
    """What calls of one description, on tensors of the same strides, have in common: made from the first of them, and
    without its tensors. The numbers of a band are among it; of other masks, each call brings its own."""

    def __init__(self, call: Call, *more: Tensor) -> None:
        """``more``: other tensors of the call, which are read like its query."""
        spec, given = call.spec, Inputs(call)
        tensors = (call.query, call.key, call.value, *more)
        self.has_unit_strides = all(tensor.stride(3) == 1 for tensor in tensors)
        strides, dims = [_outer_strides(tensor) for tensor in tensors], (spec.head_dim, spec.value_dim)
        unit = _common_unit([*dims, *(number for numbers in strides for number in numbers)], spec.dtype)
        self.strides = tuple(number // unit for numbers in strides for number in numbers)
        self.sizes = (spec.heads, spec.heads // spec.kv_heads, *(dim // unit for dim in dims))
        self.scales, self.natural_scales, self.rises = given.scales, given.natural_scales, given.rises()
        self.lead = (spec.batch, spec.heads, spec.queries)
        self.new_row = maker(self.lead, torch.float32, call.query.device)
        self.threshold, self.share = dropping(spec.dropout)
        band = band_of(call)
        self.banded = band is not None
        self._band = None if band is None else test_of_band(band, spec.queries)._replace(lo=None, hi=None)
        self._has_offsets = band is not None and band.offsets is not None
        self._lengths_at = place_of_lengths(call)
        self.launches: dict[tuple[Any, ...], Launch] = {}  # by what else decides about them
        self.widths = widths(spec)
        self._form: dict[str, Any] = {
            "D": self.widths[0], "DV": self.widths[1], "WHOLE": self.widths[0] == dims[0],
            "WHOLE_V": self.widths[1] == dims[1], "UNIT": unit, "SOFTCAP": spec.softcap is not None,
            "DROPOUT": spec.dropout > 0, "PRECISION": PRECISION[spec.dtype], "DIRECT": spec.device == "cuda",
        }  # fmt: skip

    def tests(self, call: Call, block_q: int) -> Iterable[Test]:
        """As ``tests_of``."""
        band = self._band
        if band is None:
            return tests_of(call, block_q)
        if band.constants["PADDED"] or self._has_offsets:
            lo = lengths_of(call, self._lengths_at) if band.constants["PADDED"] else None
            hi = call.offset.contiguous() if isinstance(call.offset, Tensor) else None
            return (_make(Test, (band.rows, lo, hi, band.numbers, band.constants)),)
        return (band,)

    def constants(self, tiles: Tiles, test: Test, bias: Bias, **more: Any) -> dict[str, Any]:
        """What a kernel of attention is compiled for, and how."""
        options = dict(tiles)
        sizes = {"BM": options.pop("BM"), "BN": options.pop("BN")}
        fields: dict[str, Any] = {**self._form, **sizes, **test.constants, "BIASED": bias.form, **more}
        return {"F": Form(**fields), **options}


def _common_unit(numbers: Sequence[int], dtype: torch.dtype) -> int:
    """How many numbers of this dtype take 16 bytes, where that divides all of these and they need no 64 bits; or 1."""
    unit = _UNIT // dtype.itemsize
    return 1 if any(number % unit or number >= 1 << 31 for number in numbers) else unit


def _outer_strides(tensor: Tensor) -> tuple[int, ...]:
    """How far items, heads and tokens lie apart as the kernels read them; 0 where there is one."""
    read = rows_of_unit_stride(tensor)
    return tuple(stride if size > 1 else 0 for stride, size in zip(read.stride()[:3], read.shape, strict=False))


class _Forward(Recipe):
    def __init__(self, call: Call, rows: bool) -> None:
        super().__init__(call)
        spec = call.spec
        self.rows, self.tiles = rows, tiles_of(spec)
        # the gradients of a bias cancel to the last digits: they are made from an output that was not rounded
        learned = spec.grad and spec.bias is not None and spec.bias.needs_grad
        self.out_dtype = torch.float32 if learned else call.query.dtype
        self.new_out = maker((*self.lead, spec.value_dim), self.out_dtype, call.query.device)
        # a descriptor costs the host more than it saves a short call
        self.may_copy = spec.queries >= _LONG and has_copy_engine(call.query.device)

    def __call__(self, call: Call) -> Attended:
        query, key, value = call.query, call.key, call.value
        if not self.has_unit_strides:
            query, key, value = (rows_of_unit_stride(tensor) for tensor in (query, key, value))
        copied = self.may_copy and can_be_copied(query, key, value)
        given = self._described(query, key, value) if copied else (query, key, value)
        bias = NO_BIAS if call.bias is None else bias_of(call)
        sinks = None if call.sinks is None else call.sinks.detach().contiguous()
        of_sinks = None if sinks is None else sinks.dtype
        out, lse = self.new_out(), self.new_row()
        entropy, largest = (self.new_row(), self.new_row()) if self.rows else NO_TABLES
        for test in self.tests(call, self.tiles["BM"]):
            lists: TileLists | None = None
            rest: tuple[Any, ...] = ()  # all that decides about the launch of a band is known already
            if not self.banded:
                lists = lists_of(call, self.tiles, test.constants["PREDICATE"])
                rest = (test.numbers, *test.constants.values(), test.rows.start, owners_of(lists))
            kind = (copied, bias.strides, of_sinks, rest)
            launch = self.launches.get(kind)
            if launch is None:
                launch = self.launches[kind] = self._launch(call, copied, bias, test, owners_of(lists))
            tables = NO_TABLES if lists is None else lists[:2]
            launch((*given, bias.memory, test.lo, test.hi, sinks, call.seed, *tables, out, lse, entropy, largest))
        made: Attended = _make(Attended, (out, lse, entropy, largest) if self.rows else (out, lse, None, None))
        return made

    def _described(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, Any, Any]:
        keys, (wide, wide_v) = self.tiles["BN"], self.widths
        return described(query, self.tiles["BM"], wide), described(key, keys, wide), described(value, keys, wide_v)

    def _launch(self, call: Call, copied: bool, bias: Bias, test: Test, owners: tuple[int, int, int]) -> Launch:
        from regard._triton.forward import attend as kernel

        spec, tiles = call.spec, self.tiles
        constants = self.constants(tiles, test, bias, COPIED=copied, RISING=self.rises, ROWS=self.rows)
        numbers = (
            *self.strides, *bias.strides, *test.numbers, *owners[:2], spec.queries, spec.keys, test.rows.start,
            owners[2], *self.sizes, int(spec.sinks), self.threshold, *self.natural_scales, self.share,
        )  # fmt: skip
        return Launch(kernel, (-(-len(test.rows) // tiles["BM"]), spec.batch * spec.heads), numbers, constants)


_NO_LISTS = (0, 0, 0)
NO_TABLES = (None, None)


def owners_of(lists: TileLists | None) -> tuple[int, int, int]:
    """Whether each item has lists of its own, how many lists there are, and how many an item has."""
    return _NO_LISTS if lists is None else (int(lists.groups > 1), lists.groups * lists.blocks, lists.blocks)


class Bias(NamedTuple):
    """A bias as the kernels read it; see ``load_bias``."""

    form: int
    memory: Tensor | None
    strides: tuple[int, ...]


NO_BIAS = Bias(0, None, (0, 0, 0, 0))


def bias_of(call: Call) -> Bias:
    spec = call.spec
    if call.bias is None or spec.bias is None:
        return NO_BIAS
    rule, table = spec.bias.rule, call.bias.detach()
    if rule is None:
        whole = table.expand(spec.batch, spec.heads, spec.queries, spec.keys)
        *outer, last = whole.stride()
        unit = _common_unit(outer, table.dtype)
        if last == 1 and unit > 1:
            return Bias(ALIGNED, whole, (*(stride // unit for stride in outer), 1))
        return Bias(MATRIX, whole, whole.stride())
    offset = call.offset
    if rule.is_linear and not isinstance(offset, Tensor) and spec.queries + spec.keys + abs(offset) < _EXACT:
        return Bias(SLOPES, table.contiguous(), (0, 1, int(offset), 0))
    # a row of a tile begins one earlier than the row above; tiles reach beyond the ends of the call
    place = offset.view(-1, 1) if isinstance(offset, Tensor) else offset
    # row 0 begins at an address that _UNIT divides, as that of every other tensor
    before = -(-(spec.queries - 1 + _MARGIN) // _UNIT) * _UNIT
    steps = torch.arange(-before, spec.keys + _MARGIN, device=table.device).unsqueeze(0) - place
    line = rule.line(table, steps).to(torch.float32).contiguous()  # [B or 1, H, before + S + margin]
    strides = (line.stride(0) if len(line) > 1 else 0, line.stride(1), -1, 1)
    return Bias(LINE, line[..., before:], strides)


def _nothing(call: Call, rows: bool) -> Attended:
    """Without keys every row is empty; without rows there are none."""
    spec, new = call.spec, call.query.new_full
    lead = (spec.batch, spec.heads, spec.queries)
    missing = new(lead, torch.nan, dtype=torch.float32) if rows else None
    out = new((*lead, spec.value_dim), 0.0)
    return Attended(out, new(lead, -torch.inf, dtype=torch.float32), missing, missing)
