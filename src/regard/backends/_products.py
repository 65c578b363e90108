"""Gathered pieces on a CPU by plain products of all rows of a piece: torch's kernel takes 32 or 64 rows at a time.

The weights of a few pieces, not of the call, are in memory. exp(x) is taken as a power of two, at which torch is
faster. The query is scaled, not its products: a BLAS need not look at what it multiplies by 0, and NaN would be lost.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.backends._steps import Gathered, Room, Three
from regard.spec import Call

# weights of a piece up to which products are the faster
MOST_WEIGHTS = 1 << 20

_LOG2_E = math.log2(math.e)


def are_faster(step: Gathered) -> bool:
    """Whether products are faster than the kernel for the pieces of a step."""
    return step.piece.kind == "rect" and step.group * step.piece.rows * step.piece.width <= MOST_WEIGHTS


def forward(call: Call, step: Gathered, results: tuple[Tensor, Tensor], room: Room) -> None:
    """Writes output and log-sum-exp of the step."""
    shape = (step.number, step.group * step.piece.rows)
    query = step.take_rows(room, "query", call.query, call.spec.kv_heads)
    # keys, then values in their place: less to keep in a cache
    keys = step.take_keys(room, "key", call.key, "keys").squeeze(1)
    weights = room.of("weights", math.prod(shape), step.piece.width, query).view(*shape, -1)
    torch.bmm((query * call.spec.scale).view(*shape, -1), keys.mT, out=weights)
    top = weights.amax(-1, keepdim=True)
    total = weights.sub_(top).mul_(_LOG2_E).exp2_().sum(-1, keepdim=True)
    values = step.take_keys(room, "value", call.value, "keys").squeeze(1)
    own = step.in_place(results[0])
    found = torch.bmm(weights, values, out=None if own is None else own.view(*shape, -1)).div_(total)
    parts = found.view(*query.shape[:3], -1), total.log_().add_(top).view(query.shape[:3])
    step.write(results, parts, call.spec.kv_heads)


def backward(call: Call, step: Gathered, results: Three, totals: list[Tensor], room: Room) -> None:
    """Writes the gradient of the query and adds those of keys and values; results: grad_out, out, lse."""
    scale, shape = call.spec.scale, (step.number, step.group * step.piece.rows)
    named = zip(("grad_out", "out", "lse"), results, strict=True)
    d_out, out, lse = (step.take_rows(room, name, tensor, call.spec.kv_heads) for name, tensor in named)
    rows, keys, values = step.inputs(call, room)
    query, key, value, d_rows = (rows * scale).flatten(1, 2), keys[:, 0], values[:, 0], d_out.reshape(*shape, -1)
    weights, slopes = (room.of(name, math.prod(shape), step.piece.width, query) for name in ("weights", "slopes"))
    weights, slopes = weights.view(*shape, -1), slopes.view(*shape, -1)
    torch.bmm(query, key.mT, out=weights).sub_(lse.reshape(*shape, 1)).mul_(_LOG2_E).exp2_()
    torch.bmm(d_rows, value.mT, out=slopes)
    slopes.sub_((d_out * out).sum(-1).view(*shape, 1)).mul_(weights)
    # rows that follow each other are written where they belong; keys' gradients where the keys were gathered
    own = step.in_place(totals[0])
    d_query = torch.empty_like(rows) if own is None else own
    torch.bmm(slopes, key, out=d_query.view(query.shape)).mul_(scale)
    torch.bmm(slopes.mT, query, out=key)
    torch.bmm(weights.mT, d_rows, out=value)
    step.add(totals, (d_query, keys, values))
