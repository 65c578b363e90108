"""How many pairs a mask permits."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from regard.masks._blocks import block_table, cells
from regard.masks._intervals import (
    Spans,
    Strip,
    Whole,
    complement,
    group_count,
    intersection,
    offset_array,
    same_for_all,
)

if TYPE_CHECKING:
    from regard.masks._base import Mask

_STRIP_ROWS = 2**16
_BOUND_BLOCK = 128
# Up to this many pairs, evaluating the rule on all of them is quick enough to be preferred to a bound.
_FEW_PAIRS = 2**18
_TILE_PAIRS = 2**20
# Up to this many blocks, those that are not empty are looked up; beyond, each rule is counted by itself.
_FEW_CELLS = 2**22


def kept_pairs(mask: Mask, L: int, S: int, offset: int | Tensor, B: int, H: int) -> tuple[int, bool]:
    """See :meth:`Mask.kept_pairs`."""
    offsets = offset_array(offset)
    if offsets is None or torch.compiler.is_compiling():
        return B * H * L * S, False
    groups = group_count(mask, offsets, B)
    repeats = (B if groups == 1 else 1) * (H if mask.heads == 1 else 1)
    total = _by_rows(mask, L, S, offsets, groups)
    if total is not None:
        return total * repeats, True
    countable = mask.fold(lambda part: part._countable, operator.and_, _never, _never)
    if mask.readable() and (groups * mask.heads * L * S <= _FEW_PAIRS or countable):
        return _by_tiles(mask, L, S, offset, groups) * repeats, True
    if groups * cells(L, S, _BOUND_BLOCK) <= _FEW_CELLS:
        return _of_blocks(mask, L, S, offset, B) * (B // groups if groups else 0) * H, False
    return _bound(mask, L, S, offset, B, H), False


def _by_rows(mask: Mask, L: int, S: int, offsets: Whole, groups: int) -> int | None:
    total = 0
    for head in range(mask.heads):
        for group in range(groups):
            for start in range(0, L, _STRIP_ROWS):
                rows = range(start, min(start + _STRIP_ROWS, L))
                strip = Strip(L, S, offsets, rows, range(group, group + 1), head)
                count = _count(mask, same_for_all(0, S), strip)
                if count is None:
                    return None
                total += count
    return total


def _count(mask: Mask, within: Spans, strip: Strip) -> int | None:
    """Pairs that the mask permits inside ``within``; None when no closed form is known."""
    spans = mask._spans(strip)
    if spans is not None:
        joint = intersection(spans, within, strip)
        return None if joint is None else _size(joint, strip)
    if mask.parts:
        answer: int | None = mask._join(
            list(mask.parts),
            lambda one, other: _count_joined(one, other, within, strip, both=True),
            lambda one, other: _count_joined(one, other, within, strip, both=False),
            lambda inner: _count_without(inner, within, strip),
        )
        return answer
    total = 0
    for lo, hi in within:
        lo, hi = np.broadcast_arrays(lo, np.maximum(lo, hi))
        upper, lower = mask._count_below(strip, hi), mask._count_below(strip, lo)
        if upper is None or lower is None:
            return None
        total += int(np.broadcast_to(upper - lower, (1, strip.stop - strip.start)).sum())
    return total


def _count_without(mask: Mask, within: Spans, strip: Strip) -> int | None:
    inside = _count(mask, within, strip)
    return None if inside is None else _size(within, strip) - inside


def _count_joined(one: Mask, other: Mask, within: Spans, strip: Strip, both: bool) -> int | None:
    """Of ``one & other`` where ``both``, else of ``one | other``. One side must be intervals: nothing is permitted
    outside of them, or everything inside of them, and the other side is counted in what is left."""
    for first, second in ((one, other), (other, one)):
        spans = first._spans(strip)
        left = spans if spans is None or both else complement(spans, strip)
        region = None if left is None else intersection(left, within, strip)
        if region is not None:
            rest, whole = _count(second, region, strip), 0 if both else _count(first, within, strip)
            return None if rest is None or whole is None else rest + whole
    return None


def _size(spans: Spans, strip: Strip) -> int:
    shape = (1, strip.stop - strip.start)
    return sum(int(np.broadcast_to(np.maximum(hi - lo, 0), shape).sum()) for lo, hi in spans)


def _by_tiles(mask: Mask, L: int, S: int, offset: int | Tensor, groups: int) -> int:
    step = max(1, _TILE_PAIRS // max(1, S * mask.batch * mask.heads))
    device = mask.tensors[0].device if mask.tensors else "cpu"
    total = 0
    for start in range(0, L, step):
        rows = range(start, min(start + step, L))
        tile = mask.tile(rows, range(S), L, S, offset=offset, device=device)
        total += int(tile.sum()) * (groups if tile.shape[0] == 1 else 1)
    return total


def _of_blocks(mask: Mask, L: int, S: int, offset: int | Tensor, B: int) -> int:
    """The pairs of all non-empty blocks, over the groups."""
    table = block_table(mask, L, S, offset, B, _BOUND_BLOCK, _BOUND_BLOCK)
    heights = np.minimum(_BOUND_BLOCK, L - np.arange(table.query_blocks) * _BOUND_BLOCK)
    widths = np.minimum(_BOUND_BLOCK, S - table.cols.astype(np.int64) * _BOUND_BLOCK)
    return int((heights[table.owners % table.query_blocks] * widths).sum())


def _bound(mask: Mask, L: int, S: int, offset: int | Tensor, B: int, H: int) -> int:
    """An upper bound, from what is known of each rule: & keeps no more than the fewer, | no more than both."""
    every = B * H * L * S

    def ask(part: Mask) -> int | None:
        offsets = offset_array(offset)
        assert offsets is not None
        groups = group_count(part, offsets, B)
        total = _by_rows(part, L, S, offsets, groups)
        if total is not None:
            return total * (B if groups == 1 else 1) * (H if part.heads == 1 else 1)
        return None if part.parts else B * H * L * part._most_keys(S)

    return part_sum if (part_sum := mask.fold(ask, min, operator.add, lambda _: every)) < every else every


def _never(*_: bool) -> bool:
    return False
