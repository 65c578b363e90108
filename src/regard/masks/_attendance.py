"""Masks that are the caller's own tensor: keep, drop and from_additive."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.masks import _intervals
from regard.masks._arguments import DTYPE_NAMES, plain, shape_of
from regard.masks._base import Mask, Structure
from regard.masks._blocks import states_of
from regard.masks._facts import KeySets
from regard.masks._flex import Frame, Predicate, lookup
from regard.masks._grid import Grid
from regard.masks._intervals import Spans, States, Strip, Whole

_MOST_RUNS = 4


class _Attendance(Mask):
    """A tensor [S], [L, S] or [B or 1, H or 1, L or 1, S or 1] over the call's rows and columns."""

    _by_call = True

    def __init__(self, tensor: Tensor) -> None:
        shape = shape_of(tensor)
        batch, heads = shape[:2] if len(shape) == 4 else (1, 1)
        super().__init__((self.kind, shape, DTYPE_NAMES[tensor.dtype]), (tensor,), batch, heads)
        self._about_keys = (1, *shape)[-2] == 1

    @classmethod
    def _rebuild(cls, structure: Structure, tensors: Iterator[Tensor]) -> Mask:
        return cls(next(tensors))

    @staticmethod
    def _permits(values: Tensor) -> Tensor:
        """True = may attend, from a part of the caller's tensor."""
        raise NotImplementedError

    def _four(self) -> Tensor:
        tensor = self.tensors[0]
        return tensor if tensor.dim() == 4 else tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape))

    def _see(self, grid: Grid) -> Tensor:
        part = self._four()
        if part.shape[2] != 1:
            part = part[:, :, grid.row_start : grid.row_stop]
        if part.shape[3] != 1:
            part = part[:, :, :, grid.col_start : grid.col_stop]
        return self._permits(part.to(grid.device))

    def _spans(self, strip: Strip) -> Spans | None:
        four = self._four()
        if four.shape[1] != 1 or 1 not in four.shape[2:] or not plain(self.tensors[0]):
            return None
        if four.shape[3] == 1:  # a row sees everything or nothing
            seen = strip.pick(self._permits(four.detach())[:, 0, :, 0].numpy())
            seen = seen if seen.shape[1] == 1 else seen[:, strip.start : strip.stop]
            return [(_intervals.ZERO, seen * np.int64(strip.S))]
        return self.remember(("runs", strip.S, strip.groups), 0, lambda: self._runs(four, strip))

    def _runs(self, four: Tensor, strip: Strip) -> Spans | None:
        seen = strip.pick(self._permits(four.detach())[:, 0, 0].numpy())
        seen = np.broadcast_to(seen, (len(seen), strip.S))
        edges = np.diff(seen.astype(np.int8), axis=1, prepend=0, append=0)
        slots = int((edges > 0).sum(axis=1).max(initial=0))
        if slots > _MOST_RUNS:
            return None
        lo = np.full((slots, len(seen), 1), strip.S, dtype=np.int64)
        hi = lo.copy()
        for g, row in enumerate(edges):
            starts, ends = np.flatnonzero(row > 0), np.flatnonzero(row < 0)
            lo[: len(starts), g, 0], hi[: len(ends), g, 0] = starts, ends
        return list(zip(lo, hi, strict=True))

    def _block_states(self, strip: Strip, block_q: int, block_k: int) -> States | None:
        if not plain(self.tensors[0]):
            return None
        four = self._four().detach()
        if four.shape[2] != 1:
            four = four[:, :, strip.start : strip.stop]
        if four.shape[0] != 1:
            four = four[strip.groups.start : strip.groups.stop]
        states = states_of(self._permits(four)[0].numpy(), block_q, block_k)
        return np.broadcast_to(states, (-(-(strip.stop - strip.start) // block_q), -(-strip.S // block_k)))

    def _count_below(self, strip: Strip, key: Whole) -> Whole | None:
        four = self._four()
        if four.shape[2] != 1 or not plain(self.tensors[0]):
            return None

        def count() -> NDArray[np.int32]:
            seen = self._permits(four.detach())[:, :, 0].expand(-1, -1, strip.S).numpy()
            below = np.zeros((*seen.shape[:2], strip.S + 1), dtype=np.int32)
            np.cumsum(seen, axis=2, dtype=np.int32, out=below[:, :, 1:])
            return below

        below = strip.pick(self.remember(("below", strip.S), 0, count))[0]
        found: Whole = below[strip.head if len(below) > 1 else 0][key].astype(np.int64)
        return found

    def _key_sets(self, S: int, device: torch.device) -> KeySets:
        four = self._four()
        if four.shape[2] != 1:
            return None, None
        seen = self._permits(four.to(device))[:, :, 0]
        wide = (seen.shape[0], S)
        return ~seen.any(dim=1).expand(wide), seen.all(dim=1).expand(wide)

    def _per_head(self, B: int, H: int) -> Mask | None:
        four = self._four()
        if 1 not in four.shape[2:]:  # a number for each pair is not repeated for each item
            return None
        return type(self)(four.expand(B, H, -1, -1).reshape(B * H, 1, *four.shape[2:]))

    def survives(self, window: int, sinks: int) -> bool:
        return self.tensors[0].dim() == 4 and self.tensors[0].shape[3] == 1

    def _predicate(self, frame: Frame) -> Predicate:
        look, kind = lookup(self.tensors[0].to(frame.device))
        permits = self._permits
        return Predicate((self.kind, *kind), lambda b, h, q, k: permits(look(b, h, q, k)))

    def _check_shape(self, B: int, H: int, L: int, S: int) -> None:
        shape = tuple(self._four().shape)
        for size, wanted, what in zip(shape, (B, H, L, S), ("batch items", "heads", "queries", "keys"), strict=True):
            if size not in (1, wanted):
                raise ValueError(
                    f"the mask {self!r} is for {size} {what}, but the call has {wanted}; "
                    f"it must broadcast to [B, H, L, S] = [{B}, {H}, {L}, {S}]{self._hint(B, S)}"
                )

    def _hint(self, B: int, S: int) -> str:
        if tuple(self.tensors[0].shape) != (B, S):
            return ""
        return "; if its first dim is the batch (one row of keys for each item), pass t[:, None, None, :]"

    def _text(self) -> str:
        return f"{self.kind}(<{DTYPE_NAMES[self.tensors[0].dtype]} {list(self.tensors[0].shape)}>)"


class Keep(_Attendance):
    kind = "keep"

    @staticmethod
    def _permits(values: Tensor) -> Tensor:
        return values


class Drop(_Attendance):
    kind = "drop"

    @staticmethod
    def _permits(values: Tensor) -> Tensor:
        return ~values


class Additive(_Attendance):
    kind = "from_additive"

    @staticmethod
    def _permits(values: Tensor) -> Tensor:
        return values == 0


def check_additive(tensor: Tensor) -> None:
    """Refuse a readable tensor that holds more than 0 and −inf (or the dtype's minimum)."""
    if tensor.requires_grad:
        raise ValueError(
            "masks.from_additive: the tensor requires grad, and a mask has no gradient; pass it as bias= instead"
        )
    if torch.compiler.is_compiling() or not plain(tensor):
        return
    fine = (tensor == 0) | (tensor == -torch.inf) | (tensor == torch.finfo(tensor.dtype).min)
    if not bool(fine.all()):
        odd = tensor[~fine].flatten()[0].item()
        raise ValueError(
            f"masks.from_additive: expected only 0 (may attend) and -inf or the smallest {DTYPE_NAMES[tensor.dtype]} "
            f"(forbidden), got {odd}; numbers that are added to the logits go to bias="
        )
