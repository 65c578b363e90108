"""Steps of equal shape as one: pieces of a mask at equal distances are views, and one kernel call computes them all.

A band is cut into rows whose windows of keys overlap, equal documents stand one after another, and a mask that keeps
every s-th key is s small masks whose rows and keys are s apart: none of them needs a copy of the keys.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.backends._schedule import Run, Step, from_intervals, steps_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from regard.masks import Mask
    from regard.spec import Call, CallSpec

# Numbers of the keys that the pieces of one call see, counted for each of them: their gradients are apart before they
# are added up, and take as much memory.
AT_ONCE = 1 << 22
# every s-th key, up to this s: each of s masks is worked out by itself
MOST_CLASSES = 1024


class Span(NamedTuple):
    """Keys of each piece: ``width`` of them from ``first`` on, ``step`` further with each piece."""

    first: int
    step: int
    width: int


class Pieces(NamedTuple):
    """Steps that differ only in where they stand."""

    one: Step  # rows from 0 on, keys as they are gathered: side by side from 0 on
    number: int
    row: int  # the first row of the first piece
    row_step: int  # from a piece to the next
    keys: tuple[Span, ...]
    stride: int = 1  # from a row to the next, and from a key to the next
    batch: int | None = None  # None: all items alike
    again: bool = False  # the rows are in another step too: results merge

    @property
    def rows(self) -> int:
        return self.number * self.one.rows

    @property
    def pairs(self) -> float:
        return self.rows * self.one.width / (2 if self.one.kind == "triangle" else 1)

    def cut(self, most: int) -> Iterator[Pieces]:
        """The same, so many pieces at a time."""
        for start in range(0, self.number, most):
            keys = tuple(span._replace(first=span.first + start * span.step) for span in self.keys)
            number = min(most, self.number - start)
            yield self._replace(number=number, row=self.row + start * self.row_step, keys=keys)

    def items(self, spec: CallSpec) -> tuple[int, int]:
        """Batch items and key heads."""
        return (spec.batch if self.batch is None else 1), spec.kv_heads

    def local(self, call: Call) -> Call:
        """The call of one kernel call: an item for each key head of an item, a key head for each piece."""
        spec = call.spec
        items, kv_heads = self.items(spec)
        heads = self.number * (spec.heads // kv_heads)
        local = spec._replace(
            batch=items * kv_heads, heads=heads, kv_heads=self.number, queries=self.one.rows, keys=self.one.width
        )
        return call.replace(spec=local, sinks=None)

    def rows_of(self, tensor: Tensor, kv_heads: int) -> Tensor:
        """The rows of [batch, head, token, ...] as [item, key head, piece, head of a group, row, ...]; a view."""
        batch, heads = tensor.shape[:2]
        tensor = tensor if self.batch is None else tensor[self.batch : self.batch + 1]
        item, head, token, *rest = tensor.stride()
        group = heads // kv_heads
        return tensor.as_strided(
            (tensor.shape[0], kv_heads, self.number, group, self.one.rows, *tensor.shape[3:]),
            (item, group * head, self.row_step * token, head, self.stride * token, *rest),
            tensor.storage_offset() + self.row * token,
        )

    def take_rows(self, tensor: Tensor, kv_heads: int) -> Tensor:
        """The same as [item · key head, piece · head of a group, row, ...]; a view where the strides allow it."""
        return self.rows_of(tensor, kv_heads).flatten(2, 3).flatten(0, 1)

    def split_rows(self, part: Tensor, kv_heads: int) -> Tensor:
        """What a kernel gives, in the shape of ``rows_of``."""
        return torch.unflatten(torch.unflatten(part, 1, (self.number, -1)), 0, (-1, kv_heads))

    def _keys_of(self, tensor: Tensor, first: int, step: int, width: int) -> Tensor:
        """Keys of [batch, key head, token, dim] as [item, key head, piece, width, dim]; a view."""
        tensor = tensor if self.batch is None else tensor[self.batch : self.batch + 1]
        item, head, token, dim = tensor.stride()
        return tensor.as_strided(
            (*tensor.shape[:2], self.number, width, tensor.shape[3]),
            (item, head, step * token, self.stride * token, dim),
            tensor.storage_offset() + first * token,
        )

    def take_keys(self, tensor: Tensor) -> Tensor:
        """[item · key head, piece, key, dim]: a view of compact tensors (see ``compact``) where there is one span."""
        parts = [self._keys_of(tensor, *span).flatten(0, 1) for span in self.keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def add_keys(self, total: Tensor, part: Tensor) -> None:
        """Add what each piece gives to its keys; windows that overlap are cut into parts that do not."""
        part = torch.unflatten(part, 0, (-1, total.shape[1]))
        at = 0
        for first, step, width in self.keys:
            own = part[..., at : at + width, :]
            at += width
            if step == 0:
                self._keys_of(total, first, 0, width)[:, :, 0].add_(own.sum(2))
                continue
            apart = step * self.number <= self.stride  # each piece has the keys between those of the others
            most = width if apart else step // self.stride
            for start in range(0, width, most):
                some = own[..., start : start + most, :]
                self._keys_of(total, first + start * self.stride, step, some.shape[3]).add_(some)


def compact(tensor: Tensor) -> Tensor:
    """Item and head can be counted through: overlapping windows are views, and not copied window by window."""
    whole = tensor.shape[0] == 1 or tensor.stride(0) == tensor.shape[1] * tensor.stride(1)
    return tensor if whole else tensor.contiguous()


def pieces_of(call: Call) -> list[Step | Pieces]:
    """The steps of a call, those of equal shape together."""
    spec, mask = call.spec, call.mask
    if mask is None or spec.bias is not None or spec.dropout or isinstance(call.offset, Tensor):
        return list(steps_of(call))
    offset = call.offset
    key = ("pieces", spec.queries, spec.keys, offset, spec.batch, spec.kv_heads, max(spec.head_dim, spec.value_dim))
    return mask.remember(key, offset, lambda: _build(call, mask, offset))


def _build(call: Call, mask: Mask, offset: int) -> list[Step | Pieces]:
    spec = call.spec
    if mask.readable() and mask.heads == 1:
        found = _periodic_steps(mask, spec, offset)
        if found is not None:
            return found
    steps = steps_of(call)
    return list(_grouped([_Placed(step, 0, 0, 1) for step in steps], spec)) if len(steps) > 1 else list(steps)


def _periodic_steps(mask: Mask, spec: CallSpec, offset: int) -> list[Step | Pieces] | None:
    """The steps of a mask with a period: of its classes, and of what it is joined to by ``|``."""
    plain: Mask | None = None
    periodic = _periodic(mask)
    if periodic is None:
        joined = _union(mask)
        if joined is None:
            return None
        plain, other = joined
        periodic = _periodic(other & ~plain)
    if periodic is None or periodic[0] > min(MOST_CLASSES, spec.queries):
        return None
    period, rest = periodic
    sizes = (spec.queries, spec.keys, offset, spec.batch)
    intervals = None if rest is None else rest.rows(*sizes)
    if rest is not None and intervals is None:
        return None
    placed: list[_Placed] = []
    if plain is not None:
        first = plain.rows(*sizes)
        if first is None:
            return None
        for g in range(first.lo.shape[0]):
            item = None if first.lo.shape[0] == 1 else g
            placed += [_Placed(step, 0, 0, 1) for step in from_intervals(item, first.lo[g], first.hi[g])]
    lo = np.zeros((1, 1, spec.queries), np.int64) if intervals is None else intervals.lo
    hi = np.full((1, 1, spec.queries), spec.keys, np.int64) if intervals is None else intervals.hi
    for g in range(lo.shape[0]):
        item = None if lo.shape[0] == 1 else g
        for row in range(period):
            key = (row + offset) % period
            # the keys key, key + period, …: how many of them lie below each end
            below = [-((key - ends[g, :, row::period]) // period) for ends in (lo, hi)]
            for step in from_intervals(item, *(np.maximum(ends, 0) for ends in below)):
                placed.append(_Placed(step._replace(again=step.again or plain is not None), row, key, period))
    return list(_grouped(placed, spec))


def _periodic(mask: Mask) -> tuple[int, Mask | None] | None:
    """(s, rest) where a mask keeps pairs with (i - j) mod s = 0 that the rest keeps."""
    parts = mask.conjuncts
    for at, part in enumerate(parts):
        if part.period is not None:
            rest = parts[:at] + parts[at + 1 :]
            return part.period, functools.reduce(operator.and_, rest) if rest else None
    return None


def _union(mask: Mask) -> tuple[Mask, Mask] | None:
    """A mask as one without a period, and one with it."""
    parts = mask.conjuncts
    for at, part in enumerate(parts):
        plain = [one for one in part.disjuncts if _periodic(one) is None]
        periodic = [one for one in part.disjuncts if _periodic(one) is not None]
        if plain and len(periodic) == 1:
            rest = parts[:at] + parts[at + 1 :]
            sides = functools.reduce(operator.or_, plain), periodic[0]
            first, second = (functools.reduce(operator.and_, [side, *rest]) for side in sides)
            return first, second
    return None


class _Placed(NamedTuple):
    """A step of a class of rows and keys: those ``stride`` apart, from ``row`` and ``key`` on."""

    step: Step
    row: int
    key: int
    stride: int


def _grouped(placed: list[_Placed], spec: CallSpec) -> Iterator[Step | Pieces]:
    """Equal steps at equal distances together; what merges with the rows of others comes last."""
    alike: dict[tuple[object, ...], list[tuple[int, _Placed]]] = {}
    single: list[Step | Pieces] = []
    for each in placed:
        step = each.step
        if step.lo is None or step.hi is None:
            single.append(step)
            continue
        lo, hi = _gathered(step)
        shape = (step.rows, tuple((run.stop - run.start, run.full) for run in step.runs), each.stride)
        sign = (step.again, step.batch, step.kind, shape, lo.tobytes(), hi.tobytes())
        alike.setdefault(sign, []).append((each.row + step.start * each.stride, each))
    groups = [group for found in alike.values() for group in _evenly_spaced(found)]
    made = [*single, *(part for group in groups for part in _joined(group, spec))]
    yield from (step for step in made if not step.again)
    yield from (step for step in made if step.again)


def _gathered(step: Step) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The intervals of a step counted in its keys side by side."""
    assert step.lo is not None and step.hi is not None
    starts = np.array([run.start for run in step.runs])
    widths = np.array([run.stop - run.start for run in step.runs])
    moved = np.concatenate([[0], np.cumsum(widths)[:-1]]) - starts
    used = step.lo < step.hi
    at = moved[np.clip(np.searchsorted(starts, step.lo, side="right") - 1, 0, None)]
    return np.where(used, step.lo + at, 0), np.where(used, step.hi + at, 0)


def _evenly_spaced(found: list[tuple[int, _Placed]]) -> Iterator[list[_Placed]]:
    """Runs of steps whose rows, and the keys of each of their spans, are equally far from one to the next."""
    found.sort(key=lambda pair: pair[0])
    group: list[_Placed] = []
    last: list[int] = []
    moved: list[int] | None = None
    for row, each in found:
        here = [row, *(each.key + run.start * each.stride for run in each.step.runs)]
        step = [b - a for a, b in zip(last, here, strict=True)] if group else None
        if step is not None and (moved is None or step == moved) and _can_be_views(step, each):
            moved = step
        elif group:
            yield group
            group, moved = [], None
        group.append(each)
        last = here
    if group:
        yield group


def _can_be_views(step: list[int], each: _Placed) -> bool:
    """Spans that follow the rows, in whole steps or between each other; or that stay where they are."""
    return all(moved == 0 or (moved > 0 and (moved < each.stride or moved % each.stride == 0)) for moved in step[1:])


def _joined(group: list[_Placed], spec: CallSpec) -> Iterator[Step | Pieces]:
    step, row, key, stride = group[0]
    if len(group) == 1 and stride == 1:
        yield step
        return
    width = step.width
    numbers = spec.kv_heads * (spec.batch if step.batch is None else 1) * width * max(spec.head_dim, spec.value_dim)
    lo, hi = _gathered(step)
    full = step.kind == "rect"
    one = Step(None, 0, step.rows, (Run(0, width, full),), step.kind, lo, hi)
    at_once = max(1, AT_ONCE // numbers)
    other = group[min(1, len(group) - 1)]
    spans = tuple(
        Span(key + a.start * stride, other.key - key + (b.start - a.start) * stride, a.stop - a.start)
        for a, b in zip(step.runs, other.step.runs, strict=True)
    )
    at = row + step.start * stride
    row_step = other.row + other.step.start * stride - at
    yield from Pieces(one, len(group), at, row_step, spans, stride, step.batch, step.again).cut(at_once)
