"""What each statistic of the attention weights is, and which of them are wanted.

All of them are reductions of the matrix of weights p [L, S] of one batch item and head (dropout not applied):

  lse         log of the sum of exponentials of a row's logits; -inf for an empty row
  entropy     -sum p·log p of a row, in nats, with 0·log 0 = 0; missing (NaN) for an empty row
  max_weight  the largest p of a row; missing likewise
  key_mass    sum of p over the queries, for each key
  map         sum of p in a cell of a coarse grid, divided by the cell's number of pairs
  top         the k largest p of a row and their keys, ties to the lower key
  distance    total p by |i - j|: bucket 0 is 0, bucket b is 2^(b-1) … 2^b - 1
  first_mass  the p a row gives to its first n keys
  weights     p itself, over a rectangle

Rows are independent, and everything else is a sum over rows: parts computed on different ranges of queries merge by
writing rows next to each other and adding the sums. Parts of the same rows over different keys merge by ``merge``.

This is the one place for these definitions: code for CPUs, kernels and caches take their constants and formulas from
here. A kernel that writes a formula in its own language is tested against this one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

BUCKETS = 32
# Stands for log 0, below the log of any permitted weight: its exponential is 0, and 0 times it is 0 (0 · −inf is NaN).
NEVER = -1e30
# How parts that were computed on different ranges of queries merge: rows stand next to each other, sums are added. The
# map is a sum as well, once its cells are multiplied by their numbers of pairs; `weights` are rows of a rectangle.
OF_ROWS = ("lse", "entropy", "max_weight", "top_keys", "top_weights", "first_mass")
SUMS = ("key_mass", "distance")


@dataclass(frozen=True)
class Want:
    """Which statistics ``regard.observe`` computes. What is not asked for costs nothing and is absent from the result.

    Args:
        rows: ``entropy`` and ``max_weight``, one number per query each.
        key_mass: what each key receives, added over the queries.
        map: rows and columns of the thumbnail of all weights; None for no map.
        top_k: number of largest weights to return per query, with their keys; 0 for none.
        distance: total weight by distance between query and key, in buckets that double.
        first: with n > 0, ``first_mass``: the weight each query gives to keys 0 … n−1.
        queries: slice of the queries that ``key_mass`` and ``map`` count.
        weights: (queries, keys), two slices: the exact weights of that rectangle; "all" for the whole matrix, which
            grows with the square of the length.
    """

    rows: bool = True  # entropy and max_weight
    key_mass: bool = True
    map: tuple[int, int] | None = (64, 64)
    top_k: int = 8
    distance: bool = True
    first: int = 0  # first_mass over keys 0 … first-1
    queries: slice | None = None  # limits key_mass and map to these queries
    weights: Any = None  # an exact rectangle, (query slice, key slice); "all" stands for the whole

    def __post_init__(self) -> None:
        if self.map is not None and (
            not isinstance(self.map, tuple) or len(self.map) != 2 or any(not _count(n) or n < 1 for n in self.map)
        ):
            raise ValueError(f"Want(map=...) must be (rows, columns) of at least 1 each, or None, got {self.map!r}")
        for name in ("top_k", "first"):
            given = getattr(self, name)
            if not _count(given) or given < 0:
                raise ValueError(f"Want({name}=...) must be an int of at least 0, got {given!r}")
        if self.queries is not None:
            _check_slice("queries", self.queries)
        if isinstance(self.weights, str) and self.weights == "all":
            object.__setattr__(self, "weights", (slice(None), slice(None)))
        if self.weights is not None:
            if not isinstance(self.weights, tuple) or len(self.weights) != 2:
                raise TypeError(f"Want(weights=...) must be (query slice, key slice) or 'all', got {self.weights!r}")
            for part in self.weights:
                _check_slice("weights", part)

    @classmethod
    def all(cls) -> Want:
        """Every statistic, and the whole matrix of weights: memory O(L·S)."""
        return cls(first=4, weights=(slice(None), slice(None)))

    @classmethod
    def none(cls) -> Want:
        """Only ``out`` and ``lse``."""
        return cls(rows=False, key_mass=False, map=None, top_k=0, distance=False)

    def but(self, **changes: Any) -> Want:
        """A copy with some fields changed."""
        return replace(self, **changes)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """The same, hashable (slices are not before Python 3.12)."""
        spans = [self.queries, *(self.weights or ())]
        return (self.rows, self.key_mass, self.map, self.top_k, self.distance, self.first, *map(str, spans))

    @property
    def asks(self) -> bool:
        """Whether anything beyond out and lse is wanted."""
        return bool(self.rows or self.asks_more)

    @property
    def asks_more(self) -> bool:
        """Whether anything beyond out, lse and the statistics of rows is wanted."""
        return bool(self.key_mass or self.map or self.top_k or self.distance or self.first or self.weights is not None)


def _count(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


def _check_slice(name: str, given: object) -> None:
    if not isinstance(given, slice) or given.step not in (None, 1):
        raise TypeError(f"Want({name}=...) takes slices with step 1, got {given!r}")


def cell_of(position: Any, size: int, count: int) -> Any:
    """The cell of a position (an int, an array or a tensor) among ``size`` on a grid of ``count`` cells.

    Cell c starts at ⌊c·size/count⌋.
    """
    return ((position + 1) * count - 1) // size


def cells(size: int, count: int, device: torch.device) -> Tensor:
    """The cell of each of ``size`` positions."""
    found: Tensor = cell_of(torch.arange(size, device=device), size, count)
    return found


def bucket_of(distance: Any) -> Any:
    """The bucket of a distance ≥ 0: its number of binary digits."""
    if isinstance(distance, torch.Tensor):
        return torch.frexp(distance.to(torch.float64)).exponent.to(torch.int64).clamp_max(BUCKETS - 1)
    return np.minimum(np.frexp(np.asarray(distance, np.float64))[1], BUCKETS - 1)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Join two parts of the same rows in place of the first, each normalised on its own keys; ``part`` is used up."""
    part_lse = part_lse.contiguous()  # torch rounds strided numbers in another way
    total = torch.logaddexp(lse, part_lse)
    safe = total.masked_fill(total == -torch.inf, 0.0)
    mine, theirs = torch.exp(lse - safe).unsqueeze(-1), torch.exp(part_lse - safe).unsqueeze(-1)
    out.mul_(mine).add_(part.mul_(theirs))
    lse.copy_(total)
