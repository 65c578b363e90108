"""Runs a call step by step (see _schedule) with an engine that knows one step, and joins the results."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch

from regard.backends._autograd import FusedBackend
from regard.backends._base import accumulation
from regard.backends._bias import bias_over, items_of
from regard.backends._pieces import Pieces, compact, pieces_of
from regard.backends._schedule import Run, Step
from regard.backends._stacks import (
    Room,
    Stacks,
    Work,
    by_heads,
    by_keys,
    in_blocks,
    piece_of,
    put,
    split_items,
    stacks_of,
    take,
)
from regard.spec import Result
from regard.statistics import merge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from regard.backends._stacks import Places, Stack
    from regard.masks import Mask
    from regard.spec import Call, CallSpec

Grads = tuple["Tensor | None", ...]
# of keys, values and weights of a part, and what it needs beside them
PartBytes = tuple[int, int, int, int]


class TiledBackend(FusedBackend):
    """A fused backend made of steps. Rows of different steps are independent, so each step is exact on its own."""

    @abstractmethod
    def step_forward(self, call: Call, step: Step, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) of the step's rows over its keys, without sinks; lse -inf where a row sees nothing."""

    @abstractmethod
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
        """Gradients of the step's query, key and value; adds to ``grad_bias`` in place."""

    def stack_forward(self, work: Work, results: tuple[Tensor, Tensor]) -> None:
        """Writes (out, lse) of all pieces of a stack, in blocks, or merges them where the rows were in another one."""
        piece = piece_of(work.stack)
        for at in work.parts:
            found = self.step_forward(work.call, piece, *work.inputs(at))
            if work.stack.causal:
                before = (take(results[0], at, "row"), take(results[1], at, "row"))
                merge(*before, *found)
                found = before
            for result, part in zip(results, found, strict=True):
                put(result, at, "row", part)

    def stack_backward(self, work: Work, results: tuple[Tensor, Tensor, Tensor], totals: list[Tensor]) -> None:
        """Adds the gradients of all pieces of a stack to those of query, key and value; results: grad_out, out, lse."""
        piece = piece_of(work.stack)
        for at in work.parts:
            d_out, out, lse = (take(t, at, "row") for t in results)
            found = self.step_backward(work.call, piece, work.inputs(at), d_out, out, lse, None)
            # a row is in one stack that is not causal, and those come first
            put(totals[0], at, "row", found[0], add=work.stack.causal)
            put(totals[1], at, "key", found[1], add=True)
            put(totals[2], at, "value", found[2], add=True)

    def forward(self, call: Call) -> Result:
        spec = call.spec
        if spec.pairs == 0:
            out = call.query.new_zeros(spec.batch, spec.heads, spec.queries, spec.value_dim)
            return Result(out, call.query.new_full(out.shape[:3], -torch.inf, dtype=accumulation(spec.dtype)))
        out, lse = self._forward(call)
        return Result(out, lse) if call.sinks is None else Result(*add_sinks(out, lse, call.sinks))

    def _forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """Without sinks."""
        spec = call.spec
        apart = by_heads(call)
        if apart is not None:
            out, lse = self._forward(apart)
            lead = (spec.batch, spec.heads, spec.queries)
            return out.view(*lead, spec.value_dim), lse.view(lead)
        stacks = self.plan_stacks(call)
        return self._forward_steps(call) if stacks is None else self._forward_stacks(call, stacks)

    def _forward_steps(self, call: Call) -> tuple[Tensor, Tensor]:
        spec, query = call.spec, call.query
        steps = self.plan_steps(call)
        alone = steps[0] if len(steps) == 1 else None
        if isinstance(alone, Step) and alone.batch is None and alone.rows == spec.queries:
            keys = (call.key, call.value) if is_whole(alone, spec) else gather(call, alone)
            return self.step_forward(call, alone, query, *keys)
        out, lse = self._nothing_yet(call)
        call = _compact(call, steps)
        for step in steps:
            self._forward_step(call, step, out, lse)
        return out, lse

    def _forward_stacks(self, call: Call, stacks: Stacks) -> tuple[Tensor, Tensor]:
        out, lse = self._nothing_yet(call, cleared=not stacks.covers)
        split = by_keys(call)
        items, block = split.spec.batch, stacks.block
        outs, lses = (in_blocks(split_items(t, items), block) for t in (out, lse))
        query, key, value = (in_blocks(t, block).contiguous() for t in (split.query, split.key, split.value))
        room = Room()
        for stack, parts in stacks.parts(call.spec):
            self.stack_forward(Work(split, stack, parts, query, key, value, room), (outs, lses))
        for step in stacks.rest:
            self._forward_step(call, step, out, lse)
        return out, lse

    def _nothing_yet(self, call: Call, *, cleared: bool = True) -> tuple[Tensor, Tensor]:
        """Room for output and lse; where every row will be written, it need not be cleared."""
        spec = call.spec
        lead = (spec.batch, spec.heads, spec.queries)
        out = call.query.new_empty(*lead, spec.value_dim, dtype=self.part_dtype(spec))
        lse = call.query.new_empty(lead, dtype=accumulation(spec.dtype))
        return (out.zero_(), lse.fill_(-torch.inf)) if cleared else (out, lse)

    def _forward_step(self, call: Call, step: Step | Pieces, out: Tensor, lse: Tensor) -> None:
        if isinstance(step, Pieces):
            self._forward_pieces(call, step, out, lse)
            return
        where = rows_of(step)
        part, part_lse = self.step_forward(call, step, call.query[where], *gather(call, step))
        if step.again:
            merge(out[where], lse[where], part, part_lse)
        else:
            out[where] = part
            lse[where] = part_lse

    def _forward_pieces(self, call: Call, pieces: Pieces, out: Tensor, lse: Tensor) -> None:
        kv_heads = call.spec.kv_heads
        query = pieces.take_rows(call.query, kv_heads)
        key, value = pieces.take_keys(call.key), pieces.take_keys(call.value)
        found = self.step_forward(pieces.local(call), pieces.one, query, key, value)
        part, part_lse = (pieces.split_rows(t, kv_heads) for t in found)
        rows, rows_lse = (pieces.rows_of(t, kv_heads) for t in (out, lse))
        if pieces.again:
            merge(rows, rows_lse, part, part_lse)
        else:
            rows.copy_(part)
            rows_lse.copy_(part_lse)

    def _backward_pieces(
        self, call: Call, pieces: Pieces, grad_out: Tensor, out: Tensor, lse: Tensor, grads: list[Tensor]
    ) -> None:
        kv_heads = call.spec.kv_heads
        query, d_out, rows, rows_lse = (pieces.take_rows(t, kv_heads) for t in (call.query, grad_out, out, lse))
        inputs = (query, pieces.take_keys(call.key), pieces.take_keys(call.value))
        found = self.step_backward(pieces.local(call), pieces.one, inputs, d_out, rows, rows_lse, None)
        pieces.rows_of(grads[0], kv_heads).add_(pieces.split_rows(found[0], kv_heads))
        pieces.add_keys(grads[1], found[1])
        pieces.add_keys(grads[2], found[2])

    def plan_stacks(self, call: Call) -> Stacks | None:
        """The call in stacks of equal pieces, where its mask is made of blocks."""
        return stacks_of(call)

    def plan_steps(self, call: Call) -> list[Step | Pieces]:
        return pieces_of(call)

    def part_dtype(self, spec: CallSpec) -> torch.dtype:
        """What ``step_forward`` returns its output in."""
        return accumulation(spec.dtype)

    def backward(self, call: Call, grad_out: Tensor, out: Tensor, lse: Tensor, needs: tuple[bool, ...]) -> Grads:
        spec = call.spec
        work = accumulation(spec.dtype)
        bias = call.bias
        grad_bias = bias.new_zeros(bias.shape, dtype=work) if needs[3] and bias is not None else None
        grad_sinks = sink_gradient(call, grad_out, out, lse) if needs[4] else None
        tensors = (call.query, call.key, call.value)
        apart = None if spec.empty else by_heads(call)
        stacks = None if spec.empty or apart is not None else self.plan_stacks(call)
        steps: Sequence[Step | Pieces] = []
        if not spec.empty and apart is None:
            steps = stacks.rest if stacks is not None else self.plan_steps(call)
        alone = steps[0] if len(steps) == 1 and stacks is None else None
        if isinstance(alone, Step) and is_whole(alone, spec):
            parts = self.step_backward(call, alone, tensors, grad_out, out, lse, grad_bias)
            if bias is None and call.sinks is None and parts[0].dtype == spec.dtype:
                return (*parts, None, None)
            grads = list(parts)
        elif apart is not None:
            grads = self._backward_apart(call, apart, grad_out, out, lse)
        else:
            grads = [torch.empty(t.shape, dtype=work, device=t.device) for t in tensors]
            for grad in grads[stacks is not None and stacks.covers :]:  # the query's is then written before added to
                grad.zero_()
            if stacks is not None:
                self._backward_stacks(call, stacks, grad_out, out, lse, grads)
            call = _compact(call, steps)
            for step in steps:
                if isinstance(step, Pieces):
                    self._backward_pieces(call, step, grad_out, out, lse, grads)
                    continue
                where = rows_of(step)
                inputs = (call.query[where], *gather(call, step))
                parts = self.step_backward(call, step, inputs, grad_out[where], out[where], lse[where], grad_bias)
                grads[0][where] += parts[0]
                _scatter(grads[1], step, parts[1])
                _scatter(grads[2], step, parts[2])
        made = tuple(g.to(spec.dtype) if need else None for g, need in zip(grads, needs, strict=False))
        grad_bias = None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)
        return (*made, grad_bias, grad_sinks)

    def _backward_apart(self, call: Call, apart: Call, grad_out: Tensor, out: Tensor, lse: Tensor) -> list[Tensor]:
        """Gradients from a call whose heads are items; heads that share keys add up."""
        spec = call.spec
        grad_out, out, lse = (t.reshape(apart.spec.batch, 1, *t.shape[2:]) for t in (grad_out, out, lse))
        found = self.backward(apart, grad_out, out, lse, (True, True, True, False, False))
        query, key, value = (g.view(spec.batch, spec.heads, *g.shape[2:]) for g in found[:3] if g is not None)
        if spec.kv_heads != spec.heads:
            group = (spec.kv_heads, spec.heads // spec.kv_heads)
            key, value = (torch.unflatten(g, 1, group).sum(2) for g in (key, value))
        return [query, key, value]

    def _backward_stacks(
        self, call: Call, stacks: Stacks, grad_out: Tensor, out: Tensor, lse: Tensor, grads: list[Tensor]
    ) -> None:
        split = by_keys(call)
        items, block = split.spec.batch, stacks.block
        given = (split.query, *(split_items(t, items) for t in (grad_out, out, lse)))
        query, d_out, outs, lses = (in_blocks(t, block).contiguous() for t in given)
        key, value = (in_blocks(t, block).contiguous() for t in (split.key, split.value))
        totals = [in_blocks(split_items(t, items), block) for t in grads]
        room = Room()
        for stack, parts in stacks.parts(call.spec):
            work = Work(split, stack, parts, query, key, value, room)
            self.stack_backward(work, (d_out, outs, lses), totals)


def _compact(call: Call, steps: Sequence[Step | Pieces]) -> Call:
    """The call with keys of which pieces can be views."""
    if not any(isinstance(step, Pieces) for step in steps):
        return call
    return call.replace(key=compact(call.key), value=compact(call.value))


def rows_of(step: Step) -> tuple[slice, slice, slice]:
    batch = slice(None) if step.batch is None else slice(step.batch, step.batch + 1)
    return batch, slice(None), slice(step.start, step.stop)


def gather(call: Call, step: Step) -> tuple[Tensor, Tensor]:
    """The step's keys and values: views where they are one run, else the runs side by side."""
    return _take(call.key, step), _take(call.value, step)


def _take(tensor: Tensor, step: Step) -> Tensor:
    batch = rows_of(step)[0]
    parts = [tensor[batch, :, run.start : run.stop] for run in step.runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def apart_bytes(backend: TiledBackend, call: Call, itemsize: int) -> int | None:
    """Bytes for the mask of a call that is computed head by head, where it is."""
    apart = by_heads(call)
    if apart is None:
        return None
    copied = 0 if call.spec.heads == call.spec.kv_heads else apart.key.numel() + apart.value.numel()
    return backend.mask_bytes(apart) + copied * itemsize


def planned(backend: TiledBackend, call: Call) -> tuple[list[Step | Pieces], Stacks | None]:
    """The steps that the call is computed in, beside its stacks where it has some."""
    stacks = backend.plan_stacks(call)
    return (backend.plan_steps(call), None) if stacks is None else (list(stacks.rest), stacks)


def part_bytes(call: Call, step: Step | Pieces, alone: bool) -> int:
    """Bytes of a step's result and of keys that are gathered for it; ``alone``: the result is that of the call."""
    spec = call.spec
    if isinstance(step, Pieces):
        items, kv_heads = step.items(spec)
        numbers = items * spec.heads * step.rows * (spec.value_dim + 1)
        numbers += items * spec.heads * step.rows * spec.head_dim * (spec.heads > kv_heads)  # queries gathered
        if len(step.keys) > 1:
            numbers += items * kv_heads * step.number * step.one.width * (spec.head_dim + spec.value_dim)
        return numbers * accumulation(spec.dtype).itemsize
    items = spec.batch if step.batch is None else 1
    whole = alone and step.batch is None and step.rows == spec.queries
    numbers = 0 if whole else items * spec.heads * step.rows * (spec.value_dim + 1)
    if len(step.runs) > 1:
        numbers += items * spec.kv_heads * step.width * (spec.head_dim + spec.value_dim)
    return numbers * accumulation(spec.dtype).itemsize


def boolean_bytes(mask: Mask, step: Step) -> int:
    """Bytes a pair of a tile takes for what it permits: booleans; a rule that is computed makes more, of positions."""
    if step.lo is not None:
        return 3
    return max(mask.batch, 1) * max(mask.heads, 1) * (1 if mask.tensors else 12)


def stack_bytes(stacks: Stacks, call: Call, itemsize: int, own: Callable[[Stack, Places], PartBytes]) -> int:
    """Bytes that stacks are computed in. What a part has in a ``Room`` is used again by the next, never given back.
    ``itemsize``: of the numbers that a step is given."""
    found = [own(stack, at) for stack, parts in stacks.parts(call.spec) for at in parts]
    most: int = sum(max(of_one_kind) for of_one_kind in zip(*found, strict=True))
    for tensor in (call.query, call.key, call.value):
        whole = tensor.shape[2] % stacks.block == 0 and tensor.is_contiguous()
        most += 0 if whole else tensor.numel() * itemsize  # copied, so that its blocks are rows of numbers
    return most


def gathered_bytes(stack: Stack, at: Places, dim: int, itemsize: int) -> int:
    """Bytes of the keys, or the values, that are gathered for a part."""
    return len(at.col_numbers) * stack.block * dim * itemsize


def result_bytes(stack: Stack, at: Places, spec: CallSpec) -> int:
    """Bytes of a part's result before it is where it belongs, and of what its rows have where they are gathered."""
    result = spec.value_dim + 1
    gathered = 0 if at.first is not None else spec.head_dim + (result if stack.causal else 0)
    return len(at.row_numbers) * stack.block * (result + gathered) * accumulation(spec.dtype).itemsize


def _scatter(total: Tensor, step: Step, part: Tensor) -> None:
    batch, at = rows_of(step)[0], 0
    for run in step.runs:
        size = run.stop - run.start
        total[batch, :, run.start : run.stop] += part[:, :, at : at + size]
        at += size


def is_whole(step: Step, spec: CallSpec) -> bool:
    """Whether a step is the whole call: all items, rows and keys."""
    alone = step.batch is None and step.rows == spec.queries and len(step.runs) == 1
    return alone and step.runs[0].start == 0 and step.runs[0].stop == spec.keys


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    lse = lse.contiguous()  # torch rounds strided numbers in another way
    total = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))
    share = torch.exp(lse - total).masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)
    return (out * share).to(out.dtype), total.masked_fill(lse == -torch.inf, -torch.inf)


def sink_gradient(call: Call, grad_out: Tensor, out: Tensor, lse: Tensor) -> Tensor | None:
    if call.sinks is None:
        return None
    # the sink has no value: its weight only takes away from the others'
    weight = torch.exp(call.sinks.to(lse.dtype).view(1, -1, 1) - lse).masked_fill(lse == -torch.inf, 0.0)
    return -(weight * (grad_out.to(lse.dtype) * out).sum(-1)).sum((0, 2)).to(call.sinks.dtype)


def bias_tile(call: Call, step: Step, rows: range, run: Run) -> Tensor | None:
    """The part of the bias that lies over some rows and a run; broadcast dims kept at 1."""
    return None if call.bias is None else bias_over(call, rows, range(run.start, run.stop), items_of(step))
