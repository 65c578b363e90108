"""A mask as the kernels read it: which key tiles each block of rows must visit, and a test for the pairs in them.

The tiles of a block come as runs [start, stop) of neighbours, of three kinds: plain ones; those that straddle cells of
the map or more than two buckets of distance; those with forbidden pairs, which are tested. Other tiles are never
visited. The test is one of

  ANY        nothing but the end of the keys
  INTERVALS  up to four intervals of keys for each row
  DENSE      a boolean for each pair, made for some rows at a time where the whole would be large
  BAND       a band around the diagonal, and a range of keys for each item, as numbers: the kernels that take it (those
             of attention itself, forward and backward) work out their tiles themselves, and need no runs
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.statistics import bucket_of, cell_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from regard.masks import Mask
    from regard.spec import Call

ANY, INTERVALS, DENSE, BAND = 0, 1, 2, 3
# of the last number of a band, as in tiles.py
_RIGHT_PADDING, _LEFT_PADDING, _OFFSETS = 1, 2, 4
# wider than any call
_FAR = 1 << 29
PLAIN, STRADDLING, TESTED = 0, 1, 2
# booleans of one piece of a mask that has no intervals
_PIECE = 1 << 28


class Tiling(NamedTuple):
    """Tiles of ``block_q`` rows and ``block_k`` keys, and what a plain one must not straddle."""

    block_q: int
    block_k: int
    grid: tuple[int, int] = (0, 0)  # cells of the map
    limit: tuple[int, int] = (0, 0)  # queries that the map covers
    distance: bool = False
    distinct: bool = True  # straddling tiles are told from tested ones

    @property
    def straddles(self) -> bool:
        return self.distance or self.grid[0] > 0


class Runs(NamedTuple):
    """``table``: int32 [groups, blocks, runs, 2] for each kind, one after the other; ``counts``: how many runs
    each kind has, then where each begins. ``extents``: int32, two for each group and block, its tiles from the first to
    the last; None where some between them are not visited."""

    table: Tensor
    counts: Tensor
    groups: int
    blocks: int
    extents: Tensor | None = None

    def on(self, device: torch.device) -> Runs:
        extents = None if self.extents is None else self.extents.to(device)
        return self._replace(table=self.table.to(device), counts=self.counts.to(device), extents=extents)


class Encoded(NamedTuple):
    """``lo``, ``hi``: int32 [groups, K, L] for INTERVALS. ``split``: which tiles straddle something is known; where it
    is not, none counts as plain."""

    test: int
    runs: Runs
    lo: Tensor | None = None
    hi: Tensor | None = None
    split: bool = True

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.runs.table, self.runs.extents, self.lo, self.hi) if t is not None)


def encode(call: Call, tiling: Tiling) -> Encoded:
    """The call's mask for kernels with these tiles; remembered, and without reading anything from a GPU."""
    spec, mask, device, offset = call.spec, call.mask, call.query.device, call.offset
    if mask is None:
        if isinstance(offset, Tensor):
            return _everything(spec.queries, spec.keys, 0, _unsplit(tiling), device)._replace(split=False)
        return _everything(spec.queries, spec.keys, offset, tiling, device)
    key = ("triton", spec.queries, spec.keys, offset, spec.batch, tiling, device)
    return mask.remember(key, offset, lambda: _build(call, mask, tiling))


class Band(NamedTuple):
    """Row r may see keys j with −left <= j − (r + offset) <= right. ``lengths``, ``offsets``: one for each item."""

    offset: int
    left: int
    right: int
    given: int  # which of the tensors are there
    lengths: Tensor | None
    offsets: Tensor | None

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        return self[:4]


def band_of(call: Call) -> Band | None:
    """The call's mask as a band; None where it is none. Its numbers follow from the description of the call."""
    spec, mask, offset = call.spec, call.mask, call.offset
    left = right = _FAR
    given, lengths = 0, None
    if mask is not None:
        flags = mask.fused(spec.queries, spec.keys, offset)
        if flags is None or flags.documents is not None:
            return None
        left = _FAR if flags.left is None else min(flags.left, _FAR)
        right = _FAR if flags.right is None else min(flags.right, _FAR)
        if flags.padding is not None:
            lengths = lengths_of(call)
            given = _LEFT_PADDING if flags.padding.side == "left" else _RIGHT_PADDING
    if isinstance(offset, Tensor):
        return Band(0, left, right, given | _OFFSETS, lengths, offset.contiguous())
    return Band(int(offset), left, right, given, lengths, None)


def place_of_lengths(call: Call) -> int | None:
    """Where among the tensors of masks of this structure the lengths of all items are; None where they are not."""
    flags = None if call.mask is None else call.mask.flags
    if call.mask is None or flags is None or flags.padding is None or flags.padding.lengths.shape[0] != call.spec.batch:
        return None
    return next((n for n, tensor in enumerate(call.mask.tensors) if tensor is flags.padding.lengths), None)


def lengths_of(call: Call, place: int | None = None) -> Tensor:
    """Of a call whose mask has padding: the lengths of its items, one after the other in the memory of its device.
    ``place``: see ``place_of_lengths``; found once for many calls, it saves most of the time."""
    if place is not None:
        found: Tensor = call.mask.tensors[place]  # type: ignore[union-attr]
        if found.device == call.query.device and found.is_contiguous():
            return found
    padding = call.mask.flags.padding  # type: ignore[union-attr]
    assert padding is not None
    lengths, batch = padding.lengths_on(call.query.device), call.spec.batch
    return (lengths if lengths.shape[0] == batch else lengths.expand(batch)).contiguous()


class TileLists(NamedTuple):
    """Which tiles each owner (a block of rows, or of keys) walks over, in order; first those in which all is permitted.

    ``tiles``: int32, all lists one after the other. ``starts``: int32 [2, owners + 1], where each kind's lists begin.
    """

    tiles: Tensor
    starts: Tensor
    groups: int
    blocks: int  # owners of a group

    @property
    def nbytes(self) -> int:
        return self.tiles.nbytes + self.starts.nbytes


def tile_lists(call: Call, block_q: int, block_k: int, of_keys: bool) -> TileLists:
    """Of the call's mask, which has no band; remembered. ``of_keys``: blocks of keys own row tiles."""
    spec, mask, offset = call.spec, call.mask, call.offset
    assert mask is not None
    device = call.query.device
    key = ("tile lists", spec.queries, spec.keys, offset, spec.batch, block_q, block_k, of_keys, device)
    return mask.remember(key, offset, lambda: _tile_lists(call, mask, block_q, block_k, of_keys))


def _tile_lists(call: Call, mask: Mask, block_q: int, block_k: int, of_keys: bool) -> TileLists:
    spec = call.spec
    blocks = mask.blocks(spec.queries, spec.keys, call.offset, spec.batch, block_q, block_k)
    counts = np.diff(blocks.row_ptr, axis=1)
    groups, query_blocks = counts.shape
    rows = np.tile(np.arange(query_blocks, dtype=np.int32), groups).repeat(counts.ravel())
    group = np.repeat(np.arange(groups), counts.sum(1))
    # tiles that reach beyond an end are tested: what lies there must not count
    full = blocks.full & ((blocks.cols + 1) * np.int64(block_k) <= spec.keys)
    if of_keys:
        full &= (rows + 1) * np.int64(block_q) <= spec.queries
        size, owner, tile = blocks.key_blocks, group * blocks.key_blocks + blocks.cols, rows
    else:
        size, owner, tile = query_blocks, group * query_blocks + rows, blocks.cols
    order = np.lexsort((tile, owner, ~full))
    kinds = np.stack([np.bincount(owner[kind], minlength=groups * size) for kind in (full, ~full)])
    starts = np.zeros((2, groups * size + 1), dtype=np.int32)
    starts[:, 1:] = kinds.cumsum(1)
    starts[1] += starts[0, -1]
    with torch.inference_mode(False):
        lists = [torch.from_numpy(part).to(call.query.device) for part in (tile[order].astype(np.int32), starts)]
        return TileLists(lists[0], lists[1], groups, size)


def intervals(call: Call) -> tuple[Tensor, Tensor] | None:
    """Intervals of keys for each row, int32 [groups, K, L] on the device; None where the mask has none. Remembered."""
    spec, mask, offset = call.spec, call.mask, call.offset
    assert mask is not None
    device = call.query.device

    def build() -> tuple[Tensor, Tensor] | None:
        rows = mask.rows(spec.queries, spec.keys, offset, spec.batch)
        if rows is None:
            return None
        with torch.inference_mode(False):
            return tuple(torch.from_numpy(side.astype(np.int32)).to(device) for side in (rows.lo, rows.hi))  # type: ignore[return-value]

    return mask.remember(("triton intervals", spec.queries, spec.keys, offset, spec.batch, device), offset, build)


def _unsplit(tiling: Tiling) -> Tiling:
    """Without known positions every tile may straddle buckets; one cell of the map over no queries marks them all."""
    return tiling._replace(grid=(1, 1), limit=(0, 0), distance=False) if tiling.straddles else tiling


def _cells(S: int, cols: int, block_k: int) -> NDArray[np.int32]:
    """The map's column in which each key tile lies, -1 where it lies in several."""
    start = np.arange(0, S, block_k, dtype=np.int64)
    last = np.minimum(start + block_k, S) - 1
    first, final = (cell_of(at, S, cols) for at in (start, last))
    return np.where(first == final, first, -1).astype(np.int32)


def pieces(call: Call, block_q: int) -> list[range]:
    """The rows for which a DENSE test is made at once."""
    spec, mask = call.spec, call.mask
    assert mask is not None
    items = spec.batch if isinstance(call.offset, Tensor) else mask.batch
    at_once = _PIECE // max(1, items * mask.heads * spec.keys) // block_q * block_q
    at_once = max(block_q, at_once)
    return [range(start, min(start + at_once, spec.queries)) for start in range(0, spec.queries, at_once)]


def dense_piece(call: Call, rows: range) -> Tensor:
    """The mask on some rows, expanded to [B, H, rows, S]."""
    spec, mask = call.spec, call.mask
    assert mask is not None
    device = call.query.device
    seen = mask.tile(rows, range(spec.keys), spec.queries, spec.keys, offset=call.offset, device=device)
    return seen.expand(spec.batch, spec.heads, len(rows), spec.keys)


def _build(call: Call, mask: Mask, tiling: Tiling) -> Encoded:
    spec, offset, device = call.spec, call.offset, call.query.device
    L, S, B = spec.queries, spec.keys, spec.batch
    rows = mask.rows(L, S, offset, B)
    if rows is None and (band := _band_on_device(call, mask)) is not None:
        return Encoded(INTERVALS, _band_runs(*band, S, tiling), *band, split=False)
    blocks = mask.blocks(L, S, offset, B, tiling.block_q, tiling.block_k)
    counts = np.diff(blocks.row_ptr, axis=1).ravel()
    owner = np.repeat(np.arange(len(counts)), counts)
    shape = blocks.groups, blocks.query_blocks
    split = not isinstance(offset, Tensor)
    if not split:
        tiling = _unsplit(tiling)
    with torch.inference_mode(False):
        runs = _runs(owner, blocks.cols, blocks.full, shape, L, S, 0 if isinstance(offset, Tensor) else offset, tiling)
        runs = runs.on(device)
        if rows is None:
            return Encoded(DENSE, runs, split=split)
        lo, hi = (torch.from_numpy(side.astype(np.int32)).to(device) for side in (rows.lo, rows.hi))
        return Encoded(INTERVALS, runs, lo, hi, split)


@lru_cache(256)
def _everything(L: int, S: int, offset: int, tiling: Tiling, device: torch.device) -> Encoded:
    blocks, tiles = -(-L // tiling.block_q), -(-S // tiling.block_k)
    owner = np.repeat(np.arange(blocks), tiles)
    cols = np.tile(np.arange(tiles, dtype=np.int32), blocks)
    with torch.inference_mode(False):
        runs = _runs(owner, cols, np.ones(len(cols), dtype=np.bool_), (1, blocks), L, S, offset, tiling)
        return Encoded(ANY, runs.on(device))


def _runs(
    owner: NDArray[np.int64],
    cols: NDArray[np.int32],
    full: NDArray[np.bool_],
    shape: tuple[int, int],
    L: int,
    S: int,
    offset: int,
    tiling: Tiling,
) -> Runs:
    """Tiles, given as (block that owns it, column, whether all is permitted) in order, as runs of each kind."""
    keys = (cols + np.int64(1)) * tiling.block_k
    kinds = np.where(full & (keys <= S), PLAIN, TESTED)
    if tiling.straddles:
        first_row = owner % shape[1] * tiling.block_q
        kinds[(kinds == PLAIN) & _straddling(first_row, cols, keys, L, S, offset, tiling)] = (
            STRADDLING if tiling.distinct else TESTED
        )
    tables = [_grouped(owner[kinds == kind], cols[kinds == kind], shape[0] * shape[1]) for kind in range(3)]
    begins = np.cumsum([0] + [table.size for table in tables[:2]])
    counts = np.array([*(table.shape[1] for table in tables), *begins], dtype=np.int32)
    whole = np.concatenate([table.ravel() for table in tables])
    extents = _grouped(owner, cols, shape[0] * shape[1])
    whole_blocks = torch.from_numpy(extents) if extents.shape[1] == 1 else None
    return Runs(torch.from_numpy(whole), torch.from_numpy(counts), *shape, whole_blocks)


def _straddling(
    first_row: NDArray[np.int64],
    cols: NDArray[np.int32],
    keys: NDArray[np.int64],
    L: int,
    S: int,
    offset: int,
    tiling: Tiling,
) -> NDArray[np.bool_]:
    found = np.zeros(len(cols), dtype=np.bool_)
    if tiling.distance:
        below = offset + first_row - (keys - 1)
        above = offset + first_row + tiling.block_q - 1 - (keys - tiling.block_k)
        near = np.maximum(np.maximum(below, -above), 0)
        far = np.maximum(above, -below)
        # a single edge between two is no obstacle
        found |= bucket_of(far) > bucket_of(near) + 1
    if tiling.grid[0] > 0:
        start, stop = tiling.limit
        if stop <= start:
            return np.ones_like(found)
        ends = (np.clip(row, start, stop - 1) - start for row in (first_row, first_row + tiling.block_q - 1))
        first, last = (cell_of(row, stop - start, tiling.grid[0]) for row in ends)
        found |= (first != last) | (_cells(S, tiling.grid[1], tiling.block_k)[cols] < 0)
    return found


def _grouped(owner: NDArray[np.int64], cols: NDArray[np.int32], owners: int) -> NDArray[np.int32]:
    """[owners, most runs of an owner, 2]; unused places hold empty runs."""
    opens = np.ones(len(cols), dtype=np.bool_)
    opens[1:] = (owner[1:] != owner[:-1]) | (cols[1:] != cols[:-1] + 1)
    first = np.flatnonzero(opens)
    last = np.append(first, len(cols))[1:] - 1
    runs = np.bincount(owner[first], minlength=owners)
    out = np.zeros((owners, int(runs.max(initial=0)), 2), dtype=np.int32)
    slot = np.arange(len(first)) - np.repeat(np.cumsum(runs) - runs, runs)
    out[owner[first], slot, 0] = cols[first]
    out[owner[first], slot, 1] = cols[last] + 1
    return out


def _band_on_device(call: Call, mask: Mask) -> tuple[Tensor, Tensor] | None:
    """Intervals of a band with key padding whose numbers are on the GPU, where they may not be read; else None."""
    spec, device = call.spec, call.query.device
    flags = mask.fused(spec.queries, spec.keys, call.offset)
    if flags is None or flags.documents is not None:
        return None
    offset = call.offset.to(device).view(-1, 1, 1) if isinstance(call.offset, Tensor) else call.offset
    i = torch.arange(spec.queries, device=device) + offset
    i = i.view(-1, 1, spec.queries)
    lo = torch.zeros_like(i) if flags.left is None else i - flags.left
    hi = torch.full_like(i, spec.keys) if flags.right is None else i + flags.right + 1
    if flags.padding is not None:
        lengths = flags.padding.tensors[0].to(device).view(-1, 1, 1)
        if flags.padding.side == "left":
            lo = torch.maximum(lo, spec.keys - lengths)
        else:
            hi = torch.minimum(hi, lengths)
    shape = (max(len(lo), len(hi)), 1, spec.queries)
    lo, hi = (side.clamp(0, spec.keys).to(torch.int32).expand(shape).contiguous() for side in (lo, hi))
    return lo, hi


def _band_runs(lo: Tensor, hi: Tensor, S: int, tiling: Tiling) -> Runs:
    """Runs of one interval a row, by device operations: the tiles all rows of a block cover, and those around them."""
    block_q, block_k = tiling.block_q, tiling.block_k
    empty = lo >= hi
    beyond = -lo.shape[2] % block_q

    def over_blocks(edge: Tensor, filler: int, largest: bool) -> Tensor:
        padded = torch.nn.functional.pad(edge[:, 0], (0, beyond), value=filler).view(len(edge), -1, block_q)
        return padded.amax(2) if largest else padded.amin(2)

    first = over_blocks(lo.masked_fill(empty, S), S, False) // block_k
    last = -(-over_blocks(hi.masked_fill(empty, 0), 0, True) // block_k)
    inner = -(-over_blocks(lo.masked_fill(empty, S), 0, True) // block_k)
    outer = over_blocks(hi.masked_fill(empty, 0), S, False) // block_k
    # where no tile is full, everything is left to the first of the two tested runs
    inner = torch.where(inner < outer, inner, last)
    outer = torch.maximum(inner, outer.minimum(last))
    table = torch.stack([inner, outer, first, inner, outer, last], -1)
    groups, blocks = first.shape
    table = torch.cat([table[..., :2].flatten(), table[..., 2:].flatten(), torch.stack([first, last], -1).flatten()])
    extents = torch.stack([first, torch.maximum(first, last)], -1).to(torch.int32).unsqueeze(2)
    return Runs(table.to(torch.int32), _band_counts(groups * blocks, tiling, lo.device), groups, blocks, extents)


@lru_cache(256)
def _band_counts(owners: int, tiling: Tiling, device: torch.device) -> Tensor:
    """The table holds the full run of each owner, the two around it, and all of these as one."""
    full, around, whole = 0, 2 * owners, 6 * owners
    counts = [1, 0, 2, full, full, around]
    if tiling.straddles:
        # which tiles straddle something is not known: all are taken for such
        counts = [0, 1, 2, full, full, around] if tiling.distinct else [0, 0, 1, full, full, whole]
    with torch.inference_mode(False):
        return torch.tensor(counts, dtype=torch.int32).to(device)
