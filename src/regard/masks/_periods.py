"""Masks that keep every s-th key: what they are joined from, so that each of the s classes can be computed apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regard.masks._base import Mask


def periodic_part(mask: Mask) -> tuple[int, Mask | None] | None:
    """(s, rest) where a mask keeps pairs with (i - j) mod s = 0 that the rest keeps."""
    if mask.period is not None:
        return mask.period, None
    if mask.kind == "and":
        for one, other in (mask.parts, mask.parts[::-1]):
            found = periodic_part(one)
            if found is not None:
                return found[0], other if found[1] is None else found[1] & other
    return None


def with_period_apart(mask: Mask) -> tuple[Mask, Mask] | None:
    """A mask as one without a period, and one with it."""
    if mask.kind == "or":
        for one, other in (mask.parts, mask.parts[::-1]):
            if periodic_part(other) is not None and periodic_part(one) is None:
                return one, other
    if mask.kind == "and":
        for one, other in (mask.parts, mask.parts[::-1]):
            found = with_period_apart(one)
            if found is not None:
                return found[0] & other, found[1] & other
    return None
