"""Rule 58: linear attention by sums equals linear attention by pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from regard.linear import LinearState
from regard.testing._calls import array, expect, largest
from regard.testing._suite import DOUBLE, Trial, rule

CASES = ("causal", "causal, documents", "causal, padding", "causal, decay", "causal, not normalised", "after a state")


@rule(58, "causal linear attention equals its quadratic form within 1e-10", CASES, DOUBLE)
def linear_by_pairs(t: Trial, case: str) -> str:
    attend = t.need("linear_attention")
    query, key, value = t.normal(2, 4, 77, 5, seed=1), t.normal(2, 2, 77, 5, seed=2), t.normal(2, 2, 77, 3, seed=3)
    mask: Any = t.masks.causal()
    given: dict[str, Any] = {}
    seen = np.broadcast_to(np.tril(np.ones((77, 77), dtype=bool)), (2, 1, 77, 77))
    fade = np.ones((4, 77, 77))
    if case == "causal, documents":
        mask, document = mask & t.masks.documents(lengths=[70, 7]), np.arange(77) >= 70
        seen = seen & (document[:, None] == document)
    elif case == "causal, padding":
        mask = mask & t.masks.padding([77, 11])
        seen = seen & (np.arange(77) < np.array([77, 11])[:, None])[:, None, None]
    elif case == "causal, decay":
        given = {"decay": [0.5, 0.9, 0.99, 1.0]}
        fade = np.array(given["decay"])[:, None, None] ** np.abs(np.subtract.outer(np.arange(77), np.arange(77)))
    elif case == "causal, not normalised":
        given = {"normalize": False}
    if case == "after a state":
        out = array(_in_two(attend, query, key, value, mask))
    else:
        out = array(attend(query, key, value, mask=mask, **given))
    q, k, v = (_features(array(query)), _features(array(key)).repeat(2, 1), array(value).repeat(2, 1))
    weights = np.where(seen, np.einsum("bhid,bhjd->bhij", q, k) * fade, 0.0)
    exact = weights @ v
    if case != "causal, not normalised":
        exact = exact / weights.sum(-1, keepdims=True)
    error = largest(out - exact)
    expect(error <= 1e-10, f"error {error:.2e} > 1e-10")
    return f"error {error:.1e}"


def _features(x: Any) -> Any:
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def _in_two(attend: Any, query: Any, key: Any, value: Any, mask: Any) -> Any:
    state = LinearState()
    cuts = (slice(0, 31), slice(31, 32), slice(32, 77))
    parts = [attend(query[:, :, at], key[:, :, at], value[:, :, at], mask=mask, state=state) for at in cuts]
    return torch.cat(parts, 2)
