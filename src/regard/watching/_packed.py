"""Heads that a function hands to a kernel as queries.

Hugging Face's function does so for a single query of grouped attention: [batch, head, 1, dim] becomes
[batch, key head, heads that share it, dim], so that no key is repeated. What the model asked for tells the difference.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

_here = threading.local()


class asking:  # entered at every call of Hugging Face's
    """While Hugging Face's attention function runs for this query, [batch, head, token, dim]."""

    __slots__ = ("_before", "_heads")

    def __init__(self, query: Any) -> None:
        one = isinstance(query, Tensor) and query.dim() == 4 and query.shape[2] == 1
        self._heads: int = query.shape[1] if one else 0

    def __enter__(self) -> None:
        self._before = _heads()
        _here.heads = self._heads

    def __exit__(self, *_: object) -> None:
        _here.heads = self._before


def packed_heads(heads: int, queries: int) -> int:
    """How many heads a call of this many heads and queries really has; 0 where they are what they seem."""
    real = _heads()
    return real if queries > 1 and real == heads * queries else 0


def unpacked(tensor: Tensor, heads: int) -> Tensor:
    """[batch, key head, heads that share it, …] as [batch, head, 1, …]."""
    return tensor.reshape(tensor.shape[0], heads, 1, *tensor.shape[3:])


def unpacked_mask(mask: Tensor, shape: tuple[int, ...], heads: int) -> Tensor:
    """A mask that broadcasts to [batch, key head, heads that share it, key] likewise; as it is where all share it."""
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    if mask.shape[1] == mask.shape[2] == 1:
        return mask
    return unpacked(mask.expand(mask.shape[0], *shape[1:3], mask.shape[3]), heads)


def _heads() -> int:
    return getattr(_here, "heads", 0)
