"""Drawing a mask with characters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from regard.masks._base import Mask

_MOST_CELLS = 64
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
            pictures.append("\n".join([title, *_drawing(mask, L, S, place, b, h)]))
    return "\n\n".join(pictures)


def _drawing(mask: Mask, L: int, S: int, place: int, b: int, h: int) -> list[str]:
    down, across = max(1, -(-L // _MOST_CELLS)), max(1, -(-S // _MOST_CELLS))
    row_names = [str(place + row) for row in range(0, L, down)]
    margin = max([3, *[len(name) + 1 for name in row_names]])
    lines = [_ruler(S, across, margin)] if S else []
    for row, name in zip(range(0, L, down), row_names, strict=True):
        # One band of rows at a time, so that a picture of a long mask needs no L × S memory.
        seen = mask.tile(range(row, min(row + down, L)), range(S), L, S, offset=place, device=_device(mask))
        band = seen[b if seen.shape[0] > 1 else 0, h if seen.shape[1] > 1 else 0]
        cells = [_cell(band[:, col : col + across]) for col in range(0, S, across)]
        lines.append(" ".join([f"{name:>{margin - 1}} ", *cells]))
    return lines


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


def _device(mask: Mask) -> torch.device:
    return mask.tensors[0].device if mask.tensors else torch.device("cpu")
