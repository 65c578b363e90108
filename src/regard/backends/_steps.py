"""What one kernel call computes: some rows of a call over some of its keys, in pieces of equal shape.

A ``Step`` is one piece, or several at equal distances: those are strided views, so that a band (whose windows of keys
overlap), equal documents and every s-th key need no copy of the keys. ``Gathered`` pieces stand anywhere on a grid of
blocks, and are copied next to each other. Both answer the same questions, which ``_tiled`` asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.spec import Call, CallSpec
from regard.statistics import merge

# tensors of query, key and value; or the gradient of the output, the output and the log-sum-exp
Three = tuple[Tensor, Tensor, Tensor]


class Run(NamedTuple):
    start: int
    stop: int
    full: bool  # every row of the step sees all of it


def side_by_side(ranges: Iterable[tuple[int, ...]]) -> Iterator[tuple[slice, slice]]:
    """Ranges (start, stop, …), each with its place where all are put next to each other."""
    at = 0
    for start, stop, *_ in ranges:
        yield slice(start, stop), slice(at, at + stop - start)
        at += stop - start


def tokens_of(tensor: Tensor, ranges: Sequence[tuple[int, ...]]) -> Tensor:
    """Ranges of the tokens of [batch, head, token, …] next to each other; a view where there is one."""
    if len(ranges) == 1:
        start, stop, *_ = ranges[0]
        return tensor[:, :, start:stop]
    return torch.cat([tensor[:, :, start:stop] for start, stop, *_ in ranges], 2)


class Step(NamedTuple):
    """Rows and the runs of keys that they may see. Three kinds:

      rect      every row sees every key of the runs              -> no mask at all
      triangle  as many rows as keys, row r sees keys 0..r        -> a fused kernel's causal flag
      tile      anything else                                     -> a small mask over the step

    Of several pieces one is described; ``at`` and ``far`` say where the first is, and how far each is from the one
    before: the rows, and each run. ``stride``: from a row to the next, and from a key to the next. ``listed``: the
    runs count these keys, which are copied next to each other.
    """

    batch: int | None  # None: all items alike
    start: int
    stop: int
    runs: tuple[Run, ...]
    kind: str
    lo: NDArray[np.int64] | None  # [K, rows] permitted intervals, when the mask has that form
    hi: NDArray[np.int64] | None
    merges: bool = False  # the rows are in a step before this one too: results merge by log-sum-exp
    number: int = 1
    stride: int = 1
    at: tuple[int, ...] = ()
    far: tuple[int, ...] = ()
    listed: Tensor | None = None

    @property
    def piece(self) -> Step:
        """What a kernel is told."""
        return self

    @property
    def items(self) -> slice:
        """Of the call's batch."""
        return slice(None) if self.batch is None else slice(self.batch, self.batch + 1)

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def width(self) -> int:
        return sum(run.stop - run.start for run in self.runs)

    @property
    def size(self) -> tuple[tuple[Any, ...], int]:
        """A kind of steps, of which the largest takes the most memory, and how large this one is."""
        return (self.kind, self.rows, len(self.runs) > 1, self.batch is None), self.number * self.rows * self.width

    @property
    def has_empty_rows(self) -> bool:
        """Whether a row of the step may see nothing; True when that is not known."""
        if self.lo is None or self.hi is None:
            return self.kind == "tile"
        return bool((self.lo >= self.hi).all(axis=0).any())

    @property
    def places(self) -> tuple[int, ...]:
        """The first row, and the first key of each run; of the first piece."""
        return self.at or (self.start, *(run.start for run in self.runs))

    def visible(self, run: Run, rows: range) -> tuple[int, int]:
        """The part of a run that holds all its keys that some rows see."""
        if self.lo is None or self.hi is None or self.lo.shape[0] > 1:
            return run.start, run.stop
        at = slice(rows.start - self.start, rows.stop - self.start)
        return max(run.start, int(self.lo[0, at].min())), min(run.stop, int(self.hi[0, at].max()))

    def cut_pairs(self, pairs: Tensor, items: slice, heads: slice) -> Tensor:
        """Of pairs [B or 1, H or 1, rows, columns] those of some items and heads; a step for one item has no others."""
        if pairs.shape[0] > 1 and self.batch is None:
            pairs = pairs[items]
        return pairs[:, heads] if pairs.shape[1] > 1 else pairs

    @property
    def is_slice(self) -> bool:
        """One piece of neighbouring rows: tensors keep the call's shape."""
        return not self.far

    def is_whole(self, spec: CallSpec) -> bool:
        """Whether the step is the whole call: all items, rows and keys."""
        keys = len(self.runs) == 1 and self.runs[0].start == 0 and self.runs[0].stop == spec.keys
        return keys and self.listed is None and self.is_slice and self.batch is None and self.rows == spec.queries

    def lines(self, spec: CallSpec) -> int:
        """Rows of all pieces, items and heads."""
        return (spec.batch if self.batch is None else 1) * spec.heads * self.number * self.rows

    def pairs(self, spec: CallSpec) -> float:
        """Query-key pairs that are computed."""
        return self.lines(spec) * self.width / (2 if self.kind == "triangle" else 1)

    def cut(self, most: int) -> Iterator[Step]:
        """The same, this many pieces at a time."""
        for start in range(0, self.number, most):
            at = tuple(first + start * far for first, far in zip(self.places, self.far, strict=True))
            yield self._replace(number=min(most, self.number - start), at=at)

    def local(self, call: Call) -> Call:
        """The call as a kernel sees it: of several pieces, an item for each key head and a key head for each piece."""
        if self.is_slice:
            return call
        spec = call.spec
        items, heads = (spec.batch if self.batch is None else 1), self.number * (spec.heads // spec.kv_heads)
        local = spec._replace(
            batch=items * spec.kv_heads, heads=heads, kv_heads=self.number, queries=self.rows, keys=self.width
        )
        return call.replace(spec=local, sinks=None)

    def inputs(self, call: Call, room: Room) -> Three:
        """Query, key and value of the step; views where they are one run."""
        key, value = call.key, call.value
        if self.listed is not None:
            key, value = room.listed("key", key, self.listed), room.listed("value", value, self.listed)
        elif not self.is_slice:
            key, value = room.compact("key", key), room.compact("value", value)
        query = self.take_rows(room, "query", call.query, call.spec.kv_heads)
        return query, self._take_keys(key), self._take_keys(value)

    def take_rows(self, room: Room, name: str, tensor: Tensor, kv_heads: int) -> Tensor:
        """The rows of [batch, head, token, ...] as a kernel takes them."""
        rows = self._rows_of(tensor, kv_heads)
        return rows if self.is_slice else rows.flatten(2, 3).flatten(0, 1)

    def write(self, results: tuple[Tensor, Tensor], parts: tuple[Tensor, Tensor], kv_heads: int) -> None:
        """Put output and log-sum-exp of the step where they belong, or merge them with what is there."""
        out, lse = (self._rows_of(result, kv_heads) for result in results)
        part, part_lse = parts[0].view(out.shape), parts[1].view(lse.shape)
        if self.merges:
            merge(out, lse, part, part_lse)
        else:
            out.copy_(part)
            lse.copy_(part_lse)

    def add(self, totals: list[Tensor], parts: Three) -> None:
        """Put or add the gradients of the step's query, key and value to those of the call."""
        rows = self._rows_of(totals[0], totals[1].shape[1])
        part = parts[0].view(rows.shape)
        if self.merges:
            rows.add_(part)
        else:
            rows.copy_(part)
        self._add_keys(totals[1], parts[1])
        self._add_keys(totals[2], parts[2])

    def _items_of(self, tensor: Tensor) -> Tensor:
        return tensor if self.batch is None else tensor[self.items]

    def _rows_of(self, tensor: Tensor, kv_heads: int) -> Tensor:
        """A view; of several pieces [item, key head, piece, head of a group, row, ...]."""
        tensor = self._items_of(tensor)
        if self.is_slice:
            return tensor[:, :, self.start : self.stop]
        item, head, token, *rest = tensor.stride()
        group = tensor.shape[1] // kv_heads
        return tensor.as_strided(
            (tensor.shape[0], kv_heads, self.number, group, self.rows, *tensor.shape[3:]),
            (item, group * head, self.far[0] * token, head, self.stride * token, *rest),
            tensor.storage_offset() + self.at[0] * token,
        )

    def _keys_of(self, tensor: Tensor, run: int, start: int, width: int) -> Tensor:
        """``width`` keys from ``start`` on, of a run of each piece: a view [item, key head, piece, key, dim]."""
        tensor = self._items_of(tensor)
        item, head, token, dim = tensor.stride()
        first = self.at[1 + run] + start * self.stride
        return tensor.as_strided(
            (*tensor.shape[:2], self.number, width, tensor.shape[3]),
            (item, head, self.far[1 + run] * token, self.stride * token, dim),
            tensor.storage_offset() + first * token,
        )

    def _take_keys(self, tensor: Tensor) -> Tensor:
        """The keys of [batch, key head, token, dim] as a kernel takes them, runs side by side."""
        if self.is_slice:
            return tokens_of(self._items_of(tensor), self.runs)
        sizes = [run.stop - run.start for run in self.runs]
        parts = [self._keys_of(tensor, n, 0, size).flatten(0, 1) for n, size in enumerate(sizes)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _add_keys(self, total: Tensor, part: Tensor) -> None:
        """Add what each piece gives to its keys; windows that overlap are cut into parts that do not."""
        if not self.is_slice:
            part = torch.unflatten(part, 0, (-1, total.shape[1]))
        for n, (keys, place) in enumerate(side_by_side(self.runs)):
            own = part[..., place, :]
            if self.listed is not None:
                self._items_of(total).index_add_(2, self.listed[keys], own.to(total.dtype))
                continue
            if self.is_slice:
                self._items_of(total)[:, :, keys] += own
                continue
            width, step = keys.stop - keys.start, self.far[1 + n]
            if step == 0:
                self._keys_of(total, n, 0, width)[:, :, 0].add_(own.sum(2))
                continue
            apart = step * self.number <= self.stride  # each piece has the keys between those of the others
            most = width if apart else max(1, step // self.stride)  # single keys of different pieces always are apart
            for start in range(0, width, most):
                some = own[..., start : start + most, :]
                self._keys_of(total, n, start, some.shape[3]).add_(some)


class Gathered(NamedTuple):
    """Pieces of whole blocks of rows and keys; blocks are numbered through all items and heads."""

    piece: Step  # one of them, from row and key 0 on
    block: int
    number: int
    group: int  # heads that share the keys of a piece
    rows: Tensor  # [number · group · blocks of a piece]
    keys: Tensor  # [number · blocks of a piece]
    first: int | None  # the first block of rows, where the others follow it one by one: no need to gather them

    @property
    def merges(self) -> bool:
        """Triangles come after whole blocks, whose rows they share."""
        return self.piece.kind == "triangle"

    @property
    def size(self) -> tuple[tuple[Any, ...], int]:
        kind, one = self.piece.size
        return (*kind, self.first is None), self.number * one

    def lines(self, spec: CallSpec) -> int:
        return self.number * self.group * self.piece.rows

    def pairs(self, spec: CallSpec) -> float:
        return self.lines(spec) * self.piece.width / (2 if self.merges else 1)

    def local(self, call: Call) -> Call:
        rows, keys = self.piece.rows, self.piece.width
        local = call.spec._replace(batch=self.number, heads=self.group, kv_heads=1, queries=rows, keys=keys)
        return call.replace(spec=local, sinks=None)

    def inputs(self, call: Call, room: Room) -> Three:
        query = self.take_rows(room, "query", call.query, call.spec.kv_heads)
        return query, self.take_keys(room, "key", call.key), self.take_keys(room, "value", call.value)

    def take_keys(self, room: Room, name: str, tensor: Tensor, into: str | None = None) -> Tensor:
        """[piece, 1, key, dim], in memory that is used again for what is put ``into`` the same."""
        flat = room.in_blocks(name, tensor, self.block).flatten(0, 1).flatten(1)
        found = room.of(into or name, len(self.keys), flat.shape[1], flat)
        torch.index_select(flat, 0, self.keys, out=found)
        return found.view(self.number, 1, -1, tensor.shape[-1])

    def take_rows(self, room: Room, name: str, tensor: Tensor, kv_heads: int) -> Tensor:
        """[piece, head of a group, row, ...]; a view of rows that follow each other."""
        return self._rows_of(room.in_blocks(name, tensor, self.block))

    def write(self, results: tuple[Tensor, Tensor], parts: tuple[Tensor, Tensor], kv_heads: int) -> None:
        if self.merges:
            out, lse = (self._rows_of(_in_blocks(result, self.block)) for result in results)
            merge(out, lse, *parts)
            parts = out, lse
        for result, part in zip(results, parts, strict=True):
            self._put(result, self.rows, part, self.first)

    def add(self, totals: list[Tensor], parts: Three) -> None:
        self._put(totals[0], self.rows, parts[0], self.first, add=self.merges)
        self._put(totals[1], self.keys, parts[1], add=True)
        self._put(totals[2], self.keys, parts[2], add=True)

    def in_place(self, total: Tensor) -> Tensor | None:
        """The rows of a result as a view, where they are one."""
        blocks = _in_blocks(total, self.block)
        return self._rows_of(blocks) if self.first is not None and blocks.is_contiguous() else None

    def _rows_of(self, blocks: Tensor) -> Tensor:
        if not blocks.is_contiguous():
            rows = blocks[_places(self.rows, blocks)]
        elif self.first is not None:
            rows = blocks.flatten(0, 1)[self.first : self.first + len(self.rows)]
        else:  # whole blocks as rows: one copy each
            rows = blocks.flatten(0, 1).flatten(1).index_select(0, self.rows)
        return rows.view(self.number, self.group, -1, *blocks.shape[3:])

    def _put(
        self, total: Tensor, numbers: Tensor, part: Tensor, first: int | None = None, *, add: bool = False
    ) -> None:
        """Write to blocks, or add: a key block may be in many pieces."""
        blocks = _in_blocks(total, self.block)
        part = part.to(total.dtype)
        if not blocks.is_contiguous():
            blocks.index_put_(_places(numbers, blocks), part.reshape(-1, *blocks.shape[2:]), accumulate=add)
            return
        flat = blocks.flatten(0, 1).flatten(1)
        if first is None:
            source = part.reshape(-1, flat.shape[1])
            (flat.index_add_ if add else flat.index_copy_)(0, numbers, source)
            return
        rows = flat[first : first + len(numbers)].view(part.shape)
        if add:
            rows.add_(part)
        elif rows.data_ptr() != part.data_ptr():  # what was merged or computed in place is there already
            rows.copy_(part)


AnyStep = Step | Gathered


def _in_blocks(tensor: Tensor, block: int) -> Tensor:
    """[batch, head, token, ...] as [item · head, block, size, ...], without the tokens that fill no block; a view where
    the strides allow it."""
    count = tensor.shape[2] // block
    return torch.unflatten(tensor.flatten(0, 1)[:, : count * block], 1, (count, block))


def _places(numbers: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    return numbers // blocks.shape[1], numbers % blocks.shape[1]


class Room:
    """Memory of one pass over a call's steps. What is gathered, and tiles of logits, use the same places again and
    again: fresh pages would cost more than the copying."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._shaped: dict[tuple[str, int], Tensor] = {}

    def of(self, name: str, rows: int, width: int, like: Tensor) -> Tensor:
        """[rows, width], not cleared."""
        numbers = rows * width
        kept = self._kept.get(name)
        if kept is None or kept.numel() < numbers:
            self._kept.pop(name, None)
            del kept  # before there is another
            kept = self._kept[name] = like.new_empty(numbers)
        return kept[:numbers].view(rows, width)

    def compact(self, name: str, tensor: Tensor) -> Tensor:
        """Item and head can be counted through: overlapping windows are views, and not copied window by window."""
        if tensor.shape[0] == 1 or tensor.stride(0) == tensor.shape[1] * tensor.stride(1):
            return tensor
        return self._contiguous(name, 0, tensor)

    def listed(self, name: str, tensor: Tensor, keys: Tensor) -> Tensor:
        """Some keys of [batch, head, token, dim] next to each other; all steps of a call list the same."""
        found = self._shaped.get((name, -1))
        if found is None:
            found = self._shaped[name, -1] = tensor.index_select(2, keys)
        return found

    def in_blocks(self, name: str, tensor: Tensor, block: int) -> Tensor:
        """[item · head, block, size, ...], contiguous."""
        return self._contiguous(name, block, tensor)

    def _contiguous(self, name: str, block: int, tensor: Tensor) -> Tensor:
        found = self._shaped.get((name, block))
        if found is None:
            found = self._shaped[name, block] = (_in_blocks(tensor, block) if block else tensor).contiguous()
        return found
