"""Turns a mask into the steps that compute it: rectangles of rows and keys, so that time follows the kept pairs.

Rows that no step mentions see nothing. ``grouped_steps`` (see ``_grouped``) puts those of equal shape together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.backends._steps import Run, Step
from regard.masks import BlockTable, Mask
from regard.masks._areas import Ranges, joined
from regard.masks._intervals import moves_of, segments
from regard.spec import Call, CallSpec

# pairs of a head of 64 that each step has to save against one masked call of all pairs (benchmarks/cpu.py --only
# crossover)
STEP_PAIRS = 16_000
# to bring a key from memory takes as long as to meet it with this many rows
ROWS_OF_A_READ = 8
# below this many rows, a step of its own costs more to launch than the pairs it saves
SHORT = 32
# rows of a tile step; small, since a band of width w pays for w + TILE keys per row
TILE = 64
# of the first interval: its end follows the row, as below a causal edge (see ``moves_of``)
_DOWN = 1


def steps_of(call: Call) -> list[Step]:
    """The steps of a call; read once per mask, size and offset."""
    spec, mask = call.spec, call.mask
    rows, keys = spec.queries, spec.keys
    if mask is None:
        return _everything(rows, keys)
    unread = not mask.readable() or (isinstance(call.offset, Tensor) and call.offset.device.type != "cpu")
    if unread or _items_are_short(call, mask):
        return [Step(None, 0, rows, (Run(0, keys, False),), "tile", None, None)]
    key = ("steps", rows, keys, call.offset, spec.batch)
    return mask.remember(key, call.offset, lambda: _build(mask, rows, keys, call.offset, spec.batch))


def _items_are_short(call: Call, mask: Mask) -> bool:
    """Whether each item, as of a padded batch that is decoded, sees keys of its own, but too few for a step of its own.
    Neither the mask nor the offsets are read for it: those of a decoded token are new, and nothing is remembered."""
    spec = call.spec
    apart = mask.batch > 1 or (isinstance(call.offset, Tensor) and call.offset.numel() > 1)
    return apart and spec.queries < SHORT and worth(spec, spec.heads * spec.queries * spec.keys) <= STEP_PAIRS


def worth(spec: CallSpec, pairs: float) -> float:
    """Pairs of a call as those of a head of 64 that take as long, among many rows."""
    return pairs * max(ROWS_OF_A_READ / max(spec.queries, 1), 1.0) * spec.head_dim / 64


@lru_cache(256)
def _everything(rows: int, keys: int) -> list[Step]:
    return [Step(None, 0, rows, (Run(0, keys, True),), "rect", None, None)]


def _build(mask: Mask, rows: int, keys: int, offset: int | Tensor, batch: int) -> list[Step]:
    intervals = mask.rows(rows, keys, offset, batch)
    if intervals is not None:
        return [step for item, lo, hi in by_items(intervals) for step in from_intervals(item, lo, hi)]
    block = 64 if keys <= 4096 else 128
    table = mask.blocks(rows, keys, offset, batch, block, block)
    return from_blocks(table, table.owners, table.cols, table.full, rows, keys)


def by_items(
    intervals: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> Iterator[tuple[int | None, NDArray[np.int64], NDArray[np.int64]]]:
    """The intervals of each item; of None, where those of all items are the same."""
    groups = len(intervals[0])
    for g, (lo, hi) in enumerate(zip(*intervals, strict=True)):
        yield None if groups == 1 else g, lo, hi


def from_intervals(batch: int | None, lo: NDArray[np.int64], hi: NDArray[np.int64]) -> list[Step]:
    """``lo``, ``hi``: [K, rows], as ``RowIntervals`` has them."""
    lo, hi = _used(lo, hi)
    rows = lo.shape[1]
    steps: list[Step] = []
    pending: int | None = None  # start of segments waiting to share tiles
    # one query for each of many items is a step of decoding
    for start, stop, moves in segments(moves_of(lo, hi)) if rows > 1 else [(0, 1, 0)] * rows:
        if moves == _DOWN and not (lo[:, start] < hi[:, start]).any():
            start += 1  # a causal edge may begin with an empty row
        used = np.flatnonzero(lo[:, start] < hi[:, start])
        even = len(used) > 0 and moves in (0, _DOWN * 4 ** used[-1])  # all but the last interval stay where they are
        empty = len(used) == 0 and moves == 0
        if not empty and ((stop - start < SHORT and rows > SHORT) or (len(lo) > 1 and not even)):
            pending = start if pending is None else pending
            continue
        if pending is not None:
            steps += _tiles(batch, lo, hi, pending, start)
            pending = None
        if even:
            steps += _segment(batch, lo[used, start:stop], hi[used, start:stop], start, moves != 0)
        elif not empty:
            steps += _tiles(batch, lo, hi, start, stop)
    if pending is not None:
        steps += _tiles(batch, lo, hi, pending, rows)
    return steps


def _used(lo: NDArray[np.int64], hi: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Without the slots that no row uses, but for one."""
    used: NDArray[np.bool_] = np.count_nonzero(lo < hi, axis=1) > 0
    used[0] |= not used.any()
    return (lo, hi) if used.all() else (lo[used], hi[used])


def _segment(batch: int | None, lo: NDArray[np.int64], hi: NDArray[np.int64], start: int, moves: bool) -> list[Step]:
    """Rows from ``start`` on over intervals [K, rows] that stay where they are, but for the end of the last."""
    stop = start + lo.shape[1]
    corner = int(hi[-1, 0]) - 1 if moves else int(hi[-1, 0])  # what lies before it every row sees
    ends = np.concatenate([hi[:-1], np.full_like(hi[-1:], corner)])
    runs = tuple(Run(int(a), int(b), True) for a, b in zip(lo[:, 0], ends[:, 0], strict=True) if a < b)
    if not moves:
        return [Step(batch, start, stop, runs, "rect", lo, hi)]
    below = Run(corner, int(hi[-1, -1]), False)
    edge = Step(batch, start, stop, (below,), "triangle", np.maximum(lo[-1:], corner), hi[-1:], merges=bool(runs))
    return [Step(batch, start, stop, runs, "rect", lo, ends), edge] if runs else [edge]


def _tiles(batch: int | None, lo: NDArray[np.int64], hi: NDArray[np.int64], start: int, stop: int) -> list[Step]:
    steps = []
    for top in range(start, stop, TILE):
        end = min(top + TILE, stop)
        inside_lo, inside_hi = lo[:, top:end], hi[:, top:end]
        runs = _hulls(inside_lo, inside_hi)
        if not runs:
            continue
        same = (inside_lo == inside_lo[:, :1]).all() and (inside_hi == inside_hi[:, :1]).all()
        kind = "rect" if same else "tile"
        steps.append(Step(batch, top, end, tuple(Run(a, b, bool(same)) for a, b in runs), kind, inside_lo, inside_hi))
    return steps


def _hulls(lo: NDArray[np.int64], hi: NDArray[np.int64]) -> Ranges:
    """The keys that some row sees, slot by slot, those that overlap joined."""
    slots = ((start[start < stop], stop[start < stop]) for start, stop in zip(lo, hi, strict=True))
    return joined((int(start.min()), int(stop.max())) for start, stop in slots if len(start))


def from_blocks(
    table: BlockTable,
    owners: NDArray[np.int64],
    cols: NDArray[np.int32],
    full: NDArray[np.bool_],
    rows: int,
    keys: int,
    merges: bool = False,
) -> list[Step]:
    """Some blocks of a table, row by row: ``owners`` are their query blocks, counted through the groups."""
    steps, block = [], table.block_q
    edges = [*np.flatnonzero(np.diff(owners, prepend=-1)).tolist(), len(owners)]
    for first, last in itertools.pairwise(edges):
        runs: list[Run] = []
        for col, whole in zip(cols[first:last].tolist(), full[first:last].tolist(), strict=True):
            start, stop = col * block, min((col + 1) * block, keys)
            if runs and runs[-1].stop == start and runs[-1].full == whole:
                start = runs.pop().start
            runs.append(Run(start, stop, whole))
        group, row = divmod(int(owners[first]), table.query_blocks)
        batch, bottom = None if table.groups == 1 else group, min((row + 1) * block, rows)
        kind = "rect" if all(run.full for run in runs) else "tile"
        steps.append(Step(batch, row * block, bottom, tuple(runs), kind, None, None, merges))
    return steps


def merged_steps(call: Call) -> list[Step]:
    """The steps with every row in one of them only."""
    mask, spec = call.mask, call.spec
    steps = steps_of(call)
    if mask is None or not any(step.merges for step in steps):
        return steps
    sizes = spec.queries, spec.keys, call.offset, spec.batch
    intervals = mask.rows(*sizes)
    assert intervals is not None  # others have no steps that merge

    def build() -> list[Step]:
        found = ((item, *_used(lo, hi)) for item, lo, hi in by_items(intervals))
        return [step for item, lo, hi in found for step in _tiles(item, lo, hi, 0, spec.queries)]

    return mask.remember(("merged steps", *sizes), call.offset, build)


def permitted_of(step: Step, call: Call, rows: range, run: Run) -> Tensor | None:
    """Which keys of a run some rows of the step may see: bool, broadcastable to [B, H, rows, run]; None means all."""
    if run.full:
        return None
    device = call.query.device
    if step.lo is not None and step.hi is not None:
        at = slice(rows.start - step.start, rows.stop - step.start)
        lo, hi = step.lo[:, at], step.hi[:, at]
        if lo.shape[0] == 1 and int(lo.max()) <= run.start and int(hi.min()) >= run.stop:
            return None
        keys = torch.arange(run.start, run.stop, device=device)
        seen: Tensor | None = None
        for slot_lo, slot_hi in zip(lo, hi, strict=True):
            inside = (keys >= _column(slot_lo, device)) & (keys < _column(slot_hi, device))
            seen = inside if seen is None else seen | inside
        assert seen is not None
        return seen[None, None]
    tile = call.permitted(rows, range(run.start, run.stop))
    return tile[step.items] if tile.shape[0] > 1 else tile


def _column(numbers: NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(device).unsqueeze(1)
