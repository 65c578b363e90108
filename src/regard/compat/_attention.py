"""`torch.nn.functional.scaled_dot_product_attention`, computed by regard."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard import api, masks
from regard._checks import autocasts, is_exporting

_CAUSAL = masks.causal()
# PyTorch's own, also where `torch.nn.functional` has been given the one below in its place
_torch_attention = torch._C._nn.scaled_dot_product_attention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale · Q Kᵀ + attn_mask) V, called exactly as `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        query: `[..., Hq, L, E]`, two dims or more; also nested (jagged) `[batch, head, token, dim]`, all three then.
        key: `[..., H, S, E]`.
        value: `[..., H, S, Ev]`.
        attn_mask: broadcastable to `[..., Hq, L, S]`; bool with True = take part, or float, which is added.
        dropout_p: applied whenever it is above 0: pass 0.0 in evaluation, as with PyTorch's.
        is_causal: query i sees keys 0 … i, counted from the top left; not together with `attn_mask`.
        scale: 1/√E when not given.
        enable_gqa: key and value may have fewer heads, which divide the query's.

    Returns:
        `[..., Hq, L, Ev]`.
    """
    check_tensors(query=query, key=key, value=value)
    if query.is_nested or key.is_nested or value.is_nested:
        return _nested(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    _check(query, key, value, attn_mask, dropout_p, is_causal)
    if is_exporting() and _has_unknown_lengths(query, key, value, attn_mask):
        return _torch_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    same = query.dim() == key.dim() == value.dim() == 4 and query.shape[:2] == key.shape[:2] == value.shape[:2]
    if not same and (query.shape[-2] == 0 or 0 in value.shape):
        return _zeros(query, key, value, query.shape[:-1])  # PyTorch looks at no other shape then
    q, k, v, batch = (query, key, value, tuple(query.shape[:2])) if same else _four_dims(query, key, value, enable_gqa)
    if q.shape[1] == 0:
        return _zeros(query, key, value, (*batch, q.shape[2]))
    mask, bias, offset = _mask(attn_mask, is_causal, (*batch, q.shape[2], k.shape[2]), q)
    if q.shape[-1] == 0:
        q, k = torch.nn.functional.pad(q, (0, 1)), torch.nn.functional.pad(k, (0, 1))
    scale = None if scale is None else float(scale)
    dropout = float(dropout_p)
    try:
        out = api.attention(q, k, v, mask=mask, bias=bias, scale=scale, dropout=dropout, query_offset=offset)
    except (TypeError, ValueError) as error:
        if bias is None or not str(error).startswith("bias "):
            raise
        raise type(error)(f"attn_mask {str(error).removeprefix('bias ')}") from None  # the caller's name for it
    return out if len(batch) == 2 else out.reshape(*batch, q.shape[2], v.shape[3])


def _zeros(query: Tensor, key: Tensor, value: Tensor, rows: Sequence[int]) -> Tensor:
    """Zeros where there is nothing to attend to or from, with gradients of the right shapes."""
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if autocasts(device) and query.dtype != torch.float64 else query.dtype
    q, k, v = (x.narrow(-1, 0, 0).sum() for x in (query, key, value))
    return query.new_zeros((*rows, value.shape[-1]), dtype=dtype) + (q + k + v).to(dtype)


def _has_unknown_lengths(*tensors: Tensor | None) -> bool:
    """Whether a length depends on data: a plan is made for lengths, so PyTorch's operation goes into the graph then."""
    if torch.compiler.is_dynamo_compiling():
        return False  # it traces this function too, and finds no such lengths unless it is told to
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

    return any(has_free_unbacked_symbols(x) for x in tensors if x is not None)


class _Mask(NamedTuple):
    mask: masks.Mask | None
    bias: Tensor | None
    query_offset: int | None


def _mask(attn_mask: Tensor | None, is_causal: bool, full: tuple[int, ...], q: Tensor) -> _Mask:
    if is_causal:
        return _Mask(_CAUSAL, None, 0)
    if attn_mask is None:
        return _Mask(None, None, None)
    variant = getattr(attn_mask, "variant", None)
    if variant is not None:  # torch.nn.attention.bias.CausalBias: a rule dressed as a tensor
        return _Mask(_CAUSAL, None, 0 if variant.name == "UPPER_LEFT" else None)
    given = _mask_in_four_dims(attn_mask, full)
    if given.dtype == torch.bool:
        return _Mask(masks.keep(given), None, None)
    return _Mask(None, given.to(q.dtype) if q.dtype == torch.float64 else given, None)


def _mask_in_four_dims(attn_mask: Tensor, full: tuple[int, ...]) -> Tensor:
    """The mask as `[B or 1, H or 1, L or 1, S or 1]`, without repeating what it broadcasts unless batch dims merge."""
    shape = attn_mask.shape
    fits = 2 <= len(shape) <= len(full) and all(
        n in (whole, 1) for n, whole in zip(shape[::-1], full[::-1], strict=False)
    )
    if not fits:
        raise RuntimeError(
            f"attn_mask has shape {list(shape)}; it must have two dims or more and broadcast to the weights' shape "
            f"{list(full)}"
        )
    padded = (1,) * (max(len(full), 4) - len(shape)) + tuple(shape)
    batch, rest = padded[:-3], padded[-3:]
    if len(batch) > 1 and any(n != 1 for n in batch):
        return attn_mask.reshape(padded).expand(*full[:-3], *rest).reshape(math.prod(full[:-3]), *rest)
    return attn_mask.reshape(math.prod(batch), *rest)


def _four_dims(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """The three as `[batch, head, token, dim]`, and the shape that PyTorch's result has before `[L, Ev]`."""
    if enable_gqa:
        key, value = _grouped(query, key, value)
    three = (query, key, value)
    batch = (*_broadcast(three, 3), query.shape[-3]) if enable_gqa else _broadcast(three, 2)
    heads = batch[-1] if batch else 1
    # One key/value head for all queries is what grouped attention does without copying it.
    shared = enable_gqa or (len(batch) > 0 and _heads(key) == _heads(value) == 1)
    q = _expand(query, batch[:-1], heads)
    k = _expand(key, batch[:-1], _heads(key) if shared else heads)
    v = _expand(value, batch[:-1], _heads(value) if shared else heads)
    return q, k, v, batch


def _broadcast(tensors: tuple[Tensor, Tensor, Tensor], without: int) -> tuple[int, ...]:
    """The shape that all dims but the last `without` broadcast to."""
    try:
        return tuple(torch.broadcast_shapes(*(x.shape[:-without] for x in tensors)))  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        hint = "; heads of key and value that divide the query's need enable_gqa=True" if without == 2 else ""
        shapes = ", ".join(str(list(x.shape)) for x in tensors)
        raise RuntimeError(f"batch dims of query, key and value do not broadcast: {shapes}{hint}") from error


def _heads(x: Tensor) -> int:
    return x.shape[-3] if x.dim() > 2 else 1


def _expand(x: Tensor, batch: Sequence[int], heads: int) -> Tensor:
    return x.expand(*batch, heads, *x.shape[-2:]).reshape(math.prod(batch), heads, *x.shape[-2:])


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    if min(query.dim(), key.dim(), value.dim()) < 3:
        raise RuntimeError("enable_gqa=True needs a head dim: query, key and value of three dims or more")
    heads, counts = query.shape[-3], (key.shape[-3], value.shape[-3])
    if 0 in counts or any(heads % n for n in counts):
        raise RuntimeError(
            f"key has {counts[0]} heads and value {counts[1]}; enable_gqa=True needs divisors of query's {heads}"
        )
    if counts[0] == counts[1]:
        return key, value
    return key.repeat_interleave(heads // counts[0], -3), value.repeat_interleave(heads // counts[1], -3)


def check_tensors(hint: str = "call .dense(L, S) of a mask", /, **given: Any) -> None:
    """Each under its name; with a mask of regard's, the error says how to make a tensor of it."""
    for name, x in given.items():
        if not isinstance(x, Tensor):
            said = f"; {hint}" if isinstance(x, masks.Mask) else ""
            raise TypeError(f"{name} must be a Tensor, got {type(x).__name__}{said}")


def _check(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool
) -> None:
    """What PyTorch refuses, as the RuntimeError that its callers know."""
    if query.dim() < 2 or key.dim() < 2 or value.dim() < 2:
        dims = [x.dim() for x in (query, key, value)]
        raise RuntimeError(f"query, key and value need two dims or more, got {dims}")
    autocast = autocasts(query.device.type)
    if not autocast and not query.dtype == key.dtype == value.dtype:
        dtypes = [str(x.dtype) for x in (query, key, value)]
        raise RuntimeError(f"query, key and value must have the same dtype, got {dtypes}")
    if not query.is_floating_point():
        raise RuntimeError(f"query, key and value must be floating point, got {query.dtype}")
    if not query.device == key.device == value.device:
        devices = [str(x.device) for x in (query, key, value)]
        raise RuntimeError(f"query, key and value must be on one device, got {devices}")
    if query.shape[-1] != key.shape[-1]:
        raise RuntimeError(f"query and key must have the same last dim, got {query.shape[-1]} and {key.shape[-1]}")
    if key.shape[-2] != value.shape[-2]:
        raise RuntimeError(f"key and value must have the same length, got {key.shape[-2]} and {value.shape[-2]}")
    if type(dropout_p) is not float and not isinstance(dropout_p, (numbers.Real, Tensor)):
        raise TypeError(f"dropout_p must be a number, got {type(dropout_p).__name__}")
    if not 0.0 <= dropout_p <= 1.0:
        raise RuntimeError(f"dropout_p must be a probability in [0, 1], got {dropout_p}")
    if attn_mask is not None:
        _check_mask(attn_mask, query, is_causal, autocast)


def _check_mask(attn_mask: Tensor, query: Tensor, is_causal: bool, autocast: bool) -> None:
    check_tensors(attn_mask=attn_mask)
    rule = getattr(attn_mask, "variant", None) is not None  # torch's CausalBias has no contents, so no place either
    if is_causal:
        kind = ValueError if rule else RuntimeError
        raise kind("attn_mask and is_causal=True were both given; put the causal rule into attn_mask")
    if attn_mask.device != query.device and not rule:
        raise RuntimeError(f"attn_mask is on {attn_mask.device} but query is on {query.device}; move one of them")
    if not autocast and attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        also = "" if query.dtype == torch.float32 else ", torch.float32"
        raise RuntimeError(f"attn_mask must be torch.bool{also} or {query.dtype} as query, got {attn_mask.dtype}")


def _nested(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Item by item: `regard.nn.MultiHeadAttention` is the one that packs nested input into a single call."""
    three = (query, key, value)
    if not all(x.is_nested and x.layout == torch.jagged and x.dim() == 4 for x in three):
        raise ValueError("query, key and value must all be nested: jagged [batch, head, token, dim], or none of them")
    if attn_mask is not None:
        raise ValueError("attn_mask cannot be given with nested tensors: use is_causal or regard.nn.MultiHeadAttention")
    outputs = [
        scaled_dot_product_attention(
            q, k, v, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        ).transpose(0, 1)
        for q, k, v in zip(*(x.unbind() for x in three), strict=True)
    ]
    offsets: Tensor = query.offsets()  # type: ignore[attr-defined]
    return torch.nested.nested_tensor_from_jagged(torch.cat(outputs), offsets=offsets).transpose(1, 2)
