"""Torch's fused attention operators as calls in regard's terms, with the log-sum-exp that they computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard import masks
from regard.masks import Mask
from regard.watching._packed import packed_heads, unpacked, unpacked_mask
from regard.watching._seen import Seen, Unseen, hiding, recognised

aten = torch.ops.aten


def _kernel(given: dict[str, Any], out: Any) -> Seen:
    """The kernels behind torch.nn.functional.scaled_dot_product_attention, [batch, head, token, dim]."""
    q, k, v = (_plain(given[name]) for name in ("query", "key", "value"))
    added = given.get("attn_mask", given.get("attn_bias"))
    result = out[0] if isinstance(out, (tuple, list)) else out
    if heads := packed_heads(*q.shape[1:3]):
        added = None if added is None else unpacked_mask(added.detach(), q.shape, heads)
        q, result = unpacked(q, heads), unpacked(result, heads)
    mask, bias = additive(added, q, k)
    offset = None
    if given["is_causal"]:
        mask, offset = masks.causal(), 0  # counted from the top left
    lse = out[1] if isinstance(out, (tuple, list)) and len(out) > 1 else None
    if not isinstance(lse, Tensor) or lse.numel() != q.shape[0] * q.shape[1] * q.shape[2]:
        lse = None  # not every kernel computes it where no gradient is asked for
    return Seen(
        q,
        k,
        v,
        mask,
        bias,
        given.get("scale"),
        offset=offset,
        placed=offset is not None,
        lse=None if lse is None else lse.detach().reshape(q.shape[:3]).contiguous(),
        result=result,
    )


def _plain(tensor: Tensor) -> Tensor:
    if tensor.is_nested:
        raise Unseen("nested tensors")
    return tensor.detach()


def additive(given: Tensor | None, q: Tensor, k: Tensor) -> tuple[Mask | None, Tensor | None]:
    """A mask tensor of torch's function: the rule it says, or what it adds to the logits."""
    if given is None:
        return None, None
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    given = given.detach()
    given = given.reshape((1,) * (4 - given.dim()) + tuple(given.shape))
    if given.dtype == torch.bool:
        return recognised(masks.keep(given), full[2], full[3], q.device), None
    given = hiding(given)
    assert given is not None
    if q.device.type == "cpu" and bool(((given == 0) | (given == -torch.inf)).all()):
        return recognised(masks.keep(given == 0), full[2], full[3], q.device), None
    if q.device.type == "cpu" and not bool((given < torch.inf).all()):
        raise ValueError("bias holds NaN or +inf: its weights are no numbers")
    return None, given.to(q.dtype) if q.dtype == torch.float64 else given


def _multi_head(given: dict[str, Any], out: Any) -> Seen:
    """torch.nn.MultiheadAttention's fused operator, and the attention of torch's fused encoder layer."""
    source: Tensor = given["query"] if "query" in given else given["src"]
    if source.is_nested:
        padded = source.detach().to_padded_tensor(0.0)
        sizes = source._nested_tensor_size()[:, 0]
        hidden = torch.arange(padded.shape[1], device=padded.device) >= sizes[:, None].to(padded.device)
        return _projected(given, padded, padded, padded, masks.drop(hidden[:, None, None]), real=~hidden)
    key, value = given.get("key", source), given.get("value", source)
    mask = given.get("mask")
    rule = None if mask is None else _of_layer(mask, given.get("mask_type"), source)
    return _projected(given, source.detach(), key.detach(), value.detach(), rule)


def _of_layer(mask: Tensor, kind: int | None, source: Tensor) -> Mask:
    """torch's kinds of mask: 0 is [query, key], 1 is [batch, key], 2 is [batch, head, query, key]; True hides."""
    hidden = mask if mask.dtype == torch.bool else mask == -torch.inf
    if kind == 1 or (kind is None and hidden.dim() == 2 and hidden.shape[0] == source.shape[0]):
        return masks.drop(hidden[:, None, None])
    return masks.drop(hidden if hidden.dim() == 4 else hidden[None, None])


def _projected(
    given: dict[str, Any], query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, real: Tensor | None = None
) -> Seen:
    if given.get("norm_first") and given.get("src") is not None:
        width = (query.shape[-1],)
        query = key = value = torch.nn.functional.layer_norm(
            query, width, given["norm_weight_1"], given["norm_bias_1"], given["eps"]
        )
    heads: int = given["num_head"] if "num_head" in given else given["num_heads"]
    weight, bias = given["qkv_weight"].detach(), given["qkv_bias"].detach()
    q, k, v = (
        torch.nn.functional.linear(x, w, b).view(*x.shape[:2], heads, -1).transpose(1, 2)
        for x, w, b in zip((query, key, value), weight.chunk(3), bias.chunk(3), strict=True)
    )
    return Seen(q, k, v, mask, real=real)


KERNELS: dict[Any, Callable[[dict[str, Any], Any], Seen]] = {
    packet: _kernel
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    if (packet := getattr(aten, name, None)) is not None
} | {aten._native_multi_head_attention: _multi_head, aten._transformer_encoder_layer_fwd: _multi_head}
