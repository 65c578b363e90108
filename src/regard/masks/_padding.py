"""Key padding: each batch item has its own number of real keys."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from regard.masks._arguments import DTYPE_NAMES, plain, shape_of
from regard.masks._base import Mask, Structure
from regard.masks._facts import KeySets
from regard.masks._flags import Fused
from regard.masks._flex import Frame, Predicate, several
from regard.masks._grid import Grid
from regard.masks._intervals import Spans, Strip


class Padding(Mask):
    """``lengths`` real keys in each item, at the start (side "right") or at the end (side "left")."""

    kind = "padding"
    _countable = _of_intervals = _about_keys = True

    def __init__(self, lengths: Tensor, side: str, made: bool = False) -> None:
        shape = shape_of(lengths)
        super().__init__((self.kind, side, shape, DTYPE_NAMES[lengths.dtype]), (lengths,), batch=shape[0], made=made)
        self.side = self._side = side

    @classmethod
    def _rebuild(cls, structure: Structure, tensors: Iterator[Tensor]) -> Mask:
        return cls(next(tensors), structure[1])

    @property
    def lengths(self) -> Tensor:
        return self.tensors[0]

    def lengths_on(self, device: torch.device) -> Tensor:
        """The lengths where a kernel reads them; those of a list are copied there once."""
        return self._on(device)

    def _seen(self, j: Tensor, S: int) -> Tensor:
        lengths = self._on(j.device).to(torch.int64).unsqueeze(1)  # S - lengths would wrap in uint8
        return j < lengths if self.side == "right" else j >= S - lengths

    def _see(self, grid: Grid) -> Tensor:
        return self._seen(grid.j, grid.S)[:, None, None]

    def _spans(self, strip: Strip) -> Spans | None:
        if not plain(self.lengths):
            return None
        lengths = strip.clip(strip.pick(self.lengths.detach().to(torch.int64).numpy()[:, None]))
        if self.side == "right":
            return [(np.zeros_like(lengths), lengths)]
        return [(strip.S - lengths, np.full_like(lengths, strip.S))]

    def _flags(self) -> Fused | None:
        return Fused(padding=self)

    def _key_sets(self, S: int, device: torch.device) -> KeySets:
        seen = self._seen(torch.arange(S, device=device), S)
        return ~seen, seen

    def _marks(self) -> bool:
        return True

    def _per_head(self, B: int, H: int) -> Mask:
        return Padding(self.lengths.repeat_interleave(H), self.side, self._made)

    def _predicate(self, frame: Frame) -> Predicate:
        edge = self.lengths.to(frame.device, torch.int64).clamp(max=frame.keys).to(torch.int32)
        each = several(edge, 0)
        if self.side == "right":
            return Predicate((self.kind, self.side, each), lambda b, h, q, k: k < edge[b * each])
        edge = frame.keys - edge
        return Predicate((self.kind, self.side, each), lambda b, h, q, k: k >= edge[b * each])

    def _text(self) -> str:
        side = "" if self.side == "right" else f", side={self.side!r}"
        return f"padding({contents(self.lengths, 'lengths')}{side})"


def contents(tensor: Tensor, what: str) -> str:
    """A few numbers written out, more of them (or unreadable ones) by their count."""
    if tensor.dim() == 1 and tensor.numel() <= 8 and not torch.compiler.is_compiling() and plain(tensor):
        return str(tensor.tolist())
    return f"<{what} {list(tensor.shape)}>"
