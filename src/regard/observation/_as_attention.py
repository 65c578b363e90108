"""Gradients of statistics as the gradients of another attention call, which fused kernels compute fastest.

What a statistic's gradient says about the weight of a pair is, but for a number of its own in each row, a product of
numbers of the query and numbers of the key (`_gradients` has the formula; z_ij = scale·q_i·k_j − lse_i):

    G_ij = −dH_i·scale·q_i · k_j  +  1 · dM_j  +  dF_i · [j < n]  +  number of row i

and that is what a backward pass of attention makes of values k_j, dM_j, [j < n] and a gradient of the output
−dH_i·scale·q_i, 1, dF_i. The number of the row falls out where weights sum to 1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.plan import program_of
from regard.spec import Call
from regard.statistics import Want

# the widest values that fused kernels take, and what their width is a multiple of
WIDEST, STEP = 256, 8


def takes(call: Call) -> bool:
    """Whether a call's logits are such products, on a device whose fused kernels are much faster than tiles."""
    spec = call.spec
    plain = call.bias is None and call.sinks is None and spec.softcap is None
    return spec.device == "cuda" and plain and spec.head_dim + spec.heads // spec.kv_heads + 1 <= WIDEST


def gradients(call: Call, lse: Tensor, want: Want, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Those of query and key, for gradients of the statistics by name."""
    spec = call.spec
    group, dtype = spec.heads // spec.kv_heads, spec.dtype
    query, key = (torch.where(t.isfinite(), t, 0.0).detach() for t in (call.query, call.key))
    values, grads = [], []
    if (entropy := given.get("entropy")) is not None:
        # an empty row has no entropy
        slope = entropy.to(lse.dtype).masked_fill(lse == -torch.inf, 0.0).mul(-spec.scale)
        values.append(key)
        grads.append(slope.unsqueeze(-1) * query)
    if (mass := given.get("key_mass")) is not None:
        # without what all keys of a head have in common, which falls out: half precision is for what is left
        mass = mass.to(lse.dtype)
        mass = mass - mass.mean(-1, keepdim=True)
        size = mass.abs().amax().clamp_min(torch.finfo(lse.dtype).tiny)
        # the heads of a group share their values: a column for each, which only that head's output reads
        values.append((mass / size).to(dtype).unflatten(1, (spec.kv_heads, group)).transpose(2, 3))
        own = torch.eye(group, dtype=lse.dtype, device=lse.device).repeat(spec.kv_heads, 1)
        counts = torch.zeros(spec.queries, 1, dtype=lse.dtype, device=lse.device)
        counts[want.queries or slice(None)] = size
        grads.append((own.unsqueeze(1) * counts).expand(spec.batch, -1, -1, -1))
    if (first := given.get("first_mass")) is not None:
        column = (torch.arange(spec.keys, device=lse.device) < want.first).to(dtype)
        values.append(column.view(1, 1, -1, 1).expand(spec.batch, spec.kv_heads, -1, -1))
        grads.append(first.to(lse.dtype).unsqueeze(-1))
    # queries, keys and values of one width, which all fused kernels take: the rest is zeros
    used = sum(part.shape[-1] for part in values)
    width = max(spec.head_dim, used)
    width += -width % STEP
    value, grad = (F.pad(torch.cat(parts, -1), (0, width - used)) for parts in (values, grads))
    # gradients may be larger than half precision holds, as scaled losses make them: they are carried without their size
    whole = grad.abs().amax().clamp_min(torch.finfo(lse.dtype).tiny)
    changed = spec._replace(head_dim=width, value_dim=width, grad=True, unit_stride=True, dropout=0.0)
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (query, key)]  # values stay constants
        wide = [F.pad(t if t.stride(3) == 1 else t.contiguous(), (0, width - spec.head_dim)) for t in leaves]
        other = call.replace(spec=changed, query=wide[0], key=wide[1], value=value, seed=None, wants_rows=False)
        out = program_of(other, "auto").run(other).out
    d_query, d_key = torch.autograd.grad(out, leaves, (grad / whole).to(dtype))
    return (d_query * whole).to(dtype), (d_key * whole).to(dtype)
