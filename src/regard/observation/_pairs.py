"""The exact weights of single pairs of a query and a key, exp(s_ij − lse_i): time and memory grow with the pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends._base import accumulation, no_autocast
from regard.spec import Call
from regard.statistics import checked_pairs

# numbers of gathered queries that are alive at once
_NUMBERS = 1 << 22


def weights_of_pairs(call: Call, lse: Tensor, pairs: Tensor) -> Tensor:
    """[B, H, n] for pairs [n, 2] of rows and columns of the call; what the mask or the bias hides is 0."""
    spec = call.spec
    pairs = checked_pairs(pairs, spec.queries, spec.keys).to(call.query.device)
    found = call.query.new_zeros(spec.batch, spec.heads, len(pairs), dtype=accumulation(spec.dtype))
    at_once = max(1, _NUMBERS // max(1, spec.batch * spec.heads * spec.head_dim))
    with torch.no_grad(), no_autocast(spec.device):
        for start in range(0, len(pairs), at_once):
            some = pairs[start : start + at_once]
            found[:, :, start : start + at_once] = _weights(call, lse, some[:, 0], some[:, 1])
    return found


def _weights(call: Call, lse: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    spec, work = call.spec, accumulation(call.spec.dtype)
    group = spec.heads // spec.kv_heads
    query = torch.unflatten(call.query[:, :, rows].to(work), 1, (spec.kv_heads, group)) * spec.scale
    logits = (query * call.key[:, :, keys].to(work).unsqueeze(2)).sum(-1).flatten(1, 2)
    if spec.softcap is not None:
        logits = torch.tanh(logits / spec.softcap) * spec.softcap
    hidden = lse[:, :, rows] == -torch.inf
    if call.bias is not None:
        bias = _bias(call, call.bias, rows, keys).to(work)
        logits, hidden = logits + bias, hidden | (bias == -torch.inf)
    if call.mask is not None:
        hidden = hidden | ~_permitted(call, rows, keys)
    return torch.exp(logits - lse[:, :, rows].to(work)).masked_fill(hidden, 0.0)


def _bias(call: Call, bias: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """The bias of each pair, [B or 1, H or 1, n]."""
    assert call.spec.bias is not None
    rule = call.spec.bias.rule
    if rule is None:
        return bias[:, :, rows if bias.shape[2] > 1 else rows * 0, keys if bias.shape[3] > 1 else keys * 0]
    offset = call.offset.view(-1, 1) if isinstance(call.offset, torch.Tensor) else call.offset
    distance = (keys - rows - offset).to(bias.device)
    return rule.line(bias, distance if distance.dim() == 2 else distance[None])


def _permitted(call: Call, rows: Tensor, keys: Tensor) -> Tensor:
    """Whether the mask permits each pair, [B or 1, H or 1, n]: from each row's intervals of keys where it has them,
    else from one row of the mask after the other."""
    mask, spec = call.mask, call.spec
    assert mask is not None
    if mask.readable() and not (isinstance(call.offset, torch.Tensor) and call.offset.device.type != "cpu"):
        spans = mask.rows(spec.queries, spec.keys, call.offset, spec.batch)
        if spans is not None:
            at = rows.cpu().numpy()
            lo, hi = (torch.from_numpy(side[:, :, at]).to(keys.device) for side in (spans.lo, spans.hi))
            return ((keys >= lo) & (keys < hi)).any(1).unsqueeze(1)
    found = torch.zeros(mask.batch, mask.heads, len(rows), dtype=torch.bool, device=keys.device)
    if isinstance(call.offset, torch.Tensor):
        found = found.expand(spec.batch, -1, -1).clone()
    for row in sorted(set(rows.tolist())):
        here = rows == row
        found[:, :, here] = call.permitted(range(row, row + 1), range(spec.keys))[:, :, 0, keys[here]]
    return found
