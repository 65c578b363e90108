"""A mask from its code and tensors, for crossing a boundary that only takes strings and tensors."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from regard.masks import _function, _joins, _rectangle, _rules, _tables  # noqa: F401  (defining the kinds registers them)
from regard.masks._base import KINDS, Mask, Structure
from regard.masks._intervals import MOST_INTERVALS


def rebuild(code: str, tensors: Sequence[Tensor] = ()) -> Mask:
    """The inverse of ``mask.code`` and ``mask.tensors``; contents are not checked again.

    >>> from regard import masks
    >>> mask = masks.causal() & masks.padding([2, 3])
    >>> rebuild(mask.code, mask.tensors) == mask
    True
    """
    return _without_tensors(code) if not tensors else _build(_parse(code), tensors)


@lru_cache(maxsize=1024)
def of_intervals(structure: Structure) -> bool:
    """Whether the rows of a mask of this structure see a few intervals of keys each; others are tested pair by pair."""
    return _intervals_of(structure) <= MOST_INTERVALS


def _intervals_of(structure: Structure) -> float:
    """The most intervals of keys that a row may see; infinite where it may see any keys."""
    kind = KINDS[structure[0]]
    if issubclass(kind, _joins.Joint):
        return float(kind.intervals_of([_intervals_of(part) for part in structure[1:]]))
    return float(kind.intervals_in(structure))


def _build(structure: Structure, tensors: Sequence[Tensor]) -> Mask:
    remaining = iter(tensors)
    mask: Mask = KINDS[structure[0]]._rebuild(structure, remaining)
    if next(remaining, None) is not None:
        raise ValueError(f"more tensors were given than the mask {mask!r} has")
    return mask


@lru_cache(maxsize=1024)
def _parse(code: str) -> Structure:
    structure: Structure = ast.literal_eval(code)
    return structure


@lru_cache(maxsize=1024)
def _without_tensors(code: str) -> Mask:
    return _build(_parse(code), ())
