"""Computes the wanted statistics in one pass of row tiles, from the inputs and the log-sum-exp: no L×S tensor.

A tile is some query rows against all keys they may see, for some heads. Its logits are computed again, turned into
z = log p and p in two buffers that are used over and over, and folded into the statistics (see ``regard.statistics``).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from regard import statistics
from regard._observing._totals import Tile, Totals
from regard.backends._base import accumulation, no_autocast
from regard.backends._bias import bias_over
from regard.backends._schedule import Run, Step, merged_steps, permitted_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from regard.spec import Call
    from regard.statistics import Want

# numbers in one tile: two buffers of this size are alive
_NUMBERS = 1 << 21
_ROWS = 64
_LOG2_E = math.log2(math.e)


def observe_rows(call: Call, lse: Tensor, want: Want) -> dict[str, Tensor]:
    """Every wanted statistic of the call, [B, H, ...]."""
    totals = Totals(call, want)
    if call.spec.pairs:
        with torch.no_grad(), no_autocast(call.spec.device):
            for step in merged_steps(call):
                for tile in _tiles(call, step, lse):
                    totals.fold(tile)
    return totals.result()


def observing_bytes(call: Call, want: Want) -> int:
    """Bytes alive at the peak of ``observe_rows``: the statistics and the two buffers."""
    spec = call.spec
    rows, heads = spec.queries, spec.batch * spec.heads
    itemsize = accumulation(spec.dtype).itemsize
    numbers = rows * (2 * want.rows + bool(want.first) + 3 * want.top_k) + spec.keys * want.key_mass
    numbers += (rows + spec.keys) * want.distance
    if want.map is not None:
        numbers += want.map[0] * want.map[1]
    if want.weights is not None:
        spans = zip(want.weights, (rows, spec.keys), strict=True)
        numbers += math.prod(len(range(size)[span]) for span, size in spans)
    items, heads_at_once, at_once = _shape(call, spec.keys)
    return itemsize * (heads * numbers + 2 * items * heads_at_once * at_once * (spec.keys + _ROWS))


def _shape(call: Call, width: int) -> tuple[int, int, int]:
    """Items, heads and rows of a tile over ``width`` keys."""
    spec = call.spec
    rows = min(_ROWS, spec.queries)
    group = spec.heads // spec.kv_heads
    if spec.batch * spec.heads * rows * width <= _NUMBERS:
        grown = _NUMBERS // (spec.batch * spec.heads * max(1, width))
        return spec.batch, spec.heads, max(1, min(spec.queries, grown))
    return 1, group * max(1, min(spec.kv_heads, _NUMBERS // (group * rows * max(1, width)))), rows


def _tiles(call: Call, step: Step, lse: Tensor) -> Iterator[Tile]:
    spec = call.spec
    work = accumulation(spec.dtype)
    batch = range(spec.batch) if step.batch is None else range(step.batch, step.batch + 1)
    at_once, heads_at_once, rows_at_once = _shape(call, step.width)
    at_once = min(at_once, len(batch))
    size = rows_at_once + at_once * heads_at_once * rows_at_once * (step.width + rows_at_once)
    buffers = torch.zeros(2, size, dtype=work, device=call.query.device)
    for item in range(batch.start, batch.stop, at_once):
        items = slice(item, min(item + at_once, batch.stop))
        for head in range(0, spec.heads, heads_at_once):
            heads = slice(head, min(head + heads_at_once, spec.heads))
            for start in range(step.start, step.stop, rows_at_once):
                rows = range(start, min(start + rows_at_once, step.stop))
                tile = _tile(call, step, items, heads, rows, lse, buffers)
                if tile is not None:
                    yield tile


def _tile(call: Call, step: Step, items: slice, heads: slice, rows: range, lse: Tensor, buffers: Tensor) -> Tile | None:
    spec = call.spec
    group = spec.heads // spec.kv_heads
    kv = slice(heads.start // group, heads.stop // group)
    runs = tuple(run for run in (_seen_by(step, rows, run) for run in step.runs) if run.stop > run.start)
    if not runs:
        return None
    work = buffers.dtype
    width, count = sum(run.stop - run.start for run in runs), len(rows)
    shape = (items.stop - items.start, heads.stop - heads.start, count, width)
    at = (items, heads, slice(rows.start, rows.stop))
    z = _logits(call, at, kv, runs, buffers[0, : math.prod(shape)].view(shape))
    row_lse = lse[at].to(work).unsqueeze(-1)
    z.sub_(row_lse.masked_fill(row_lse == -torch.inf, 0.0))
    hidden = _hide(call, step, items, heads, rows, runs, z)
    if call.bias is not None:
        z.clamp_min_(statistics.NEVER)
    padded = buffers[1, : count + math.prod(shape[:3]) * (width + count)]
    whole = padded[count:].view(*shape[:3], width + count)
    padded[:count] = 0.0
    whole[..., width:] = 0.0
    # on a CPU exp2 takes a third of the time of exp
    p = torch.mul(z, _LOG2_E, out=whole[..., :width]).exp2_()
    return Tile(p, z, padded, items, heads, rows, runs, hidden)


def _seen_by(step: Step, rows: range, run: Run) -> Run:
    if step.lo is None or step.hi is None or step.lo.shape[0] > 1:
        return run
    at = slice(rows.start - step.start, rows.stop - step.start)
    return Run(max(run.start, int(step.lo[0, at].min())), min(run.stop, int(step.hi[0, at].max())), run.full)


def _logits(call: Call, at: tuple[slice, slice, slice], kv: slice, runs: tuple[Run, ...], out: Tensor) -> Tensor:
    """softcap(scale·q·k) + bias of the tile, written into ``out``."""
    spec = call.spec
    items, heads, rows = at
    query = call.query[items, heads, rows].to(out.dtype) * spec.scale
    keys = [call.key[items, kv, run.start : run.stop] for run in runs]
    key = (keys[0] if len(keys) == 1 else torch.cat(keys, 2)).to(out.dtype)
    lead = key.shape[0] * key.shape[1]
    flat = out.view(lead, -1, out.shape[-1])
    torch.bmm(query.reshape(lead, -1, query.shape[-1]), key.reshape(lead, *key.shape[2:]).transpose(1, 2), out=flat)
    if spec.softcap is not None:
        out.div_(spec.softcap).tanh_().mul_(spec.softcap)
    if call.bias is not None:
        start = 0
        for run in runs:
            part = bias_over(call, range(rows.start, rows.stop), range(run.start, run.stop), items, heads)
            assert part is not None
            into = out[..., start : start + run.stop - run.start]
            into.add_(part).masked_fill_(part == -torch.inf, -torch.inf)  # NaN + -inf is NaN
            start += run.stop - run.start
    return out


def _hide(
    call: Call, step: Step, items: slice, heads: slice, rows: range, runs: tuple[Run, ...], z: Tensor
) -> list[tuple[slice, Tensor]]:
    """Set what the mask forbids to NEVER; where that was, as (columns, pairs broadcastable to the tile)."""
    hidden, start = [], 0
    for run in runs:
        for part in _partial(step, rows, run):
            permitted = permitted_of(step, call, rows, part)
            if permitted is None:
                continue
            if permitted.shape[0] > 1 and step.batch is None:
                permitted = permitted[items]
            if permitted.shape[1] > 1:
                permitted = permitted[:, heads]
            pairs = ~permitted
            columns = slice(start + part.start - run.start, start + part.stop - run.start)
            # not -inf: 0 · -inf is NaN in the entropy, and exp of this is 0 as well
            z[..., columns].masked_fill_(pairs, statistics.NEVER)
            hidden.append((columns, pairs))
        start += run.stop - run.start
    return hidden


def _partial(step: Step, rows: range, run: Run) -> list[Run]:
    """The parts of a run that some of the rows do not see: what lies between is seen by all."""
    if run.full:
        return []
    if step.lo is None or step.hi is None or step.lo.shape[0] > 1:
        return [run]
    at = slice(rows.start - step.start, rows.stop - step.start)
    first, last = int(step.lo[0, at].max()), int(step.hi[0, at].min())
    if first >= last:
        return [run]
    edges = (Run(run.start, first, False), Run(last, run.stop, False))
    return [edge for edge in edges if edge.stop > edge.start]
