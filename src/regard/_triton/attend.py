"""Attention by the kernels of this package: out and lse, and row statistics in the same pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from regard._triton import decoding, inputs
from regard._triton.encode import (
    BAND,
    DENSE,
    INTERVALS,
    TileLists,
    band_of,
    dense_piece,
    intervals,
    pieces,
    tile_lists,
)
from regard._triton.inputs import Inputs, can_be_copied, described, rows_of_unit_stride
from regard._triton.launcher import Launch, kept_launch, on
from regard._triton.tile_sizes import tiles_of, widths

if TYPE_CHECKING:
    from regard._triton.tile_sizes import Tiles
    from regard.spec import Call, CallSpec

# forms of a bias, as in tiles.py
MATRIX, LINE, SLOPES = 1, 2, 3
# tiles are no larger than this
_MARGIN = 256
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


def tests_of(call: Call, block_q: int) -> Iterator[Test]:
    """One for all rows; of a mask that is neither a band nor intervals, one after the other as they fit the memory."""
    rows = range(call.spec.queries)
    band = band_of(call)
    if band is not None:
        numbers = (band.offset, band.left, band.right, band.given)
        padded = band.lengths is not None
        yield Test(rows, band.lengths, band.offsets, numbers, {"PREDICATE": BAND, "SLOTS": 0, "PADDED": padded})
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


class Draw(NamedTuple):
    """A call's dropout as the kernels take it."""

    seed: Tensor | None
    threshold: int  # draws of 24 bits below this are dropped
    share: float

    @classmethod
    def of(cls, call: Call) -> Draw:
        p = call.spec.dropout
        return cls(call.seed, _threshold(p), 0.0 if p == 1 else 1.0 / (1.0 - p)) if p else cls(None, 0, 1.0)


@lru_cache(64)
def _threshold(p: float) -> int:
    # what a comparison with a float32 draw makes of the probability
    return math.ceil(torch.tensor(p, dtype=torch.float32).item() * 2**24)


def attend(call: Call, rows: bool) -> Attended:
    """The call's result; ``rows`` asks for entropy and largest weight too. Reads nothing from the device."""
    from regard._triton.forward import attend as kernel

    spec = call.spec
    if spec.empty:
        return _nothing(call, rows)
    decodes = decoding.takes_wide(spec) or (not rows and decoding.is_decoding(spec))
    if decodes and (band := band_of(call)) is not None:
        return Attended(*decoding.decode(call, band), None, None)
    tiles, given, draw = tiles_of(spec), Inputs(call), Draw.of(call)
    bias = bias_of(call)
    value = rows_of_unit_stride(call.value)
    lead = (spec.batch, spec.heads, spec.queries)
    new = call.query.new_empty
    # the gradients of a bias cancel to the last digits: they are made from an output that was not rounded
    learned = spec.grad and spec.bias is not None and spec.bias.needs_grad
    out = new(*lead, spec.value_dim, dtype=torch.float32 if learned else spec.dtype)
    lse = new(lead, dtype=torch.float32)
    entropy, largest = (new(lead, dtype=torch.float32) for _ in range(2)) if rows else (lse, lse)
    wide, wide_v = widths(spec)
    query, key, source = given.query, given.key, value
    # a descriptor costs the host more than it saves a short call
    copied = spec.queries >= _LONG and given.copied and can_be_copied(value)
    if copied:
        query, key = described(query, tiles["BM"], wide), described(key, tiles["BN"], wide)
        source = described(value, tiles["BN"], wide_v)
    sinks = lse if call.sinks is None else call.sinks.detach().contiguous()
    with on(call.query.device):
        for test in tests_of(call, tiles["BM"]):
            lists = lists_of(call, tiles, test.constants["PREDICATE"])

            def make(test: Test = test, lists: TileLists | None = lists) -> Launch:
                constants = given.shape(
                    **tiles, **test.constants, VALUE=spec.value_dim, DV=wide_v, COPIED=copied, RISING=given.rises(),
                    SINK=call.sinks is not None, ROWS=rows, DROPOUT=draw.seed is not None, DIRECT=spec.device == "cuda",
                )  # fmt: skip
                constants["BIASED"] = bias.form
                numbers = (
                    *given.query.stride()[:3], *given.key.stride()[:3], *value.stride()[:3], *bias.strides,
                    *test.numbers, *owners_of(lists)[:2], spec.queries, spec.keys, test.rows.start, owners_of(lists)[2],
                    draw.threshold, *given.natural_scales, draw.share,
                )  # fmt: skip
                grid = -(-len(test.rows) // tiles["BM"]), spec.batch * spec.heads
                return Launch(kernel, grid, numbers, constants)

            kind = ("attend", rows, copied, test.numbers, test.rows, owners_of(lists))
            launch = kept_launch(call, kind, make)
            launch([
                query, key, source, lse if bias.memory is None else bias.memory, lse if test.lo is None else test.lo,
                lse if test.hi is None else test.hi, sinks, lse if draw.seed is None else draw.seed,
                *((lse, lse) if lists is None else lists[:2]), out, lse, entropy, largest,
            ])  # fmt: skip
    return Attended(out, lse, entropy, largest) if rows else Attended(out, lse, None, None)


def owners_of(lists: TileLists | None) -> tuple[int, int, int]:
    """Whether each item has lists of its own, how many lists there are, and how many an item has."""
    return (0, 0, 0) if lists is None else (int(lists.groups > 1), lists.groups * lists.blocks, lists.blocks)


class Bias(NamedTuple):
    """A bias as the kernels read it; see ``load_bias``."""

    form: int
    memory: Tensor | None
    strides: tuple[int, ...]


def bias_of(call: Call) -> Bias:
    spec = call.spec
    if call.bias is None or spec.bias is None:
        return Bias(0, None, (0, 0, 0, 0))
    rule, table = spec.bias.rule, call.bias.detach()
    if rule is None:
        whole = table.expand(spec.batch, spec.heads, spec.queries, spec.keys)
        return Bias(MATRIX, whole, whole.stride())
    offset = call.offset
    if rule.is_linear and not isinstance(offset, Tensor) and spec.queries + spec.keys + abs(offset) < _EXACT:
        return Bias(SLOPES, table.contiguous(), (0, 1, int(offset), 0))
    # a row of a tile begins one earlier than the row above; tiles reach beyond the ends of the call
    place = offset.view(-1, 1) if isinstance(offset, Tensor) else offset
    steps = torch.arange(1 - spec.queries - _MARGIN, spec.keys + _MARGIN, device=table.device).unsqueeze(0) - place
    line = rule.line(table, steps).to(torch.float32).contiguous()  # [B or 1, H, L + S - 1 + 2·margin]
    strides = (line.stride(0) if len(line) > 1 else 0, line.stride(1), -1, 1)
    return Bias(LINE, line[..., spec.queries - 1 + _MARGIN :], strides)


def _nothing(call: Call, rows: bool) -> Attended:
    """Without keys every row is empty; without rows there are none."""
    spec, new = call.spec, call.query.new_full
    lead = (spec.batch, spec.heads, spec.queries)
    missing = new(lead, torch.nan, dtype=torch.float32) if rows else None
    out = new((*lead, spec.value_dim), 0.0)
    return Attended(out, new(lead, -torch.inf, dtype=torch.float32), missing, missing)
