"""Statistics of weights that are in memory, [batch, head, query, key]: the definitions of ``regard.statistics``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from regard import statistics

if TYPE_CHECKING:
    from torch import Tensor

    from regard.statistics import Want

# numbers of weights that are looked at together
_NUMBERS = 1 << 22


def statistics_of(
    weights: Tensor, want: Want, offset: int | Tensor, lengths: Tensor | None = None
) -> dict[str, Tensor]:
    """Every wanted statistic. A row of nothing but zeros is empty: its statistics are missing. Without the ``lengths``
    of the values [batch, head, key] there is no value mass."""
    dtype = torch.float64 if weights.dtype == torch.float64 else torch.float32
    batch, heads, rows, keys = weights.shape
    counted = range(rows)[want.queries or slice(None)]
    parts: dict[str, list[Tensor]] = {}
    sums: dict[str, Tensor] = {}
    step = max(1, _NUMBERS // max(1, batch * heads * keys))
    for start in range(0, rows, step):
        some = range(start, min(rows, start + step))
        p = weights[:, :, some.start : some.stop].to(dtype)
        if want.rows:
            best = p.amax(-1)
            empty = best == 0
            entropy = (0.0 - torch.special.xlogy(p, p).sum(-1)).clamp_min(0.0)
            parts.setdefault("entropy", []).append(entropy.masked_fill(empty, torch.nan))
            parts.setdefault("max_weight", []).append(best.masked_fill(empty, torch.nan))
        if want.top_k:
            for name, part in zip(("top_weights", "top_keys"), _top(p, want.top_k), strict=True):
                parts.setdefault(name, []).append(part)
        if want.first:
            parts.setdefault("first_mass", []).append(p[..., : want.first].sum(-1))
        if want.distance:
            _add(sums, "distance", _by_distance(p, some, offset))
        if want.scores is not False:
            parts.setdefault("relations", []).append(_relations(p, some, offset, want.scores))
        inside = range(max(some.start, counted.start), min(some.stop, counted.stop))
        within = slice(inside.start - some.start, inside.stop - some.start)
        names = ("key_mass" if want.key_mass else None, "map")
        if len(inside):
            _add_columns(sums, p[:, :, within], inside, counted, want, names)
        if want.value_mass and lengths is not None:
            carried = p * lengths.to(dtype).unsqueeze(2)
            carried = carried.masked_fill_(p == 0, 0.0)  # what is hidden may hold anything
            parts.setdefault("value_sum", []).append(carried.sum(-1))
            if want.top_k:
                for name, part in zip(("value_top_lengths", "value_top_keys"), _top(carried, want.top_k), strict=True):
                    parts.setdefault(name, []).append(part)
            if len(inside):
                _add_columns(sums, carried[:, :, within], inside, counted, want, ("value_mass", "value_map"))
    found = {name: torch.cat(pieces, 2) for name, pieces in parts.items()} | sums
    if want.weights is not None:
        queries, columns = (range(size)[span] for span, size in zip(want.weights, (rows, keys), strict=True))
        rectangle = weights[:, :, queries.start : queries.stop, columns.start : columns.stop]
        found["weights"] = rectangle.to(dtype, copy=True)
    if want.value_mass and lengths is not None:
        found["value_length"] = lengths.to(dtype)
    if want.pairs is not None:
        pairs = statistics.checked_pairs(want.pairs, rows, keys).to(weights.device)
        found["pairs"] = weights[:, :, pairs[:, 0], pairs[:, 1]].to(dtype)
    if want.map is not None and "map" in found:
        shape = found["map"].shape[2:]
        counts = zip((len(counted), keys), shape, strict=True)
        sizes = [statistics.cell_sizes(size, count, weights.device) for size, count in counts]
        for name in {"map", "value_map"} & set(found):
            found[name] /= sizes[0][:, None] * sizes[1]
    return found


def _add(sums: dict[str, Tensor], name: str, more: Tensor) -> None:
    sums[name] = sums[name] + more if name in sums else more


def _positions(p: Tensor, rows: range, offset: int | Tensor) -> tuple[Tensor, Tensor]:
    """Of the queries, [batch or 1, 1, row, 1] or [row, 1], and of the keys."""
    i = torch.arange(rows.start, rows.stop, device=p.device)[:, None]
    i = i + (offset.to(p.device).view(-1, 1, 1, 1) if isinstance(offset, torch.Tensor) else offset)
    return i, torch.arange(p.shape[3], device=p.device)


def _relations(p: Tensor, rows: range, offset: int | Tensor, given: bool | Tensor) -> Tensor:
    tokens = statistics.checked_tokens(given, p.shape[0], p.shape[3])
    tokens = None if tokens is None else tokens.to(p.device)
    return statistics.relation_masses(p, p > 0, *_positions(p, rows, offset), tokens)


def _add_columns(
    sums: dict[str, Tensor], p: Tensor, rows: range, counted: range, want: Want, names: tuple[str | None, str]
) -> None:
    if names[0] is not None:
        _add(sums, names[0], p.sum(2))
    if want.map is not None:
        grid = min(want.map[0], len(counted)), min(want.map[1], p.shape[3])
        by_key = p.new_zeros(*p.shape[:3], grid[1]).index_add_(3, statistics.cells(p.shape[3], grid[1], p.device), p)
        cells = statistics.cells(len(counted), grid[0], p.device)[
            rows.start - counted.start : rows.stop - counted.start
        ]
        _add(sums, names[1], p.new_zeros(*p.shape[:2], *grid).index_add_(2, cells, by_key))


def _top(p: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Largest first, ties to the lower key; keys of weight 0 are no keys that were looked at."""
    best, at = statistics.top_of(p, k)
    at = at.masked_fill(best <= 0, -1)
    if best.shape[-1] < k:
        short = k - best.shape[-1]
        best = torch.nn.functional.pad(best, (0, short))
        at = torch.nn.functional.pad(at, (0, short), value=-1)
    return best, at


def _by_distance(p: Tensor, rows: range, offset: int | Tensor) -> Tensor:
    i, j = _positions(p, rows, offset)
    return statistics.bucket_sums((i - j).abs(), p)
