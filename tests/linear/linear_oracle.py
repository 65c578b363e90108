"""Linear attention as its formula says, pair by pair in float64: no sums over chunks, no states, no cumulative sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.masks import Mask

MAPS = {"elu": lambda x: torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0))), "relu": lambda x: x.clamp(min=0)}


def weights(
    query: Tensor,
    key: Tensor,
    mask: Mask | None,
    *,
    feature_map: str = "elu",
    offset: int | None = None,
    log_gate: Tensor | None = None,
    hidden: Tensor | None = None,
) -> Tensor:
    """[B, H, L, S]. `log_gate` [B, H, S] counts at the keys that are not `hidden` [B, S]."""
    B, H, L, _ = query.shape
    S = key.shape[2]
    offset = S - L if offset is None else offset
    key = key.repeat_interleave(H // key.shape[1], 1)
    phi = MAPS.get(feature_map, lambda x: x)
    scale = query.shape[-1] ** -0.5 if feature_map == "identity" else 1.0
    found = scale * torch.einsum("bhid,bhjd->bhij", phi(query), phi(key))
    if log_gate is not None:
        i, j, t = torch.arange(L)[:, None, None] + offset, torch.arange(S)[None, :, None], torch.arange(S)
        between = ((j < t) & (t <= i)).double()  # the tokens that come after key j, up to query i
        counted = torch.ones(B, S).double() if hidden is None else (~hidden).double()
        found = found * torch.exp(torch.einsum("ijt,bht,bt->bhij", between, log_gate.double(), counted))
    if mask is None:
        return found
    seen = mask.dense(L, S, query_offset=offset)
    return torch.where(seen, found, 0.0)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask | None = None, **keywords: Any) -> Tensor:
    normalize = keywords.pop("normalize", True)
    found = weights(query, key, mask, **keywords)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    total = found.sum(-1, keepdim=True)
    out = torch.einsum("bhij,bhje->bhie", found, value)
    return out / torch.where(total == 0, 1.0, total) if normalize else out


def inputs(
    B: int, H: int, L: int, S: int, D: int, *, Dv: int | None = None, Hkv: int | None = None, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, H, L, D), (B, Hkv or H, S, D), (B, Hkv or H, S, Dv or D))
    made = [torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]
    return made[0], made[1], made[2]


def gradients(out: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    direction = torch.randn(out.shape, dtype=torch.float64, generator=generator).to(out)
    return torch.autograd.grad(out, tensors, direction)
