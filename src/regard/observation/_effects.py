"""The effect of cutting single edges on a scalar of the output, and sums of weights that rows are weighted by.

With dO the gradient of a scalar by the output of a call, cutting the edge from query i to key j (its weight becomes 0,
the others of the row grow so that they sum to 1 again) changes the scalar, as far as it is linear in the output, by

    effect_ij = p_ij / (1 − p_ij) · (dO_i·out_i − dO_i·v_j)

Gradient × attention (Chefer et al., 2021) is p_ij · (dO_i·v_j), of which the positive part counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.backends._base import accumulation, no_autocast
from regard.backends._steps import side_by_side
from regard.observation._rows import tiles
from regard.observation._totals import Tile
from regard.spec import Call
from regard.statistics import Grid

# numbers of weights in memory that are looked at together
_NUMBERS = 1 << 20


class Part(NamedTuple):
    """Weights p and g = dO·v of some rows [items, heads, rows, keys], and where they stand."""

    p: Tensor
    g: Tensor
    items: slice
    heads: slice
    rows: range
    runs: Sequence[tuple[int, ...]]  # the keys, as (start, stop, …)
    sink: Tensor | None  # [items, heads, rows]: the share of the denominator that no key has


def edge_effects(call: Call, lse: Tensor, grad_out: Tensor, grid: tuple[int, int], top_k: int) -> dict[str, Tensor]:
    """Effects by key, on a map, and the ``top_k`` largest of each head, in O(L) memory; see ``Effects``."""
    shape = (call.spec.batch, call.spec.heads, call.spec.queries, call.spec.keys)
    made = Effects(shape, grid, top_k, call.query.device, accumulation(call.spec.dtype))
    with torch.no_grad(), no_autocast(call.spec.device):
        for part in _of_call(call, lse, grad_out):
            made.fold(part)
    return made.result()


def edge_effects_of_weights(
    weights: Tensor, grad_weights: Tensor, grid: tuple[int, int], top_k: int
) -> dict[str, Tensor]:
    """The same of weights that are in memory, with the gradient by them: dO·v."""
    batch, heads, queries, keys = weights.shape
    made = Effects((batch, heads, queries, keys), grid, top_k, weights.device, accumulation(weights.dtype))
    step = max(1, _NUMBERS // max(1, batch * heads * keys))
    # how far from 1 rounding leaves the sum of a row
    noise = torch.finfo(weights.dtype).eps * (32 if weights.dtype.itemsize > 2 else 4)
    with torch.no_grad():
        for start in range(0, queries, step):
            rows = range(start, min(queries, start + step))
            p, g = (t[:, :, rows.start : rows.stop].to(made.dtype) for t in (weights, grad_weights))
            left = 1.0 - p.sum(-1)  # more than rounding: a sink that has no key
            sink = left.masked_fill(left < noise, 0.0)
            made.fold(Part(p, g, slice(0, batch), slice(0, heads), rows, ((0, keys),), sink))
    return made.result()


def _of_call(call: Call, lse: Tensor, grad_out: Tensor) -> Iterable[Part]:
    spec, work = call.spec, accumulation(call.spec.dtype)
    # what a pair that is not permitted holds must not reach a product with 0
    value = torch.where(call.value.isfinite(), call.value, 0.0).to(work)
    group = spec.heads // spec.kv_heads
    for tile in tiles(call, lse):
        values = tile.of_keys(value, group)
        lead = values.shape[0] * values.shape[1]
        grad = grad_out[tile.at].to(work).reshape(lead, -1, spec.value_dim)
        g = torch.bmm(grad, values.reshape(lead, *values.shape[2:]).transpose(1, 2)).view(tile.p.shape)
        sink = None
        if call.sinks is not None:
            share = torch.exp(call.sinks[tile.heads].to(work).view(1, -1, 1) - lse[tile.at])
            sink = share.masked_fill(lse[tile.at] == -torch.inf, 0.0)
        yield Part(tile.p, g, tile.items, tile.heads, tile.rows, tile.runs, sink)


class Effects:
    """Takes parts in any order, each row in one of them.

    key_effect [B, H, S]: what cutting each key for all queries, edge by edge, would add up to; ``map`` [B, H, rows,
    columns], the mean over the pairs of a cell; ``top_queries``, ``top_keys``, ``top_effects``, ``top_weights`` [B, H,
    k]: the edges with the largest effects in size, −1 and 0 where there are fewer; ``key_gradient``, ``gradient_map``:
    the same sums of the positive part of gradient × attention.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        grid: tuple[int, int],
        top_k: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        batch, heads, queries, keys = shape
        self.dtype, self.top_k = dtype, top_k
        self.grid = Grid(grid, queries, keys, device)
        lead = (batch, heads)
        new: dict[str, Any] = {"dtype": dtype, "device": device}
        self.parts = {name: torch.zeros(*lead, keys, **new) for name in ("key_effect", "key_gradient")}
        self.parts |= {name: torch.zeros(*lead, *self.grid.shape, **new) for name in ("map", "gradient_map")}
        self.best = torch.zeros(*lead, top_k, **new)
        self.best_weights = torch.zeros(*lead, top_k, **new)
        self.best_at = torch.full((*lead, top_k), -1, dtype=torch.int64, device=device)

    def fold(self, part: Part) -> None:
        gradient = part.p * part.g
        effect = _cut(part, gradient)
        self._add(part, effect, "key_effect", "map")
        self._add(part, gradient.clamp_min(0.0), "key_gradient", "gradient_map")
        if self.top_k:
            self._keep_best(part, effect)

    def _add(self, part: Part, numbers: Tensor, by_key: str, cells: str) -> None:
        sums, first = self.grid.row_sums(numbers, part.rows)
        for keys, columns in side_by_side(part.runs):
            self.parts[by_key][part.items, part.heads, keys] += sums[..., columns].sum(2)
            self.grid.add(self.parts[cells][part.items, part.heads], sums[..., columns], first, keys)

    def _keep_best(self, part: Part, effect: Tensor) -> None:
        at = (part.items, part.heads)
        flat = effect.flatten(2)
        found = flat.abs().topk(min(self.top_k, flat.shape[-1]), -1).indices
        keys = torch.cat([torch.arange(low, high, device=flat.device) for low, high, *_ in part.runs])
        width = effect.shape[-1]
        where = (part.rows.start + found // width) * self.grid.keys + keys[found % width]
        effects = torch.cat([self.best[at], flat.gather(-1, found)], -1)
        weights = torch.cat([self.best_weights[at], part.p.flatten(2).gather(-1, found)], -1)
        places = torch.cat([self.best_at[at], where.masked_fill(weights[..., self.top_k :] == 0, -1)], -1)
        best = torch.sort(effects.abs(), dim=-1, descending=True, stable=True).indices[..., : self.top_k]
        self.best[at], self.best_at[at] = effects.gather(-1, best), places.gather(-1, best)
        self.best_weights[at] = weights.gather(-1, best)

    def result(self) -> dict[str, Tensor]:
        for name in ("map", "gradient_map"):
            self.parts[name] /= self.grid.pairs
        none = self.best_at < 0
        return self.parts | {
            "top_queries": (self.best_at // self.grid.keys).masked_fill(none, -1),
            "top_keys": (self.best_at % self.grid.keys).masked_fill(none, -1),
            "top_effects": self.best,
            "top_weights": self.best_weights,
        }


def _cut(part: Part, gradient: Tensor) -> Tensor:
    """The effect of cutting each edge. Where one weight is more than a half, 1 − p and the difference of its two
    products lose their digits: there the row is summed without that edge. A row of one edge is left with nothing."""
    total = gradient.sum(-1, keepdim=True)
    effect = part.p / (1.0 - part.p) * (total - part.g)
    top, at = part.p.max(-1, keepdim=True)
    without = gradient.scatter(-1, at, 0.0).sum(-1, keepdim=True)
    rest = part.p.scatter(-1, at, 0.0).sum(-1, keepdim=True)
    if part.sink is not None:
        rest = rest + part.sink.unsqueeze(-1)
    careful = torch.where(rest > 0, without / rest, 0.0) - total
    careful = torch.where(top > 0.5, careful, effect.gather(-1, at))
    return effect.scatter(-1, at, careful)


def weighted_key_mass(call: Call, lse: Tensor, rows: Tensor) -> Tensor:
    """Σ_i r_i·p_ij, added over the heads: [B, n, S] for row weights [B, n, L]."""
    found = rows.new_zeros(rows.shape[0], rows.shape[1], call.spec.keys)
    with torch.no_grad(), no_autocast(call.spec.device):
        for tile in tiles(call, lse):
            _add_weighted(tile, rows, found)
    return found


def _add_weighted(tile: Tile, rows: Tensor, found: Tensor) -> None:
    some = rows[tile.items, :, tile.rows.start : tile.rows.stop].to(tile.p.dtype)
    # heads are summed by the product: [items, n, heads · rows] × [items, heads · rows, keys]
    repeated = some.repeat(1, 1, tile.p.shape[1])
    sums = repeated @ tile.p.reshape(tile.p.shape[0], -1, tile.p.shape[-1])
    for keys, columns in side_by_side(tile.runs):
        found[tile.items, :, keys] += sums[..., columns]
