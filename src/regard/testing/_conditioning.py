"""How large the terms of a gradient are before they cancel.

A gradient can be exactly 0 as a sum of large terms: one permitted key, or a bias that shifts a whole row. Plain
arithmetic may then be exact by luck, and no other order of the same sums is. Rounding of the accumulator (float32, or
float64 for float64 inputs) is therefore counted against the sum of the terms' absolute values.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.testing._calls import Call, array, largest
from regard.testing._rules_of_bias import table_gradient

Array = NDArray[np.float64]
ROUNDINGS = 8  # a product, its mask and scale, the softmax's two factors, and the sums over tiles


def accumulated(call: Call, grad_out: Tensor) -> dict[str, float]:
    """The rounding that the accumulation of each gradient may have."""
    accumulator = torch.float64 if call.query.dtype == torch.float64 else torch.float32
    unit = ROUNDINGS * torch.finfo(accumulator).eps
    return {name: unit * largest(terms) for name, terms in _terms(call, grad_out).items()}


def _terms(call: Call, grad_out: Tensor) -> dict[str, Array]:
    group = call.query.shape[1] // call.key.shape[1]
    q, g = np.abs(array(call.query)), np.abs(array(grad_out))
    k, v = (np.abs(array(x)).repeat(group, axis=1) for x in (call.key, call.value))
    weights = call.oracle.weights
    kept = 1.0 if call.kept is None else call.kept
    d_weights = (g @ v.swapaxes(-1, -2)) * kept
    row = (weights * d_weights).sum(-1, keepdims=True)
    d_logits = weights * (d_weights + row)
    scale = call.options.get("scale")
    scaled = d_logits * abs(q.shape[-1] ** -0.5 if scale is None else scale)
    return {
        "query": scaled @ k,
        "key": _grouped(scaled.swapaxes(-1, -2) @ q, group),
        "value": _grouped((weights * kept).swapaxes(-1, -2) @ g, group),
        "bias": _of_bias(call, d_logits),
        "sinks": row.sum(axis=(0, 2, 3)),
    }


def _of_bias(call: Call, terms: Array) -> Array:
    if call.bias is None:
        return terms
    if call.rule is not None:
        return table_gradient(call.rule, terms, call.sizes, call.query_offset, sizes_of_terms=True)
    return _summed(terms, tuple(call.bias.shape))


def _grouped(terms: Array, group: int) -> Array:
    B, H, S, D = terms.shape
    return np.asarray(terms.reshape(B, H // group, group, S, D).sum(axis=2))


def _summed(terms: Array, shape: tuple[int, ...]) -> Array:
    padded = (1,) * (4 - len(shape)) + shape
    axes = tuple(axis for axis, size in enumerate(padded) if size == 1)
    return np.asarray(terms.sum(axis=axes))
