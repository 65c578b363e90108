"""Small models that attend in every way that `regard.watch` must see, and what their weights are."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as imported_earlier


class ByHand(nn.Module):
    """Self attention that calls torch's function by a name given at construction."""

    def __init__(self, width: int = 21, heads: int = 3, how: str = "attribute", **keywords: Any) -> None:
        super().__init__()
        self.heads, self.how, self.keywords = heads, how, keywords
        self.qkv = nn.Linear(width, 3 * width)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        if self.how == "attribute":
            out = F.scaled_dot_product_attention(q, k, v, **self.keywords)
        elif self.how == "earlier":
            out = imported_earlier(q, k, v, **self.keywords)
        else:
            out = torch.nn.functional.scaled_dot_product_attention(query=q, key=k, value=v, **self.keywords)
        return out.transpose(1, 2).flatten(2)


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def dense(q: Tensor, k: Tensor, permitted: Tensor | None = None) -> Tensor:
    """The weights, whole."""
    logits = q.double() @ k.double().transpose(-1, -2) / q.shape[-1] ** 0.5
    return (logits if permitted is None else logits.masked_fill(~permitted, -torch.inf)).softmax(-1)


def check_statistics(call: Any, weights: Tensor, tolerance: float = 2e-6, real: Tensor | None = None) -> None:
    """Every statistic of a recorded call against the same reduction of the whole matrix [B, H, L, S].

    Queries that are not ``real`` [B, L] must be missing, and in no sum."""
    weights, empty = weights.double(), torch.zeros(weights.shape[:3], dtype=torch.bool)
    if real is not None:
        empty = ~real[:, None].expand(weights.shape[:3])
        weights = weights.masked_fill(empty.unsqueeze(-1), 0.0)
    assert torch.equal(call.entropy.isnan(), empty) and torch.equal(call.max_weight.isnan(), empty)
    close = {"rtol": 0.0, "atol": tolerance * max(1, weights.shape[2])}
    entropy = -(weights * weights.clamp_min(1e-300).log()).sum(-1)
    torch.testing.assert_close(call.entropy.nan_to_num().double(), entropy, rtol=0.0, atol=100 * tolerance)
    torch.testing.assert_close(call.max_weight.nan_to_num().double(), weights.amax(-1), rtol=0.0, atol=tolerance)
    torch.testing.assert_close(call.key_mass.double(), weights.sum(2), **close)
    k = call.top_weights.shape[-1]
    best = weights.topk(min(k, weights.shape[-1]), -1).values
    torch.testing.assert_close(call.top_weights[..., : best.shape[-1]].double(), best, rtol=0.0, atol=tolerance)
    found = call.top_keys.long()
    at = weights.gather(-1, found.clamp_min(0)).masked_fill(found < 0, 0.0)
    torch.testing.assert_close(at, call.top_weights.double(), rtol=0.0, atol=tolerance)
    torch.testing.assert_close(call.distance.sum(-1).double(), weights.sum((-1, -2)), **close)
    rows, columns = call.map.shape[2:]
    sums = weights.new_zeros(*call.map.shape)
    of_rows = torch.bucketize(torch.arange(weights.shape[2]), torch.arange(rows) * weights.shape[2] // rows, right=True)
    of_keys = torch.bucketize(
        torch.arange(weights.shape[3]), torch.arange(columns) * weights.shape[3] // columns, right=True
    )
    by_key = weights.new_zeros(*weights.shape[:3], columns).index_add_(3, of_keys - 1, weights)
    sums.index_add_(2, of_rows - 1, by_key)
    pairs = torch.bincount(of_rows - 1)[:, None] * torch.bincount(of_keys - 1)
    torch.testing.assert_close(call.map.double(), sums / pairs, **close)
