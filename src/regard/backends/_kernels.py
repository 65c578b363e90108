"""The fused kernels inside torch, one calling convention for all: (out, lse) forward, three gradients backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from regard.spec import CallSpec

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def refuse(spec: CallSpec) -> list[str]:
    """What no kernel of the device takes."""
    if spec.device == "cpu":
        return []
    return [f"torch has no fused kernel that returns the log-sum-exp on {spec.device}"]


def workspace(spec: CallSpec) -> int:
    """Bytes a kernel allocates for itself."""
    # a tile of logits and an accumulator a thread
    return torch.get_num_threads() * (256 * (512 + 1) + 256 * spec.value_dim + 512) * 4


def forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, added: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = _cpu_forward(query, key, value, 0.0, causal, attn_mask=added, scale=scale)
    return out, lse


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
    return _cpu_backward(  # type: ignore[no-any-return]
        grad_out, query, key, value, out, lse, 0.0, causal, attn_mask=added, scale=scale
    )
