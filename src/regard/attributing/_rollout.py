"""Attention rollout (Abnar and Zuidema, 2020): how a token's final state goes back to the tokens of the input.

Each layer mixes tokens by ½·I + ½·Ā, Ā the mean of its heads' weights; rollout is the product of these over the layers.
Of one token the product is one row, which goes through the layers from the last to the first: r ← ½·r + ½·rᵀĀ, a sum of
weights that rows are weighted by. A map goes the other way: the matrix that pools keys into columns goes through the
layers as values do. Neither needs a matrix of tokens by tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard import api, statistics
from regard._checks import as_int
from regard.attributing._collect import Collected, collecting, run
from regard.backends._base import accumulation
from regard.observation._effects import weighted_key_mass
from regard.watching._in_memory import InMemory
from regard.watching._seen import Seen


def rollout(
    model: nn.Module,
    inputs: Any,
    *,
    token: int | Sequence[int] | None = None,
    map: tuple[int, int] | None = None,
    layers: Sequence[int | str] | None = None,
    residual: float = 0.5,
) -> Tensor:
    """Attention rollout of a model's self attention, exactly, in memory O(L).

        rollout(model, inputs, token=-1)         # [batch, token]: what the last token is made of
        rollout(model, inputs, map=(64, 64))     # [batch, 64, 64]: the whole of it, pooled as ``Want(map=...)`` pools

    A row sums to 1 (less where a query sees nothing, or a sink takes a share). It describes attention alone: what the
    values hold, and what the other layers do with them, is not in it.

    Args:
        inputs: what the model is called with: a mapping of keywords, a tuple, or one argument.
        token: a position, or several: then the result is [batch, len(token), token].
        map: rows and columns; either this or ``token``.
        layers: numbers or module paths of the layers that count, such as those of an encoder; all when None.
        residual: the share that goes past attention in each layer; ½ in the paper.

    Raises:
        ValueError: a call could not be followed, or is no self attention over the whole input.
    """
    if (token is None) == (map is None):
        raise ValueError("rollout takes token=… (a position, or several) or map=(rows, columns): one of the two")
    if not isinstance(residual, (int, float)) or not 0.0 <= residual <= 1.0:
        raise ValueError(f"residual must be between 0 and 1, got {residual!r}")
    if map is not None:
        return _pooled(model, inputs, statistics.Want(map=map).map, layers, float(residual))
    kept: list[Collected] = []
    with collecting(model, layers, kept.append), torch.no_grad():
        run(model, inputs)
    _check(kept)
    batch, _, length, _ = kept[0].seen.shape
    given: Any = token
    alone = as_int(given) is not None
    wanted = [as_int(n) for n in ([given] if alone else given if isinstance(given, Iterable) else [None])]
    if not wanted or any(n is None or not -length <= n < length for n in wanted):
        raise ValueError(f"token must be a position among {length} tokens, or a list of those, got {token!r}")
    numbers = [n % length for n in wanted if n is not None]
    rows = _zeros(kept[0].seen, batch, len(wanted), length)
    rows[:, range(len(numbers)), numbers] = 1.0
    while kept:
        seen = kept.pop().seen  # its tensors are needed no more
        rows = residual * rows + (1.0 - residual) * _taken(seen, rows) / seen.shape[1]
    return rows[:, 0] if alone else rows


def _pooled(
    model: nn.Module, inputs: Any, grid: tuple[int, int] | None, layers: Sequence[int | str] | None, residual: float
) -> Tensor:
    assert grid is not None
    columns: list[Tensor] = []
    seen_first: list[Collected] = []

    def take(call: Collected) -> None:
        _check([*seen_first, call])
        seen = call.seen
        batch, heads, length, _ = seen.shape
        if not columns:
            seen_first.append(call._replace(seen=seen._replace(result=None)))
            cells = statistics.cells(length, min(grid[1], length), seen.device)
            columns.append(
                _zeros(seen, batch, length, int(cells[-1]) + 1).scatter_(2, cells.expand(batch, -1)[..., None], 1.0)
            )
        columns[0] = residual * columns[0] + (1.0 - residual) * _mixed(seen, columns[0]) / heads

    with collecting(model, layers, take), torch.no_grad():
        run(model, inputs)
    found = columns[0]
    length = found.shape[1]
    rows = statistics.cells(length, min(grid[0], length), found.device)
    made = found.new_zeros(len(found), int(rows[-1]) + 1, found.shape[2]).index_add_(1, rows, found)
    keys = statistics.cells(length, found.shape[2], found.device)
    return made / (torch.bincount(rows)[:, None] * torch.bincount(keys))


def _zeros(seen: Seen | InMemory, *shape: int) -> Tensor:
    like = seen.weights if isinstance(seen, InMemory) else seen.query
    return torch.zeros(*shape, dtype=accumulation(like.dtype), device=like.device)


def _taken(seen: Seen | InMemory, rows: Tensor) -> Tensor:
    """Σ_i r_i·p_ij, added over the heads."""
    if isinstance(seen, InMemory):
        return torch.einsum("bnl,bhls->bns", rows, seen.weights.to(rows.dtype))
    lse = seen.lse if seen.lse is not None else seen.observe(statistics.Want.none()).lse
    if seen.mask is not None or seen.bias is not None:
        lse = lse.masked_fill(seen.permitted().to(lse.device) == 0, -torch.inf)
    return weighted_key_mass(seen.call(), lse.to(rows.dtype), rows)


def _mixed(seen: Seen | InMemory, columns: Tensor) -> Tensor:
    """Σ_j p_ij·x_j, added over the heads: attention whose values are the columns."""
    if isinstance(seen, InMemory):
        return torch.einsum("bhls,bsc->blc", seen.weights.to(columns.dtype), columns)
    query, key = seen.query.to(columns.dtype), seen.key.to(columns.dtype)
    value = columns[:, None].expand(-1, key.shape[1], -1, -1)
    told = seen.keywords
    told |= {name: told[name].to(columns.dtype) for name in ("bias", "sinks") if isinstance(told[name], Tensor)}
    return api.attention(query, key, value, **told).sum(1)


def _check(calls: list[Collected]) -> None:
    """Rollout multiplies the layers: all must mix the same tokens."""
    first = calls[0]
    for call in calls:
        batch, _, queries, keys = call.seen.shape
        if call.kind != "self" or queries != keys or (batch, queries) != (first.seen.shape[0], first.seen.shape[2]):
            raise ValueError(
                f"rollout needs self attention over one text in every layer, and {call.site} attends from {queries} to "
                f"{keys} tokens of {batch} items ({call.kind}), where {first.site} has {first.seen.shape[2]} of "
                f"{first.seen.shape[0]}: name the layers that belong together with layers=[…]"
            )
