"""Computes the wanted statistics from the inputs and the log-sum-exp, some rows at a time: no L×S tensor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from regard import statistics
from regard.backends._base import accumulation
from regard.backends.eager import logits_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from regard.spec import Call
    from regard.statistics import Want

# numbers in the rows of weights that are alive at once
_NUMBERS = 1 << 22


def observe_rows(call: Call, lse: Tensor, want: Want) -> dict[str, Tensor]:
    """Every wanted statistic of the call, [B, H, ...]."""
    found = _Found(call, want)
    with torch.no_grad(), torch.autocast(call.spec.device, enabled=False):
        for rows in _row_chunks(call):
            found.add(rows, lse)
    return found.result()


def observing_bytes(call: Call, want: Want) -> int:
    """Bytes alive at the peak of ``observe_rows``: the statistics, and some rows of logits and weights."""
    spec = call.spec
    rows, heads = spec.queries, spec.batch * spec.heads
    itemsize = accumulation(spec.dtype).itemsize
    numbers = rows * (2 * want.rows + bool(want.first) + 3 * want.top_k) + spec.keys * want.key_mass
    if want.map is not None:
        numbers += want.map[0] * want.map[1]
    if want.weights is not None:
        spans = zip(want.weights, (rows, spec.keys), strict=True)
        numbers += math.prod(len(range(size)[span]) for span, size in spans)
    alive = heads * spec.keys * max(1, min(rows, _NUMBERS // max(1, heads * spec.keys)))
    return itemsize * (heads * numbers + alive * (4 + 4 * bool(want.top_k or want.distance)))


class _Found:
    """Statistics under way: rows are written to their place, sums are added to."""

    def __init__(self, call: Call, want: Want) -> None:
        spec = call.spec
        self.call, self.want = call, want
        self.dtype = accumulation(spec.dtype)
        self.lead = (spec.batch, spec.heads)
        self.parts: dict[str, Tensor] = {}
        rows = slice(*(want.queries or slice(None)).indices(spec.queries)[:2])
        self.queries = range(rows.start, max(rows.start, rows.stop))
        if want.rows:
            self.parts["entropy"] = self._new(spec.queries)
            self.parts["max_weight"] = self._new(spec.queries)
        if want.key_mass:
            self.parts["key_mass"] = self._new(spec.keys)
        if want.map is not None:
            self.grid = min(want.map[0], len(self.queries)), min(want.map[1], spec.keys)
            self.parts["map"] = self._new(*self.grid)
            device = call.query.device
            self.row_cells = statistics.cells(len(self.queries), max(1, self.grid[0]), device)
            self.key_cells = statistics.cells(spec.keys, max(1, self.grid[1]), device)
        if want.top_k:
            self.parts["top_weights"] = self._new(spec.queries, want.top_k)
            self.parts["top_keys"] = self._new(spec.queries, want.top_k).long()
        if want.distance:
            self.parts["distance"] = self._new(statistics.BUCKETS)
        if want.first:
            self.parts["first_mass"] = self._new(spec.queries)
        if want.weights is not None:
            self.rectangle = tuple(
                range(n)[part] for part, n in zip(want.weights, (spec.queries, spec.keys), strict=True)
            )
            self.parts["weights"] = self._new(*map(len, self.rectangle))

    def _new(self, *shape: int) -> Tensor:
        return torch.zeros(*self.lead, *shape, dtype=self.dtype, device=self.call.query.device)

    def add(self, rows: range, lse: Tensor) -> None:
        want, spec = self.want, self.call.spec
        at = slice(rows.start, rows.stop)
        logs, seen = _masked_logits(self.call, rows)
        row_lse = lse[:, :, at].to(self.dtype).unsqueeze(-1)
        empty = row_lse == -torch.inf
        logs = logs - row_lse.masked_fill(empty, 0.0)
        weights = logs.exp()
        parts = self.parts
        if want.rows:
            missing = empty.squeeze(-1)
            parts["entropy"][:, :, at] = statistics.entropy(weights, logs).masked_fill(missing, torch.nan)
            top = weights.amax(-1) if spec.keys else weights.new_zeros(weights.shape[:-1])
            parts["max_weight"][:, :, at] = top.masked_fill(missing, torch.nan)
        if want.first:
            parts["first_mass"][:, :, at] = weights[..., : want.first].sum(-1)
        if want.top_k:
            parts["top_weights"][:, :, at], parts["top_keys"][:, :, at] = statistics.top(weights, seen, want.top_k)
        if want.distance:
            self._distance(rows, weights)
        self._sums(rows, weights)

    def _sums(self, rows: range, weights: Tensor) -> None:
        want = self.want
        inside = range(max(rows.start, self.queries.start), min(rows.stop, self.queries.stop))
        if len(inside) and (want.key_mass or want.map is not None):
            some = weights[:, :, inside.start - rows.start : inside.stop - rows.start]
            if want.key_mass:
                self.parts["key_mass"] += some.sum(2)
            if want.map is not None:
                by_key = some.new_zeros(*some.shape[:3], self.grid[1]).index_add_(3, self.key_cells, some)
                first = inside.start - self.queries.start
                self.parts["map"].index_add_(2, self.row_cells[first : first + len(inside)], by_key)
        if want.weights is not None:
            wanted, keys = self.rectangle
            inside = range(max(rows.start, wanted.start), min(rows.stop, wanted.stop))
            if len(inside):
                some = weights[:, :, inside.start - rows.start : inside.stop - rows.start, keys.start : keys.stop]
                self.parts["weights"][:, :, inside.start - wanted.start : inside.stop - wanted.start] = some

    def _distance(self, rows: range, weights: Tensor) -> None:
        call, device = self.call, weights.device
        i = torch.arange(rows.start, rows.stop, device=device)
        offset = call.offset.view(-1, 1) if isinstance(call.offset, torch.Tensor) else call.offset
        position = (i + offset).reshape(-1, 1, len(rows), 1)
        far = statistics.buckets((position - torch.arange(call.spec.keys, device=device)).abs())
        far = far.expand(weights.shape).reshape(*self.lead, -1)
        self.parts["distance"].scatter_add_(2, far, weights.reshape(*self.lead, -1))

    def result(self) -> dict[str, Tensor]:
        if "map" in self.parts:
            rows = torch.bincount(self.row_cells, minlength=self.grid[0])[: self.grid[0]]
            keys = torch.bincount(self.key_cells, minlength=self.grid[1])[: self.grid[1]]
            self.parts["map"] /= rows[:, None] * keys
        return self.parts


def _masked_logits(call: Call, rows: range) -> tuple[Tensor, Tensor | None]:
    """Logits of some rows over all keys, -inf where forbidden, and what they may see (None: everything)."""
    spec, at = call.spec, slice(rows.start, rows.stop)
    bias = call.bias if call.bias is None or call.bias.shape[2] == 1 else call.bias[:, :, at]
    logits = logits_of(call, call.query[:, :, at], call.key, bias)
    seen = None if bias is None else bias != -torch.inf
    if call.mask is not None:
        permitted = call.mask.tile(
            rows, range(spec.keys), spec.queries, spec.keys, offset=call.offset, device=call.query.device
        )
        logits = logits.masked_fill(~permitted, -torch.inf)
        seen = permitted if seen is None else permitted & seen
    return logits, seen


def exact_lse(call: Call) -> Tensor:
    """Log-sum-exp of every row in accumulation precision, sinks included."""
    spec = call.spec
    found = []
    with torch.no_grad(), torch.autocast(spec.device, enabled=False):
        for rows in _row_chunks(call):
            lse = torch.logsumexp(_masked_logits(call, rows)[0], -1)
            if call.sinks is not None:
                total = torch.logaddexp(lse, call.sinks.to(lse.dtype).view(1, -1, 1))
                lse = total.masked_fill(lse == -torch.inf, -torch.inf)
            found.append(lse)
    empty = call.query.new_empty(spec.batch, spec.heads, 0, dtype=accumulation(spec.dtype))
    return torch.cat([empty, *found], 2)


def _row_chunks(call: Call) -> Iterator[range]:
    spec = call.spec
    at_once = max(1, _NUMBERS // max(1, spec.batch * spec.heads * spec.keys))
    for start in range(0, spec.queries, at_once):
        yield range(start, min(start + at_once, spec.queries))
