"""How sharp attention over normal queries and keys is; E4 and X1 measure it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from regard import api
from regard.lab._result import look


@dataclass(frozen=True)
class Sharpness:
    largest: float  # the largest weight of a row, mean over the rows
    entropy: float  # nats, mean over the rows
    slope: float  # p·(1 − p), the diagonal of the softmax's derivative, mean over all pairs
    gradient: float  # what reaches a score when the output's gradient is normal, mean size
    outside: float  # share of the scores beyond ±1


def sharpness(head_dim: int, keys: int, queries: int, *, scale: float, seed: int) -> Sharpness:
    draw = torch.Generator().manual_seed(seed)
    query, key, value, upstream = (
        torch.randn(1, 1, count, head_dim, generator=draw) for count in (queries, keys, keys, queries)
    )
    seen = look(query, key, value, scale=scale)
    scores = scale * query @ key.mT
    # A bias of zeros changes nothing, and its gradient is the gradient of the scores.
    zeros = torch.zeros_like(scores, requires_grad=True)
    api.attention(query, key, value, scale=scale, bias=zeros).backward(  # type: ignore[no-untyped-call]
        upstream / head_dim**0.5
    )
    assert zeros.grad is not None
    return Sharpness(
        largest=seen.max_weight.mean().item(),
        entropy=seen.entropy.mean().item(),
        slope=(seen.weights * (1 - seen.weights)).mean().item(),
        gradient=zeros.grad.abs().mean().item(),
        outside=(scores.abs() > 1).double().mean().item(),
    )
