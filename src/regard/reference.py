"""Attention in NumPy, float64, one formula after another: the oracle that every fast path is compared with.

    out = softmax(softcap(scale · Q Kᵀ) + bias) V

Legend for shapes: B batch, H query heads, Hkv key/value heads (H is a multiple of it), L queries, S keys,
Dk width of a query or key head, Dv width of a value head. Leading axes before `[H, L, Dk]` are batch axes;
a single head may also be given as `[L, Dk]`, `[S, Dk]`, `[S, Dv]`.

This module knows nothing of torch, and no fast code knows of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Gradients", "Result", "Trace", "attention", "gradients", "multi_head_attention", "softmax", "trace"]

Array = NDArray[np.float64]
Allowed = NDArray[np.bool_]


class Result(NamedTuple):
    """What `attention(..., return_weights=True)` gives."""

    out: Array  # [..., H, L, Dv]
    weights: Array  # [..., H, L, S], before dropout
    lse: Array  # [..., H, L], log of the softmax's denominator; -inf for a row with nothing to attend to
    logits: Array  # [..., H, L, S], -inf where attention is not permitted


class Gradients(NamedTuple):
    """What `gradients` gives; `bias` and `sinks` are None when the call had none."""

    query: Array
    key: Array
    value: Array
    bias: Array | None
    sinks: Array | None


def softmax(x: ArrayLike, axis: int = -1) -> Array:
    """exp(x) / Σ exp(x) along `axis`. A line that is -inf throughout gives zeros.

    >>> softmax([2.3, 9.1, 0.5]).round(5).tolist()
    [0.00111, 0.9987, 0.00018]
    """
    lines = np.moveaxis(np.asarray(x, dtype=np.float64), axis, -1)
    return np.moveaxis(_softmax(lines)[0], -1, axis)


def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    keep: ArrayLike | None = None,
    return_weights: bool = False,
) -> Any:
    """Scaled dot-product attention, `softmax(softcap(scale · Q Kᵀ) + bias) V`.

    Args:
        query: `[..., H, L, Dk]`.
        key: `[..., Hkv, S, Dk]`; query head h uses key/value head ⌊h · Hkv / H⌋.
        value: `[..., Hkv, S, Dv]`.
        mask: boolean, broadcastable to `[..., H, L, S]`, True where attention is permitted.
        bias: broadcastable likewise, added to the logits; -inf forbids.
        scale: 1/√Dk when not given.
        softcap: c > 0 replaces every s = scale · q · k by c · tanh(s / c).
        sinks: `[H]`, one extra logit per head, in the softmax's denominator only.
        keep: dropout, as the number every weight is multiplied by: 0 or 1/(1-p).
        return_weights: give a `Result` in place of the output alone.

    A query with nothing to attend to gets zeros. What a query may not see cannot reach it, whatever it holds.

    >>> attention([[1, 0, 1, 0], [0, 1, 0, 1]], np.eye(4)[:2], np.eye(4)[:2]).shape
    (2, 4)
    """
    q, k, v = _heads(query, key, value)
    with np.errstate(invalid="ignore", over="ignore"):
        raw = _scores(q, k, scale)
        logits, allowed = _logits(raw, mask, bias, softcap)
        weights, lse = _softmax(logits, sinks)
        used = weights if keep is None else weights * np.asarray(keep, dtype=np.float64)
        out = _sum_over_allowed(used, allowed, v)
    return Result(out, weights, lse, logits) if return_weights else out


def gradients(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    grad_out: ArrayLike,
    *,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    keep: ArrayLike | None = None,
) -> Gradients:
    """Derivatives of Σ out · grad_out with respect to what went into `attention`, each in its input's shape.

    With p = softmax(z) and a row's gradient g = dp, the softmax gives dz = p · (g - Σ p g). A sink is one more
    logit whose value is zero, so its g is 0.
    """
    q, k, v = _heads(query, key, value)
    d_out = np.asarray(grad_out, dtype=np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        raw = _scores(q, k, scale)
        logits, allowed = _logits(raw, mask, bias, softcap)
        weights, lse = _softmax(logits, sinks)
        multiplier = np.float64(1.0) if keep is None else np.asarray(keep, dtype=np.float64)

        d_weights = np.where(allowed, d_out @ _transpose(v), 0.0) * multiplier
        row_sum = (weights * d_weights).sum(-1, keepdims=True)
        d_logits = np.where(allowed, weights * (d_weights - row_sum), 0.0)
        d_raw = d_logits if softcap is None else d_logits * (1.0 - np.tanh(raw / softcap) ** 2)
        d_raw = np.where(allowed, d_raw, 0.0) * _scale(q, scale)

        d_query = _sum_over_allowed(d_raw, allowed, k)
        d_key = _sum_over_allowed(_transpose(d_raw), _transpose(allowed), q)
        d_value = _sum_over_allowed(_transpose(weights * multiplier), _transpose(allowed), d_out)
        d_sinks = None if sinks is None else _sink_gradient(sinks, lse, row_sum[..., 0])
    return Gradients(
        d_query,
        _sum_groups(d_key, np.shape(key)),
        _sum_groups(d_value, np.shape(value)),
        None if bias is None else _sum_to(d_logits, np.shape(bias)),
        d_sinks,
    )


class Trace(dict[str, Array]):
    """Every step of multi-head attention by name, in order; `print` shows the names with their shapes."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every step, by its name."""
        return {name: array.shape for name, array in self.items()}

    def __str__(self) -> str:
        width = max((len(name) for name in self), default=0)
        return "\n".join(f"{name:<{width}}  {list(shape)}" for name, shape in self.shapes.items())

    def _repr_html_(self) -> str:
        rows = (
            f"<tr><th style='text-align:left'>{name}</th><td>{list(array.shape)}</td><td style='text-align:left'>"
            f"<code>{np.array2string(array.reshape(-1)[:4], precision=4)}</code></td></tr>"
            for name, array in self.items()
        )
        head = "<tr><th>step</th><th>shape</th><th style='text-align:left'>begins with</th></tr>"
        return f"<table>{head}{''.join(rows)}</table>"


def trace(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    weights: Mapping[str, ArrayLike],
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
) -> Trace:
    """Multi-head attention, `Concat(head_1 … head_H) W^O`, returning each step by name.

    Args:
        query, key, value: `[B, L, E_q]`, `[B, S, E_k]`, `[B, S, E_v]`; the same array three times is self attention.
        weights: `q`, `k`, `v`, `out`, each `[width in, width out]` so that a projection is `x @ W` as in the paper
            (a `torch.nn.Linear` holds the transpose); and, where there are biases, `q_bias`, `k_bias`, `v_bias`,
            `out_bias`. Head h owns the h-th slice of the columns.
        mask, bias, scale, softcap, sinks: as in `attention`, for `[B, H, L, S]`.

    The steps: `query`, `key`, `value` (projected), `query_heads`, `key_heads`, `value_heads`, `raw_scores` (q · k),
    `scores` (scale · q · k), `logits` (with softcap, bias and mask), `weights`, `heads`, `concat`, `output`.

    >>> x = [[[1, 0, 1, 0], [0, 1, 0, 1]]]
    >>> steps = trace(x, x, x, dict.fromkeys(("q", "k", "v", "out"), np.eye(4)), num_heads=2)
    >>> steps["raw_scores"].shape, steps["weights"].round(4)[0, 0].tolist()
    ((1, 2, 2, 2), [[0.6698, 0.3302], [0.3302, 0.6698]])
    """
    _check_names(weights)
    steps = Trace()
    for name, given in (("query", query), ("key", key), ("value", value)):
        steps[name] = _project(given, weights, name[0])
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    for name, count in (("query", num_heads), ("key", kv_heads), ("value", kv_heads)):
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)):
            raise TypeError(f"{name} is to have {count!r} heads; expected a whole number")
        if count < 1 or steps[name].shape[-1] % count:
            raise ValueError(f"{name} is projected to width {steps[name].shape[-1]}, which {count} heads do not divide")
        steps[f"{name}_heads"] = _split(steps[name], count)

    q, k, v = steps["query_heads"], steps["key_heads"], steps["value_heads"]
    result = attention(q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks, return_weights=True)
    with np.errstate(invalid="ignore", over="ignore"):
        keys = _heads(q, k, v)[1]
        steps["raw_scores"] = _scores(q, keys, 1.0)
        steps["scores"] = _scores(q, keys, scale)
    steps["logits"] = result.logits
    steps["weights"] = result.weights
    steps["heads"] = result.out
    steps["concat"] = _concat(result.out)
    steps["output"] = _project(steps["concat"], weights, "out")
    return steps


def multi_head_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, weights: Mapping[str, ArrayLike], **keywords: Any
) -> Array:
    """The output of `trace`, which says what the arguments are. Weights are given, never drawn here."""
    return trace(query, key, value, weights, **keywords)["output"]


def _heads(query: ArrayLike, key: ArrayLike, value: ArrayLike) -> tuple[Array, Array, Array]:
    """The three as float64, with key and value heads repeated so that there is one for each query head."""
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (query, key, value))
    if q.ndim < 3 or k.shape[-3] == q.shape[-3]:
        return q, k, v
    num_heads, num_kv_heads = q.shape[-3], k.shape[-3]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"key has {num_kv_heads} heads, which do not divide query's {num_heads}; expected a divisor")
    group = num_heads // num_kv_heads
    return q, np.repeat(k, group, axis=-3), np.repeat(v, group, axis=-3)


def _scale(q: Array, scale: float | None) -> float:
    return float(q.shape[-1]) ** -0.5 if scale is None else float(scale)


def _scores(q: Array, k: Array, scale: float | None) -> Array:
    scores: Array = (q @ _transpose(k)) * _scale(q, scale)
    return scores


def _logits(
    scores: Array, mask: ArrayLike | None, bias: ArrayLike | None, softcap: float | None
) -> tuple[Array, Allowed]:
    """The logits, -inf where not permitted, and where they are permitted."""
    logits = scores if softcap is None else softcap * np.tanh(scores / softcap)
    allowed = np.ones(scores.shape, dtype=bool)
    if mask is not None:
        permitted = np.asarray(mask)
        if permitted.dtype != bool:
            raise TypeError(f"mask is {permitted.dtype}; expected bool, True where attention is permitted")
        allowed = allowed & _repeated("mask", permitted, scores.shape)
    if bias is not None:
        added = _repeated("bias", np.asarray(bias, dtype=np.float64), scores.shape)
        allowed = allowed & (added != -np.inf)
        logits = logits + added
    return np.where(allowed, logits, -np.inf), allowed


def _repeated(name: str, given: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """The mask or the bias for every score."""
    try:
        return np.broadcast_to(given, shape)
    except ValueError:
        raise ValueError(
            f"{name} is {list(given.shape)}; expected what broadcasts to the scores, {list(shape)}"
        ) from None


def _softmax(logits: Array, sinks: ArrayLike | None = None) -> tuple[Array, Array]:
    """Softmax over the last axis and the log of its denominator; the sink of a head joins the denominator only."""
    top = logits.max(axis=-1, keepdims=True, initial=-np.inf)
    empty = top == -np.inf
    sink = None if sinks is None else np.asarray(sinks, dtype=np.float64)[:, None, None]
    if sink is not None:
        top = np.maximum(top, sink)
    # Without the largest logit taken off, exp overflows; a row whose largest is not finite keeps its NaN or inf.
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        exponentials = np.exp(logits - top)
        total = exponentials.sum(axis=-1, keepdims=True)
        if sink is not None:
            total = total + np.exp(sink - top)
        weights = exponentials / np.where(empty, 1.0, total)
        lse = np.where(empty, -np.inf, top + np.log(total))
    return weights, lse[..., 0]


def _sum_over_allowed(weights: Array, allowed: Allowed, rows: Array) -> Array:
    """`weights @ rows`, where a row that is not finite reaches only those that may see it (0 · NaN is NaN)."""
    finite = np.asarray(np.isfinite(rows).all(axis=-1))
    total: Array = weights @ np.where(finite[..., None], rows, 0.0)
    for j in np.flatnonzero(~finite.all(axis=tuple(range(finite.ndim - 1)))):
        seen = allowed[..., :, j] & ~finite[..., None, j]
        total += np.where(seen[..., None], weights[..., :, j, None] * rows[..., None, j, :], 0.0)
    return total


def _sink_gradient(sinks: ArrayLike, lse: Array, row_sum: Array) -> Array:
    logit = np.asarray(sinks, dtype=np.float64)
    share = np.where(lse == -np.inf, 0.0, np.exp(logit[:, None] - lse))
    return _sum_to((-share * row_sum).sum(axis=-1), logit.shape)


def _sum_groups(gradient: Array, shape: tuple[int, ...]) -> Array:
    """The gradient of heads that several query heads shared: the sum over those that shared."""
    if gradient.shape == shape:
        return gradient
    *batch, num_kv_heads, length, width = shape
    group = gradient.shape[-3] // num_kv_heads
    total: Array = gradient.reshape(*batch, num_kv_heads, group, length, width).sum(axis=-3)
    return total


def _sum_to(gradient: Array, shape: tuple[int, ...]) -> Array:
    """The gradient of something that was broadcast from `shape`: the sum over what it was repeated along."""
    extra = tuple(range(gradient.ndim - len(shape)))
    gradient = np.asarray(gradient.sum(axis=extra))
    repeated = tuple(axis for axis, size in enumerate(shape) if size == 1 and gradient.shape[axis] != 1)
    return np.asarray(gradient.sum(axis=repeated, keepdims=True))


def _check_names(weights: Mapping[str, ArrayLike]) -> None:
    matrices = ("q", "k", "v", "out")
    expected = f"expected {', '.join(matrices)}, and where there are biases q_bias, k_bias, v_bias, out_bias"
    if missing := [name for name in matrices if name not in weights]:
        raise ValueError(f"weights has no {', '.join(missing)}; {expected}")
    if unknown := sorted(set(weights) - {*matrices, *(f"{name}_bias" for name in matrices)}):
        raise ValueError(f"weights has {', '.join(map(repr, unknown))}, which nothing reads; {expected}")


def _project(x: ArrayLike, weights: Mapping[str, ArrayLike], name: str) -> Array:
    given, matrix = np.asarray(x, dtype=np.float64), np.asarray(weights[name], dtype=np.float64)
    if matrix.ndim != 2 or given.shape[-1:] != matrix.shape[:1]:
        raise ValueError(
            f"weights[{name!r}] is {list(matrix.shape)}, and what it projects is {list(given.shape)}; "
            "expected [width in, width out]"
        )
    projected: Array = given @ matrix
    bias = weights.get(f"{name}_bias")
    return projected if bias is None else projected + np.asarray(bias, dtype=np.float64)


def _split(x: Array, num_heads: int) -> Array:
    """`[..., T, H·D]` to `[..., H, T, D]`."""
    return x.reshape(*x.shape[:-1], num_heads, x.shape[-1] // num_heads).swapaxes(-3, -2)


def _concat(x: Array) -> Array:
    """`[..., H, T, D]` to `[..., T, H·D]`."""
    joined = x.swapaxes(-3, -2)
    return joined.reshape(*joined.shape[:-2], x.shape[-3] * x.shape[-1])


def _transpose(x: NDArray[Any]) -> NDArray[Any]:
    return x.swapaxes(-1, -2)
