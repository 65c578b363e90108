"""Pure torch, any device: exact attention in tiles, memory O(L), empty tiles skipped, gradients by recomputation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from regard.backends._base import accumulation, reads_values
from regard.backends._bias import add_bias_gradient, bias_over, is_rule
from regard.backends._dropout import Draw, kept_scale
from regard.backends._pieces import Pieces
from regard.backends._schedule import Run, Step, permitted_of
from regard.backends._tiled import (
    TiledBackend,
    apart_bytes,
    boolean_bytes,
    gathered_bytes,
    part_bytes,
    planned,
    result_bytes,
    stack_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from regard.backends._stacks import Places, Stack
    from regard.backends._tiled import PartBytes
    from regard.spec import Call, CallSpec

# numbers in one tile of logits: large enough to keep the matrix units busy, small enough to stay in a core's cache
TILE_NUMBERS = {"cpu": 1 << 19}
TILE_NUMBERS_ELSEWHERE = 1 << 24
TILE_KEYS = 1024
TILE_ROWS = 512
# softcaps up to which a tanh that is off by a rounding of 1 leaves the logits exact to some millionths
SMALL_CAP = 64.0
_LOG2_E = math.log2(math.e)
# logits of pieces of equal shape that are computed at once: little memory, and still worth the launch
PIECES_NUMBERS = 1 << 16


class Blockwise(TiledBackend):
    name = "blockwise"
    about = "pure torch in tiles: memory O(L), empty tiles skipped, every modifier"

    def refuse(self, spec: CallSpec) -> list[str]:
        if spec.mode == "transform":
            return ["torch.func transforms (vmap, grad, jvp) need operations that torch can see through: use eager"]
        if spec.mode == "dual":
            return ["it has no forward-mode derivative: use eager"]
        return []

    def takes_rules(self, spec: CallSpec) -> bool:
        return True

    def workspace(self, spec: CallSpec, kept_pairs: int) -> int:
        if spec.empty:
            return 0
        itemsize = accumulation(spec.dtype).itemsize
        lead = spec.batch * spec.heads * spec.queries
        out = lead * (spec.value_dim + 1) * itemsize
        rounded = lead * spec.value_dim * spec.dtype.itemsize if spec.dtype.itemsize < itemsize else 0
        # with a mask the call is computed in parts: see mask_bytes
        tiles = 0 if spec.mask is not None else _tile_bytes(spec, spec.batch, spec.queries, spec.keys)
        return out + max(tiles, rounded)

    def mask_bytes(self, call: Call) -> int:
        spec, mask = call.spec, call.mask
        if mask is None or spec.empty:
            return 0
        apart = apart_bytes(self, call, spec.dtype.itemsize)
        if apart is not None:
            return apart
        steps, stacks = planned(self, call)
        found = []
        for step in steps:
            if isinstance(step, Pieces):
                own, one = step.local(call).spec, step.one
                items = own.batch
            else:
                own, one, items = spec, step, spec.batch if step.batch is None else 1
            rows, keys = tile_shape(own, items, one.rows, one.width)[2:]
            booleans = min(rows, one.rows) * keys * boolean_bytes(mask, one) if one.kind == "tile" else 0
            tiles = _tile_bytes(own, items, one.rows, one.width)
            if isinstance(step, Pieces):  # windows of keys and values, copied
                tiles += items * step.number * one.width * (spec.head_dim + spec.value_dim) * spec.dtype.itemsize
            found.append(tiles + booleans + part_bytes(call, step, len(steps) == 1 and stacks is None))
        if stacks is not None:
            found.append(stack_bytes(stacks, call, spec.dtype.itemsize, lambda stack, at: _part_bytes(stack, at, spec)))
        return max(found, default=0)

    def plan_steps(self, call: Call) -> list[Step | Pieces]:
        """Pieces a few at a time, as their keys are copied."""
        spec, found = call.spec, list[Step | Pieces]()
        for step in super().plan_steps(call):
            if isinstance(step, Pieces):
                items = spec.batch if step.batch is None else 1
                numbers = items * spec.heads * step.one.rows * step.one.width
                found += step.cut(max(1, PIECES_NUMBERS // numbers))
            else:
                found.append(step)
        return found

    def step_forward(self, call: Call, step: Step, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        spec = call.spec
        work = accumulation(spec.dtype)
        batch, heads, rows, _ = query.shape
        out = query.new_empty((batch, heads, rows, spec.value_dim), dtype=work)
        lse = query.new_empty((batch, heads, rows), dtype=work)
        for tile in _tiles(call, step, query, key, value):
            at = (tile.items, tile.heads, tile.part)
            top, total, acc = tile.nothing()
            for run, place in tile.runs():
                logits, _ = self._logits(tile, run, place, derive=False)
                peak = torch.maximum(top, logits.amax(-1, keepdim=True))
                # where nothing is permitted yet, -inf - -inf would be NaN
                weights = _exp(logits.sub_(peak.masked_fill(peak == -torch.inf, 0.0)))
                shrink = torch.exp(top - peak).masked_fill_(top == -torch.inf, 0.0)
                top, total = peak, total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
                if spec.dropout:
                    tile.draw(run, weights).put_on(weights)
                acc.mul_(shrink).add_(torch.bmm(weights, tile.values(place)))
            scale = kept_scale(spec) if spec.dropout else 1.0
            shape = out[at].shape
            out[at] = (acc.mul_(scale).div_(total.masked_fill(total == 0, 1.0))).view(shape)
            lse[at] = top.add_(total.log_()).view(shape[:3])
        return out, lse

    def _logits(self, tile: Tile, run: Run, place: slice, *, derive: bool) -> tuple[Tensor, Tensor | None]:
        """Masked logits of one tile [B·Hkv, G·rows, keys]; to derive them, tanh(s/c) too where there is a softcap c."""
        call, step, spec = tile.call, tile.step, tile.call.spec
        logits = torch.bmm(tile.scaled, tile.keys(place).transpose(1, 2))
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
            whole.masked_fill_(~tile.cut(permitted), -torch.inf)
        return logits, capped

    def step_backward(
        self,
        call: Call,
        step: Step,
        tensors: tuple[Tensor, Tensor, Tensor],
        grad_out: Tensor,
        out: Tensor,
        lse: Tensor,
        grad_bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        spec = call.spec
        work = accumulation(spec.dtype)
        query, key, value = tensors
        grad_query = torch.empty(query.shape, dtype=work, device=query.device)
        grad_key = torch.zeros(key.shape, dtype=work, device=key.device)
        grad_value = torch.zeros(value.shape, dtype=work, device=value.device)
        # an empty row's weights are exp(-inf - inf) = 0
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        scale = kept_scale(spec) if spec.dropout else 1.0
        for tile in _tiles(call, step, query, key, value, passes=2):
            at, kv = (tile.items, tile.heads, tile.part), (tile.items, tile.kv_heads)
            d_out = tile.fold(grad_out[at].to(work))
            # what is dropped gets no gradient, what is kept is multiplied: in d_out once, not in every weight
            delta = (d_out * tile.fold(out[at].to(work))).sum(-1, keepdim=True)
            d_out = d_out * scale if spec.dropout else d_out
            row_lse = lse[at].reshape(*d_out.shape[:2], 1)
            d_query = torch.zeros_like(tile.scaled)
            d_keys, d_values = _flat(grad_key[kv]), _flat(grad_value[kv])
            for run, place in tile.runs():
                logits, capped = self._logits(tile, run, place, derive=True)
                d_weights = torch.bmm(d_out, tile.values(place).transpose(1, 2))
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
        self, call: Call, step: Step, tensors: tuple[Tensor, ...], items: slice, kv_heads: slice, part: slice, size: int
    ) -> None:
        spec = call.spec
        self.call, self.step, self.items, self.kv_heads, self.part, self._size = call, step, items, kv_heads, part, size
        group = spec.heads // spec.kv_heads
        self.heads = slice(kv_heads.start * group, kv_heads.stop * group)
        self.rows = range(step.start + part.start, step.start + part.stop)
        # of the call's batch: a step may be for one item alone
        self.batch_items = items if step.batch is None else slice(step.batch, step.batch + 1)
        self.lead = (items.stop - items.start, self.heads.stop - self.heads.start)
        self._group, self._work = group, accumulation(spec.dtype)
        self._key, self._value = tensors[1], tensors[2]
        self.scaled = self.fold(tensors[0][items, self.heads, part].to(self._work) * spec.scale)

    def fold(self, tensor: Tensor) -> Tensor:
        """[items, heads, rows, dim] to [items · kv heads, group · rows, dim]: heads that share keys are neighbours."""
        items, heads, rows, dim = tensor.shape
        return tensor.reshape(items * heads // self._group, self._group * rows, dim)

    def keys(self, place: slice) -> Tensor:
        return _flat(self._key[self.items, self.kv_heads, place].to(self._work))

    def values(self, place: slice) -> Tensor:
        return _flat(self._value[self.items, self.kv_heads, place].to(self._work))

    def nothing(self) -> tuple[Tensor, Tensor, Tensor]:
        """The running maximum, sum of exponentials and weighted values of rows that have seen nothing yet."""
        lead = self.scaled.shape[:2]
        top = self.scaled.new_full((*lead, 1), -torch.inf)
        return top, torch.zeros_like(top), self.scaled.new_zeros(*lead, self.call.spec.value_dim)

    def runs(self) -> Iterator[tuple[Run, slice]]:
        return _tile_runs(self.step, self.rows, self._size)

    def cut(self, pairs: Tensor) -> Tensor:
        """Of pairs [B or 1, H or 1, rows, columns] those of the tile."""
        if pairs.shape[0] > 1 and self.step.batch is None:
            pairs = pairs[self.items]
        return pairs[:, self.heads] if pairs.shape[1] > 1 else pairs

    def draw(self, run: Run, like: Tensor) -> Draw:
        return Draw(self.call, self.rows, range(run.start, run.stop), self.batch_items, self.heads, like)


def _tiles(call: Call, step: Step, query: Tensor, key: Tensor, value: Tensor, passes: int = 1) -> Iterator[Tile]:
    spec = call.spec
    batch, _, rows, _ = query.shape
    items, kv_heads, height, size = tile_shape(spec, batch, rows, step.width, passes)
    for item in range(0, batch, items):
        for head in range(0, spec.kv_heads, kv_heads):
            of = slice(item, min(item + items, batch)), slice(head, min(head + kv_heads, spec.kv_heads))
            for start in range(0, rows, height):
                part = slice(start, min(start + height, rows))
                yield Tile(call, step, (query, key, value), *of, part, size)


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


def tile_shape(spec: CallSpec, batch: int, rows: int, width: int, passes: int = 1) -> tuple[int, int, int, int]:
    """Items, key heads, rows and keys of one tile, so that its logits stay near TILE_NUMBERS: as many rows as there are
    first, as products of tall matrices are faster, then heads, then items."""
    numbers = TILE_NUMBERS.get(spec.device, TILE_NUMBERS_ELSEWHERE) // passes
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


def _part_bytes(stack: Stack, at: Places, spec: CallSpec) -> PartBytes:
    apart = spec._replace(heads=spec.heads // spec.kv_heads, kv_heads=1)  # see by_keys
    rows, keys = (blocks.shape[1] * stack.block for blocks in (stack.rows, stack.cols))
    key, value = (gathered_bytes(stack, at, dim, spec.dtype.itemsize) for dim in (spec.head_dim, spec.value_dim))
    return key, value, 0, result_bytes(stack, at, spec) + _tile_bytes(apart, len(at.item), rows, keys)


def _tile_bytes(spec: CallSpec, batch: int, queries: int, width: int) -> int:
    """Bytes alive while the tiles of so many items, queries and keys are computed."""
    itemsize = accumulation(spec.dtype).itemsize
    items, kv_heads, rows, keys = tile_shape(spec, batch, queries, width)
    rows, lead = min(rows, queries), items * kv_heads * (spec.heads // spec.kv_heads)
    tile = lead * rows * keys * itemsize
    # the tile before is still there when the next is made
    before = min(tile, batch * spec.heads * queries * width * itemsize - tile)
    # a softcap makes a copy, a draw two words an element, and some of 64 bits where it is not fast
    fast = spec.device == "cpu" and spec.dtype != torch.float64
    copies = (spec.softcap is not None) + (2 if fast else 8) * (spec.dropout > 0) + is_rule(spec)
    inputs = lead * rows * (spec.head_dim + 2 * spec.value_dim)
    if spec.dtype.itemsize < itemsize:
        inputs += items * kv_heads * keys * max(spec.head_dim, spec.value_dim)
    return tile * (1 + copies) + before + inputs * itemsize


def _tile_runs(step: Step, rows: range, size: int) -> Iterator[tuple[Run, slice]]:
    """The step's runs cut to tiles, each with its place among the gathered keys; without what these rows cannot see."""
    at = 0
    for run in step.runs:
        lo, hi = _visible(step, rows, run)
        for start in range(lo, hi, size):
            stop = min(start + size, hi)
            yield Run(start, stop, run.full), slice(at + start - run.start, at + stop - run.start)
        at += run.stop - run.start


def _visible(step: Step, rows: range, run: Run) -> tuple[int, int]:
    if step.lo is None or step.hi is None or step.lo.shape[0] > 1:
        return run.start, run.stop
    at = slice(rows.start - step.start, rows.stop - step.start)
    return max(run.start, int(step.lo[0, at].min())), min(run.stop, int(step.hi[0, at].max()))


def _flat(tensor: Tensor) -> Tensor:
    """[B, Hkv, keys, dim] to [B·Hkv, keys, dim]; a view where the strides allow it."""
    return tensor.flatten(0, 1)
