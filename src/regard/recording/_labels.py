"""What a head looks like: numbers that describe it, and a name by printed thresholds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from regard._display.head_labels import LOCAL_KEYS, NEAR_BUCKETS, RULES, label
from regard.recording._summary_words import WORDS

if TYPE_CHECKING:
    from torch import Tensor

    from regard.recording._calls import Recorded

_LEAST = {name: least for name, _, least in RULES}
# Those of the page's rules that have their statistic here, as the summary writes them.
_WRITTEN = {"first": "first-token", "previous": "previous-token", "local": "local", "broad": "broad"}
THRESHOLD_NUMBERS = {
    **{name: _LEAST[name] for name in _WRITTEN}, "near": 2 ** (NEAR_BUCKETS - 1) - 1, "keys": LOCAL_KEYS
}  # fmt: skip
THRESHOLDS = WORDS["thresholds"][0].format(**THRESHOLD_NUMBERS)


def describe(call: Recorded) -> list[dict[str, Any]]:
    """For every item and head of the call, its numbers and its label; a number that was not recorded is None."""
    rows = (call.lse != -torch.inf).sum(-1).clamp_min(1)  # queries that see something
    numbers: dict[str, Tensor] = {}
    if "entropy" in call.parts:
        numbers["entropy"] = call.entropy.nanmean(-1)
        numbers["spread"] = _spread(call)
        numbers["max_weight"] = call.max_weight.nanmean(-1)
    if "key_mass" in call.parts:
        numbers["first"] = _first(call.key_mass) / call.key_mass.sum(-1).clamp_min(1e-30)
        if "value_mass" in call.parts:
            carried = call.value_mass.gather(-1, first_key(call.key_mass)).squeeze(-1)
            numbers["first_value"] = carried / call.value_mass.sum(-1).clamp_min(1e-30)
    if "distance" in call.parts and call.kind == "self":
        share = call.distance / call.distance.sum(-1, keepdim=True).clamp_min(1e-30)
        numbers["distance"] = (share * _middles(share)).sum(-1)
        numbers["near"] = share[..., :NEAR_BUCKETS].sum(-1)
    if "top_keys" in call.parts and call.kind == "self":
        numbers["previous"] = _previous(call) / rows
    names = ["entropy", "spread", "max_weight", "first", "distance", "near", "previous"]
    names += ["first_value"] * ("first_value" in numbers)
    found = []
    for item in range(call.batch):
        for at, head in enumerate(call.heads):
            row: dict[str, Any] = {name: float(numbers[name][item, at]) if name in numbers else None for name in names}
            row = {key: None if value is not None and math.isnan(value) else value for key, value in row.items()}
            found.append({"item": item, "head": head, **row, "label": _WRITTEN.get(label(row, call.keys), "")})
    return found


def has_nan(call: Recorded) -> bool:
    """Whether some statistic is NaN though its query sees keys: a query, a key or a value was."""
    return any(bool(call.parts[name].isnan().any()) for name in ("lse", "key_mass", "value_mass") if name in call.parts)


def first_key(mass: Tensor) -> Tensor:
    """The first key that receives any mass, [..., 1]: padding on the left receives none."""
    return (mass > 0).to(torch.uint8).argmax(-1, keepdim=True)


def _first(mass: Tensor) -> Tensor:
    return mass.gather(-1, first_key(mass)).squeeze(-1)


def _spread(call: Recorded) -> Tensor:
    """Mean entropy over the mean of the largest that each query could have, ln(permitted)."""
    most = call.counts().clamp_min(1).to(call.entropy.dtype).log().masked_fill(call.entropy.isnan(), 0.0)
    return call.entropy.nansum(-1) / most.sum(-1)


def _middles(share: Tensor) -> Tensor:
    """The middle of each distance bucket: 0, 1, 2.5, 5.5, 11.5 …"""
    b = torch.arange(share.shape[-1], dtype=share.dtype)
    return torch.where(b == 0, 0.0, (2.0 ** (b - 1) + 2.0**b - 1) / 2)


def _previous(call: Recorded) -> Tensor:
    """Weight given to the key just before each query, summed; what is outside a row's top keys counts as 0."""
    at = torch.arange(call.queries) + call.positions.view(-1, 1) - 1  # [batch or 1, L]
    return (call.top_weights * (call.top_keys == at[:, None, :, None])).sum((-1, -2))
