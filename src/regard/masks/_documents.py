"""Documents packed into one row of tokens: a query sees the keys of its own document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.masks._arguments import DTYPE_NAMES, describe, plain, shape_of
from regard.masks._base import Mask, Structure
from regard.masks._facts import KeySets
from regard.masks._flags import Fused
from regard.masks._flex import Frame, Predicate, several
from regard.masks._grid import Grid
from regard.masks._intervals import Spans, Strip, Whole
from regard.masks._padding import contents


class Runs(NamedTuple):
    """One item's keys as runs: run k covers edges[k] … edges[k + 1] − 1, and its tokens see keys lo[k] … hi[k] − 1."""

    edges: Whole
    lo: Whole
    hi: Whole


class Documents(Mask):
    """Either ``lengths`` [documents] (all items alike) or ``ids`` [S] or [B, S] (negative = padding)."""

    kind = "documents"
    _countable = _of_intervals = True

    def __init__(self, by: str, tensor: Tensor, made: bool = False) -> None:
        shape = shape_of(tensor)
        batch = shape[0] if len(shape) == 2 else 1
        super().__init__((self.kind, by, shape, DTYPE_NAMES[tensor.dtype]), (tensor,), batch=batch, made=made)
        self.by = by

    @classmethod
    def _rebuild(cls, structure: Structure, tensors: Iterator[Tensor]) -> Mask:
        return cls(structure[1], next(tensors))

    @property
    def lengths(self) -> Tensor | None:
        return self.tensors[0] if self.by == "lengths" else None

    @property
    def ids(self) -> Tensor | None:
        return self.tensors[0] if self.by == "ids" else None

    def _see(self, grid: Grid) -> Tensor:
        queries, keys = self._documents_of(grid.i, grid), self._documents_of(grid.j, grid)
        inside = (grid.i >= 0) & (grid.i < grid.S)
        return (queries == keys) & (keys >= 0) & inside

    def _documents_of(self, at: Tensor, grid: Grid) -> Tensor:
        """The document at each position (any number where the position is outside), [B or 1, 1, rows, columns]."""
        tensor = self._on(grid.device)
        if self.by == "lengths":
            ends = tensor.to(torch.int64).cumsum(0)
            # The zero belongs to the same transform as the lengths: searchsorted warns about a mixture under vmap.
            place = at.contiguous() + torch.zeros_like(ends[:1])
            found = torch.searchsorted(ends, place, right=True)
            return torch.where(found < ends.shape[0], found, -1)
        ids = tensor if tensor.dim() == 2 else tensor.unsqueeze(0)
        item = torch.arange(ids.shape[0], device=grid.device).reshape(-1, 1, 1, 1)
        return ids[item, at.clamp(0, grid.S - 1)]

    def runs(self, S: int) -> list[Runs] | None:
        """Each item's documents as runs of keys; None when a document comes back after another, or is unreadable."""
        if torch.compiler.is_compiling() or not plain(self.tensors[0]):
            return None
        return self.remember(("runs", S), 0, self._find_runs)

    def _find_runs(self) -> list[Runs] | None:
        numbers = self.tensors[0].detach().numpy()
        if self.by == "lengths":
            edges = np.concatenate([[0], np.cumsum(numbers[numbers > 0], dtype=np.int64)]).astype(np.int64)
            return [Runs(edges, edges[:-1], edges[1:])]
        found = [_runs_of(row) for row in np.atleast_2d(numbers)]
        return None if any(runs is None for runs in found) else [runs for runs in found if runs is not None]

    def _spans(self, strip: Strip) -> Spans | None:
        runs = self.runs(strip.S)
        if runs is None:
            return None
        runs = runs if len(runs) == 1 else runs[strip.groups.start : strip.groups.stop]
        count = max(len(runs), len(strip.offsets))
        lo = np.zeros((count, strip.stop - strip.start), dtype=np.int64)
        hi = np.zeros_like(lo)
        for g in range(count):
            first = int(strip.offsets[g % len(strip.offsets), 0]) + strip.start
            _fill(runs[g % len(runs)], first, lo[g], hi[g])
        return [(lo, np.minimum(hi, strip.S))]

    def _flags(self) -> Fused | None:
        return Fused(documents=self)

    def _key_sets(self, S: int, device: torch.device) -> KeySets:
        if self.by == "lengths":
            return None, None
        padded = self._on(device) < 0
        return (padded if padded.dim() == 2 else padded.unsqueeze(0)), None

    def _marks(self) -> bool:
        if self.by == "lengths":
            return False
        if torch.compiler.is_compiling() or not plain(self.tensors[0]):
            return True
        return self.remember("marks", 0, lambda: bool((self.tensors[0] < 0).any()))

    def _per_head(self, B: int, H: int) -> Mask | None:
        return None if self.by == "lengths" else Documents("ids", self.tensors[0].repeat_interleave(H, 0), self._made)

    def ids_of(self, S: int, device: torch.device) -> Tensor:
        """[B or 1, S]: the document of each key, below 0 for padding."""
        tensor = self._on(device)
        if self.by == "ids":
            # Unsigned numbers could not hold what stands for no document.
            tensor = tensor.to(torch.int64 if tensor.dtype == torch.int64 else torch.int32)
            return tensor if tensor.dim() == 2 else tensor.unsqueeze(0)
        ends = tensor.to(torch.int64).cumsum(0)
        found = torch.searchsorted(ends, torch.arange(S, device=device), right=True)
        return torch.where(found < ends.shape[0], found, -1).unsqueeze(0)

    def comes_back(self) -> bool:
        """Whether a document goes on after another one; between two halves of one there may be padding."""
        if self.by == "lengths":
            return False

        def find() -> bool:
            met = [torch.unique_consecutive(row[row >= 0]) for row in self.ids_of(0, self.tensors[0].device)]
            return any(len(torch.unique(row)) < len(row) for row in met)

        return self.remember("comes back", 0, find)

    def _predicate(self, frame: Frame) -> Predicate:
        keys, place = self.ids_of(frame.keys, frame.device), frame.positions
        items = max(len(keys), len(place))
        place = place.expand(items, -1)
        queries = keys.expand(items, -1).gather(1, place.clamp(0, frame.keys - 1))
        # Queries and keys without a document get different numbers, so that they are equal to nothing.
        queries = torch.where((place >= 0) & (place < frame.keys) & (queries >= 0), queries, -1)
        keys = torch.where(keys >= 0, keys, -2)
        q_each, k_each = several(queries, 0), several(keys, 0)
        return Predicate((self.kind, q_each, k_each), lambda b, h, q, k: queries[b * q_each, q] == keys[b * k_each, k])

    def _check_shape(self, B: int, H: int, L: int, S: int) -> None:
        if self.by == "ids":
            if self.tensors[0].shape[-1] != S:
                raise ValueError(f"the mask {self!r} has ids for {self.tensors[0].shape[-1]} keys, the call has {S}")
        elif not torch.compiler.is_compiling() and plain(self.tensors[0]):
            total = self.remember("total", 0, lambda: int(self.tensors[0].sum()))
            if total != S:
                raise ValueError(f"the lengths of {self!r} add up to {total}, but the call has {S} keys")

    def _text(self) -> str:
        return f"documents({self.by}={contents(self.tensors[0], self.by)})"


def _runs_of(ids: Whole) -> Runs | None:
    if len(ids) == 0:
        return Runs(np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))
    edges = np.concatenate([[0], np.flatnonzero(ids[1:] != ids[:-1]) + 1, [len(ids)]]).astype(np.int64)
    names = ids[edges[:-1]]
    real = names >= 0
    if len(np.unique(names[real])) < np.count_nonzero(real):
        return None
    return Runs(edges, edges[:-1] * real, edges[1:] * real)


def _fill(runs: Runs, first: int, lo: Whole, hi: Whole) -> None:
    """Write the run around each position first, first + 1, … into lo and hi; where there is none they stay 0."""
    begin, end = max(first, 0), min(first + len(lo), int(runs.edges[-1]))
    if begin >= end:
        return
    k = slice(int(np.searchsorted(runs.edges, begin, "right")) - 1, int(np.searchsorted(runs.edges, end, "left")))
    edges = np.clip(runs.edges[k.start : k.stop + 1], begin, end)
    times = edges[1:] - edges[:-1]
    lo[begin - first : end - first] = np.repeat(runs.lo[k], times)
    hi[begin - first : end - first] = np.repeat(runs.hi[k], times)


def filled_up(lengths: Any) -> Any:
    """Lists of different lengths, one for each item, with zeros at their ends; anything else as it is."""
    if not isinstance(lengths, (list, tuple)) or not lengths or not all(isinstance(x, (list, tuple)) for x in lengths):
        return lengths
    most = max(len(item) for item in lengths)
    return [[*item, *[0] * (most - len(item))] for item in lengths]


def ids_from(lengths: Tensor) -> Tensor:
    """[batch, S] from the lengths [batch, documents] of each item, −1 behind the last document of a shorter item."""
    if torch.compiler.is_compiling() or not plain(lengths):
        raise ValueError(
            "masks.documents: lengths of each item, [batch, documents], are read on the CPU in eager mode; there give "
            f"ids=, got {describe(lengths)} on {lengths.device}"
        )
    ends = lengths.to(torch.int64).cumsum(1)
    at = torch.arange(int(ends[:, -1].max()) if ends.numel() else 0).expand(len(ends), -1)
    found = torch.searchsorted(ends, at.contiguous(), right=True)
    return torch.where(found < ends.shape[1], found, -1)
