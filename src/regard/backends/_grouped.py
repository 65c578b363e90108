"""Steps of equal shape as one: a long call is a few calls of a kernel, forward and backward.

Equal steps at equal distances are one step of strided views: a band is cut into rows whose windows of keys overlap,
equal documents stand one after another, and a mask that keeps every s-th key is s small masks whose rows and keys are
s apart. Single keys that all rows may see are copied next to each other. Along the grid of its own blocks a mask has
full blocks, triangles on the diagonal (where it is also causal) and perhaps a few others: full blocks of rows that see
equally many of them are gathered, likewise the triangles, and what is left goes step by step.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.backends._schedule import by_items, from_blocks, from_intervals, steps_of
from regard.backends._steps import AnyStep, Gathered, Run, Step
from regard.masks import Mask, RowIntervals
from regard.masks._rebuild import of_intervals
from regard.spec import Call, CallSpec

# Numbers of the keys that strided pieces of one call see, counted for each of them: their gradients are apart before
# they are added up, and take as much memory.
STRIDED_AT_ONCE = 1 << 22
# every s-th key, up to this s: each of s masks is worked out by itself
MOST_CLASSES = 1024
# a kernel works on many rows at a time; smaller blocks are left to the steps
LEAST, MOST = 16, 256
# keys, and weights where they are kept, of the pieces gathered at once, for each thread: few, to stay in its core's
# cache, but enough to be worth the launch
AT_ONCE = 3 << 18
# of one piece; up to here a thread is given two at least
LARGE = 1 << 19


class Steps(list[AnyStep]):
    """Knows the bytes of what it keeps, for the memory that it is remembered in."""

    @property
    def nbytes(self) -> int:
        gathered, listed = 0, None  # all steps of a call list the same keys
        for step in self:
            if isinstance(step, Gathered):
                gathered += step.rows.nbytes + step.keys.nbytes
            elif step.listed is not None:
                listed = step.listed
        return gathered + (0 if listed is None else listed.nbytes)


def grouped_steps(call: Call) -> Steps:
    """The steps of a call, those of equal shape together; what merges with the rows of others comes after them."""
    spec, mask, offset = call.spec, call.mask, call.offset
    if mask is None or spec.bias is not None or spec.dropout or isinstance(offset, Tensor):
        return Steps(steps_of(call))
    sizes = (spec.queries, spec.keys, offset, spec.batch, spec.heads, spec.kv_heads, spec.head_dim, spec.value_dim)
    key = ("grouped", *sizes, spec.device, torch.get_num_threads())
    return mask.remember(key, offset, lambda: _build(call, mask, offset))


def _build(call: Call, mask: Mask, offset: int) -> Steps:
    spec = call.spec
    if mask.readable() and mask.heads == 1:
        found = _from_table(mask, spec, offset) if spec.device == "cpu" else None
        if found is None:
            found = _periodic_steps(mask, spec, offset) or _listed_steps(mask, spec, offset)
        if found is not None:
            return found
    steps = steps_of(call)
    return Steps(_grouped(steps, spec) if len(steps) > 1 else steps)


def _periodic_steps(mask: Mask, spec: CallSpec, offset: int) -> Steps | None:
    """The steps of a mask with a period: of its classes, and of what it is joined to by ``|``."""
    found = _split(mask, lambda part: part.period is not None)
    if found is None:
        return None
    plain, part, rest = found
    period = part.period
    if period is None or period > min(MOST_CLASSES, spec.queries):
        return None

    def classes(item: int | None, lo: NDArray[np.int64], hi: NDArray[np.int64]) -> Iterator[Step]:
        for row in range(period):
            key = (row + offset) % period
            # the keys key, key + period, …: how many of them lie below each end
            below = (np.maximum(-((key - end[:, row::period]) // period), 0) for end in (lo, hi))
            for step in from_intervals(item, *below):
                places = step.places
                at = (row + places[0] * period, *(key + place * period for place in places[1:]))
                yield step._replace(stride=period, at=at)

    return _steps_of_sides(plain, rest, classes, spec, offset)


def _listed_steps(mask: Mask, spec: CallSpec, offset: int) -> Steps | None:
    """The steps of a mask that hides most keys, here and there, from all rows, and of what it is joined to by ``|``:
    the keys that are left are copied next to each other."""
    sizes = (spec.queries, spec.keys, offset, spec.batch)
    # by its structure first: the padding of a batch that is decoded is new for every token, and not to be read
    if spec.device != "cpu" or of_intervals(mask.structure) or mask.rows(*sizes) is not None:
        return None
    found = _split(mask, lambda part: part.about_keys and part.batch == 1 and part.rows(*sizes) is None)
    if found is None:
        return None
    plain, part, rest = found
    seen = part.tile(range(1), range(spec.keys), spec.queries, spec.keys, offset=offset, device=spec.device)
    keys = seen.expand(1, 1, 1, spec.keys).flatten().nonzero().flatten()
    if 2 * len(keys) > spec.keys:
        return None

    def among(item: int | None, lo: NDArray[np.int64], hi: NDArray[np.int64]) -> Iterator[Step]:
        for step in from_intervals(item, *(np.searchsorted(keys.numpy(), end) for end in (lo, hi))):
            yield step._replace(listed=keys)

    return _steps_of_sides(plain, rest, among, spec, offset)


def _split(mask: Mask, wanted: Callable[[Mask], bool]) -> tuple[Mask | None, Mask, Mask | None] | None:
    """(plain, part, rest) where the mask is ``plain | (part & rest)``, no pair is on both sides, and the part is one
    that is wanted."""
    parts = mask.conjuncts
    for at, whole in enumerate(parts):
        others, sides = parts[:at] + parts[at + 1 :], whole.disjuncts
        with_it = [side for side in sides if any(map(wanted, side.conjuncts))]
        if len(with_it) != 1:
            continue
        without = [side for side in sides if side is not with_it[0]]
        plain = functools.reduce(operator.and_, [functools.reduce(operator.or_, without), *others]) if without else None
        inside = [*with_it[0].conjuncts, *others, *([] if plain is None else [~plain])]
        part = next(filter(wanted, inside))
        rest = [each for each in inside if each is not part]
        return plain, part, functools.reduce(operator.and_, rest) if rest else None
    return None


def _steps_of_sides(
    plain: Mask | None,
    rest: Mask | None,
    steps_of_item: Callable[[int | None, NDArray[np.int64], NDArray[np.int64]], Iterator[Step]],
    spec: CallSpec,
    offset: int,
) -> Steps | None:
    """The steps of the plain side, and of the intervals of the rest on the other; None where one has no such form."""
    sizes = (spec.queries, spec.keys, offset, spec.batch)
    steps: list[Step] = []
    if plain is not None:
        found = plain.rows(*sizes)
        if found is None:
            return None
        steps = [step for item, lo, hi in by_items(found) for step in from_intervals(item, lo, hi)]
    whole = np.zeros((1, 1, spec.queries), np.int64)
    intervals = RowIntervals(whole, whole + spec.keys) if rest is None else rest.rows(*sizes)
    if intervals is None:
        return None
    for item, lo, hi in by_items(intervals):
        for step in steps_of_item(item, lo, hi):
            steps.append(step._replace(merges=step.merges or plain is not None))
    return Steps(_grouped(steps, spec))


def _grouped(steps: list[Step], spec: CallSpec) -> Iterator[Step]:
    """Equal steps at equal distances together."""
    alike: dict[tuple[object, ...], list[Step]] = {}
    made: list[Step] = []
    for step in steps:
        if step.lo is None or step.hi is None or step.listed is not None:
            made.append(step)
            continue
        widths = tuple((run.stop - run.start, run.full) for run in step.runs)
        sign = (step.merges, step.batch, step.kind, step.rows, widths, step.stride, *_side_by_side(step))
        alike.setdefault(sign, []).append(step)
    for found in alike.values():
        for group in _evenly_spaced(found):
            made += _joined(group, spec)
    yield from sorted(made, key=lambda step: step.merges)


def _side_by_side(step: Step) -> tuple[bytes, bytes]:
    """The intervals of a step counted in its keys side by side."""
    assert step.lo is not None and step.hi is not None
    starts = np.array([run.start for run in step.runs])
    widths = np.array([run.stop - run.start for run in step.runs])
    moved = np.concatenate([[0], np.cumsum(widths)[:-1]]) - starts
    used = step.lo < step.hi
    at = moved[np.clip(np.searchsorted(starts, step.lo, side="right") - 1, 0, None)]
    return np.where(used, step.lo + at, 0).tobytes(), np.where(used, step.hi + at, 0).tobytes()


def _evenly_spaced(found: list[Step]) -> Iterator[list[Step]]:
    """Runs of steps whose rows, and the keys of each of their runs, are equally far from one to the next."""
    found.sort(key=lambda step: step.places[0])
    group: list[Step] = []
    moved: list[int] | None = None
    for step in found:
        far = [b - a for a, b in zip(group[-1].places, step.places, strict=True)] if group else None
        if far is not None and (moved is None or far == moved) and _can_be_views(far, step.stride):
            moved = far
        elif group:
            yield group
            group, moved = [], None
        group.append(step)
    if group:
        yield group


def _can_be_views(far: list[int], stride: int) -> bool:
    """Runs that follow the rows, in whole steps or between each other; or that stay where they are."""
    return all(moved == 0 or (moved > 0 and (moved < stride or moved % stride == 0)) for moved in far[1:])


def _joined(group: list[Step], spec: CallSpec) -> Iterator[Step]:
    first = group[0]
    if len(group) == 1 and first.stride == 1:
        yield first
        return
    second = group[min(1, len(group) - 1)]
    far = tuple(b - a for a, b in zip(first.places, second.places, strict=True))
    items = spec.kv_heads * (spec.batch if first.batch is None else 1)
    at_once = max(1, STRIDED_AT_ONCE // (items * first.width * max(spec.head_dim, spec.value_dim)))
    yield from first._replace(number=len(group), far=far).cut(at_once)


def _from_table(mask: Mask, spec: CallSpec, offset: int) -> Steps | None:
    """The steps of a mask made of blocks of a fair size; None for others."""
    L, S = spec.queries, spec.keys
    block = math.gcd(mask.grain, offset) if mask.grain else 0
    while block > MOST:
        block = block // 2 if block % 2 == 0 else 0
    if block < LEAST or min(L, S) < 2 * block:
        return None
    causal, others = _without_causal(mask)
    table = others.blocks(L, S, offset, spec.batch, block, block)
    groups, height = table.groups, table.query_blocks
    row, col = table.owners, table.cols.astype(np.int64)
    # blocks that the last rows or keys do not fill cannot be gathered
    whole = (col < S // block) & (row % height < L // block)
    place = row % height + offset // block if causal else np.full_like(row, S)
    full, diagonal = table.full & (col < place), table.full & (col == place) & whole
    left = (col <= place) & ~(full & whole) & ~diagonal
    made = Steps()
    for chosen, kind in ((full & whole, "rect"), (diagonal, "triangle")):
        for rows, cols in _of_equal_shape(row[chosen], col[chosen], height, 1 if kind == "triangle" else MOST // block):
            made += _gathered(rows, cols, kind, block, groups, height, spec)
    made += from_blocks(table, row[left], table.cols[left], full[left], L, S, merges=True)
    return made


def _without_causal(mask: Mask) -> tuple[bool, Mask]:
    """Whether a mask is causal() & something, and that something."""
    others = [part for part in mask.conjuncts if not part.is_causal]
    if len(others) in (0, len(mask.conjuncts)):
        return False, mask
    return True, functools.reduce(operator.and_, others)


def _of_equal_shape(
    row: NDArray[np.int64], col: NDArray[np.int64], height: int, tall: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Rows of blocks that see equally many key blocks, together: [n, m] of them with [n, w] of those. Rows that see the
    same ones as the row above join it, up to ``tall``."""
    counts = np.bincount(row)
    ends = np.cumsum(counts)
    pieces: dict[tuple[int, int], list[tuple[NDArray[np.int64], NDArray[np.int64]]]] = {}
    for count in np.unique(counts[counts > 0]).tolist():
        rows = np.flatnonzero(counts == count)
        cols = col[(ends[rows] - count)[:, None] + np.arange(count)]
        same = np.zeros(len(rows), dtype=bool)
        same[1:] = (np.diff(rows) == 1) & (rows[1:] % height != 0) & (cols[1:] == cols[:-1]).all(1)
        # places in a run of equal rows; a run is cut into pieces of `tall`
        run = np.arange(len(rows)) - np.maximum.accumulate(np.where(same, 0, np.arange(len(rows))))
        heads = np.flatnonzero(run % max(1, tall) == 0)
        sizes = np.diff(heads, append=len(rows))
        for size in np.unique(sizes).tolist():
            first = heads[sizes == size]
            pieces.setdefault((size, count), []).append((rows[first][:, None] + np.arange(size), cols[first]))
    for found in pieces.values():
        rows, cols = (np.concatenate(part) for part in zip(*found, strict=True))
        yield rows, cols


def _gathered(
    rows: NDArray[np.int64], cols: NDArray[np.int64], kind: str, block: int, groups: int, height: int, spec: CallSpec
) -> Iterator[Gathered]:
    """Some pieces at a time, so that what is gathered stays small; one key head after another, so that its keys are
    near. Those of all items are alike, or each item has its own."""
    alike, group = (spec.batch if groups == 1 else 1) * spec.kv_heads, spec.heads // spec.kv_heads
    tall, wide = rows.shape[1] * block, cols.shape[1] * block
    if kind == "rect":
        piece = Step(None, 0, tall, (Run(0, wide, True),), kind, None, None)
    else:
        edges = np.zeros((1, tall), dtype=np.int64), np.arange(1, tall + 1)[None]
        piece = Step(None, 0, tall, (Run(0, wide, False),), kind, *edges)
    owner = (rows[:, 0] // height * spec.kv_heads * (groups > 1) + np.arange(alike)[:, None]).ravel()
    rows, cols = (np.tile(blocks, (alike, 1)) for blocks in (rows % height, cols))
    row_numbers = (owner[:, None] * group + np.arange(group))[:, :, None] * (spec.queries // block) + rows[:, None]
    key_numbers = owner[:, None] * (spec.keys // block) + cols
    numbers = wide * (max(spec.head_dim, spec.value_dim) + tall * group)
    at_once = torch.get_num_threads() * max(2 if numbers <= LARGE else 1, AT_ONCE // numbers)
    for start in range(0, len(owner), at_once):
        at = slice(start, start + at_once)
        own, keys = row_numbers[at].ravel(), key_numbers[at].ravel()
        first = int(own[0]) if (np.diff(own) == 1).all() else None
        yield Gathered(piece, block, len(owner[at]), group, torch.from_numpy(own), torch.from_numpy(keys), first)
