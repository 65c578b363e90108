"""The rows and columns of one tile, and the absolute positions they stand at."""

from __future__ import annotations

import torch
from torch import Tensor


class Grid:
    """One rectangle of a call. ``i`` and ``j`` are the positions of its queries and keys, shaped to broadcast."""

    def __init__(
        self,
        rows: range | slice,
        cols: range | slice,
        L: int,
        S: int,
        offset: int | Tensor,
        device: torch.device,
    ) -> None:
        self.row_start, self.row_stop = _bounds(rows, L)
        self.col_start, self.col_stop = _bounds(cols, S)
        self.height = self.row_stop - self.row_start
        self.width = self.col_stop - self.col_start
        self.L = L
        self.S = S
        self.device = device
        self.offset = offset.to(device).reshape(-1, 1, 1, 1) if isinstance(offset, Tensor) else offset
        self._i: Tensor | None = None
        self._j: Tensor | None = None

    @property
    def i(self) -> Tensor:
        """Query positions: [rows, 1], or [B, 1, rows, 1] when each item has its own offset."""
        if self._i is None:
            if isinstance(self.offset, Tensor):
                steps = torch.arange(self.row_start, self.row_stop, device=self.device)
                self._i = self.offset + steps.unsqueeze(1)
            else:
                start = self.row_start + self.offset
                self._i = torch.arange(start, start + self.height, device=self.device).unsqueeze(1)
        return self._i

    @property
    def j(self) -> Tensor:
        """Key positions: [columns]."""
        if self._j is None:
            self._j = torch.arange(self.col_start, self.col_stop, device=self.device)
        return self._j


def _bounds(part: range | slice, size: int) -> tuple[int, int]:
    start = 0 if part.start is None else part.start
    stop = size if part.stop is None else part.stop
    if part.step not in (None, 1):
        raise ValueError(f"a tile takes neighbouring rows and columns, got {part}")
    return start, max(start, min(stop, size))
