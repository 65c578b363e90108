"""What a head does, measured: shares of its weight that fall on keys of a kind, and a name.

The shares are of what the recording holds exactly: each query's largest weights, what every key receives, and the
weight by distance. A share that rests on the largest weights alone is a lower bound.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from regard._display.head_labels import NEAR_BUCKETS, label

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from regard._page._scenes import Layer

LEAST_REPEATS = 3  # queries whose token came before, for induction and duplicate to mean something
STATISTICS = (
    "entropy", "spread", "max_weight", "first", "previous", "next", "same", "near", "distance", "duplicate",
    "induction",
)  # fmt: skip


class Seen(NamedTuple):
    """What the queries of a layer saw, beyond what its page draws. Arrays are [head, …]."""

    positions: NDArray[Any]  # [query]: where each stands among the keys
    permitted: NDArray[Any]  # [head, query]: how many keys each may see; 0 where that is not known
    seeing: NDArray[Any]  # [head]: how many queries see any
    max_weight: NDArray[Any] | None
    distance: NDArray[Any] | None  # [head, bucket]


def character(layer: Layer, tokens: list[str], seen: Seen) -> list[dict[str, Any]]:
    """For each head, the statistics that could be measured (None elsewhere) and its label, empty where no rule fits."""
    heads = len(layer.heads)
    found: dict[str, NDArray[Any]] = {}
    if layer.entropy is not None:
        there = ~np.isnan(layer.entropy)
        found["entropy"] = _mean(layer.entropy)
        most = np.where(there, np.log(np.maximum(seen.permitted, 1)), 0).sum(-1)
        total = np.where(there, layer.entropy, 0).sum(-1)
        found["spread"] = np.where(most > 0, total / np.maximum(most, 1e-30), np.nan)
    if seen.max_weight is not None:
        found["max_weight"] = _mean(seen.max_weight)
    if layer.key_mass is not None:
        received = (layer.key_mass > 0).argmax(-1)  # padding on the left receives nothing
        first = np.take_along_axis(layer.key_mass, received[:, None], -1)[:, 0]
        found["first"] = first / np.maximum(layer.key_mass.sum(-1), 1e-30)
    if layer.kind == "self":
        found |= _by_place(layer, tokens, seen)
    rows = []
    for head in range(heads):
        row: dict[str, Any] = {name: _number(found[name][head]) if name in found else None for name in STATISTICS}
        rows.append({**row, "label": label(row, len(tokens))})
    return rows


def _by_place(layer: Layer, tokens: list[str], seen: Seen) -> dict[str, NDArray[Any]]:
    """Of a layer whose queries are among its keys: how far it looks, and at which of its neighbours."""
    found: dict[str, NDArray[Any]] = {}
    if seen.distance is not None:
        share = seen.distance / np.maximum(seen.distance.sum(-1, keepdims=True), 1e-30)
        buckets = np.arange(share.shape[-1])
        middle = np.where(buckets == 0, 0.0, (2.0 ** (buckets - 1) + 2.0**buckets - 1) / 2)
        found["distance"] = (share * middle).sum(-1)
        found["near"] = share[:, :NEAR_BUCKETS].sum(-1)
        found["same"] = share[:, 0]
    if layer.top_keys is not None and layer.top_weights is not None:
        for name, shift in (("previous", -1), ("next", 1)):
            hit = layer.top_keys == (seen.positions + shift)[None, :, None]
            found[name] = (layer.top_weights * hit).sum((-1, -2)) / seen.seeing
        found |= _repeats(tokens, seen.positions, layer.top_keys, layer.top_weights)
    return found


def _mean(values: NDArray[Any]) -> NDArray[Any]:
    """For each head, the mean over the queries that have a value; NaN, not 0, where none has."""
    number = (~np.isnan(values)).sum(-1)
    return np.where(number > 0, np.nansum(values, -1) / np.maximum(number, 1), np.nan)


def _number(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _repeats(
    tokens: list[str], positions: NDArray[Any], top_keys: NDArray[Any], top_weights: NDArray[Any]
) -> dict[str, NDArray[Any]]:
    """The mean weight that a query gives to earlier keys of its own token (duplicate), and to keys that come right
    after one (induction), over the queries whose token came before."""
    code: dict[str, int] = {}
    ids = np.array([code.setdefault(token, len(code)) for token in tokens], np.int64)
    inside = (positions >= 0) & (positions < len(ids))
    own = np.where(inside, ids[np.clip(positions, 0, len(ids) - 1)], -1)
    seen: set[int] = set()
    came_before = np.zeros(len(ids), bool)
    for at, token in enumerate(ids.tolist()):
        came_before[at] = token in seen
        seen.add(token)
    counted = inside & came_before[np.clip(positions, 0, len(ids) - 1)]
    total = int(counted.sum())
    if total < LEAST_REPEATS:
        return {}
    is_key = top_keys >= 0
    place = np.clip(top_keys, 0, len(ids) - 1)
    earlier = is_key & (top_keys < positions[None, :, None]) & counted[None, :, None]
    duplicate = earlier & (ids[place] == own[None, :, None])
    after = earlier & (top_keys > 0) & (ids[np.maximum(place - 1, 0)] == own[None, :, None])
    return {
        "duplicate": (top_weights * duplicate).sum((-1, -2)) / total,
        "induction": (top_weights * after).sum((-1, -2)) / total,
    }
