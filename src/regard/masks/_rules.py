"""Masks that are rules of positions alone, without tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from regard.masks import _intervals
from regard.masks._base import Mask
from regard.masks._facts import KeySets
from regard.masks._flags import CAUSAL, Fused
from regard.masks._flex import Frame, Predicate
from regard.masks._grid import Grid
from regard.masks._intervals import EMPTY, FULL, PARTIAL, Spans, States, Strip, Whole

# Integers wrap around silently: a limit beyond this is as good as none, and adding it to a position stays in range.
_FAR = 2**62


class _Numbers(Mask):
    """A rule with a few numbers and nothing else."""

    def __init__(self, *numbers: int) -> None:
        super().__init__((self.kind, *numbers))

    def _text(self) -> str:
        return f"{self.kind}({', '.join(str(number) for number in self.structure[1:])})"


class Everything(_Numbers):
    kind = "everything"
    _relative = _countable = _of_intervals = _about_keys = True

    def survives(self, window: int, sinks: int) -> bool:
        return True

    def _see(self, grid: Grid) -> Tensor:
        return torch.ones(1, 1, dtype=torch.bool, device=grid.device)

    def _spans(self, strip: Strip) -> Spans | None:
        return _intervals.same_for_all(0, strip.S)

    def _flags(self) -> Fused | None:
        return Fused()

    def _key_sets(self, S: int, device: torch.device) -> KeySets:
        return None, torch.ones(1, S, dtype=torch.bool, device=device)

    def _predicate(self, frame: Frame) -> Predicate:
        return Predicate((self.kind,), lambda b, h, q, k: k >= 0)


class Causal(_Numbers):
    kind = "causal"
    _relative = _countable = _of_intervals = True

    def survives(self, window: int, sinks: int) -> bool:
        return True

    def _see(self, grid: Grid) -> Tensor:
        return grid.j <= grid.i

    def _spans(self, strip: Strip) -> Spans | None:
        return [(_intervals.ZERO, strip.clip(strip.i + 1))]

    def _flags(self) -> Fused | None:
        return CAUSAL

    def _predicate(self, frame: Frame) -> Predicate:
        return frame.of_distance(self.kind, rule=lambda i, j: j <= i)


class Window(_Numbers):
    kind = "window"
    _relative = _recent = _countable = _of_intervals = True

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

    def survives(self, window: int, sinks: int) -> bool:
        return self.left <= window

    def _predicate(self, frame: Frame) -> Predicate:
        left, right = frame.limit(self.left), frame.limit(self.right)
        return frame.of_distance(self.kind, left, right, rule=lambda i, j: (j - i >= -left) & (j - i <= right))

    def _text(self) -> str:
        right = f", right={self.right}" if self.right else ""
        return f"window(left={self.left}{right})"


class Prefix(_Numbers):
    kind = "prefix"
    _recent = _countable = _of_intervals = True

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.n = n

    def _see(self, grid: Grid) -> Tensor:
        return (grid.i < self.n) & (grid.j < self.n)

    def _spans(self, strip: Strip) -> Spans | None:
        return [(_intervals.ZERO, (strip.i < self.n) * min(self.n, strip.S))]

    def _key_sets(self, S: int, device: torch.device) -> KeySets:
        return (torch.arange(S, device=device) >= self.n).unsqueeze(0), None

    def survives(self, window: int, sinks: int) -> bool:
        return self.n <= sinks

    def _predicate(self, frame: Frame) -> Predicate:
        n = frame.limit(self.n)
        return frame.of_distance(self.kind, n, rule=lambda i, j: (i < n) & (j < n))


class Columns(_Numbers):
    kind = "columns"
    _recent = _countable = _of_intervals = _about_keys = True

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.n = n

    def _see(self, grid: Grid) -> Tensor:
        return (grid.j < self.n).unsqueeze(0)

    def _spans(self, strip: Strip) -> Spans | None:
        return _intervals.same_for_all(0, min(self.n, strip.S))

    def _key_sets(self, S: int, device: torch.device) -> KeySets:
        seen = (torch.arange(S, device=device) < self.n).unsqueeze(0)
        return ~seen, seen

    def survives(self, window: int, sinks: int) -> bool:
        return self.n <= sinks

    def _predicate(self, frame: Frame) -> Predicate:
        n = frame.limit(self.n)
        return Predicate((self.kind, n), lambda b, h, q, k: k < n)


class Strided(_Numbers):
    kind = "strided"
    _relative = True

    def __init__(self, s: int) -> None:
        super().__init__(s)
        self.s = self.period = s

    def _see(self, grid: Grid) -> Tensor:
        return (grid.i - grid.j) % self.s == 0

    def _block_states(self, strip: Strip, block_q: int, block_k: int) -> States:
        rows = np.arange(-(-(strip.stop - strip.start) // block_q))
        return self._states_at(strip, rows[:, None], np.arange(-(-strip.S // block_k)), block_q, block_k)

    def _states_at(self, strip: Strip, rows: Whole, cols: Whole, block_q: int, block_k: int) -> States:
        """Within a block, i − j takes every value from ``low`` to ``high``: does a multiple of s lie among them?"""
        first = strip.start + rows * block_q
        last = np.minimum(first + block_q, strip.stop) - 1
        left = cols * np.int64(block_k)
        right = np.minimum(left + block_k, strip.S) - 1
        low, high = strip.offsets[0, 0] + first - right, strip.offsets[0, 0] + last - left
        touched = high // self.s > (low - 1) // self.s
        full = touched & ((low == high) | (self.s == 1))
        return np.where(full, FULL, np.where(touched, PARTIAL, EMPTY)).astype(np.int8)

    def _count_below(self, strip: Strip, key: Whole) -> Whole:
        """Among keys 0 … key − 1 those with j ≡ i (mod s)."""
        return np.asarray((key - strip.i % self.s + self.s - 1) // self.s, dtype=np.int64)

    def _predicate(self, frame: Frame) -> Predicate:
        s = frame.limit(self.s)
        return frame.of_distance(self.kind, s, rule=lambda i, j: (i - j) % s == 0)
