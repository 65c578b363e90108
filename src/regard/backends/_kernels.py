"""The fused kernels inside torch, one calling convention for all: (out, lse) forward, three gradients backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from regard.spec import CallSpec

cpu_forward = torch._scaled_dot_product_flash_attention_for_cpu  # the same op as in torch.ops, sooner reached
cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default._op


def refuse(spec: CallSpec) -> list[str]:
    """What no kernel of the device takes."""
    if spec.device == "cpu":
        return []
    return [f"torch has no fused kernel that returns the log-sum-exp on {spec.device}"]


def workspace(spec: CallSpec, queries: int, keys: int) -> int:
    """Bytes a kernel allocates for itself for so many queries and keys of the call."""
    if spec.device != "cpu":
        return 0
    # a tile of logits and an accumulator a thread
    rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
    rows, keys = min(rows, queries), min(512, keys)
    itemsize = 8 if spec.dtype == torch.float64 else 4
    return torch.get_num_threads() * rows * (keys + 2 + spec.value_dim) * itemsize


def forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, added: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
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
