"""Statistics under way: rows are written to their place, sums over rows are added to."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from regard import statistics
from regard.backends._base import accumulation
from regard.backends._steps import Run, side_by_side, tokens_of
from regard.masks._areas import joined
from regard.spec import Call
from regard.statistics import Want


class Tile(NamedTuple):
    """What is in the buffers: weights p and z = log p [items, heads, rows, keys], and where they stand."""

    p: Tensor
    z: Tensor
    padded: Tensor  # p again, flat: each row followed by as many zeros as there are rows, and zeros before the first
    items: slice
    heads: slice
    rows: range
    runs: tuple[Run, ...]
    hidden: list[tuple[slice, Tensor]]  # columns that hold forbidden pairs, and which pairs those are

    @property
    def at(self) -> tuple[slice, slice, slice]:
        """Its items, heads and rows among those of the call."""
        return self.items, self.heads, slice(self.rows.start, self.rows.stop)

    def of_keys(self, tensor: Tensor, group: int = 1) -> Tensor:
        """The part of [batch, head, key, …] that its keys have; ``group``: heads for each of the tensor's."""
        heads = slice(self.heads.start // group, self.heads.stop // group)
        return tokens_of(tensor[self.items, heads], self.runs)


class Totals:
    """Takes tiles in any order, each row in exactly one of them, and gives the statistics of the whole call."""

    def __init__(self, call: Call, want: Want, lengths: Tensor | None = None) -> None:
        spec = call.spec
        self.call, self.want, self.lengths = call, want, lengths
        self.parts: dict[str, Tensor] = {}
        rows = slice(*(want.queries or slice(None)).indices(spec.queries)[:2])
        self.queries = range(rows.start, max(rows.start, rows.stop))
        if want.rows:
            self._new("entropy", spec.queries, fill=torch.nan)
            self._new("max_weight", spec.queries, fill=torch.nan)
        if want.key_mass:
            self._new("key_mass", spec.keys)
        if want.value_mass:
            assert lengths is not None
            self.parts["value_length"] = lengths.clone()
            self._new("value_mass", spec.keys)
            self._new("value_sum", spec.queries)
        self.grid: statistics.Grid | None = None
        if want.map is not None:
            self.grid = statistics.grid_of(want.map, len(self.queries), spec.keys, call.query.device)
            for name in ("map", "value_map")[: 1 + want.value_mass]:
                self._new(name, *self.grid.shape)
        if want.top_k:
            names = ("top_weights", "top_keys"), ("value_top_lengths", "value_top_keys")
            for weights, keys in names[: 1 + want.value_mass]:
                self._new(weights, spec.queries, want.top_k)
                self.parts[keys] = self._new(keys, spec.queries, want.top_k, fill=-1.0).long()
        if want.distance:
            # summed along the diagonals j - i first: their distances are looked at once, at the end
            self._new("distance", max(0, spec.queries + spec.keys - 1))
        if want.first:
            self._new("first_mass", spec.queries)
        if want.scores is not False:
            tokens = statistics.checked_tokens(want.scores, spec.batch, spec.keys)
            self.tokens = None if tokens is None else tokens.to(call.query.device)
            count = 2 if self.tokens is None else len(statistics.RELATIONS)
            self._new("relations", spec.queries, count, fill=torch.nan)
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
        if want.scores is not False:
            self._relations(tile)
        if want.value_mass:
            self._values(tile)
        if want.rows:
            self._rows(tile)
        if want.key_mass or want.map is not None:
            self._columns(tile, tile.p, "key_mass", "map")
        if want.distance:
            self._distance(tile)
        if want.first or want.weights is not None:
            self._copies(tile)
        if want.top_k:
            self._top(tile, tile.p, "top_weights", "top_keys")

    def _relations(self, tile: Tile) -> None:
        offset = self.call.offset
        i = torch.arange(tile.rows.start, tile.rows.stop, device=tile.p.device)[:, None]
        i = i + (offset.to(i.device)[tile.items].view(-1, 1, 1, 1) if isinstance(offset, torch.Tensor) else offset)
        tokens = self.tokens if self.tokens is None or len(self.tokens) == 1 else self.tokens[tile.items]
        found = statistics.relation_masses(tile.p, tile.z > statistics.NEVER, i, _keys(tile), tokens)
        self.parts["relations"][tile.at] = found

    def _values(self, tile: Tile) -> None:
        """The same sums of weights times lengths. What is hidden is 0 whatever its value is: 0 · inf is NaN."""
        assert self.lengths is not None
        carried = tile.p * tile.of_keys(self.lengths).unsqueeze(2)
        for columns, pairs in tile.hidden:
            carried[..., columns].masked_fill_(pairs, 0.0)
        if self.call.bias is not None:
            carried.masked_fill_(tile.z <= statistics.NEVER, 0.0)
        self.parts["value_sum"][tile.at] = carried.sum(-1)
        self._columns(tile, carried, "value_mass", "value_map")
        if self.want.top_k:
            self._top(tile, carried, "value_top_lengths", "value_top_keys")

    def _rows(self, tile: Tile) -> None:
        highest = tile.z.amax(-1)
        # a row of nothing but NEVER is empty: its statistics are missing, which NaN says
        empty = highest <= statistics.NEVER
        # z is used up, unless the largest weights still have to ask it what a bias forbids
        product = torch.mul(tile.p, tile.z, out=None if self.call.bias is not None else tile.z)
        entropy = (0.0 - product.sum(-1)).clamp_min_(0.0)  # 0 - x: the negative of 0 is -0
        self.parts["entropy"][tile.at] = entropy.masked_fill_(empty, torch.nan)
        self.parts["max_weight"][tile.at] = highest.exp_().masked_fill_(empty, torch.nan)

    def _columns(self, tile: Tile, p: Tensor, mass: str, cells: str) -> None:
        """Key mass and map from sums over the rows of each map cell."""
        inside = range(max(tile.rows.start, self.queries.start), min(tile.rows.stop, self.queries.stop))
        if not len(inside):
            return
        p = p[:, :, inside.start - tile.rows.start : inside.stop - tile.rows.start]
        if self.grid is None:
            sums, first = p.sum(2, keepdim=True), 0
        else:
            counted = range(inside.start - self.queries.start, inside.stop - self.queries.start)
            sums, first = self.grid.row_sums(p, counted)
        for keys, columns in side_by_side(tile.runs):
            part = sums[..., columns]
            if mass in self.parts:
                self.parts[mass][tile.items, tile.heads, keys] += part.sum(2)
            if self.grid is not None:
                self.grid.add(self.parts[cells][tile.items, tile.heads], part, first, keys)

    def _distance(self, tile: Tile) -> None:
        """Sums along diagonals: in ``padded``, moving on by one row and one column is one fixed stride."""
        count, start = len(tile.rows), 0
        for first, last in joined((run.start, run.stop) for run in tile.runs):
            size, padded = last - first, tile.padded
            if size < tile.p.shape[-1]:
                padded = tile.p.new_zeros(count + tile.p[..., 0].numel() * (size + count))
                alone = padded[count:].view(*tile.p.shape[:3], size + count)
                alone[..., :size] = tile.p[..., start : start + size]
            pitch = size + count
            shape = (*tile.p.shape[:2], count, pitch - 1)
            stride = (tile.p.shape[1] * count * pitch, count * pitch, pitch + 1, 1)
            sums = padded.as_strided(shape, stride, padded.storage_offset() + 1).sum(2)
            # column e of the skewed view is, in row r, the span's column e - (count - 1) + r
            diagonal = first - (count - 1) - tile.rows.start + self.call.spec.queries - 1
            self.parts["distance"][tile.items, tile.heads, diagonal : diagonal + pitch - 1] += sums
            start += size

    def _by_distance(self, diagonals: Tensor) -> Tensor:
        queries, offset = self.call.spec.queries, self.call.offset
        if isinstance(offset, torch.Tensor):
            ahead = torch.arange(diagonals.shape[-1], device=diagonals.device) - (queries - 1)
            return statistics.bucket_sums((offset.view(-1, 1, 1) - ahead).abs(), diagonals)
        buckets = _buckets(queries, diagonals.shape[-1], offset, diagonals.device)
        return statistics.sums_of_buckets(buckets, diagonals)

    def _copies(self, tile: Tile) -> None:
        for run, (_, columns) in zip(tile.runs, side_by_side(tile.runs), strict=True):
            part = tile.p[..., columns]
            if run.start < self.want.first:
                self.parts["first_mass"][tile.at] += part[..., : self.want.first - run.start].sum(-1)
            if self.want.weights is not None:
                rows, keys = self.rectangle
                i = range(max(rows.start, tile.rows.start), min(rows.stop, tile.rows.stop))
                j = range(max(keys.start, run.start), min(keys.stop, run.stop))
                if len(i) and len(j):
                    into = self.parts["weights"][tile.items, tile.heads, _from(i, rows), _from(j, keys)]
                    into.copy_(part[:, :, _from(i, tile.rows), _from(j, range(run.start, run.stop))])

    def _top(self, tile: Tile, numbers: Tensor, best: str, where: str) -> None:
        """Last of all: it marks forbidden pairs in the buffer, so that they rank below permitted ones of weight 0."""
        for columns, pairs in tile.hidden:
            numbers[..., columns].masked_fill_(pairs, -1.0)
        if self.call.bias is not None:
            numbers.masked_fill_(tile.z <= statistics.NEVER, -1.0)
        weights, columns_found = statistics.top_of(numbers, self.want.top_k)
        found = _keys(tile)[columns_found]
        kept = weights.shape[-1]
        self.parts[where][tile.at][..., :kept] = found.masked_fill_(weights < 0, -1)
        self.parts[best][tile.at][..., :kept] = weights.clamp_min_(0.0)

    def result(self) -> dict[str, Tensor]:
        if self.grid is not None:
            for name in {"map", "value_map"} & set(self.parts):
                self.parts[name] /= self.grid.pairs
        if "distance" in self.parts:
            self.parts["distance"] = self._by_distance(self.parts["distance"])
        return self.parts


@functools.lru_cache(16)
def _buckets(queries: int, diagonals: int, offset: int, device: torch.device) -> Tensor:
    """Of each diagonal, the bucket of its distance."""
    with torch.inference_mode(False), torch.no_grad():
        found: Tensor = statistics.bucket_of((offset + queries - 1 - torch.arange(diagonals, device=device)).abs())
        return found


def _from(part: range, whole: range) -> slice:
    """A part of a range, counted from where that starts."""
    return slice(part.start - whole.start, part.stop - whole.start)


def _keys(tile: Tile) -> Tensor:
    """The key of each column."""
    return torch.cat([torch.arange(run.start, run.stop, device=tile.p.device) for run in tile.runs])
