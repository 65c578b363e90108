"""Statistics under way: rows are written to their place, sums over rows are added to."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from regard import statistics
from regard._observing._top import top_of
from regard.backends._base import accumulation

if TYPE_CHECKING:
    from torch import Tensor

    from regard.backends._schedule import Run
    from regard.spec import Call
    from regard.statistics import Want


class Tile(NamedTuple):
    """What is in the buffers: weights p and z = log p [items, heads, rows, keys], and where they stand."""

    p: Tensor
    z: Tensor
    padded: Tensor  # p again, each row followed by as many zeros as there are rows, and zeros before the first
    items: slice
    heads: slice
    rows: range
    runs: tuple[Run, ...]
    hidden: list[tuple[slice, Tensor]]  # columns that hold forbidden pairs, and which pairs those are


class Totals:
    """Takes tiles in any order, each row in exactly one of them, and gives the statistics of the whole call."""

    def __init__(self, call: Call, want: Want) -> None:
        spec = call.spec
        self.call, self.want = call, want
        self.parts: dict[str, Tensor] = {}
        rows = slice(*(want.queries or slice(None)).indices(spec.queries)[:2])
        self.queries = range(rows.start, max(rows.start, rows.stop))
        if want.rows:
            self._new("entropy", spec.queries, fill=torch.nan)
            self._new("max_weight", spec.queries, fill=torch.nan)
        if want.key_mass:
            self._new("key_mass", spec.keys)
        if want.map is not None:
            device = call.query.device
            self.grid = min(want.map[0], len(self.queries)), min(want.map[1], spec.keys)
            self.row_cells = statistics.cells(len(self.queries), self.grid[0], device)
            self.key_cells = statistics.cells(spec.keys, self.grid[1], device)
            self._new("map", *self.grid)
        if want.top_k:
            self._new("top_weights", spec.queries, want.top_k)
            self.parts["top_keys"] = self._new("top_keys", spec.queries, want.top_k, fill=-1.0).long()
        if want.distance:
            self._new("distance", statistics.BUCKETS)
        if want.first:
            self._new("first_mass", spec.queries)
        if want.weights is not None:
            sizes = (spec.queries, spec.keys)
            self.rectangle = [range(size)[span] for span, size in zip(want.weights, sizes, strict=True)]
            self._new("weights", *map(len, self.rectangle))

    def _new(self, name: str, *shape: int, fill: float = 0.0) -> Tensor:
        spec, device = self.call.spec, self.call.query.device
        made = torch.full((spec.batch, spec.heads, *shape), fill, dtype=accumulation(spec.dtype), device=device)
        self.parts[name] = made
        return made

    def fold(self, tile: Tile) -> None:
        want = self.want
        if want.rows:
            self._rows(tile)
        if want.key_mass or want.map is not None:
            self._columns(tile)
        if want.distance:
            self._distance(tile)
        if want.first or want.weights is not None:
            self._copies(tile)
        if want.top_k:
            self._top(tile)

    def _rows(self, tile: Tile) -> None:
        at = (tile.items, tile.heads, slice(tile.rows.start, tile.rows.stop))
        highest = tile.z.amax(-1)
        # a row of nothing but NEVER is empty: its statistics are missing, which NaN says
        empty = highest <= statistics.NEVER
        entropy = torch.linalg.vecdot(tile.p, tile.z).neg_().clamp_min_(0.0)
        self.parts["entropy"][at] = entropy.masked_fill_(empty, torch.nan)
        self.parts["max_weight"][at] = highest.exp_().masked_fill_(empty, torch.nan)

    def _columns(self, tile: Tile) -> None:
        """Key mass and map from sums over the rows of each map cell: one product with a matrix of zeros and ones."""
        inside = range(max(tile.rows.start, self.queries.start), min(tile.rows.stop, self.queries.stop))
        if not len(inside):
            return
        p = tile.p[:, :, inside.start - tile.rows.start : inside.stop - tile.rows.start]
        cell = torch.zeros(len(inside), dtype=torch.int64, device=p.device)
        first = 0
        if self.want.map is not None:
            first, last = (self._row_cell(i - self.queries.start) for i in (inside.start, inside.stop - 1))
            at = inside.start - self.queries.start
            cell = self.row_cells[at : at + len(inside)] - first
        count = (last - first if self.want.map is not None else 0) + 1
        belongs = (torch.arange(count, device=p.device)[:, None] == cell).to(p.dtype)
        sums = belongs @ p  # [items, heads, cells, keys]
        start = 0
        for run in tile.runs:
            part = sums[..., start : start + run.stop - run.start]
            if self.want.key_mass:
                self.parts["key_mass"][tile.items, tile.heads, run.start : run.stop] += part.sum(2)
            if self.want.map is not None:
                into = self.parts["map"][tile.items, tile.heads, first : first + count]
                into.index_add_(3, self.key_cells[run.start : run.stop], part)
            start += run.stop - run.start

    def _row_cell(self, row: int) -> int:
        """The map row of a query, without asking the device: the last c with ⌊c·n/rows⌋ <= row."""
        rows, size = self.grid[0], len(self.queries)
        return ((row + 1) * rows - 1) // size

    def _distance(self, tile: Tile) -> None:
        """Sums along diagonals: in ``padded``, moving on by one row and one column is one fixed stride."""
        count, width = len(tile.rows), tile.p.shape[-1]
        pitch = width + count
        lead = tile.padded.stride()[:2]
        shape = (*tile.padded.shape[:2], count, width + count - 1)
        skewed = tile.padded.as_strided(shape, (*lead, pitch + 1, 1), tile.padded.storage_offset() + 1)
        start = 0
        for run in tile.runs:
            size = run.stop - run.start
            # one run at a time: neighbours in the tile need not be neighbours among the keys
            if len(tile.runs) == 1:
                sums = skewed.sum(2)
            else:
                alone = torch.zeros_like(tile.padded)
                rows = alone[..., count:].view(*tile.p.shape[:3], pitch)
                rows[..., start : start + size] = tile.p[..., start : start + size]
                sums = alone.as_strided(shape, (*alone.stride()[:2], pitch + 1, 1), 1).sum(2)
            # column e of the skewed view is key column e - (count - 1) + r of row r
            key = torch.arange(shape[-1], device=sums.device) - (count - 1) + run.start - start
            self._add_distances(tile, key - tile.rows.start, sums)
            start += size

    def _add_distances(self, tile: Tile, ahead: Tensor, sums: Tensor) -> None:
        offset = self.call.offset
        behind = (offset[tile.items].view(-1, 1) if isinstance(offset, torch.Tensor) else offset) - ahead
        bucket = statistics.buckets(behind.abs()).view(-1, 1, ahead.shape[0]).expand(sums.shape)
        self.parts["distance"][tile.items, tile.heads] += sums.new_zeros(
            *sums.shape[:2], statistics.BUCKETS
        ).scatter_add_(2, bucket, sums)

    def _copies(self, tile: Tile) -> None:
        at, start = (tile.items, tile.heads), 0
        for run in tile.runs:
            part = tile.p[..., start : start + run.stop - run.start]
            if run.start < self.want.first:
                mass = part[..., : self.want.first - run.start].sum(-1)
                self.parts["first_mass"][(*at, slice(tile.rows.start, tile.rows.stop))] += mass
            if self.want.weights is not None:
                rows, keys = self.rectangle
                i = range(max(rows.start, tile.rows.start), min(rows.stop, tile.rows.stop))
                j = range(max(keys.start, run.start), min(keys.stop, run.stop))
                if len(i) and len(j):
                    into = (
                        slice(i.start - rows.start, i.stop - rows.start),
                        slice(j.start - keys.start, j.stop - keys.start),
                    )
                    cut = (
                        slice(i.start - tile.rows.start, i.stop - tile.rows.start),
                        slice(j.start - run.start, j.stop - run.start),
                    )
                    self.parts["weights"][(*at, *into)] = part[(..., *cut)]
            start += run.stop - run.start

    def _top(self, tile: Tile) -> None:
        """Last of all: it marks forbidden pairs in the buffer, so that they rank below permitted ones of weight 0."""
        for columns, pairs in tile.hidden:
            tile.p[..., columns].masked_fill_(pairs, -1.0)
        if self.call.bias is not None:
            tile.p.masked_fill_(tile.z <= statistics.NEVER, -1.0)
        weights, columns_found = top_of(tile.p, self.want.top_k)
        at = (tile.items, tile.heads, slice(tile.rows.start, tile.rows.stop))
        keys = torch.cat([torch.arange(run.start, run.stop, device=tile.p.device) for run in tile.runs])
        found = keys[columns_found]
        kept = weights.shape[-1]
        self.parts["top_keys"][at][..., :kept] = found.masked_fill_(weights < 0, -1)
        self.parts["top_weights"][at][..., :kept] = weights.clamp_min_(0.0)

    def result(self) -> dict[str, Tensor]:
        if "map" in self.parts:
            rows = torch.bincount(self.row_cells, minlength=self.grid[0])[: self.grid[0]]
            keys = torch.bincount(self.key_cells, minlength=self.grid[1])[: self.grid[1]]
            self.parts["map"] /= rows[:, None] * keys
        return self.parts
