"""The fused kernels inside torch, one calling convention for all: (out, lse) forward, three gradients backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from regard.backends._meter import note_inside

if TYPE_CHECKING:
    from torch import Tensor

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
