"""Recognising a mask that a fused kernel takes as flags: a band around the diagonal, key padding, documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from regard.masks._documents import Documents
    from regard.masks._padding import Padding


class Fused(NamedTuple):
    """All of these together: ``−left ≤ j − i ≤ right`` (None = no limit), key padding, documents.

    ``causal`` says that ``right`` is 0. Limits that no pair of the call reaches are None.
    """

    causal: bool = False
    left: int | None = None
    right: int | None = None
    padding: Padding | None = None
    documents: Documents | None = None


CAUSAL = Fused(causal=True, right=0)


def merged(a: Fused | None, b: Fused | None) -> Fused | None:
    """The flags of both together; None when one kernel call cannot take both."""
    if a is None or b is None:
        return None
    if _clash(a.padding, b.padding) or _clash(a.documents, b.documents):
        return None
    right = _tighter(a.right, b.right)
    return Fused(
        right == 0,
        _tighter(a.left, b.left),
        right,
        b.padding if a.padding is None else a.padding,
        b.documents if a.documents is None else a.documents,
    )


def trimmed(flags: Fused, L: int, S: int, offset: int | Tensor) -> Fused:
    """Without the limits that no pair of this call reaches (a single last query is not restricted by causal)."""
    if isinstance(offset, Tensor):
        return flags
    causal, left, right, padding, documents = flags
    if right is not None and offset + right >= S - 1:
        causal, right = False, None
    if left is not None and offset + L - 1 <= left:
        left = None
    return Fused(causal, left, right, padding, documents)


def _clash(a: object, b: object) -> bool:
    # whichever they are: what a kernel is given follows from a mask's structure alone
    return a is not None and b is not None


def _tighter(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)
