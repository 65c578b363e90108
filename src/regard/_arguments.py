"""Checks a call's arguments and turns them into a Call. Valid arguments cost a few comparisons."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from regard.bias import Bias, Rule
from regard.masks import Mask
from regard.spec import BiasSpec, Call, CallSpec

_DTYPES = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))
_HALF = frozenset((torch.float16, torch.bfloat16))
_USUAL = frozenset(("cpu", "cuda"))
_OFFSETS = frozenset((torch.int64, torch.int32))
# numbers whose products with ordinary logits stay finite in float32
_LARGEST = 1e30
_FARTHEST = 2**62
_transforms = torch._C._functorch.peek_interpreter_stack


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    bias: Tensor | Bias | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
    query_offset: int | Tensor | None,
    mode: str | None = None,
) -> Call:
    """Check everything that can be checked without reading values, and describe the call."""
    query, key, value = _checked_tensors(query, key, value)
    batch, heads, queries, head_dim = query.shape
    kv_heads, keys, value_dim = key.shape[1], key.shape[2], value.shape[3]
    dtype, device = query.dtype, query.device
    kind = device.type  # each reading makes a new string

    if scale is None:
        scale = 1.0 / math.sqrt(head_dim)
    else:
        scale = _number(
            "scale", scale, -_LARGEST, _LARGEST, "a finite number of ordinary size, or None for 1/sqrt(head_dim)"
        )
    if softcap is not None:
        softcap = _number(
            "softcap", softcap, 1 / _LARGEST, _LARGEST, "a number above 0 and up to 1e30, or None for no cap"
        )
    if type(dropout) is not float or not 0.0 <= dropout <= 1.0:
        dropout = _number("dropout", dropout, 0.0, 1.0, "a probability in [0, 1]")

    offset: int | Tensor
    if query_offset is None:
        offset = keys - queries
    elif isinstance(query_offset, Tensor):
        offset = _checked_offset(query_offset, batch, device)
    else:
        offset = _checked_position(query_offset)

    if mask is not None:
        if not isinstance(mask, Mask):
            _bad_mask(mask)
        mask = mask.sized(batch, heads)
        mask.check(batch, heads, queries, keys)
        _check_mask_devices(mask, device)
    added = bias_spec = None
    if bias is not None:
        added, rule = _checked_bias(bias, (batch, heads, queries, keys), dtype, device)
        bias_spec = BiasSpec(tuple(added.shape), added.dtype, added.requires_grad, rule)
    if sinks is not None:
        _check_sinks(sinks, heads, dtype, device)

    grad = torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (added is not None and added.requires_grad)
        or (sinks is not None and sinks.requires_grad)
    )
    if mode is None:
        mode = _mode(query, key, value, added, sinks)
    # fast path for the common case; a dim of size 1 may have any stride
    unit_stride = (
        head_dim > 1 and value_dim > 1 and query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
    )
    if not unit_stride:
        unit_stride = query.stride(3) == 1 and key.stride(3) == 1 and value.stride(3) == 1
    flags = None if mask is None or kind == "cpu" else _flags(mask, queries, keys, offset)
    areas = None
    if mask is not None and kind != "cpu" and flags is None and added is None and softcap is None and mode == "plain":
        areas = mask.areas(queries, keys, offset) if not dropout and not isinstance(offset, Tensor) else None
    spec = CallSpec(
        batch,
        heads,
        kv_heads,
        queries,
        keys,
        head_dim,
        value_dim,
        dtype,
        kind,
        None if mask is None else mask.structure,
        flags,
        areas,
        bias_spec,
        scale,
        softcap,
        sinks is not None,
        dropout,
        offset if not isinstance(offset, Tensor) else None,
        grad,
        unit_stride,
        mode,
        None,
    )
    return Call(spec, query, key, value, mask, added, sinks, offset)


def _checked_tensors(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, which fit each other; under autocast, in its dtype."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        _not_tensors(query=query, key=key, value=value)
    if query.is_nested or key.is_nested or value.is_nested:
        raise TypeError(
            "regard.attention got a nested tensor; it takes padded [batch, head, token, dim] tensors. "
            "regard.nn.MultiHeadAttention takes nested ones, or pack the items into one row and use masks.documents."
        )
    for name, given in (("query", query), ("key", key), ("value", value)):
        if given.layout is not torch.strided:
            raise TypeError(f"{name} has layout {given.layout}; expected a dense tensor: call .to_dense()")
    device = query.device
    if key.device != device or value.device != device:
        _bad_devices(query=query, key=key, value=value)
    kind = device.type  # each reading makes a new string
    if (kind in _USUAL or torch.amp.is_autocast_available(kind)) and torch.is_autocast_enabled(kind):
        query, key, value = _autocast((query, key, value), kind)
    q_shape, k_shape, v_shape = query.shape, key.shape, value.shape
    if len(q_shape) != 4 or len(k_shape) != 4 or len(v_shape) != 4:
        _bad_rank(q_shape, k_shape, v_shape)
    batch, heads, _, head_dim = q_shape
    k_batch, kv_heads, keys, k_dim = k_shape
    v_batch, v_heads, v_keys, _ = v_shape
    if (
        batch != k_batch
        or batch != v_batch
        or kv_heads != v_heads
        or keys != v_keys
        or head_dim != k_dim
        or head_dim == 0
        or kv_heads == 0
        or heads == 0
        or heads % kv_heads
    ):
        _bad_shapes(q_shape, k_shape, v_shape)
    dtype = query.dtype
    if dtype not in _DTYPES or key.dtype != dtype or value.dtype != dtype:
        _bad_dtypes(query=query, key=key, value=value)
    return query, key, value


def _flags(mask: Mask, queries: int, keys: int, offset: int | Tensor) -> tuple[Any, ...] | None:
    """The mask as flags, without its tensors: (causal, left, right, padding, how documents are given)."""
    found = mask.fused(queries, keys, offset)
    if found is None:
        return None
    documents = None if found.documents is None else "lengths" if found.documents.lengths is not None else "ids"
    return (found.causal, found.left, found.right, found.padding is not None, documents)


def _mode(*tensors: Tensor | None) -> str:
    if _transforms() is not None:
        return "transform"
    if type(tensors[0]) is not Tensor and isinstance(tensors[0], FakeTensor):
        return "fake"
    if forward_ad._current_level >= 0:
        for tensor in tensors:
            if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
                return "dual"
    return "plain"


def _autocast(tensors: tuple[Tensor, ...], device: str) -> tuple[Tensor, ...]:
    # float64 stays as it is, as under torch's own autocast
    target = torch.get_autocast_dtype(device)
    return tuple(t.to(target) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)


def _checked_offset(offset: Tensor, batch: int, device: torch.device) -> Tensor:
    if offset.dtype not in _OFFSETS:
        raise TypeError(f"query_offset must be an int or an int64/int32 tensor [batch], got dtype {offset.dtype}")
    if offset.shape != (batch,):
        raise ValueError(
            f"query_offset must have shape [batch] = [{batch}], one position per item, got {list(offset.shape)}"
        )
    _check_device("query_offset", offset, device)
    return offset.to(torch.int64)


def _checked_bias(
    bias: Tensor | Bias, full: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Rule | None]:
    """The tensor as 4-D, or the table of a bias by rule, and the rule."""
    rule = None
    if isinstance(bias, Bias):
        rule = bias.rule
        bias = bias.table(torch.float64 if dtype == torch.float64 else torch.float32, device)
        rule.check_shape(bias, full[1])
    elif not isinstance(bias, Tensor):
        raise TypeError(
            f"bias must be a floating-point tensor added to the logits, or of regard.bias (alibi, T5Bias), "
            f"got {type(bias).__name__}"
        )
    if not bias.is_floating_point():
        raise TypeError(
            f"bias is added to the logits and must be floating point, got {bias.dtype}; "
            "a boolean tensor is a mask: use mask=masks.keep(tensor) (True = attend) or masks.drop(tensor) (hidden)"
        )
    _check_joins("bias", bias, dtype, device)
    if rule is not None:
        return bias, rule
    shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    if len(shape) != 4 or any(n not in (1, whole) for n, whole in zip(shape, full, strict=True)):
        raise ValueError(
            f"bias has shape {list(bias.shape)}; it must broadcast to [batch, head, query, key] = {list(full)}, "
            "each of its dims being 1 or that size"
        )
    return bias if bias.dim() == 4 else bias.reshape(shape), None


def _check_sinks(sinks: Tensor, heads: int, dtype: torch.dtype, device: torch.device) -> None:
    if not isinstance(sinks, Tensor):
        raise TypeError(f"sinks must be a floating-point tensor [num_heads], got {type(sinks).__name__}")
    _check_joins("sinks", sinks, dtype, device)
    if sinks.shape != (heads,):
        raise ValueError(f"sinks must have shape [num_heads] = [{heads}], one logit per head, got {list(sinks.shape)}")


def _check_joins(name: str, given: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    if given.dtype != dtype and not (dtype in _HALF and given.dtype == torch.float32):
        raise TypeError(
            f"{name} has dtype {given.dtype} but query has {dtype}; convert one (float32 may join half precision)"
        )
    _check_device(name, given, device)


def _check_device(name: str, given: Tensor, device: torch.device) -> None:
    if given.device != device:
        raise TypeError(f"{name} is on {given.device} but query is on {device}; move one of them")


def _check_mask_devices(mask: Mask, device: torch.device) -> None:
    for tensor in mask.given:
        if tensor.device != device and (device.type, tensor.device.type) != ("meta", "cpu"):
            raise TypeError(
                f"mask {mask!r} holds a tensor on {tensor.device} but query is on {device}; move one of them"
            )


def _not_tensors(**arguments: object) -> NoReturn:
    for name, given in arguments.items():
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor [batch, head, token, dim], got {type(given).__name__}")
    raise AssertionError("unreachable")


def _bad_rank(*shapes: Sequence[int]) -> NoReturn:
    for name, shape in zip(("query", "key", "value"), shapes, strict=True):
        if len(shape) != 4:
            raise ValueError(
                f"{name} has {len(shape)} dims, shape {list(shape)}; expected 4: [batch, head, token, dim]. "
                "Use unsqueeze for a missing batch or head dim."
            )
    raise AssertionError("unreachable")


def _bad_shapes(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> NoReturn:
    given = f"query {list(query)}, key {list(key)}, value {list(value)}"
    if query[0] != key[0] or query[0] != value[0]:
        raise ValueError(
            f"query, key and value must have one batch size (nothing is broadcast: use expand); got {given}"
        )
    if key[1] != value[1]:
        raise ValueError(f"key and value must have the same number of heads, got {key[1]} and {value[1]}: {given}")
    if key[2] != value[2]:
        raise ValueError(f"key and value must have the same number of tokens, got {key[2]} and {value[2]}: {given}")
    if query[3] != key[3]:
        raise ValueError(f"query and key must have the same head dim, got {query[3]} and {key[3]}: {given}")
    if query[3] == 0:
        raise ValueError(f"query and key have head dim 0; it must be at least 1: {given}")
    if query[1] == 0 or key[1] == 0:
        raise ValueError(f"query and key must have at least one head, got {query[1]} and {key[1]}: {given}")
    raise ValueError(
        f"query has {query[1]} heads and key has {key[1]}: the number of key/value heads must divide the number "
        f"of query heads (grouped-query attention); {given}"
    )


def _bad_dtypes(**tensors: Tensor) -> NoReturn:
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise TypeError(
                f"{name} has dtype {tensor.dtype}; expected float64, float32, float16 or bfloat16 (convert with .to)"
            )
    named = ", ".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items())
    raise TypeError(f"query, key and value must have one dtype outside autocast, got {named}; convert with .to")


def _bad_devices(**tensors: Tensor) -> NoReturn:
    named = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
    raise TypeError(f"query, key and value must be on one device, got {named}; move them with .to")


def _number(name: str, given: Any, low: float, high: float, expected: str) -> float:
    """``given`` as a float between two bounds; NumPy's numbers count, booleans do not."""
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise TypeError(f"{name} must be {expected}, got {given!r}")
    given = given if isinstance(given, int) else float(given)
    if not low <= given <= high:  # NaN and integers too large for a float are outside as well
        raise ValueError(f"{name} must be {expected}, got {given!r}")
    return float(given)


def _checked_position(given: Any) -> int:
    if isinstance(given, torch.SymInt):
        return given  # type: ignore[return-value]
    if isinstance(given, bool) or not isinstance(given, numbers.Integral):
        raise TypeError(
            f"query_offset is the position of the first query among the keys: an int or an integer tensor [batch], "
            f"got {type(given).__name__}"
        )
    position = int(given)
    if abs(position) > _FARTHEST:
        raise ValueError(f"query_offset must be between -2**62 and 2**62, got {position}")
    return position


def _bad_mask(mask: object) -> NoReturn:
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a regard mask such as masks.causal(), got {type(mask).__name__}")
    if mask.is_floating_point():
        raise TypeError(
            f"mask is a {mask.dtype} tensor: float tensors are added to the logits, so pass it as bias=, or, if it "
            "holds only 0 and -inf, as masks.from_additive(tensor)"
        )
    raise TypeError(
        f"mask is a bare {mask.dtype} tensor, and libraries disagree on what True means: pass masks.keep(tensor) if "
        "True means may attend (torch SDPA), or masks.drop(tensor) if True means hidden (torch.nn.MultiheadAttention); "
        "convert an integer tensor with .bool() first"
    )
