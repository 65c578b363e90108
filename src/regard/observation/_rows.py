"""Computes the wanted statistics in one pass of row tiles, from the inputs and the log-sum-exp: no L×S tensor.

A tile is some query rows against all keys they may see, for some heads. Its logits are computed again, turned into
z = log p and p in two buffers that are used over and over, and folded into the statistics (see ``regard.statistics``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from regard import statistics
from regard.backends._base import accumulation, no_autocast
from regard.backends._bias import bias_over
from regard.backends._meter import each_kind, some
from regard.backends._schedule import merged_steps, permitted_of
from regard.backends._steps import Room, Run, Step, side_by_side, tokens_of
from regard.observation._totals import Tile, Totals
from regard.spec import Call
from regard.statistics import Want

# numbers in one tile: two buffers of this size are alive, and one core's cache should hold much of them
_NUMBERS = 1 << 19
_ROWS = 64
_LOG2_E = math.log2(math.e)


def observe_rows(call: Call, lse: Tensor, want: Want, lengths: Tensor | None = None) -> dict[str, Tensor]:
    """Every wanted statistic of the call but single pairs, [B, H, ...]; ``lengths`` [B, H, S] are those of values."""
    totals = Totals(call, want, lengths)
    with torch.no_grad(), no_autocast(call.spec.device):
        for tile in tiles(call, lse):
            totals.fold(tile)
    return totals.result()


def tiles(call: Call, lse: Tensor) -> Iterator[Tile]:
    """All weights of a call that are not 0, each in one tile; the next tile overwrites the last one's buffers."""
    if not call.spec.pairs:
        return
    room = Room()
    # the largest first: its buffers are large enough for all others
    steps = sorted(each_kind(merged_steps(call), lambda step: step.size), key=lambda step: -step.size[1])
    for step in steps:
        yield from _tiles(call, step, lse.to(accumulation(call.spec.dtype)), room)


def _at_once(call: Call, rows: int, width: int, items: int) -> tuple[int, int]:
    """Items and heads of a tile: all, or some of the heads of one item; heads that share keys stay together."""
    spec = call.spec
    if items * spec.heads * rows * width <= _NUMBERS:
        return items, spec.heads
    group = spec.heads // spec.kv_heads
    return 1, group * max(1, min(spec.kv_heads, _NUMBERS // (group * rows * max(1, width))))


def _tiles(call: Call, step: Step, lse: Tensor, room: Room) -> Iterator[Tile]:
    spec, batch = call.spec, range(call.spec.batch)[step.items]
    # more rows where the whole call is small
    size = max(1, min(spec.queries, max(_ROWS, _NUMBERS // (spec.batch * spec.heads * max(1, step.width)))))
    for start in some(range(step.start, step.stop, size)[::-1]):  # later rows see more, if they do not see the same
        rows = range(start, min(start + size, step.stop))
        runs = _seen_by(step, rows)
        if not runs:
            continue
        hidden = _hidden(call, step, rows, runs)
        items_at_once, heads_at_once = _at_once(call, len(rows), sum(run.stop - run.start for run in runs), len(batch))
        for item in some(range(batch.start, batch.stop, items_at_once)):
            items = slice(item, min(item + items_at_once, batch.stop))
            for head in some(range(0, spec.heads, heads_at_once)):
                part = slice(head, min(head + heads_at_once, spec.heads))
                these = [(columns, step.cut_pairs(pairs, items, part)) for columns, pairs in hidden]
                yield _tile(call, items, part, rows, runs, these, lse, room)


def _tile(
    call: Call,
    items: slice,
    heads: slice,
    rows: range,
    runs: tuple[Run, ...],
    hidden: list[tuple[slice, Tensor]],
    lse: Tensor,
    room: Room,
) -> Tile:
    width, count = sum(run.stop - run.start for run in runs), len(rows)
    lead = (items.stop - items.start, heads.stop - heads.start, count)
    at = (items, heads, slice(rows.start, rows.stop))
    z = _logits(call, at, runs, room.of("z", math.prod(lead), width, lse).view(*lead, width))
    row_lse = lse[at].unsqueeze(-1)
    z.sub_(row_lse.masked_fill(row_lse == -torch.inf, 0.0))
    for columns, pairs in hidden:
        # not -inf: 0 · -inf is NaN in the entropy, and exp of this is 0 as well
        z[..., columns].masked_fill_(pairs, statistics.NEVER)
    if call.bias is not None:
        z.clamp_min_(statistics.NEVER)
    padded = room.of("p", 1, count + math.prod(lead) * (width + count), lse)[0]
    whole = padded[count:].view(*lead, width + count)
    padded[:count] = 0.0
    whole[..., width:] = 0.0
    # on a CPU exp2 takes a third of the time of exp
    p = torch.mul(z, _LOG2_E, out=whole[..., :width]).exp2_()
    return Tile(p, z, padded, items, heads, rows, runs, hidden)


def _seen_by(step: Step, rows: range) -> tuple[Run, ...]:
    """The step's runs without what these rows cannot see."""
    cut = (Run(*step.visible(run, rows), run.full) for run in step.runs)
    return tuple(run for run in cut if run.stop > run.start)


def _logits(call: Call, at: tuple[slice, slice, slice], runs: tuple[Run, ...], out: Tensor) -> Tensor:
    """softcap(scale·q·k) + bias of the tile, written into ``out``."""
    spec = call.spec
    items, heads, rows = at
    group = spec.heads // spec.kv_heads
    kv = slice(heads.start // group, heads.stop // group)
    query = call.query[items, heads, rows].to(out.dtype) * spec.scale
    key = tokens_of(call.key[items, kv], runs).to(out.dtype)
    lead = key.shape[0] * key.shape[1]
    flat = out.view(lead, -1, out.shape[-1])
    torch.bmm(query.reshape(lead, -1, query.shape[-1]), key.reshape(lead, *key.shape[2:]).transpose(1, 2), out=flat)
    if spec.softcap is not None:
        out.div_(spec.softcap).tanh_().mul_(spec.softcap)
    if call.bias is not None:
        for place, columns in side_by_side(runs):
            part = bias_over(call, range(rows.start, rows.stop), range(place.start, place.stop), items, heads)
            assert part is not None
            out[..., columns].add_(part).masked_fill_(part == -torch.inf, -torch.inf)  # NaN + -inf is NaN
    return out


def _hidden(call: Call, step: Step, rows: range, runs: tuple[Run, ...]) -> list[tuple[slice, Tensor]]:
    """What the mask forbids: (columns of the tile, pairs broadcastable to [batch, head, rows, columns])."""
    hidden = []
    for run, (_, columns) in zip(runs, side_by_side(runs), strict=True):
        moved = columns.start - run.start
        for part in _partial(step, rows, run):
            permitted = permitted_of(step, call, rows, part)
            if permitted is not None:
                hidden.append((slice(part.start + moved, part.stop + moved), ~permitted))
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
