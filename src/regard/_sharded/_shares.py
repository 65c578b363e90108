"""Which rows each process computes, and which keys it needs for them: from the mask's rule alone, alike everywhere.

Rows are cut where the kept pairs are shared evenly, into one range per process. A range is one ordinary call, whatever
the rule; a causal mask gives the first process many short rows and the last one few long ones.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from regard.masks import Mask

Span = tuple[int, int]
_BLOCK = 128


class Shares(NamedTuple):
    """One range of rows per process, and the range of keys that those rows may see."""

    rows: list[Span]
    keys: list[Span]


def chunks(size: int, count: int) -> list[Span]:
    """What `Shard` gives each process: as `torch.chunk` cuts, with empty parts at the end where there are too few."""
    step = -(-size // count)
    return [(min(at * step, size), min((at + 1) * step, size)) for at in range(count)]


def shares_of(mask: Mask | None, queries: int, keys: int, offset: int | Tensor, batch: int, count: int) -> Shares:
    """The shares of `count` processes in a call of these sizes."""
    if mask is None or not queries or not keys:
        return Shares(_even(queries, count), [(0, keys)] * count)
    how = ("shares", queries, keys, offset, batch, count)
    return mask.remember(how, offset, lambda: _by_rule(mask, queries, keys, offset, batch, count))


def _even(size: int, count: int) -> list[Span]:
    cuts = [at * size // count for at in range(count + 1)]
    return list(itertools.pairwise(cuts))


def _by_rule(mask: Mask, queries: int, keys: int, offset: int | Tensor, batch: int, count: int) -> Shares:
    work, first, last = _rows_of(mask, queries, keys, offset, batch, count)
    # rows that see nothing cost next to nothing, but are rows: they are shared evenly where nothing else decides
    total = np.cumsum(work + 1e-6)
    cuts = [0, *np.searchsorted(total, total[-1] * np.arange(1, count) / count).tolist(), queries]
    cuts = [min(cut + (0 < at < count), queries) for at, cut in enumerate(cuts)]
    rows = list(itertools.pairwise(cuts))
    spans: list[Span] = []
    for start, stop in rows:
        seen = work[start:stop] > 0
        some = bool(seen.any())
        low = int(first[start:stop][seen].min()) if some else 0
        spans.append((low, int(last[start:stop][seen].max()) if some else low))
    return Shares(rows, spans)


def _rows_of(
    mask: Mask, queries: int, keys: int, offset: int | Tensor, batch: int, count: int
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Of each row: the keys it may see over all items, the first one and the end of the last."""
    spans = mask.rows(queries, keys, offset, batch)
    if spans is not None:
        used = spans.hi > spans.lo
        first = np.where(used, spans.lo, keys).min((0, 1))
        last = np.where(used, spans.hi, 0).max((0, 1))
        return (spans.hi - spans.lo).sum((0, 1)).astype(np.float64), first, last
    # no such form, or contents that cannot be read: the blocks that are not known to be empty
    size = max(1, min(_BLOCK, queries // (16 * count)))
    table = mask.blocks(queries, keys, offset, batch, size, size)
    counts = np.diff(table.row_ptr, axis=1)
    block = np.tile(np.arange(table.query_blocks), table.groups).repeat(counts.ravel())
    low, high = table.cols.astype(np.int64) * size, np.minimum((table.cols.astype(np.int64) + 1) * size, keys)
    work = np.bincount(block, high - low, table.query_blocks)
    first, last = np.full(table.query_blocks, keys), np.zeros(table.query_blocks, np.int64)
    np.minimum.at(first, block, low)
    np.maximum.at(last, block, high)
    return tuple(each.repeat(size)[:queries] for each in (work, first, last))  # type: ignore[return-value]
