"""The fused kernels inside torch, one calling convention for all: (out, lse) forward, three gradients backward."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends._meter import note_inside
from regard.spec import CallSpec

cpu_forward = torch._scaled_dot_product_flash_attention_for_cpu  # the same op as in torch.ops, with less overhead
cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default._op


def refuse(spec: CallSpec) -> list[str]:
    """What no kernel of the device takes."""
    if spec.device == "cpu":
        return []
    return [f"torch has no fused kernel that returns the log-sum-exp on {spec.device}"]


def _workspace(query: Tensor, keys: int) -> int:
    """Bytes that the kernel allocates for itself: for each thread a tile of logits and an accumulator."""
    queries, dim = query.shape[2:]
    rows = min(256 if queries >= 768 else 64 if queries >= 192 else 32, queries)
    return torch.get_num_threads() * rows * (min(512, keys) + 2 + dim) * query.dtype.itemsize


def forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, added: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    if query.is_meta:  # only memory is counted
        out, lse = torch.empty_like(query), query.new_empty(query.shape[:3])
        note_inside(_workspace(query, key.shape[2]))
        return out, lse
    return cpu_forward(query, key, value, 0.0, causal, attn_mask=added, scale=scale)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    added: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return cpu_backward(  # type: ignore[no-any-return]
        grad_out, query, key, value, out, lse, 0.0, causal, attn_mask=added, scale=scale
    )


def plain_forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Without a mask, or square causal: cuDNN in half precision on CUDA, and the CPU's kernel."""
    if not query.is_cuda:
        return forward(query, key, value, causal, None, scale)
    out, lse, *_ = torch._scaled_dot_product_cudnn_attention(
        aligned(query), aligned(key), aligned(value), None, True, 0.0, causal, False, scale=scale
    )
    return out, lse.reshape(lse.shape[:3])


def plain_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for rows of this output and log-sum-exp, which may be those of more keys than are given."""
    if not query.is_cuda:
        return backward(grad_out, query, key, value, out, lse, causal, None, scale)
    none = torch.zeros((), dtype=torch.int64, device=query.device)
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
        aligned(grad_out), aligned(query), aligned(key), aligned(value), aligned(out), lse.unsqueeze(-1).contiguous(),
        none, none, None, None, None, query.shape[2], key.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, copied if its rows do not start at 16-byte addresses: CUDA kernels read wrong numbers from others."""
    if tensor.data_ptr() % 16 == 0 and tensor.is_contiguous():
        return tensor  # head dims are multiples of 8, so all rows are aligned
    unit = 16 // tensor.element_size()
    if tensor.data_ptr() % 16 == 0 and tensor.stride(3) == 1 and not any(tensor.stride(n) % unit for n in range(3)):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
