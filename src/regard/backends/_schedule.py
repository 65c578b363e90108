"""Turns a mask into the steps that compute it: rectangles of rows and keys, so that time follows the kept pairs.

Rows that no step mentions see nothing. ``grouped_steps`` (see ``_grouped``) puts those of equal shape together.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.backends._steps import Run, Step
from regard.masks import Mask
from regard.masks._areas import Ranges, joined
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
# of the first interval: its end follows the row, as below a causal edge (see _segments)
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


def _build(mask: Mask, rows: int, keys: int, offset: int | Tensor, batch: int, once: bool = False) -> list[Step]:
    intervals = mask.rows(rows, keys, offset, batch)
    steps: list[Step] = []
    if intervals is not None:
        for item, lo, hi in by_items(intervals):
            steps += from_intervals(item, lo, hi, once=once)
        return steps
    block = 64 if keys <= 4096 else 128
    table = mask.blocks(rows, keys, offset, batch, block, block)
    for g in range(table.groups):
        batch_item = None if table.groups == 1 else g
        steps += _from_blocks(batch_item, table.row_ptr[g], table.cols, table.full, rows, keys, block)
    return steps


def by_items(
    intervals: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> Iterator[tuple[int | None, NDArray[np.int64], NDArray[np.int64]]]:
    """The intervals of each item; of None, where those of all items are the same."""
    groups = len(intervals[0])
    for g, (lo, hi) in enumerate(zip(*intervals, strict=True)):
        yield None if groups == 1 else g, lo, hi


def from_intervals(
    batch: int | None, lo: NDArray[np.int64], hi: NDArray[np.int64], *, once: bool = False
) -> list[Step]:
    """``lo``, ``hi``: [K, rows], as ``RowIntervals`` has them. ``once``: every row is in one step only."""
    if lo.shape[0] > 1 and not (lo[1:] < hi[1:]).any():
        lo, hi = lo[:1], hi[:1]
    if lo.shape[0] > 1 and once:
        return _tiles(batch, lo, hi, 0, lo.shape[1])
    steps: list[Step] = []
    pending: int | None = None  # start of segments waiting to share tiles
    for start, stop, moves in _segments(lo, hi):
        if moves == _DOWN and not (lo[:, start] < hi[:, start]).any():
            start += 1  # a causal edge may begin with an empty row
        used = np.flatnonzero((lo < hi)[:, min(start, stop - 1)])
        if start == stop or (moves == 0 and len(used) == 0):
            if pending is not None:
                steps += _tiles(batch, lo, hi, pending, start)
                pending = None
            continue
        even = len(used) > 0 and moves in (0, _DOWN * 4 ** used[-1])  # all but the last interval stay where they are
        if (stop - start < SHORT and lo.shape[1] > SHORT) or (len(lo) > 1 and not even):
            pending = start if pending is None else pending
            continue
        if pending is not None:
            steps += _tiles(batch, lo, hi, pending, start)
            pending = None
        inside = lo[used, start:stop], hi[used, start:stop]
        steps += _segment(batch, *inside, start, moves != 0, once) if even else _tiles(batch, lo, hi, start, stop)
    if pending is not None:
        steps += _tiles(batch, lo, hi, pending, lo.shape[1])
    return steps


def _segments(lo: NDArray[np.int64], hi: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Maximal ranges of rows whose intervals move evenly: (start, stop, moves). ``moves`` is a number of two binary
    digits for each interval: whether its start, and whether its end, is one key further in every next row."""
    rows = lo.shape[1]
    if rows < 2:  # one query for each of many items: a step of decoding
        return [(0, 1, 0)] * rows
    step_lo, step_hi = np.diff(lo), np.diff(hi)
    even = ((step_lo >= 0) & (step_lo <= 1) & (step_hi >= 0) & (step_hi <= 1)).all(0)
    digits = 4 ** np.arange(len(lo))[:, None]
    code = np.where(even, ((step_lo * 2 + step_hi) * digits).sum(0), -1)  # code[r] is the move from row r to row r + 1
    jump = code == -1
    changed = np.ones(len(code), dtype=bool)
    changed[1:] = (code[1:] != code[:-1]) & ~jump[:-1]
    starts = np.concatenate([[0], 1 + np.flatnonzero(jump | (changed & (np.arange(len(code)) > 0)))])
    stops = np.concatenate([starts[1:], [rows]])
    ends = zip(starts.tolist(), stops.tolist(), strict=True)
    return [(start, stop, int(code[start]) if stop - start > 1 else 0) for start, stop in ends]


def _segment(
    batch: int | None, lo: NDArray[np.int64], hi: NDArray[np.int64], start: int, moves: bool, once: bool
) -> list[Step]:
    """Rows from ``start`` on over intervals [K, rows] that stay where they are, but for the end of the last."""
    stop = start + lo.shape[1]
    corner = int(hi[-1, 0]) - 1 if moves else int(hi[-1, 0])  # what lies before it every row sees
    ends = np.concatenate([hi[:-1], np.full_like(hi[-1:], corner)])
    runs = tuple(Run(int(a), int(b), True) for a, b in zip(lo[:, 0], ends[:, 0], strict=True) if a < b)
    if not moves:
        return [Step(batch, start, stop, runs, "rect", lo, hi)]
    below = Run(corner, int(hi[-1, -1]), False)
    if not runs:
        return [Step(batch, start, stop, (below,), "triangle", np.maximum(lo, corner), hi)]
    if once:
        return [Step(batch, start, stop, (Run(runs[0].start, below.stop, False),), "tile", lo, hi)]
    triangle = np.maximum(lo[-1:], corner), hi[-1:]
    return [
        Step(batch, start, stop, runs, "rect", lo, ends),
        Step(batch, start, stop, (below,), "triangle", *triangle, True),
    ]


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


def _from_blocks(
    batch: int | None,
    pointers: NDArray[np.int64],
    cols: NDArray[np.int32],
    full: NDArray[np.bool_],
    rows: int,
    keys: int,
    block: int,
) -> list[Step]:
    steps = []
    for row in range(len(pointers) - 1):
        runs: list[Run] = []
        for at in range(int(pointers[row]), int(pointers[row + 1])):
            start = int(cols[at]) * block
            stop, whole = min(start + block, keys), bool(full[at])
            if runs and runs[-1].stop == start and runs[-1].full == whole:
                runs[-1] = Run(runs[-1].start, stop, whole)
            else:
                runs.append(Run(start, stop, whole))
        if runs:
            kind = "rect" if all(run.full for run in runs) else "tile"
            steps.append(Step(batch, row * block, min((row + 1) * block, rows), tuple(runs), kind, None, None))
    return steps


def merged_steps(call: Call) -> list[Step]:
    """The steps with every row in one of them only."""
    mask, spec = call.mask, call.spec
    steps = steps_of(call)
    if mask is None or not any(step.merges for step in steps):
        return steps
    sizes = spec.queries, spec.keys, call.offset, spec.batch
    return mask.remember(("merged steps", *sizes), call.offset, lambda: _build(mask, *sizes, once=True))


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
    if step.batch is not None and tile.shape[0] > 1:
        tile = tile[step.batch : step.batch + 1]
    return tile


def _column(numbers: NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(device).unsqueeze(1)
