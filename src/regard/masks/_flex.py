"""What FlexAttention takes of a mask: a predicate of (item, head, row, key).

Numbers of a rule (a window's width) become constants of the compiled code; everything that changes from call to call
(offsets, lengths, documents) is a captured tensor, so that one piece of code serves them all. What depends on a row or
a key alone is worked out once, outside the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

See = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Predicate(NamedTuple):
    """``kind`` holds all that the code of ``see`` depends on: equal kinds, same code."""

    kind: tuple[Any, ...]
    see: See


class Frame(NamedTuple):
    """One call, as its rules see it."""

    queries: int
    keys: int
    batch: int
    offset: int | Tensor
    device: torch.device

    @property
    def near(self) -> bool:
        """Whether every position and distance fits into 30 bits, which makes the kernel's arithmetic faster."""
        return not isinstance(self.offset, Tensor) and abs(self.offset) + self.queries + self.keys < 1 << 30

    @property
    def start(self) -> Tensor:
        """The first query's position, [B or 1]; made on the device, without waiting for it."""
        if isinstance(self.offset, Tensor):
            return self.offset.to(self.device)
        return torch.full((1,), self.offset, dtype=torch.int32 if self.near else torch.int64, device=self.device)

    @property
    def positions(self) -> Tensor:
        """Every query's position, [B or 1, L]."""
        return self.start.to(torch.int64).unsqueeze(1) + torch.arange(self.queries, device=self.device)

    def limit(self, number: int) -> int:
        """A rule's number, cut where a larger one means the same and could overflow."""
        return min(number, 1 << (30 if self.near else 62))

    def of_distance(self, *kind: Any, rule: Callable[[Tensor, Tensor], Tensor]) -> Predicate:
        """A predicate of the positions of query and key alone."""
        start = self.start
        each = several(start, 0)
        return Predicate((*kind, each), lambda b, h, q, k: rule(q + start[b * each], k))


def several(tensor: Tensor, dim: int) -> int:
    """0 where a dim is broadcast, else 1: what an index along it is multiplied by."""
    return int(tensor.shape[dim] != 1)


def lookup(tensor: Tensor) -> tuple[See, tuple[int, ...]]:
    """An element of a tensor that broadcasts to [B, H, L, S]; and which of its dims do not."""
    tensor = tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape))
    item, head, row, col = kind = (several(tensor, 0), several(tensor, 1), several(tensor, 2), several(tensor, 3))
    return lambda b, h, q, k: tensor[b * item, h * head, q * row, k * col], kind


def in_table(frame: Frame, kind: str, table: Tensor, row: Tensor, width: int, size: int) -> Predicate:
    """Query q reads row row[b, q] of a table [B or 1, H or 1, rows, columns], key k the column of its block."""
    row = row.to(torch.int32)
    column = (torch.arange(frame.keys, device=frame.device) // size).clamp(max=width).to(torch.int32)
    item, head, each = several(table, 0), several(table, 1), several(row, 0)
    return Predicate(
        (kind, item, head, each),
        lambda b, h, q, k: table[b * item, h * head, row[b * each, q], column[k]],
    )


def _both(one: Predicate, other: Predicate) -> Predicate:
    first, last = one.see, other.see
    return Predicate(("and", one.kind, other.kind), lambda b, h, q, k: first(b, h, q, k) & last(b, h, q, k))


def _either(one: Predicate, other: Predicate) -> Predicate:
    first, last = one.see, other.see
    return Predicate(("or", one.kind, other.kind), lambda b, h, q, k: first(b, h, q, k) | last(b, h, q, k))


def _opposite(one: Predicate) -> Predicate:
    see = one.see
    return Predicate(("not", one.kind), lambda b, h, q, k: ~see(b, h, q, k))


# How &, | and ~ join predicates.
JOINS = (_both, _either, _opposite)
