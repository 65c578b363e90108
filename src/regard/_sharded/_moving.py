"""Tokens from the processes that hold them to those that need them, and gradients the same way back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regard._sharded._shares import Span


def move(x: Tensor, held: list[Span], needed: list[Span], group: Any) -> Tensor:
    """What this process needs of a tensor, of which every process holds a range of the tokens.

    `held` cuts the whole into ranges in order; `needed` are any ranges of it, one per process.
    """
    rank = dist.get_rank(group)
    start = held[rank][0]
    x = x.movedim(2, 0)
    parts = [_common(held[rank], need) for need in needed]
    sent = torch.cat([x[low - start : high - start] for low, high in parts])
    received = [_size(_common(own, needed[rank])) for own in held]
    moved: Tensor = _Exchange.apply(sent, [_size(part) for part in parts], received, group)  # type: ignore[no-untyped-call]
    return moved.movedim(0, 2).contiguous()


def exchange(x: Tensor, have: list[list[int]], need: list[list[int]], group: Any) -> Tensor:
    """Pieces of as many tokens each, by number: from the processes that have each to those that need it."""
    rank = dist.get_rank(group)
    x = x.movedim(2, 0)
    size = x.shape[0] // len(have[rank])
    own = dict(zip(have[rank], torch.split_with_sizes(x, [size] * len(have[rank])), strict=True))
    sent = [[piece for piece in have[rank] if piece in wanted] for wanted in need]
    received = [[piece for piece in held if piece in need[rank]] for held in have]
    counts = [[size * len(each) for each in pieces] for pieces in (sent, received)]
    parts = torch.cat([own[piece] for each in sent for piece in each])
    moved: Tensor = _Exchange.apply(parts, *counts, group)  # type: ignore[no-untyped-call]
    order = [piece for each in received for piece in each]
    found = dict(zip(order, torch.split_with_sizes(moved, [size] * len(order)), strict=True))
    return torch.cat([found[piece] for piece in need[rank]]).movedim(0, 2).contiguous()


def _common(one: Span, other: Span) -> Span:
    low = max(one[0], other[0])
    # an empty range stays inside the first one, so that it can be cut from it
    return (low, min(one[1], other[1])) if low < min(one[1], other[1]) else (one[0], one[0])


def _size(span: Span) -> int:
    return span[1] - span[0]


class _Exchange(torch.autograd.Function):
    """Rows of `x`, some for each process; gradients return to whom the rows came from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.how = received, sent, group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(grad, *ctx.how), None, None, None  # type: ignore[no-untyped-call]


class Shared(torch.autograd.Function):
    """A tensor that every process has whole: its gradient is the sum of what their rows give it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.group), None  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return added(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.group), None  # type: ignore[no-untyped-call]


def added(x: Tensor, group: Any) -> Tensor:
    """The sum over all processes."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x
