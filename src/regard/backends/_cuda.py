"""Torch's fused kernels on CUDA, chosen from the spec alone, each with its log-sum-exp.

  cudnn      half precision; everything or square causal: the fastest on Hopper
  flash      half precision; causal, windows and packed documents as flags, aligned to the last key
  efficient  float32; everything or square causal

lse is [B, H, L] float32, and -inf for an empty row, in both directions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from regard.spec import Call, CallSpec

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
# cuDNN's backward pass takes heads up to this size
_CUDNN_DIM = 128


class Flags(NamedTuple):
    """A mask as a kernel's flags, resolved for one call. ``used_keys``: later keys are beyond every query's reach."""

    causal: bool
    left: int
    right: int
    documents: bool
    used_keys: int


def refuse(spec: CallSpec) -> list[str]:
    reasons = []
    if spec.dtype == torch.float64:
        reasons.append("no fused CUDA kernel takes float64")
    if spec.bias is not None:
        reasons.append("with a bias torch's CUDA kernels give no log-sum-exp that can be trusted on empty rows")
    if spec.scale <= 0:
        reasons.append("the CUDA kernels take positive scales only")
    if spec.head_dim % 8 or spec.head_dim > 256:
        reasons.append(f"head dim {spec.head_dim} is not a multiple of 8 up to 256")
    if spec.mask is not None and flags_of(spec) is None:
        reasons.append("no fused CUDA kernel takes this mask as flags")
    elif spec.dtype == torch.float32:
        flags = flags_of(spec)
        if flags is not None and not _plain(spec, flags):
            reasons.append("in float32 only unmasked and square causal calls have a fused CUDA kernel")
        if spec.kv_heads != spec.heads:
            reasons.append("the float32 CUDA kernel would need the grouped keys repeated in memory")
    return reasons


def flags_of(spec: CallSpec) -> Flags | None:
    """The kernel flags that mean the same as the mask at this offset; None when there are none."""
    if spec.mask is None:
        return Flags(False, -1, -1, False, spec.keys)
    if spec.flags is None or spec.offset is None:
        return None
    causal, left, right, padding, documents = spec.flags
    if padding:
        return None
    keys = spec.keys
    if documents:
        # packed documents restart at each boundary: only when rows and keys are the same tokens
        if spec.queries != keys or spec.offset != 0 or documents != "lengths":
            return None
    elif right == 0 and spec.queries <= spec.offset + spec.queries <= keys:
        keys = spec.offset + spec.queries
    if spec.offset != keys - spec.queries and (left is not None or right is not None):
        return None
    return Flags(
        causal and left is None, -1 if left is None else left, -1 if right is None else right, bool(documents), keys
    )


def _plain(spec: CallSpec, flags: Flags) -> bool:
    """Nothing but an optional square causal triangle: what the kernels without flags for more can do."""
    if flags.documents or flags.left >= 0 or flags.right > 0:
        return False
    return not flags.causal or flags.used_keys == spec.queries


@lru_cache(4096)
def recipe(spec: CallSpec) -> tuple[str, Flags]:
    """The kernel of a call that is not refused, and its flags."""
    flags = flags_of(spec)
    assert flags is not None
    if spec.dtype == torch.float32:
        return "efficient", flags
    return "cudnn" if _plain(spec, flags) and spec.head_dim <= _CUDNN_DIM else "flash", flags


def is_banded(spec: CallSpec) -> bool:
    """Whether FlashAttention would be given a window or documents, in half precision."""
    flags = flags_of(spec)
    return flags is not None and spec.dtype in _HALF and (flags.documents or flags.left >= 0)


@lru_cache(1)
def is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def forward(call: Call) -> tuple[Tensor, Tensor]:
    spec = call.spec
    kernel, flags = recipe(spec)
    query, key, value = _inputs(call, flags)
    if kernel == "cudnn":
        # of the same names in torch.ops and torch, the second is reached sooner
        out, lse, *_ = torch._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, flags.causal, False, scale=spec.scale
        )
        return out, lse.reshape(lse.shape[:3])
    if kernel == "efficient":
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, flags.causal, scale=spec.scale
        )
        return out, lse[:, :, : spec.queries]
    starts, longest = _starts(call) if flags.documents else (None, 0)
    q, k, v = (_tokens_first(t, flags.documents) for t in (query, key, value))
    out, lse, *_ = _aten._flash_attention_forward(
        q, k, v, starts, starts, longest or q.shape[-3], longest or k.shape[-3], 0.0, flags.causal, False,
        scale=spec.scale, window_size_left=flags.left, window_size_right=_right(flags),
    )  # fmt: skip
    if flags.documents:
        out = out.view(spec.batch, spec.queries, spec.heads, -1)
        lse = lse.view(spec.heads, spec.batch, spec.queries).transpose(0, 1)
    # flash marks a row without keys by +inf
    return out.transpose(1, 2), lse.masked_fill(lse == torch.inf, -torch.inf)


def backward(call: Call, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    spec = call.spec
    kernel, flags = recipe(spec)
    query, key, value = _inputs(call, flags)
    grad_out, out, used = _aligned(grad_out), _aligned(out), flags.used_keys
    seed = torch.zeros((), dtype=torch.uint64 if kernel == "flash" else torch.int64, device=query.device)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    if kernel == "cudnn":
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            grad_out, query, key, value, out, lse.unsqueeze(-1).contiguous(), seed, seed, None, None, None,
            spec.queries, used, 0.0, flags.causal, scale=spec.scale,
        )  # fmt: skip
    elif kernel == "efficient":
        padded = torch.nn.functional.pad(lse, (0, -spec.queries % 32), value=torch.inf)
        grads = _aten._scaled_dot_product_efficient_attention_backward(
            grad_out, query, key, value, None, out, padded, seed, seed, 0.0, [True, True, True, False], flags.causal,
            scale=spec.scale,
        )[:3]  # fmt: skip
    else:
        grads = _flash_backward(call, flags, grad_out, query, key, value, out, lse, seed)
    if used < spec.keys:
        pad = (0, 0, 0, spec.keys - used)
        grads = (grads[0], *(torch.nn.functional.pad(grad, pad) for grad in grads[1:]))
    return grads  # type: ignore[no-any-return]


def _flash_backward(
    call: Call,
    flags: Flags,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
) -> tuple[Tensor, ...]:
    spec = call.spec
    starts, longest = _starts(call) if flags.documents else (None, 0)
    packed = [_tokens_first(t, flags.documents) for t in (grad_out, query, key, value, out)]
    if flags.documents:
        lse = lse.transpose(0, 1).reshape(spec.heads, -1)
    grads = _aten._flash_attention_backward(
        *packed, lse.contiguous(), starts, starts, longest or packed[1].shape[-3], longest or packed[2].shape[-3], 0.0,
        flags.causal, seed.new_zeros(2), seed, scale=spec.scale, window_size_left=flags.left,
        window_size_right=_right(flags),
    )  # fmt: skip
    if flags.documents:
        grads = tuple(grad.view(spec.batch, -1, *grad.shape[1:]) for grad in grads)
    return tuple(grad.transpose(1, 2) for grad in grads)


def _inputs(call: Call, flags: Flags) -> tuple[Tensor, Tensor, Tensor]:
    key, value = call.key, call.value
    if flags.used_keys != call.spec.keys:
        key, value = key[:, :, : flags.used_keys], value[:, :, : flags.used_keys]
    return _aligned(call.query), _aligned(key), _aligned(value)


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, copied if its rows do not start at 16-byte addresses: the kernels read wrong numbers from others."""
    if tensor.data_ptr() % 16 == 0 and tensor.is_contiguous():
        return tensor  # head dims are multiples of 8, so all rows are aligned
    unit = 16 // tensor.element_size()
    if tensor.data_ptr() % 16 == 0 and tensor.stride(3) == 1 and not any(tensor.stride(n) % unit for n in range(3)):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _right(flags: Flags) -> int:
    return 0 if flags.causal else flags.right


def _tokens_first(tensor: Tensor, packed: bool) -> Tensor:
    """[B, H, L, D] to flash's [B, L, H, D], or [B·L, H, D] for packed documents."""
    tensor = tensor.transpose(1, 2)
    return tensor.reshape(-1, *tensor.shape[2:]) if packed else tensor


def _starts(call: Call) -> tuple[Tensor, int]:
    """Where each document starts among the packed tokens, as flash wants it, and the longest document's length."""
    mask, spec = call.mask, call.spec
    assert mask is not None
    found = mask.fused(spec.queries, spec.keys, call.offset)
    assert found is not None and found.documents is not None and found.documents.lengths is not None
    lengths = found.documents.lengths

    def build() -> tuple[Tensor, int]:
        repeated = lengths.to(torch.int64).repeat(spec.batch)
        starts = torch.nn.functional.pad(repeated.cumsum(0), (1, 0)).to(torch.int32)
        return starts.to(call.query.device), int(lengths.max())

    return mask.remember(("flash starts", spec.batch, call.query.device), 0, build)
