"""What a head does, measured: shares of its weight that fall on keys of a kind, and a name.

The shares are of what the recording holds exactly: each query's largest weights, what every key receives, and the
weight by distance. A share that rests on the largest weights alone is a lower bound.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._display.head_labels import NEAR_BUCKETS, label

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEAST_REPEATS = 3  # queries whose token came before, for induction and duplicate to mean something
STATISTICS = (
    "entropy", "spread", "max_weight", "first", "previous", "next", "same", "near", "distance", "duplicate",
    "induction",
)  # fmt: skip


def character(
    *,
    kind: str,
    tokens: list[str],
    positions: NDArray[Any],
    permitted: NDArray[Any],
    seeing: NDArray[Any],
    top_keys: NDArray[Any] | None,
    top_weights: NDArray[Any] | None,
    entropy: NDArray[Any] | None,
    max_weight: NDArray[Any] | None,
    key_mass: NDArray[Any] | None,
    distance: NDArray[Any] | None,
) -> list[dict[str, Any]]:
    """For each head, the statistics that could be measured (None elsewhere) and its label, empty where no rule fits.

    ``permitted`` [head, query] is how many keys each query may see (0 where that is not known), ``seeing`` [head] how
    many queries see any.
    """
    heads = permitted.shape[0]
    found: dict[str, NDArray[Any]] = {}
    if entropy is not None:
        there = ~np.isnan(entropy)
        found["entropy"] = _mean(entropy)
        most = np.where(there, np.log(np.maximum(permitted, 1)), 0).sum(-1)
        found["spread"] = np.where(most > 0, np.where(there, entropy, 0).sum(-1) / np.maximum(most, 1e-30), np.nan)
    if max_weight is not None:
        found["max_weight"] = _mean(max_weight)
    if key_mass is not None:
        received = (key_mass > 0).argmax(-1)  # padding on the left receives nothing
        first = np.take_along_axis(key_mass, received[:, None], -1)[:, 0]
        found["first"] = first / np.maximum(key_mass.sum(-1), 1e-30)
    if kind == "self":
        if distance is not None:
            share = distance / np.maximum(distance.sum(-1, keepdims=True), 1e-30)
            buckets = np.arange(share.shape[-1])
            middle = np.where(buckets == 0, 0.0, (2.0 ** (buckets - 1) + 2.0**buckets - 1) / 2)
            found["distance"] = (share * middle).sum(-1)
            found["near"] = share[:, :NEAR_BUCKETS].sum(-1)
            found["same"] = share[:, 0]
        if top_keys is not None and top_weights is not None:
            for name, shift in (("previous", -1), ("next", 1)):
                hit = top_keys == (positions + shift)[None, :, None]
                found[name] = (top_weights * hit).sum((-1, -2)) / seeing
            found |= _repeats(tokens, positions, top_keys, top_weights)
    rows = []
    for head in range(heads):
        row: dict[str, Any] = {name: _number(found[name][head]) if name in found else None for name in STATISTICS}
        rows.append({**row, "label": label(row, len(tokens))})
    return rows


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
