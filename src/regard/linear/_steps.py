"""The two plain forms: one token after another with a state, and the whole matrix of weights."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.linear._chunks import Part, Sums


def recur(part: Part, before: Sums) -> tuple[Tensor, Tensor, Sums]:
    """As ``chunks.attend``, one token at a time: S ← gate·S + φ(k)ᵀ v, out = φ(q)·S."""
    batch, heads, tokens, _ = part.query.shape
    state_heads, width = part.key.shape[1], part.value.shape[3]
    queries = torch.unflatten(part.query, 1, (state_heads, -1))  # [B, K, G, T, m]
    values, norms, run = before
    out, weight = [], []
    for t in range(tokens):
        if part.runs is not None:
            here = part.runs[:, t : t + 1]
            if run is not None:
                same = (here == run)[:, :, None]
                values, norms = values * same[..., None], norms * same
            run = here
        if part.gates is not None:
            gate = part.gates[:, :, t, None].exp().to(values.dtype)
            values, norms = values * gate[..., None], norms * gate
        key = part.key[:, :, t]
        values = values + key.unsqueeze(-1) * part.value[:, :, t].unsqueeze(-2)
        norms = norms + key
        query = queries[:, :, :, t]
        out.append(query @ values)
        weight.append((query @ norms.unsqueeze(-1)).squeeze(-1))
    if not tokens:
        nothing = part.query.new_zeros(batch, heads, 0, width)
        return nothing, nothing.sum(-1), before
    found = torch.stack(out, 3).flatten(1, 2)
    return found, torch.stack(weight, 3).flatten(1, 2), Sums(values, norms, run)


def whole(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Every row sees every key: weighted values [B, H, L, e] and total weights [B, H, L]."""
    queries = torch.unflatten(query, 1, (key.shape[1], -1)).flatten(2, 3)  # [B, K, G·L, m]
    out = queries @ (key.transpose(-1, -2) @ value)
    weight = (queries @ key.sum(2).unsqueeze(-1)).squeeze(-1)
    shape = query.shape[:3]
    return out.reshape(*shape, -1), weight.reshape(shape)


def quadratic(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, remains: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The definition: all L × S weights at once. ``seen`` and ``remains`` broadcast to [B, H, L, S]."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    weights = query @ key.transpose(-1, -2)
    if remains is not None:
        weights = weights * remains
    if seen is not None:
        weights = weights.masked_fill(~seen, 0.0)
    return weights @ value, weights.sum(-1)
