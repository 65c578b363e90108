"""Pure torch, any device: exact attention in tiles, memory O(L), empty tiles skipped, gradients by recomputation."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from regard.backends._base import accumulation, reads_values, refuse_transforms
from regard.backends._bias import add_bias_gradient, bias_over
from regard.backends._dropout import Draw, kept_scale
from regard.backends._grouped import Steps
from regard.backends._meter import some
from regard.backends._schedule import permitted_of
from regard.backends._steps import Room, Run, Step, Three, side_by_side
from regard.backends._tiled import TiledBackend
from regard.spec import Call, CallSpec

# numbers in one tile of logits: large enough to keep the matrix units busy, small enough to stay in a core's cache
TILE_NUMBERS = {"cpu": 1 << 19}
TILE_NUMBERS_ELSEWHERE = 1 << 24
TILE_KEYS = 1024
TILE_ROWS = 512
# fewest rows of a tile below a causal edge, where each row computes all pairs that the last one sees
EDGE_ROWS = 128
# softcaps up to which a tanh that is off by a rounding of 1 leaves the logits exact to some millionths
SMALL_CAP = 64.0
_LOG2_E = math.log2(math.e)
# logits of pieces of equal shape that are computed at once: little memory, and still worth the launch
PIECES_NUMBERS = 1 << 16


class Blockwise(TiledBackend):
    name = "blockwise"
    about = "pure torch in tiles: memory O(L), empty tiles skipped, every modifier"

    def refuse(self, spec: CallSpec) -> list[str]:
        return refuse_transforms(spec)

    def takes_rules(self, spec: CallSpec) -> bool:
        return True

    def plan_steps(self, call: Call) -> Steps:
        """Strided pieces a few at a time, as their keys are copied."""
        spec, found = call.spec, Steps()
        for step in super().plan_steps(call):
            if isinstance(step, Step) and not step.is_slice:
                at_once = max(1, PIECES_NUMBERS * step.number // max(1, step.lines(spec) * step.width))
                found += step.cut(at_once)
            else:
                found.append(step)
        return found

    def step_forward(
        self, call: Call, step: Step, query: Tensor, key: Tensor, value: Tensor, room: Room
    ) -> tuple[Tensor, Tensor]:
        spec = call.spec
        work = accumulation(spec.dtype)
        batch, heads, rows, _ = query.shape
        out = query.new_empty((batch, heads, rows, spec.value_dim), dtype=work)
        lse = query.new_empty((batch, heads, rows), dtype=work)
        # where nothing is permitted, -inf - -inf would be NaN
        may_be_empty = step.kind != "rect" or call.bias is not None
        for tile in _tiles(call, step, query, key, value, room):
            at = (tile.items, tile.heads, tile.part)
            shape = out[at].shape
            top: Tensor | None = None
            for run, place in tile.runs():
                logits, _ = self._logits(tile, run, place, derive=False)
                peak = logits.amax(-1, keepdim=True)
                peak = peak if top is None else torch.maximum(top, peak)
                weights = _exp(logits.sub_(peak.masked_fill(peak == -torch.inf, 0.0) if may_be_empty else peak))
                share = weights.sum(-1, keepdim=True)
                if spec.dropout:
                    tile.draw(run, weights).put_on(weights)
                part = torch.bmm(weights, tile.values(place))
                if top is None:
                    total, acc = share, part
                else:
                    shrink = torch.exp(top - peak).masked_fill_(top == -torch.inf, 0.0)
                    total, acc = share.add_(total.mul_(shrink)), part.add_(acc.mul_(shrink))
                top = peak
            if top is None:
                out[at], lse[at] = 0.0, -torch.inf
                continue
            if spec.dropout:
                acc.mul_(kept_scale(spec))
            whole = total.masked_fill(total == 0, 1.0) if may_be_empty else total
            out[at] = acc.div_(whole).view(shape)
            lse[at] = top.add_(total.log_()).view(shape[:3])
        return out, lse

    def _logits(self, tile: Tile, run: Run, place: slice, *, derive: bool) -> tuple[Tensor, Tensor | None]:
        """Masked logits of one tile [B·Hkv, G·rows, keys]; to derive them, tanh(s/c) too where there is a softcap c."""
        call, step, spec = tile.call, tile.step, tile.call.spec
        keys = tile.keys(place)
        logits = torch.bmm(tile.scaled, keys.mT, out=tile.memory("logits", keys.shape[1]))
        capped = None
        if spec.softcap is not None:
            capped = _tanh(logits, spec.softcap)
            logits = capped * spec.softcap if derive else capped.mul_(spec.softcap)
        whole = logits.view(*tile.lead, len(tile.rows), logits.shape[-1])
        bias = None
        if call.bias is not None:
            bias = bias_over(call, tile.rows, range(run.start, run.stop), tile.batch_items, tile.heads)
        if bias is not None:
            whole.add_(bias)
            if not reads_values(spec):
                whole.masked_fill_(bias == -torch.inf, -torch.inf)  # an overflown logit plus -inf is NaN
        permitted = permitted_of(step, call, tile.rows, run)
        if permitted is not None:
            whole.masked_fill_(~step.cut_pairs(permitted, tile.items, tile.heads), -torch.inf)
        return logits, capped

    def step_backward(
        self, call: Call, step: Step, tensors: Three, results: Three, grad_bias: Tensor | None, room: Room
    ) -> Three:
        spec = call.spec
        work = accumulation(spec.dtype)
        query, key, value = tensors
        grad_out, out, lse = results
        grad_query = torch.empty(query.shape, dtype=work, device=query.device)
        grad_key = torch.zeros(key.shape, dtype=work, device=key.device)
        grad_value = torch.zeros(value.shape, dtype=work, device=value.device)
        # an empty row's weights are exp(-inf - inf) = 0
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        scale = kept_scale(spec) if spec.dropout else 1.0
        for tile in _tiles(call, step, query, key, value, room, passes=2):
            at, kv = (tile.items, tile.heads, tile.part), (tile.items, tile.kv_heads)
            d_out = tile.fold(grad_out[at].to(work))
            # what is dropped gets no gradient, what is kept is multiplied: in d_out once, not in every weight
            delta = (d_out * tile.fold(out[at].to(work))).sum(-1, keepdim=True)
            d_out = d_out * scale if spec.dropout else d_out
            row_lse = lse[at].reshape(*d_out.shape[:2], 1)
            d_query = torch.zeros_like(tile.scaled)
            d_keys, d_values = grad_key[kv].flatten(0, 1), grad_value[kv].flatten(0, 1)  # views where strides allow it
            for run, place in tile.runs():
                logits, capped = self._logits(tile, run, place, derive=True)
                into = tile.memory("slopes", logits.shape[-1])
                d_weights = torch.bmm(d_out, tile.values(place).mT, out=into)
                if not reads_values(spec):
                    d_weights.masked_fill_(logits == -torch.inf, 0.0)  # a huge hidden value may have overflown
                weights = _exp(logits.sub_(row_lse))
                kept = weights
                if spec.dropout:
                    draw = tile.draw(run, weights)
                    kept = draw.put_on(weights.clone())
                    draw.put_on(d_weights)
                d_values[:, place].baddbmm_(kept.transpose(1, 2), d_out)
                d_logits = d_weights.sub_(delta).mul_(weights)
                if grad_bias is not None:
                    whole = d_logits.view(*tile.lead, len(tile.rows), -1)
                    cols = range(run.start, run.stop)
                    add_bias_gradient(call, grad_bias, whole, tile.rows, cols, tile.batch_items, tile.heads)
                if capped is not None:
                    d_logits.mul_(capped.square_().neg_().add_(1.0))
                d_query.baddbmm_(d_logits, tile.keys(place))
                d_keys[:, place].baddbmm_(d_logits.transpose(1, 2), tile.scaled)
            grad_query[at] = d_query.mul_(spec.scale).view(grad_query[at].shape)
            _put_back(grad_key, kv, d_keys)
            _put_back(grad_value, kv, d_values)
        return grad_query, grad_key, grad_value


class Tile:
    """Some rows of some items and heads, and what they are multiplied with."""

    def __init__(
        self,
        call: Call,
        step: Step,
        tensors: tuple[Tensor, ...],
        at: tuple[slice, slice, slice],
        size: int,
        room: Room,
    ) -> None:
        spec = call.spec
        items, kv_heads, part = at
        self.call, self.step, self.items, self.kv_heads, self.part, self._size = call, step, items, kv_heads, part, size
        self._room = room
        group = spec.heads // spec.kv_heads
        self.heads = slice(kv_heads.start * group, kv_heads.stop * group)
        self.rows = range(step.start + part.start, step.start + part.stop)
        # of the call's batch: a step may be for one item alone
        self.batch_items = items if step.batch is None else step.items
        self.lead = (items.stop - items.start, self.heads.stop - self.heads.start)
        self._group, self._work = group, accumulation(spec.dtype)
        self._key, self._value = tensors[1], tensors[2]
        self.scaled = self.fold(tensors[0][items, self.heads, part].to(self._work) * spec.scale)

    def fold(self, tensor: Tensor) -> Tensor:
        """[items, heads, rows, dim] to [items · kv heads, group · rows, dim]: heads that share keys are neighbours."""
        items, heads, rows, dim = tensor.shape
        return tensor.reshape(items * heads // self._group, self._group * rows, dim)

    def keys(self, place: slice) -> Tensor:
        return self._key[self.items, self.kv_heads, place].to(self._work).flatten(0, 1)

    def values(self, place: slice) -> Tensor:
        return self._value[self.items, self.kv_heads, place].to(self._work).flatten(0, 1)

    def memory(self, name: str, keys: int) -> Tensor:
        """[items · kv heads, group · rows, keys], used again by the next tile."""
        lead = self.scaled.shape[:2]
        return self._room.of(name, lead.numel(), keys, self.scaled).view(*lead, keys)

    def runs(self) -> Iterator[tuple[Run, slice]]:
        """The step's runs cut to tiles, each with its place among the gathered keys; without what the rows cannot
        see."""
        for run, (_, place) in zip(self.step.runs, side_by_side(self.step.runs), strict=True):
            lo, hi = self.step.visible(run, self.rows)
            moved = place.start - run.start
            for start in some(range(lo, hi, self._size)):
                stop = min(start + self._size, hi)
                yield Run(start, stop, run.full), slice(start + moved, stop + moved)

    def draw(self, run: Run, like: Tensor) -> Draw:
        return Draw(self.call, self.rows, range(run.start, run.stop), self.batch_items, self.heads, like)


def _tiles(
    call: Call, step: Step, query: Tensor, key: Tensor, value: Tensor, room: Room, passes: int = 1
) -> Iterator[Tile]:
    spec = call.spec
    batch, _, rows, _ = query.shape
    items, kv_heads, height, size = tile_shape(spec, batch, rows, step.width, passes, edge=step.kind == "triangle")
    for item in some(range(0, batch, items)):
        for head in some(range(0, spec.kv_heads, kv_heads)):
            of = slice(item, min(item + items, batch)), slice(head, min(head + kv_heads, spec.kv_heads))
            # the last rows see the most keys: what is made for them is large enough for the others
            for start in some(range(0, rows, height)[::-1]):
                part = slice(start, min(start + height, rows))
                yield Tile(call, step, (query, key, value), (*of, part), size, room)


def _exp(x: Tensor) -> Tensor:
    """exp in place; as a power of two, at which torch is three times as fast on a CPU."""
    return x.mul_(_LOG2_E).exp2_() if x.device.type == "cpu" else x.exp_()


def _tanh(x: Tensor, cap: float) -> Tensor:
    """tanh(x / cap) in place. By a sigmoid on a CPU, at which torch is six times as fast: off by a rounding of 1, which
    a small cap does not make large."""
    if x.device.type != "cpu" or cap > SMALL_CAP:
        return x.div_(cap).tanh_()
    return x.mul_(2.0 / cap).sigmoid_().mul_(2.0).sub_(1.0)


def _put_back(whole: Tensor, at: tuple[slice, slice], part: Tensor) -> None:
    """Write what was folded, where folding made a copy."""
    if part.data_ptr() != whole[at].data_ptr():
        whole[at] = part.view(whole[at].shape)


def tile_shape(
    spec: CallSpec, batch: int, rows: int, width: int, passes: int = 1, edge: bool = False
) -> tuple[int, int, int, int]:
    """Items, key heads, rows and keys of one tile, so that its logits stay near TILE_NUMBERS: as many rows as there are
    first, as products of tall matrices are faster, then heads, then items. Below a causal ``edge`` few rows, where
    heads and items fill a tile."""
    numbers = TILE_NUMBERS.get(spec.device, TILE_NUMBERS_ELSEWHERE) // passes
    if edge:
        rows = min(rows, max(EDGE_ROWS, numbers // (2 * spec.heads * batch * max(1, width))))
    keys = max(1, min(width, TILE_KEYS))
    line = spec.heads // spec.kv_heads * keys  # numbers of a row of the heads that share a key head
    height = max(16, min(rows, TILE_ROWS, numbers // line))
    lead = max(1, numbers // (line * min(height, rows)))
    if lead >= spec.kv_heads:
        items = min(batch, lead // spec.kv_heads)
        if items == batch:  # more rows, where all else is in
            height = max(height, min(rows, numbers // (line * spec.kv_heads * batch)))
        return items, spec.kv_heads, height, keys
    return 1, lead, height, keys
