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
  pairs       p itself, of single pairs of a query and a key
  relations   the p a row gives to keys that stand in a relation to it (``related``); missing where it sees none such
  value_…     the same of p·n in place of p, where n is the length of the key's value as it enters the residual stream

Rows are independent, and everything else is a sum over rows: parts computed on different ranges of queries merge by
writing rows next to each other and adding the sums. Parts of the same rows over different keys merge by ``merge``.

This is the one place for these definitions: code for CPUs, kernels and caches take their constants and formulas from
here. A kernel that writes a formula in its own language is tested against this one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard._checks import is_int

BUCKETS = 32
# Stands for log 0, below the log of any permitted weight: its exponential is 0, and 0 times it is 0 (0 · −inf is NaN).
NEVER = -1e30
# How parts that were computed on different ranges of queries merge: rows stand next to each other, sums are added. The
# map is a sum as well, once its cells are multiplied by their numbers of pairs; `weights` are rows of a rectangle.
OF_ROWS = ("lse", "entropy", "max_weight", "top_keys", "top_weights", "first_mass", "relations")
SUMS = ("key_mass", "distance")


@dataclass(frozen=True, eq=False)
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
        value_mass: each weight times the length of the value it carries: ``value_length`` of each key, ``value_mass``
            that it hands out, ``value_sum`` that each query takes in, and with ``map`` and ``top_k`` ``value_map``,
            ``value_top_keys`` and ``value_top_lengths``.
        pairs: (query, key) pairs, a list or an integer tensor [n, 2]: the exact weights of those, ``pairs`` [B, H, n].
        scores: ``relations``, which ``recording.scores()`` needs: the weight that each query gives to keys in a
            relation to it. True, or the tokens of the keys as integers [S] or [B, S], which some relations need;
            ``regard.watch`` takes them from the model's input.
    """

    rows: bool = True  # entropy and max_weight
    key_mass: bool = True
    map: tuple[int, int] | None = (64, 64)
    top_k: int = 8
    distance: bool = True
    first: int = 0  # first_mass over keys 0 … first-1
    queries: slice | None = None  # limits key_mass and map to these queries
    weights: Any = None  # an exact rectangle, (query slice, key slice); "all" stands for the whole
    value_mass: bool = False
    pairs: Any = None  # int64 [n, 2], once made
    scores: Any = False  # True, or int64 [S] or [B, S]

    def __post_init__(self) -> None:
        if self.map is not None and (
            not isinstance(self.map, tuple) or len(self.map) != 2 or any(not is_int(n) or n < 1 for n in self.map)
        ):
            raise ValueError(f"Want(map=...) must be (rows, columns) of at least 1 each, or None, got {self.map!r}")
        for name in ("top_k", "first"):
            given = getattr(self, name)
            if not is_int(given) or given < 0:
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
        if self.pairs is not None:
            object.__setattr__(self, "pairs", _whole_numbers("pairs", self.pairs, "(query, key) pairs, [n, 2]"))
            if self.pairs.dim() != 2 or self.pairs.shape[1] != 2:
                raise ValueError(f"Want(pairs=...) must be (query, key) pairs, [n, 2], got {list(self.pairs.shape)}")
        if not isinstance(self.scores, bool):
            object.__setattr__(self, "scores", _whole_numbers("scores", self.scores, "True, or tokens as integers"))
            if self.scores.dim() not in (1, 2):
                raise ValueError(f"Want(scores=...) takes tokens [S] or [B, S], got {list(self.scores.shape)}")

    @classmethod
    def all(cls) -> Want:
        """Every statistic, and the whole matrix of weights: memory O(L·S)."""
        return cls(first=4, weights=(slice(None), slice(None)), value_mass=True, scores=True)

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
        plain = (self.rows, self.key_mass, self.map, self.top_k, self.distance, self.first, *map(str, spans))
        more = (self.value_mass, _contents(self.pairs), _contents(self.scores))
        return plain if more == (False, None, False) else (*plain, *more)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Want) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def usual(self) -> Want:
        """Without what only torch operations compute."""
        return self.but(value_mass=False, pairs=None, scores=False) if self.asks_unusual else self

    @property
    def unusual(self) -> Want:
        """What only torch operations compute, alone; pairs are computed apart from all others."""
        made = Want.none().but(queries=self.queries, value_mass=self.value_mass, scores=self.scores)
        return made.but(map=self.map, top_k=self.top_k) if self.value_mass else made

    @property
    def asks_unusual(self) -> bool:
        return bool(self.value_mass or self.pairs is not None or self.scores is not False)

    @property
    def asks(self) -> bool:
        """Whether anything beyond out and lse is wanted."""
        return bool(self.rows or self.asks_more)

    @property
    def asks_more(self) -> bool:
        """Whether anything beyond out, lse and the statistics of rows is wanted."""
        return self._asks_sums or self.asks_unusual

    @property
    def asks_tiles(self) -> bool:
        """Whether anything is wanted for which all weights have to be looked at."""
        return bool(self.rows or self._asks_sums or self.value_mass or self.scores is not False)

    @property
    def _asks_sums(self) -> bool:
        return bool(self.key_mass or self.map or self.top_k or self.distance or self.first or self.weights is not None)


def _check_slice(name: str, given: object) -> None:
    if not isinstance(given, slice) or given.step not in (None, 1):
        raise TypeError(f"Want({name}=...) takes slices with step 1, got {given!r}")


def _whole_numbers(name: str, given: Any, expected: str) -> Tensor:
    try:
        made = given.detach() if isinstance(given, torch.Tensor) else torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"Want({name}=...) must be {expected}, got {type(given).__name__}") from None
    if made.numel() and (made.is_floating_point() or made.is_complex() or made.dtype == torch.bool):
        raise TypeError(f"Want({name}=...) must be {expected}, got numbers of {made.dtype}")
    made = made.to(torch.int64)
    return made.view(0, 2) if name == "pairs" and not made.numel() else made


def _contents(given: Any) -> Any:
    return (given.shape, given.cpu().numpy().tobytes()) if isinstance(given, torch.Tensor) else given


def checked_tokens(given: bool | Tensor, batch: int, keys: int) -> Tensor | None:
    """The tokens of a call's keys, [B or 1, S]; None where nobody said which they are."""
    if isinstance(given, bool):
        return None
    tokens = given[None] if given.dim() == 1 else given
    if tokens.shape[1] != keys or len(tokens) not in (1, batch):
        raise ValueError(
            f"Want(scores=...) has tokens {list(given.shape)}, and the call has {batch} items of {keys} keys"
        )
    return tokens


def checked_pairs(pairs: Tensor, queries: int, keys: int) -> Tensor:
    """Pairs [n, 2] of a call; negative numbers count from the end."""
    if not len(pairs):
        return pairs
    sizes = torch.tensor([queries, keys], device=pairs.device)
    wrong = ((pairs < -sizes) | (pairs >= sizes)).any(1)
    if bool(wrong.any()):
        first = tuple(pairs[wrong][0].tolist())
        raise ValueError(f"Want(pairs=...) names the pair {first}, and the call has {queries} queries and {keys} keys")
    return torch.where(pairs < 0, pairs + sizes, pairs)


# Of a query at position i and a key at position j, with tokens t: the first two need no tokens. "retrieval" says
# whether the largest weight of the row lies on a key that "copying" names.
RELATIONS = ("previous", "next", "duplicate", "induction", "copying", "retrieval")


def related(i: Tensor, j: Tensor, tokens: Tensor | None) -> list[Tensor]:
    """Which keys stand in each relation of ``RELATIONS`` but the last, broadcast from i […, L, 1] and j [S].

    previous    j = i − 1
    next        j = i + 1
    duplicate   another place with the query's token: t_j = t_i, j ≠ i
    induction   what followed another place with the query's token: t_(j−1) = t_i, j − 1 ≠ i
    copying     another place with the token that comes next: t_j = t_(i+1), j ≠ i + 1

    ``tokens`` [B or 1, S]; then the result is [B or 1, 1, L, S].
    """
    found = [j == i - 1, j == i + 1]
    if tokens is None:
        return found
    i = i if i.dim() == 4 else i[None, None]
    mine, ahead = _token_at(tokens, i), _token_at(tokens, i + 1)
    here, before = (_token_at(tokens, at[None, None, None]) for at in (j, j - 1))
    known, follows = (mine >= 0) & (here >= 0), (ahead >= 0) & (here >= 0)
    return [
        *found,
        (here == mine) & known & (j != i),
        (before == mine) & (mine >= 0) & (before >= 0) & (j - 1 != i),
        (here == ahead) & follows & (j != i + 1),
    ]


def _token_at(tokens: Tensor, at: Tensor) -> Tensor:
    """The tokens [B or 1, S] at positions [B or 1, 1, L, S]; −1, which is no token, outside."""
    inside = (at >= 0) & (at < tokens.shape[1])
    items = max(tokens.shape[0], at.shape[0])
    flat = at.clamp(0, max(0, tokens.shape[1] - 1)).flatten(1).expand(items, -1)
    found = tokens.expand(items, -1).gather(1, flat).view(items, *at.shape[1:])
    return found.masked_fill(~inside, -1)


def relation_masses(p: Tensor, permitted: Tensor, i: Tensor, j: Tensor, tokens: Tensor | None) -> Tensor:
    """What ``relations`` is, of weights p [B, H, L, S] of which ``permitted`` says which are any: [B, H, L, relations],
    NaN where a row sees no key in the relation."""
    which = related(i, j, tokens)
    masses = []
    for match in which:
        seen = (match & permitted).any(-1)
        masses.append((p * match).sum(-1).masked_fill(~seen, torch.nan))
    if tokens is not None:
        copied = which[-1].expand(p.shape).gather(-1, p.argmax(-1, keepdim=True)).squeeze(-1)
        masses.append(copied.to(p.dtype).masked_fill(masses[-1].isnan(), torch.nan))
    return torch.stack(masses, -1)


def cell_of(position: Any, size: int, count: int) -> Any:
    """The cell of a position (an int, an array or a tensor) among ``size`` on a grid of ``count`` cells.

    Cell c starts at ⌊c·size/count⌋.
    """
    return ((position + 1) * count - 1) // size


def cells(size: int, count: int, device: torch.device) -> Tensor:
    """The cell of each of ``size`` positions."""
    found: Tensor = cell_of(torch.arange(size, device=device), size, count)
    return found


def cell_sizes(size: int, count: int, device: torch.device) -> Tensor:
    """How many of ``size`` positions lie in each cell."""
    return (torch.arange(count + 1, device=device) * size // max(1, count)).diff()


class Grid:
    """The cells of a map over a call's rows and keys: at most as many as there are of either."""

    def __init__(self, most: tuple[int, int], rows: int, keys: int, device: torch.device) -> None:
        self.rows, self.keys = rows, keys
        self.shape = min(most[0], rows), min(most[1], keys)
        self.row_cells, self.key_cells = cells(rows, self.shape[0], device), cells(keys, self.shape[1], device)
        self.heights, self.widths = cell_sizes(rows, self.shape[0], device), cell_sizes(keys, self.shape[1], device)
        self.pairs = self.heights[:, None] * self.widths  # how many each cell has

    def row_sums(self, numbers: Tensor, rows: range) -> tuple[Tensor, int]:
        """Numbers [items, heads, rows, keys] of neighbouring rows added up by cells of rows, and the first of those."""
        first, last = (cell_of(row, self.rows, self.shape[0]) for row in (rows[0], rows[-1]))
        if first == last:
            return numbers.sum(2, keepdim=True), first
        cell = self.row_cells[rows.start : rows.stop] - first
        # a product with a matrix of zeros and ones
        return (torch.arange(last - first + 1, device=cell.device)[:, None] == cell).to(numbers.dtype) @ numbers, first

    def add(self, into: Tensor, sums: Tensor, first: int, keys: slice) -> None:
        """Add sums [items, heads, cells, keys] of the cells of rows from ``first`` on to a map, by cells of keys."""
        into[:, :, first : first + sums.shape[2]].index_add_(3, self.key_cells[keys], sums)


@lru_cache(16)
def grid_of(most: tuple[int, int], rows: int, keys: int, device: torch.device) -> Grid:
    """The grid of a call, the same for all of these sizes: to make it takes longer than to fill it."""
    with torch.inference_mode(False), torch.no_grad():
        return Grid(most, rows, keys, device)


def bucket_of(distance: Any) -> Any:
    """The bucket of a distance ≥ 0: its number of binary digits."""
    if isinstance(distance, torch.Tensor):
        return torch.frexp(distance.to(torch.float64)).exponent.to(torch.int64).clamp_max(BUCKETS - 1)
    return np.minimum(np.frexp(np.asarray(distance, np.float64))[1], BUCKETS - 1)


def bucket_sums(distance: Tensor, p: Tensor) -> Tensor:
    """``distance`` [..., 32], from weights p [B, H, ...] and how far apart the query and key of each are."""
    return sums_of_buckets(bucket_of(distance), p)


def sums_of_buckets(bucket: Tensor, p: Tensor) -> Tensor:
    """The same from the bucket of each weight."""
    bucket = bucket.expand(p.shape)
    found = p.new_zeros(*p.shape[:2], BUCKETS, dtype=torch.float64)
    return found.scatter_add_(2, bucket.flatten(2), p.flatten(2).double()).to(p.dtype)


# Columns of a group. The k largest of a row lie in the k groups with the largest maxima (ties to the earlier group):
# each group ahead of another holds a number that ranks before all of that other's.
_GROUP = 32


def top_of(numbers: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of finite numbers [..., columns], descending, ties to the lower column: (values, columns)."""
    width = numbers.shape[-1]
    k = min(k, width)
    if numbers.dtype != torch.float32:
        values, columns = torch.sort(numbers, dim=-1, descending=True, stable=True)
        return values[..., :k], columns[..., :k]
    whole = width // _GROUP * _GROUP
    if width <= 4 * k * _GROUP:
        columns = _ranked(numbers, torch.arange(width, device=numbers.device), k)
        return numbers.gather(-1, columns), columns
    grouped = numbers[..., :whole].reshape(*numbers.shape[:-1], -1, _GROUP)
    best = grouped.amax(-1)
    groups = _ranked(best, torch.arange(best.shape[-1], device=best.device), k)
    inside = torch.arange(_GROUP, device=numbers.device)
    candidates = (groups.unsqueeze(-1) * _GROUP + inside).flatten(-2)
    if whole < width:
        rest = torch.arange(whole, width, device=numbers.device)
        candidates = torch.cat([candidates, rest.expand(*candidates.shape[:-1], -1)], -1)
    columns = _ranked(numbers.gather(-1, candidates), candidates, k)
    return numbers.gather(-1, columns), columns


def _ranked(numbers: Tensor, columns: Tensor, k: int) -> Tensor:
    """The columns of the k largest numbers; number and column packed into one integer, so that ties have an order."""
    # as integers, floats >= 0 keep their order and negative ones come below
    high = numbers.contiguous().view(torch.int32).to(torch.int64) << 32
    packed = high | (0xFFFFFFFF - columns)
    return 0xFFFFFFFF - (packed.topk(k, -1).values & 0xFFFFFFFF)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Join two parts of the same rows in place of the first, each normalised on its own keys; ``part`` is used up."""
    part_lse = part_lse.contiguous()  # torch rounds strided numbers in another way
    total = torch.logaddexp(lse, part_lse)
    safe = total.masked_fill(total == -torch.inf, 0.0)
    mine, theirs = torch.exp(lse - safe).unsqueeze(-1), torch.exp(part_lse - safe).unsqueeze(-1)
    if out.dtype.itemsize == 2:  # rounded once, where products by themselves would be rounded too
        out.lerp_(part, theirs.to(out.dtype))
    else:
        out.mul_(mine).add_(part.mul_(theirs))
    lse.copy_(total)
