"""Plain torch operations on the whole matrix of logits: any derivative order, every transform, memory O(L·S)."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends._base import Backend, accumulation, no_autocast
from regard.backends._bias import bias_over, is_rule
from regard.backends._dropout import dropout_factor
from regard.spec import Call, CallSpec, Result


class Eager(Backend):
    name = "eager"
    about = "plain torch operations, the whole matrix in memory; any derivative order"

    def refuse(self, spec: CallSpec) -> list[str]:
        return []

    def takes_rules(self, spec: CallSpec) -> bool:
        return True

    def run(self, call: Call, *, named: bool) -> Result:
        return attend(call)


def attend(call: Call) -> Result:
    """softmax(softcap(scale·q·kᵀ) + bias)·v in accumulation precision."""
    spec = call.spec
    rows, keys = range(spec.queries), range(spec.keys)
    with no_autocast(spec.device):
        permitted = None if call.mask is None else call.permitted(rows, keys)
        weights, lse = softmax_with_sinks(_logits(call, rows, keys), permitted, call.sinks)
        if spec.dropout:
            assert call.seed is not None
            weights = weights * dropout_factor(call.seed, spec, rows, keys, weights)
        out = _by_key_head(weights, spec) @ call.value.to(weights.dtype)
        return Result(out.reshape(*weights.shape[:3], spec.value_dim).to(spec.dtype), lse)


def _logits(call: Call, rows: range, keys: range) -> Tensor:
    """softcap(scale·q·k) + bias, [B, H, L, S]."""
    spec = call.spec
    query, key = (tensor.to(accumulation(spec.dtype)) for tensor in (call.query, call.key))
    products = _by_key_head(query * spec.scale, spec) @ key.transpose(-1, -2)
    logits = products.reshape(spec.batch, spec.heads, spec.queries, spec.keys)
    if spec.softcap is not None:
        logits = torch.tanh(logits / spec.softcap) * spec.softcap
    bias = bias_over(call, rows, keys) if is_rule(spec) else call.bias
    if bias is not None:
        # filled rather than only added: an overflown logit plus -inf would be NaN
        logits = (logits + bias).masked_fill(bias == -torch.inf, -torch.inf)
    return logits


def _by_key_head(rows: Tensor, spec: CallSpec) -> Tensor:
    """[B, H, L, n] as [B, Hkv, group · L, n]: grouped heads share their keys without a copy."""
    return rows.reshape(spec.batch, spec.kv_heads, spec.heads // spec.kv_heads * spec.queries, rows.shape[-1])


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
