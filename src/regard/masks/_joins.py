"""``&``, ``|`` and ``~``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.masks import _intervals
from regard.masks._base import KINDS, Mask, Structure
from regard.masks._flags import Fused, merged
from regard.masks._grid import Grid
from regard.masks._intervals import Spans, Strip


class _Pair(Mask):
    """Two masks joined."""

    sign = ""

    def __init__(self, left: Mask, right: Mask) -> None:
        super().__init__(
            (self.kind, left.structure, right.structure),
            left.tensors + right.tensors,
            _joint(left, right, left.batch, right.batch, "batch items"),
            _joint(left, right, left.heads, right.heads, "heads"),
        )
        self.left = left
        self.right = right
        self.parts = (left, right)

    @classmethod
    def _rebuild(cls, structure: Structure, tensors: Iterator[Tensor]) -> Mask:
        return cls(*[KINDS[part[0]]._rebuild(part, tensors) for part in structure[1:]])

    @property
    def given(self) -> tuple[Tensor, ...]:
        return self.left.given + self.right.given

    def _check_shape(self, B: int, H: int, L: int, S: int) -> None:
        self.left._check_shape(B, H, L, S)
        self.right._check_shape(B, H, L, S)

    def _text(self) -> str:
        left = self.left._text() if type(self.left) is type(self) else _bracketed(self.left)
        return f"{left} {self.sign} {_bracketed(self.right)}"


class And(_Pair):
    """Both permit."""

    kind = "and"
    sign = "&"

    def __init__(self, left: Mask, right: Mask) -> None:
        super().__init__(left, right)
        self._fused: Fused | bool | None = False

    def _see(self, grid: Grid) -> Tensor:
        return self.left._see(grid) & self.right._see(grid)

    def _spans(self, strip: Strip) -> Spans | None:
        left = self.left._spans(strip)
        right = None if left is None else self.right._spans(strip)
        return None if left is None or right is None else _intervals.intersection(left, right, strip)

    def _flags(self) -> Fused | None:
        if isinstance(self._fused, bool):
            self._fused = merged(self.left._flags(), self.right._flags())
        return self._fused

    def _key_sets(self, S: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        hidden, seen = self.left._key_sets(S, device)
        hidden_too, seen_too = self.right._key_sets(S, device)
        return _either(hidden, hidden_too), _both(seen, seen_too)


class Or(_Pair):
    """One of the two permits."""

    kind = "or"
    sign = "|"

    def _see(self, grid: Grid) -> Tensor:
        return self.left._see(grid) | self.right._see(grid)

    def _spans(self, strip: Strip) -> Spans | None:
        left = self.left._spans(strip)
        right = None if left is None else self.right._spans(strip)
        return None if left is None or right is None else _intervals.union(left, right, strip)

    def _key_sets(self, S: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        hidden, seen = self.left._key_sets(S, device)
        hidden_too, seen_too = self.right._key_sets(S, device)
        return _both(hidden, hidden_too), _either(seen, seen_too)


class Not(Mask):
    """The opposite."""

    kind = "not"

    def __init__(self, inner: Mask) -> None:
        super().__init__((self.kind, inner.structure), inner.tensors, inner.batch, inner.heads)
        self.inner = inner
        self.parts = (inner,)

    @classmethod
    def _rebuild(cls, structure: Structure, tensors: Iterator[Tensor]) -> Mask:
        return cls(*[KINDS[part[0]]._rebuild(part, tensors) for part in structure[1:]])

    @property
    def given(self) -> tuple[Tensor, ...]:
        return self.inner.given

    def _see(self, grid: Grid) -> Tensor:
        return ~self.inner._see(grid)

    def _spans(self, strip: Strip) -> Spans | None:
        inner = self.inner._spans(strip)
        return None if inner is None else _intervals.complement(inner, strip)

    def _flags(self) -> Fused | None:
        return self.inner.inner._flags() if isinstance(self.inner, Not) else None

    def _key_sets(self, S: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        hidden, seen = self.inner._key_sets(S, device)
        return seen, hidden

    def _check_shape(self, B: int, H: int, L: int, S: int) -> None:
        self.inner._check_shape(B, H, L, S)

    def _text(self) -> str:
        return f"~{_bracketed(self.inner)}"


def _joint(left: Mask, right: Mask, one: int, other: int, what: str) -> int:
    if one != other and one != 1 and other != 1:
        raise ValueError(f"cannot join {left!r} for {one} {what} and {right!r} for {other} {what}")
    return other if one == 1 else one


def _bracketed(mask: Mask) -> str:
    return f"({mask._text()})" if isinstance(mask, _Pair) else mask._text()


def _either(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a | b


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else a & b
