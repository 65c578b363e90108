"""Drawing a mask with characters."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.masks._blocks import most_blocks

if TYPE_CHECKING:
    from regard.masks._base import Mask

_MOST_CELLS = 64
# Up to here every pair is looked at; beyond, only masks that are intervals of keys are drawn.
_MOST_PAIRS = 2**24
_SEEN, _PARTLY, _FORBIDDEN = "■", "▒", "·"


def show(mask: Mask, L: int, S: int, offset: int | Tensor) -> str:
    """See :meth:`Mask.show`."""
    items = offset.numel() if isinstance(offset, Tensor) else 1
    batch = items if mask.batch == 1 else mask.batch
    mask.check(batch, mask.heads, L, S)
    pictures = []
    for b in range(batch):
        place = int(offset.reshape(-1)[b if items > 1 else 0]) if isinstance(offset, Tensor) else offset
        for h in range(mask.heads):
            which = [f"item {b}"] * (batch > 1) + [f"head {h}"] * (mask.heads > 1)
            title = ", ".join([f"{mask!r}: {L} queries, {S} keys, first query at {place}", *which])
            pictures.append("\n".join([title, *_drawing(mask, L, S, place, batch, b, h)]))
    return "\n\n".join(pictures)


def _drawing(mask: Mask, L: int, S: int, place: int, batch: int, b: int, h: int) -> list[str]:
    down, across = max(1, -(-L // _MOST_CELLS)), max(1, -(-S // _MOST_CELLS))
    row_names = [str(place + row) for row in range(0, L, down)]
    margin = max([3, *[len(name) + 1 for name in row_names]])
    lines = [_ruler(S, across, margin)] if S else []
    cells = _by_pairs(mask, L, S, place, b, h, down, across)
    if L * S > _MOST_PAIRS:
        cells = _by_blocks(mask, L, S, place, batch, b, down, across)
    return lines + [" ".join([f"{name:>{margin - 1}} ", *row]) for name, row in zip(row_names, cells, strict=True)]


def _by_pairs(mask: Mask, L: int, S: int, place: int, b: int, h: int, down: int, across: int) -> Iterator[list[str]]:
    """One band of rows at a time, so that a picture of a long mask needs no L × S memory."""
    device = mask.tensors[0].device if mask.tensors else torch.device("cpu")
    for row in range(0, L, down):
        seen = mask.tile(range(row, min(row + down, L)), range(S), L, S, offset=place, device=device)
        band = seen[b if seen.shape[0] > 1 else 0, h if seen.shape[1] > 1 else 0]
        yield [_cell(band[:, col : col + across]) for col in range(0, S, across)]


def _by_blocks(
    mask: Mask, L: int, S: int, place: int, batch: int, b: int, down: int, across: int
) -> Iterator[list[str]]:
    """From intervals of keys, in O(L)."""
    if most_blocks(mask, L, S, place, batch, down):
        raise ValueError(
            f"show looks at up to {_MOST_PAIRS:,} pairs one by one, and {mask!r} of {L:,} queries and {S:,} keys has "
            f"{L * S:,}: draw a part of it, such as show(4096, 4096, query_offset=…)"
        )
    table = mask.blocks(L, S, place, batch, down, across)
    starts = table.row_ptr[b if table.groups > 1 else 0]
    for first, last in itertools.pairwise(starts.tolist()):
        line = [_FORBIDDEN] * table.key_blocks
        for col, full in zip(table.cols[first:last], table.full[first:last], strict=True):
            line[col] = _SEEN if full else _PARTLY
        yield line


def _cell(part: Tensor) -> str:
    if bool(part.all()):
        return _SEEN
    return _PARTLY if bool(part.any()) else _FORBIDDEN


def _ruler(S: int, across: int, margin: int) -> str:
    """Key positions above the columns: all of them while they have one digit, else every fifth."""
    if S <= 10:
        return " " * (margin + 1) + " ".join(str(key) for key in range(S))
    line = " " * (margin + 1)
    for cell in range(0, -(-S // across), 5):
        line = line.ljust(margin + 1 + 2 * cell) + str(cell * across)
    return line
