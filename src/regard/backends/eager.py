"""Plain torch operations on the whole matrix of logits: any derivative order, every transform, memory O(L·S)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from regard.backends import _bias
from regard.backends._base import Backend, accumulation, no_autocast
from regard.backends._dropout import dropout_factor
from regard.spec import Result

if TYPE_CHECKING:
    from torch import Tensor

    from regard.spec import Call, CallSpec


class Whole(NamedTuple):
    """Everything the formula produces, with heads ungrouped: [B, H, ...]."""

    out: Tensor
    lse: Tensor
    weights: Tensor  # before dropout


class Eager(Backend):
    name = "eager"
    about = "plain torch operations, the whole matrix in memory; any derivative order"

    def refuse(self, spec: CallSpec) -> list[str]:
        return []

    def takes_rules(self, spec: CallSpec) -> bool:
        return True

    def run(self, call: Call, *, named: bool) -> Result:
        whole = attend(call)
        return Result(whole.out, whole.lse)


def attend(call: Call, permitted: Tensor | None = None) -> Whole:
    """softmax(softcap(scale·q·kᵀ) + bias)·v in accumulation precision. ``permitted`` replaces the mask when given."""
    spec = call.spec
    with no_autocast(spec.device):
        if permitted is None and call.mask is not None:
            permitted = call.mask.tile(
                range(spec.queries),
                range(spec.keys),
                spec.queries,
                spec.keys,
                offset=call.offset,
                device=call.query.device,
            )
        bias = call.bias
        if _bias.is_rule(spec):
            bias = _bias.bias_over(call, range(spec.queries), range(spec.keys))
        logits = logits_of(call, call.query, call.key, bias)
        weights, lse = softmax_with_sinks(logits, permitted, call.sinks)
        dropped = weights
        if spec.dropout:
            assert call.seed is not None
            dropped = weights * dropout_factor(call.seed, spec, range(spec.queries), range(spec.keys), weights)
        out = _by_value(dropped, call.value, spec)
        return Whole(out.to(spec.dtype), lse, weights)


def logits_of(call: Call, query: Tensor, key: Tensor, bias: Tensor | None) -> Tensor:
    """softcap(scale·q·k) + bias, [B, H, l, s]; grouped heads share their keys without a copy."""
    spec = call.spec
    work = accumulation(spec.dtype)
    batch, heads, rows, dim = query.shape
    kv_heads, cols = key.shape[1], key.shape[2]
    grouped = (query.to(work) * spec.scale).reshape(batch, kv_heads, heads // kv_heads * rows, dim)
    logits = (grouped @ key.to(work).transpose(-1, -2)).reshape(batch, heads, rows, cols)
    if spec.softcap is not None:
        logits = torch.tanh(logits / spec.softcap) * spec.softcap
    if bias is not None:
        # filled rather than only added: an overflown logit plus -inf would be NaN
        logits = (logits + bias).masked_fill(bias == -torch.inf, -torch.inf)
    return logits


def softmax_with_sinks(logits: Tensor, permitted: Tensor | None, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights and log-sum-exp of each row. A row with nothing permitted gets zeros and -inf, and zero gradients."""
    if permitted is not None:
        logits = logits.masked_fill(~permitted, -torch.inf)
    if logits.shape[-1] == 0:
        if sinks is not None:
            logits = logits + sinks.view(1, -1, 1, 1)  # nothing to add to, but sinks get their (zero) gradient
        return logits, logits.new_full(logits.shape[:-1], -torch.inf)
    top = logits.detach().amax(-1, keepdim=True)
    empty = top == -torch.inf
    sink = None
    if sinks is not None:
        sink = sinks.to(logits.dtype).view(1, -1, 1, 1)
        top = torch.maximum(top, sink.detach())
    top = top.masked_fill(top == -torch.inf, 0.0)
    unnormalised = torch.exp(logits - top)
    total = unnormalised.sum(-1, keepdim=True)
    if sink is not None:
        # a sink of +inf takes everything
        total = total + torch.exp(sink - top).masked_fill(sink == torch.inf, 1.0)
    total = total.masked_fill(total == 0, 1.0)
    lse = (top + torch.log(total)).masked_fill(empty, -torch.inf)
    # filled once more: it keeps a NaN row, and gradients that overflow on hidden values, away from what is hidden
    return (unnormalised / total).masked_fill(logits == -torch.inf, 0.0), lse.squeeze(-1)


def _by_value(weights: Tensor, value: Tensor, spec: CallSpec) -> Tensor:
    batch, heads, rows, cols = weights.shape
    kv_heads = value.shape[1]
    grouped = weights.reshape(batch, kv_heads, heads // kv_heads * rows, cols)
    return (grouped @ value.to(weights.dtype)).reshape(batch, heads, rows, value.shape[-1])
