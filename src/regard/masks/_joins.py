"""``&``, ``|`` and ``~``."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from regard.masks import _intervals
from regard.masks._base import KINDS, Mask, Structure
from regard.masks._facts import SETS, KeySets
from regard.masks._flags import Fused, merged
from regard.masks._grid import Grid
from regard.masks._intervals import Spans, Strip


class Joint(Mask):
    """A mask made of masks: it answers from its parts."""

    sign = ""
    _relative = _recent = _countable = _grain = _about_keys = None

    def __init__(self, *parts: Mask) -> None:
        super().__init__(
            (self.kind, *[part.structure for part in parts]),
            sum([part.tensors for part in parts], ()),
            _joint(parts, [part.batch for part in parts], "batch items"),
            _joint(parts, [part.heads for part in parts], "heads"),
        )
        self.parts = parts
        self.is_open = any(part.is_open for part in parts)

    @classmethod
    def _rebuild(cls, structure: Structure, tensors: Iterator[Tensor]) -> Mask:
        return cls(*[KINDS[part[0]]._rebuild(part, tensors) for part in structure[1:]])

    @classmethod
    def intervals_of(cls, parts: list[float]) -> float:
        """The maximum number of intervals of keys that a row sees, from those that its parts see."""
        raise NotImplementedError

    @property
    def given(self) -> tuple[Tensor, ...]:
        return sum([part.given for part in self.parts], ())

    def _see(self, grid: Grid) -> Tensor:
        seen: Tensor = self._join(
            [part._see(grid) for part in self.parts], operator.and_, operator.or_, torch.logical_not
        )
        return seen

    def _spans(self, strip: Strip) -> Spans | None:
        spans = []
        for part in self.parts:
            found = part._spans(strip)
            if found is None:
                return None
            spans.append(found)
        joined: Spans | None = self._join(
            [*spans, strip], _intervals.intersection, _intervals.union, _intervals.complement
        )
        return joined

    def _key_sets(self, S: int, device: torch.device) -> KeySets:
        sets: KeySets = self._join([part._key_sets(S, device) for part in self.parts], *SETS)
        return sets

    def _check_shape(self, B: int, H: int, L: int, S: int) -> None:
        for part in self.parts:
            part._check_shape(B, H, L, S)

    def _text(self) -> str:
        left, right = self.parts
        first = left._text() if type(left) is type(self) else _bracketed(left)
        return f"{first} {self.sign} {_bracketed(right)}"


class And(Joint):
    """Both permit."""

    kind = "and"
    sign = "&"

    def __init__(self, left: Mask, right: Mask) -> None:
        super().__init__(left, right)
        self._fused: Fused | bool | None = False

    def _join(self, answers: list[Any], both: Any, either: Any, opposite: Any) -> Any:
        return both(*answers)

    @classmethod
    def intervals_of(cls, parts: list[float]) -> float:
        return sum(parts) - (len(parts) - 1)

    @property
    def conjuncts(self) -> list[Mask]:
        return [conjunct for part in self.parts for conjunct in part.conjuncts]

    def _flags(self) -> Fused | None:
        if isinstance(self._fused, bool):
            self._fused = merged(*[part._flags() for part in self.parts])
        return self._fused


class Or(Joint):
    """One of the two permits."""

    kind = "or"
    sign = "|"

    @classmethod
    def intervals_of(cls, parts: list[float]) -> float:
        return sum(parts)

    @property
    def disjuncts(self) -> list[Mask]:
        return [disjunct for part in self.parts for disjunct in part.disjuncts]

    def _join(self, answers: list[Any], both: Any, either: Any, opposite: Any) -> Any:
        return either(*answers)


class Not(Joint):
    """The opposite."""

    kind = "not"

    @classmethod
    def intervals_of(cls, parts: list[float]) -> float:
        return sum(parts) + 1

    def _join(self, answers: list[Any], both: Any, either: Any, opposite: Any) -> Any:
        return opposite(*answers)

    def _flags(self) -> Fused | None:
        (inner,) = self.parts
        return inner.parts[0]._flags() if isinstance(inner, Not) else None

    def _text(self) -> str:
        return f"~{_bracketed(self.parts[0])}"


def _joint(parts: tuple[Mask, ...], sizes: list[int], what: str) -> int:
    found = {size for size in sizes if size != 1}
    if len(found) > 1:
        words = " and ".join(f"{part!r} for {size} {what}" for part, size in zip(parts, sizes, strict=True))
        raise ValueError(f"cannot join {words}")
    return found.pop() if found else 1


def _bracketed(mask: Mask) -> str:
    return f"({mask._text()})" if len(mask.parts) > 1 else mask._text()


def both(mask: Mask | None, other: Mask | None) -> Mask | None:
    """Their intersection, where None hides nothing."""
    if mask is None or other is None:
        return other if mask is None else mask
    return mask & other
