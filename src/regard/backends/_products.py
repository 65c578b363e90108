"""Stacks of pieces on a CPU by plain products of all rows of a piece: torch's kernel takes 32 or 64 rows at a time.

The weights of a few pieces, not of the call, are in memory. exp(x) is taken as a power of two, at which torch is
faster. The query is scaled, not its products: a BLAS need not look at what it multiplies by 0, and NaN would be lost.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from regard.backends._base import accumulation
from regard.backends._stacks import put, take

if TYPE_CHECKING:
    from torch import Tensor

    from regard.backends._stacks import Places, Stack, Work
    from regard.spec import CallSpec

# weights of a piece up to which they are worth keeping in memory
MOST_WEIGHTS = 1 << 20

_LOG2_E = math.log2(math.e)


def pay(stack: Stack, spec: CallSpec) -> bool:
    """Whether products are faster than the kernel for the pieces of a stack."""
    return not stack.causal and _rows(stack, spec) * stack.cols.shape[1] * stack.block <= MOST_WEIGHTS


def weights_bytes(stack: Stack, at: Places, spec: CallSpec) -> int:
    numbers = len(at.item) * _rows(stack, spec) * int(stack.cols.shape[1]) * stack.block
    return numbers * accumulation(spec.dtype).itemsize


def sums_bytes(stack: Stack, spec: CallSpec) -> int:
    items = spec.batch if stack.item is None else 1
    return 2 * items * spec.heads * int(stack.rows.size) * stack.block * accumulation(spec.dtype).itemsize


def forward(work: Work, results: tuple[Tensor, Tensor]) -> None:
    """Writes output and lse of all pieces, in blocks."""
    tops, sums = _outputs(work, results[0])
    lse = sums.log_().add_(tops)
    start = 0
    for at in work.parts:
        put(results[1], at, "row", lse[start : start + len(at.item)].view(len(at.item), work.call.spec.heads, -1))
        start += len(at.item)


def backward(work: Work, results: tuple[Tensor, Tensor, Tensor], totals: list[Tensor]) -> None:
    """Writes the gradient of the query and adds those of keys and values; results: grad_out, out, lse."""
    scale, width = work.call.spec.scale, work.stack.cols.shape[1] * work.stack.block
    for at in work.parts:
        n = len(at.item)
        (rows, key, value), (d_out, out, lse) = work.inputs(at), (take(t, at, "row") for t in results)
        query, key, value, d_rows = (rows * scale).flatten(1, 2), key[:, 0], value[:, 0], d_out.flatten(1, 2)
        weights, slopes = (work.room.of(name, n * query.shape[1], width, query) for name in ("weights", "slopes"))
        weights, slopes = weights.view(n, -1, width), slopes.view(n, -1, width)
        torch.bmm(query, key.mT, out=weights).sub_(lse.view(n, -1, 1)).mul_(_LOG2_E).exp2_()
        torch.bmm(d_rows, value.mT, out=slopes)
        slopes.sub_((d_out * out).sum(-1).view(n, -1, 1)).mul_(weights)
        # rows that follow each other are written where they belong; keys' gradients where the keys were gathered
        follow = at.first is not None and totals[0].is_contiguous()
        d_query = take(totals[0], at, "row") if follow else torch.empty_like(rows)
        torch.bmm(slopes, key, out=d_query.view(query.shape)).mul_(scale)
        torch.bmm(slopes.mT, query, out=key)
        torch.bmm(weights.mT, d_rows, out=value)
        put(totals[0], at, "row", d_query)
        put(totals[1], at, "key", key.unsqueeze(1), add=True)
        put(totals[2], at, "value", value.unsqueeze(1), add=True)


def _rows(stack: Stack, spec: CallSpec) -> int:
    """Rows that see the keys of one piece: of all heads that share them."""
    return int(stack.rows.shape[1]) * stack.block * (spec.heads // spec.kv_heads)


def _outputs(work: Work, out: Tensor) -> tuple[Tensor, Tensor]:
    """Writes the output; returns the largest logit of each row and the sum of exp(logit - that), both [piece, row, 1].
    Few operations, as a part is soon done."""
    spec, stack, parts, room = work.call.spec, work.stack, work.parts, work.room
    query, key, value = (t.view(-1, t.shape[3] * t.shape[4]) for t in (work.query, work.key, work.value))
    in_place = out.view(query.shape) if out.is_contiguous() else None
    rows, width, dim = _rows(stack, spec), stack.cols.shape[1] * stack.block, spec.head_dim
    tops, sums = query.new_empty(2, sum(len(at.item) for at in parts), rows, 1)
    n = start = 0
    for at in parts:
        if n != len(at.item):  # all parts but the last are alike
            n = len(at.item)
            # keys, then values in their place: less to keep in a cache
            gathered = room.of("key", len(at.col_numbers), query.shape[1], query)
            seen = gathered.view(n, width, dim)
            seen_t = seen.mT
            weights = room.of("weights", n * rows, width, query).view(n, rows, width)
        torch.index_select(key, 0, at.col_numbers, out=gathered)
        follow = None if at.first is None else slice(at.first, at.first + len(at.row_numbers))
        given = query.index_select(0, at.row_numbers) if follow is None else query[follow]
        torch.bmm((given * spec.scale).view(n, rows, dim), seen_t, out=weights)
        top, total = tops[start : start + n], sums[start : start + n]
        start += n
        torch.amax(weights, -1, keepdim=True, out=top)
        torch.sum(weights.sub_(top).mul_(_LOG2_E).exp2_(), -1, keepdim=True, out=total)
        torch.index_select(value, 0, at.col_numbers, out=gathered)
        if follow is not None and in_place is not None:
            torch.bmm(weights, seen, out=in_place[follow].view(n, rows, dim)).div_(total)
        else:
            found = torch.bmm(weights, seen).div_(total)
            put(out, at, "row", found.view(n, spec.heads, -1, dim))
    return tops, sums
