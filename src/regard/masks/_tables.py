"""Block-sparse masks: a table of blocks given by the caller, or drawn from a hash."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard._hash import mix, mix_number
from regard.masks._arguments import plain, shape_of
from regard.masks._base import Mask, Structure
from regard.masks._blocks import cells
from regard.masks._flex import Frame, Predicate, in_table
from regard.masks._grid import Grid
from regard.masks._intervals import EMPTY, FULL, PARTIAL, States, Strip, Whole

Cells = NDArray[np.bool_]
_CPU = torch.device("cpu")
# Larger tables are not gone through to count pairs.
_MOST_CELLS = 2**26


class _Table(Mask):
    """Blocks of ``size`` × ``size`` positions, each seen or not."""

    size: int

    def _cells(self, strip: Strip, first: int, last: int) -> Cells | None:
        """Table rows first … last, over all key blocks of the call, for one item and head; None if unreadable."""
        raise NotImplementedError

    def _below(self, strip: Strip, first: int, last: int, key: Whole, row: Whole) -> Whole | None:
        """How many keys below ``key`` are seen from table row ``first + row``."""
        cells = self._cells(strip, first, last)
        if cells is None:
            return None
        before = np.zeros((cells.shape[0], cells.shape[1] + 1), dtype=np.int64)
        np.cumsum(cells, axis=1, out=before[:, 1:])
        cells = np.pad(cells, ((0, 0), (0, 1)))
        block = key // self.size
        counted: Whole = before[row, block] * self.size + cells[row, block] * (key - block * self.size)
        return counted

    def _count_below(self, strip: Strip, key: Whole) -> Whole | None:
        if cells(strip.L, strip.S, self.size) > _MOST_CELLS:
            return None
        if strip.start == strip.stop:
            return np.zeros((1, 0), dtype=np.int64)
        rows = strip.i // self.size
        first, last = int(rows[0, 0]), int(rows[0, -1])
        return self._below(strip, first, last, key, rows - first)

    def _block_states(self, strip: Strip, block_q: int, block_k: int) -> States | None:
        """Count the seen pairs of each block: rows of the strip that share a table row are counted once."""
        place = int(strip.offsets[0, 0])
        start, stop = strip.start + place, strip.stop + place
        first, last = start // self.size, (stop - 1) // self.size
        # Rows are cut where a query block or a table row begins; within a piece all rows see the same keys.
        cuts = np.union1d(np.arange(start, stop, block_q), np.clip(np.arange(first, last + 1) * self.size, start, stop))
        edges = np.minimum(np.arange(0, strip.S + block_k, block_k), strip.S)
        below = self._below(strip, first, last, edges[None, :], (cuts // self.size - first)[:, None])
        if below is None:
            return None
        pairs = np.diff(below, axis=1) * np.diff(cuts, append=stop)[:, None]
        pieces = np.searchsorted(cuts, np.arange(start, stop, block_q))
        seen = np.add.reduceat(pairs, pieces, axis=0)
        height = np.diff(np.append(np.arange(start, stop, block_q), stop))
        area = height[:, None] * np.diff(edges)
        return np.where(seen == area, FULL, np.where(seen > 0, PARTIAL, EMPTY)).astype(np.int8)


class Blocks(_Table):
    kind = "blocks"
    _countable = True

    def __init__(self, table: Tensor, size: int) -> None:
        shape = shape_of(table)
        batch, heads = shape[:2] if len(shape) == 4 else (1, 1)
        super().__init__((self.kind, size, shape), (table,), batch, heads)
        self.size = self._grain = size

    @classmethod
    def _rebuild(cls, structure: Structure, tensors: Iterator[Tensor]) -> Mask:
        return cls(next(tensors), structure[1])

    def _four(self, device: torch.device) -> Tensor:
        table = self._on(device)
        return table if table.dim() == 4 else table[None, None]

    def _see(self, grid: Grid) -> Tensor:
        table = self._four(grid.device)
        batch, heads, height, width = table.shape
        if height == 0 or width == 0:
            return torch.zeros(batch, heads, 1, 1, dtype=torch.bool, device=grid.device)
        row, col = grid.i // self.size, grid.j // self.size
        item = torch.arange(batch, device=grid.device).reshape(-1, 1, 1, 1)
        head = torch.arange(heads, device=grid.device).reshape(-1, 1, 1)
        seen = table[item, head, row.clamp(0, height - 1), col.clamp(0, width - 1)]
        return seen & (row >= 0) & (row < height) & (col < width)

    def _cells(self, strip: Strip, first: int, last: int) -> Cells | None:
        if not plain(self.tensors[0]):
            return None
        table = strip.pick(self._four(_CPU).numpy())[0]
        table = table[strip.head if len(table) > 1 else 0]
        cells = np.zeros((last - first + 1, -(-strip.S // self.size)), dtype=np.bool_)
        rows = slice(max(first, 0), min(last + 1, table.shape[0]))
        if rows.start < rows.stop:
            part = table[rows, : cells.shape[1]]
            cells[rows.start - first : rows.stop - first, : part.shape[1]] = part
        return cells

    def _block_states(self, strip: Strip, block_q: int, block_k: int) -> States | None:
        """Over all heads: full where every head's block is, empty where every head's is."""
        heads = []
        for head in range(self.heads):
            one = Strip(strip.L, strip.S, strip.offsets, range(strip.start, strip.stop), strip.groups, head)
            states = super()._block_states(one, block_q, block_k)
            if states is None:
                return None
            heads.append(states)
        if not heads:
            return None
        low, high = np.min(heads, axis=0), np.max(heads, axis=0)
        return np.where(low == high, low, PARTIAL).astype(np.int8)

    def _per_head(self, B: int, H: int) -> Mask:
        table = self._four(self.tensors[0].device)
        return Blocks(table.expand(B, H, *table.shape[2:]).reshape(B * H, 1, *table.shape[2:]), self.size)

    def _predicate(self, frame: Frame) -> Predicate:
        table = self._four(frame.device)
        height, width = table.shape[2:]
        # One more row and column, seen by nobody, for all positions outside the table.
        table = torch.nn.functional.pad(table, (0, 1, 0, 1))
        row = frame.positions // self.size
        row = torch.where((row >= 0) & (row < height), row, height)
        return in_table(frame, self.kind, table, row, width, self.size)

    def _text(self) -> str:
        return f"blocks(<bool {list(self.tensors[0].shape)}>, size={self.size})"


class RandomBlocks(_Table):
    """The ``count`` key blocks of each query block with the smallest hash; ties go to the lower column."""

    kind = "random_blocks"

    def __init__(self, count: int, size: int, seed: int) -> None:
        super().__init__((self.kind, count, size, seed))
        self.count = count
        self.size = self._grain = size
        self.seed = seed

    def _chosen(self, rows: Tensor, S: int) -> Tensor:
        """For table rows [..., R] the seen key blocks, bool [..., R, key blocks]."""
        width = -(-S // self.size)
        if self.count >= width:
            return torch.ones(*rows.shape, width, dtype=torch.bool, device=rows.device)
        cols = torch.arange(width, device=rows.device)
        row_key = mix(rows + mix_number(self.seed + mix_number(self.seed >> 32)))
        # The column below the hash makes every rank different, and is what ties are broken by.
        rank = (mix(row_key.unsqueeze(-1) + cols) << 31) + cols
        if self.count == 0:
            return torch.zeros_like(rank, dtype=torch.bool)
        last = rank.kthvalue(self.count, dim=-1, keepdim=True).values
        return rank <= last

    def _see(self, grid: Grid) -> Tensor:
        start = grid.row_start + grid.offset
        first = start // self.size
        count = (grid.height - 1) // self.size + 2
        steps = torch.arange(count, device=grid.device)
        if isinstance(first, Tensor):
            chosen = self._chosen(first + steps, grid.S)
            item = torch.arange(chosen.shape[0], device=grid.device).reshape(-1, 1, 1, 1)
            return chosen[item, 0, 0, grid.i // self.size - first, grid.j // self.size]
        return self._chosen(first + steps, grid.S)[grid.i // self.size - first, grid.j // self.size]

    def _cells(self, strip: Strip, first: int, last: int) -> Cells | None:
        return self.remember(
            ("cells", first, last, strip.S),
            0,
            lambda: self._chosen(torch.arange(first, last + 1, device="cpu"), strip.S).numpy(),
        )

    def _predicate(self, frame: Frame) -> Predicate:
        row = frame.positions // self.size
        first = row[:, :1]
        steps = torch.arange((frame.queries - 1) // self.size + 2, device=frame.device)
        table = self._chosen(first + steps, frame.keys).unsqueeze(1)
        return in_table(frame, self.kind, table, row - first, table.shape[3], self.size)

    def _most_keys(self, S: int) -> int:
        return min(S, self.count * self.size)

    def _text(self) -> str:
        return f"random_blocks(count={self.count}, size={self.size}, seed={self.seed})"
