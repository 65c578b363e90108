"""Masks that are rules of positions alone, without tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.masks import _intervals
from regard.masks._base import Mask, Structure
from regard.masks._flags import Fused
from regard.masks._grid import Grid
from regard.masks._intervals import Spans, Strip
from regard.masks._strided import strided_block_states, strided_count_below

# Integers wrap around silently: a limit beyond this is as good as none, and adding it to a position stays in range.
_FAR = 2**62


class _Numbers(Mask):
    """A rule with a few numbers and nothing else."""

    def __init__(self, *numbers: int) -> None:
        super().__init__((self.kind, *numbers))

    @classmethod
    def _rebuild(cls, structure: Structure, tensors: Iterator[Tensor]) -> Mask:
        return cls(*structure[1:])

    def _text(self) -> str:
        return f"{self.kind}({', '.join(str(number) for number in self.structure[1:])})"


class Everything(_Numbers):
    kind = "everything"

    def _see(self, grid: Grid) -> Tensor:
        return torch.ones(1, 1, dtype=torch.bool, device=grid.device)

    def _spans(self, strip: Strip) -> Spans | None:
        return _intervals.same_for_all(0, strip.S)

    def _flags(self) -> Fused | None:
        return Fused()

    def _key_sets(self, S: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        return None, torch.ones(1, S, dtype=torch.bool, device=device)


class Causal(_Numbers):
    kind = "causal"

    def _see(self, grid: Grid) -> Tensor:
        return grid.j <= grid.i

    def _spans(self, strip: Strip) -> Spans | None:
        return [(_intervals.ZERO, strip.clip(strip.i + 1))]

    def _flags(self) -> Fused | None:
        return Fused(causal=True, right=0)


class Window(_Numbers):
    kind = "window"

    def __init__(self, left: int, right: int) -> None:
        super().__init__(left, right)
        self.left = left
        self.right = right

    def _see(self, grid: Grid) -> Tensor:
        left, right = min(self.left, _FAR), min(self.right, _FAR)
        return (grid.j >= grid.i - left) & (grid.j <= grid.i + right)

    def _spans(self, strip: Strip) -> Spans | None:
        left, right = min(self.left, _FAR), min(self.right, _FAR)
        return [(strip.clip(strip.i - left), strip.clip(strip.i + (right + 1)))]

    def _flags(self) -> Fused | None:
        return Fused(self.right == 0, self.left, self.right)

    def _text(self) -> str:
        right = f", right={self.right}" if self.right else ""
        return f"window(left={self.left}{right})"


class Prefix(_Numbers):
    kind = "prefix"

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.n = n

    def _see(self, grid: Grid) -> Tensor:
        return (grid.i < self.n) & (grid.j < self.n)

    def _spans(self, strip: Strip) -> Spans | None:
        return [(_intervals.ZERO, (strip.i < self.n) * min(self.n, strip.S))]

    def _key_sets(self, S: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        return (torch.arange(S, device=device) >= self.n).unsqueeze(0), None


class Columns(_Numbers):
    kind = "columns"

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.n = n

    def _see(self, grid: Grid) -> Tensor:
        return (grid.j < self.n).unsqueeze(0)

    def _spans(self, strip: Strip) -> Spans | None:
        return _intervals.same_for_all(0, min(self.n, strip.S))

    def _key_sets(self, S: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        seen = (torch.arange(S, device=device) < self.n).unsqueeze(0)
        return ~seen, seen


class Strided(_Numbers):
    kind = "strided"

    def __init__(self, s: int) -> None:
        super().__init__(s)
        self.s = self.period = s

    def _see(self, grid: Grid) -> Tensor:
        return (grid.i - grid.j) % self.s == 0

    def _block_states(self, strip: Strip, block_q: int, block_k: int) -> _intervals.States:
        return strided_block_states(self.s, strip, block_q, block_k)

    def _count_below(self, strip: Strip, key: _intervals.Whole) -> _intervals.Whole:
        return strided_count_below(self.s, strip, key)
