"""What the tests of the modules share: random modules in float64, and the oracle's answer for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard import reference
from regard.nn import MultiHeadAttention


def build(*arguments: int, **keywords: Any) -> MultiHeadAttention:
    """A module in float64 whose biases and gains are not at their tell-tale starting values."""
    module = MultiHeadAttention(*arguments, dtype=torch.float64, **keywords)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.normal_()
    return module


def random(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


def weights_of(module: MultiHeadAttention) -> dict[str, np.ndarray]:
    """The module's projections as the reference names them, `[width in, width out]`."""
    if module.packed:
        parts = module.qkv_proj.weight.split(module.projection_widths)
        found = dict(zip("qkv", parts, strict=True))
        if module.qkv_proj.bias is not None:
            biases = module.qkv_proj.bias.split(module.projection_widths)
            found |= {f"{name}_bias": bias for name, bias in zip("qkv", biases, strict=True)}
    else:
        projections = {"q": module.q_proj, "k": module.k_proj, "v": module.v_proj}
        found = {name: projection.weight for name, projection in projections.items()}
        found |= {f"{name}_bias": p.bias for name, p in projections.items() if p.bias is not None}
    found["out"] = module.out_proj.weight
    if module.out_proj.bias is not None:
        found["out_bias"] = module.out_proj.bias
    return {name: tensor.detach().numpy().T for name, tensor in found.items()}


def oracle(module: MultiHeadAttention, query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    given = [x.detach().numpy() for x in (query, key, value)]
    heads = {"num_heads": module.num_heads, "num_kv_heads": module.num_kv_heads}
    return torch.from_numpy(reference.multi_head_attention(*given, weights_of(module), **heads, **keywords))


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=0.0, atol=tolerance)


def gradients(module: torch.nn.Module, out: Tensor, *inputs: Tensor) -> dict[str, Tensor]:
    """Gradients of a fixed random projection of `out`, for every parameter and each input."""
    generator = torch.Generator().manual_seed(7)
    pull = torch.randn(out.shape, dtype=out.dtype, generator=generator)
    named = dict(module.named_parameters()) | {f"input {i}": x for i, x in enumerate(inputs)}
    found = torch.autograd.grad((out * pull).sum(), list(named.values()))
    return dict(zip(named, found, strict=True))
