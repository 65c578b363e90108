"""What `regard.bias` means, written out pair by pair for the oracle; the objects under test are asked nothing.

A rule is a tuple, so that a failing call prints as Python: ("alibi",) with a table of slopes [H], or
("t5", buckets, largest distance, both ways) with a table [buckets, H].
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.bias import Bias, T5Bias, alibi

Array = NDArray[np.float64]
Rule = tuple[Any, ...]
Sizes = tuple[int, int, int, int]


def table_shape(rule: Rule, heads: int) -> tuple[int, ...]:
    return (heads,) if rule[0] == "alibi" else (rule[1], heads)


def build(rule: Rule, table: Tensor) -> Bias:
    """The object of `regard.bias` that reads this very table, so that gradients reach it."""
    if rule[0] == "alibi":
        return alibi(table.shape[0], slopes=table)
    _, buckets, largest, both = rule
    made = T5Bias(table.shape[1], num_buckets=buckets, max_distance=largest, bidirectional=both)
    del made.weight
    made.weight = table  # type: ignore[assignment]  # not a parameter: the table is somebody's leaf already
    return made


def dense(rule: Rule, table: Array, sizes: Sizes, offset: Any) -> Array:
    """The bias of every pair, [B, H, L, S]."""
    far = _distances(sizes, offset)
    if rule[0] == "alibi":
        return -table[:, None, None] * np.abs(far)[:, None]
    return np.moveaxis(table[_buckets(rule, far)], -1, 1)


def dense_tensor(rule: Rule, table: Tensor, sizes: Sizes, offset: Any) -> Tensor:
    """The same in torch and the table's own dtype, for the arithmetic that errors are measured on."""
    far = _distances(sizes, offset)
    if rule[0] == "alibi":
        distance = torch.from_numpy(np.abs(far)[:, None]).to(table.device, table.dtype)
        return -table[:, None, None] * distance
    return table[torch.from_numpy(_buckets(rule, far)).to(table.device)].movedim(-1, 1)


def table_gradient(rule: Rule, by_pair: Array, sizes: Sizes, offset: Any, *, sizes_of_terms: bool = False) -> Array:
    """The table's gradient from that of every pair [B, H, L, S]; or, of terms >= 0, how much is added up in it."""
    far = _distances(sizes, offset)
    if rule[0] == "alibi":
        weight = np.abs(far)[:, None] * (1.0 if sizes_of_terms else -1.0)
        return np.asarray((by_pair * weight).sum((0, 2, 3)))
    total = np.zeros(table_shape(rule, sizes[1]))
    np.add.at(total, _buckets(rule, far), np.moveaxis(by_pair, 1, -1))
    return total


def _distances(sizes: Sizes, offset: Any) -> NDArray[np.int64]:
    """Key position − query position, [B, L, S]."""
    B, _, L, S = sizes
    offset = S - L if offset is None else offset
    first = offset.cpu().numpy() if isinstance(offset, Tensor) else np.full(B, offset)
    return np.asarray(np.arange(S) - (np.arange(L)[:, None] + first[:, None, None]))


def _buckets(rule: Rule, far: NDArray[np.int64]) -> NDArray[np.int64]:
    _, count, largest, both = rule
    side = count // 2 if both else count
    exact = side // 2
    away = np.abs(far) if both else np.maximum(0, -far)
    by_distance = [
        d if d < exact else min(side - 1, exact + int(math.log(d / exact) / math.log(largest / exact) * (side - exact)))
        for d in range(int(away.max(initial=0)) + 1)
    ]
    found = np.array(by_distance)[away]
    return np.asarray(found + side * (far > 0) if both else found)
