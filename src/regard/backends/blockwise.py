"""Pure torch, any device: exact attention in tiles, memory O(L), empty tiles skipped, gradients by recomputation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from regard.backends._base import accumulation, reads_values
from regard.backends._bias import add_bias_gradient, is_rule, items_of
from regard.backends._pieces import Pieces
from regard.backends._schedule import Run, Step, permitted_of
from regard.backends._tiled import (
    TiledBackend,
    apart_bytes,
    bias_tile,
    boolean_bytes,
    gathered_bytes,
    part_bytes,
    planned,
    result_bytes,
    stack_bytes,
)
from regard.backends.eager import dropout_factor

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
            rows, keys = tile_shape(own, items, one.rows, one.width)
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
        rows_a_tile, keys_a_tile = tile_shape(spec, batch, rows, step.width)
        for start in range(0, rows, rows_a_tile):
            part = slice(start, min(start + rows_a_tile, rows))
            tile_rows = range(step.start + part.start, step.start + part.stop)
            scaled = _fold(query[:, :, part].to(work) * spec.scale, spec.kv_heads)
            state: tuple[Tensor, Tensor, Tensor] | None = None
            for run, at in _tile_runs(step, tile_rows, keys_a_tile):
                logits, _ = self._logits(call, step, scaled, key[:, :, at], tile_rows, run)
                state = _absorb(call, step, state, logits, value[:, :, at].to(work), tile_rows, run)
            if state is None:
                out[:, :, part], lse[:, :, part] = 0.0, -torch.inf
                continue
            top, total, acc = state
            shape = (batch, heads, part.stop - part.start)
            out[:, :, part] = (acc / total.masked_fill(total == 0, 1.0)).view(*shape, spec.value_dim)
            lse[:, :, part] = (top + total.log()).view(shape)
        return out, lse

    def _logits(
        self, call: Call, step: Step, scaled: Tensor, key: Tensor, rows: range, run: Run
    ) -> tuple[Tensor, Tensor | None]:
        """Masked logits of one tile [B·Hkv, G·rows, keys], and tanh(s/c) where there is a softcap c."""
        spec = call.spec
        logits = torch.bmm(scaled, _flat(key.to(scaled.dtype)).transpose(1, 2))
        capped = None
        if spec.softcap is not None:
            capped = logits.div_(spec.softcap).tanh_()
            logits = capped * spec.softcap
        whole = logits.view(-1, spec.heads, len(rows), logits.shape[-1])
        bias = bias_tile(call, step, rows, run)
        if bias is not None:
            whole.add_(bias)
            if not reads_values(spec):
                whole.masked_fill_(bias == -torch.inf, -torch.inf)  # an overflown logit plus -inf is NaN
        permitted = permitted_of(step, call, rows, run)
        if permitted is not None:
            whole.masked_fill_(~permitted, -torch.inf)
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
        batch, heads, rows, _ = query.shape
        grad_query = torch.zeros(query.shape, dtype=work, device=query.device)
        grad_key = torch.zeros(key.shape, dtype=work, device=key.device)
        grad_value = torch.zeros(value.shape, dtype=work, device=value.device)
        flat_grads = _flat(grad_key), _flat(grad_value)
        # an empty row's weights are exp(-inf - inf) = 0
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        rows_a_tile, keys_a_tile = tile_shape(spec, batch, rows, step.width, passes=2)
        for start in range(0, rows, rows_a_tile):
            part = slice(start, min(start + rows_a_tile, rows))
            tile_rows = range(step.start + part.start, step.start + part.stop)
            scaled = _fold(query[:, :, part].to(work) * spec.scale, spec.kv_heads)
            d_out = _fold(grad_out[:, :, part].to(work), spec.kv_heads)
            delta = (d_out * _fold(out[:, :, part].to(work), spec.kv_heads)).sum(-1, keepdim=True)
            row_lse = lse[:, :, part].reshape(*d_out.shape[:2], 1)
            d_query = torch.zeros_like(scaled)
            for run, at in _tile_runs(step, tile_rows, keys_a_tile):
                logits, capped = self._logits(call, step, scaled, key[:, :, at], tile_rows, run)
                d_weights = torch.bmm(d_out, _flat(value[:, :, at].to(work)).transpose(1, 2))
                if not reads_values(spec):
                    d_weights.masked_fill_(logits == -torch.inf, 0.0)  # a huge hidden value may have overflown
                weights = logits.sub_(row_lse).exp_()
                kept = weights
                if spec.dropout:
                    factor = _dropout(call, step, tile_rows, run, weights)
                    kept = weights * factor
                    d_weights *= factor
                flat_grads[1][:, at].baddbmm_(kept.transpose(1, 2), d_out)
                d_logits = d_weights.sub_(delta).mul_(weights)
                if grad_bias is not None:
                    whole = d_logits.view(batch, heads, len(tile_rows), -1)
                    add_bias_gradient(call, grad_bias, whole, tile_rows, range(run.start, run.stop), items_of(step))
                if capped is not None:
                    d_logits = d_logits * (1 - capped * capped)
                d_query.baddbmm_(d_logits, _flat(key[:, :, at].to(work)))
                flat_grads[0][:, at].baddbmm_(d_logits.transpose(1, 2), scaled)
            grad_query[:, :, part] = d_query.mul_(spec.scale).view(batch, heads, len(tile_rows), -1)
        return grad_query, grad_key, grad_value


def tile_shape(spec: CallSpec, batch: int, rows: int, width: int, passes: int = 1) -> tuple[int, int]:
    """Rows and keys of one tile, so that its logits over all heads stay near TILE_NUMBERS."""
    numbers = TILE_NUMBERS.get(spec.device, TILE_NUMBERS_ELSEWHERE) // passes
    keys = max(1, min(width, TILE_KEYS))
    return max(16, min(rows, numbers // (batch * spec.heads * keys))), keys


def _part_bytes(stack: Stack, at: Places, spec: CallSpec) -> PartBytes:
    apart = spec._replace(heads=spec.heads // spec.kv_heads, kv_heads=1)  # see by_keys
    rows, keys = (blocks.shape[1] * stack.block for blocks in (stack.rows, stack.cols))
    key, value = (gathered_bytes(stack, at, dim, spec.dtype.itemsize) for dim in (spec.head_dim, spec.value_dim))
    return key, value, 0, result_bytes(stack, at, spec) + _tile_bytes(apart, len(at.item), rows, keys)


def _tile_bytes(spec: CallSpec, items: int, queries: int, width: int) -> int:
    """Bytes alive while the tiles of so many items, queries and keys are computed."""
    itemsize = accumulation(spec.dtype).itemsize
    rows, keys = tile_shape(spec, items, queries, width)
    rows, lead = min(rows, queries), items * spec.heads
    tile = lead * rows * keys * itemsize
    # the tile before is still there when the next is made
    before = min(tile, lead * queries * width * itemsize - tile)
    # a softcap makes a copy, a draw some in int64
    copies = (spec.softcap is not None) + 8 * (spec.dropout > 0) + is_rule(spec)
    inputs = lead * rows * spec.head_dim
    if spec.dtype.itemsize < itemsize:
        inputs += items * spec.kv_heads * keys * max(spec.head_dim, spec.value_dim)
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


def _absorb(
    call: Call,
    step: Step,
    state: tuple[Tensor, Tensor, Tensor] | None,
    logits: Tensor,
    value: Tensor,
    rows: range,
    run: Run,
) -> tuple[Tensor, Tensor, Tensor]:
    """Fold one tile into the running (maximum, sum of exponentials, weighted values) of its rows; eats ``logits``."""
    top = logits.amax(-1, keepdim=True)
    if state is not None:
        top = torch.maximum(top, state[0])
    weights = logits.sub_(top.masked_fill(top == -torch.inf, 0.0)).exp_()
    total = weights.sum(-1, keepdim=True)
    if call.spec.dropout:
        weights = weights * _dropout(call, step, rows, run, weights)
    acc = torch.bmm(weights, _flat(value))
    if state is not None:
        # where the row has seen nothing yet, -inf - -inf is NaN; its sums are 0 whatever the factor
        shrink = torch.exp(state[0] - top).masked_fill(state[0] == -torch.inf, 0.0)
        total += state[1] * shrink
        acc += state[2] * shrink
    return top, total, acc


def _dropout(call: Call, step: Step, rows: range, run: Run, like: Tensor) -> Tensor:
    assert call.seed is not None
    factor = dropout_factor(call.seed, call.spec, rows, range(run.start, run.stop), like)
    if step.batch is not None:
        factor = factor[step.batch : step.batch + 1]
    return factor.reshape(like.shape)


def _fold(tensor: Tensor, kv_heads: int) -> Tensor:
    """[B, H, rows, dim] to [B·Hkv, G·rows, dim]: heads that share keys stand below each other."""
    batch, heads, rows, dim = tensor.shape
    return tensor.reshape(batch * kv_heads, heads // kv_heads * rows, dim)


def _flat(tensor: Tensor) -> Tensor:
    """[B, Hkv, keys, dim] to [B·Hkv, keys, dim]; a view where the strides allow it."""
    return tensor.flatten(0, 1)
