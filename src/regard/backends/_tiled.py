"""Runs a call step by step (see ``_steps``) with an engine that knows one step, and joins the results."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from regard.backends._autograd import FusedBackend
from regard.backends._base import accumulation
from regard.backends._grouped import Steps, grouped_steps
from regard.backends._meter import each_kind
from regard.backends._steps import AnyStep, Room, Step, Three
from regard.spec import Call, CallSpec, Result

Grads = tuple["Tensor | None", ...]
# up to here one call with a mask of all pairs costs less than steps for each head
FEW_PAIRS = 1 << 20


class TiledBackend(FusedBackend):
    """A fused backend made of steps. Rows of different steps are independent, so each step is exact on its own."""

    @abstractmethod
    def step_forward(
        self, call: Call, step: Step, query: Tensor, key: Tensor, value: Tensor, room: Room
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of the step's rows over its keys, without sinks; lse -inf where a row sees nothing."""

    @abstractmethod
    def step_backward(
        self, call: Call, step: Step, tensors: Three, results: Three, grad_bias: Tensor | None, room: Room
    ) -> Three:
        """Gradients of the step's query, key and value; adds to ``grad_bias`` in place. ``results``: grad_out, out and
        lse."""

    def plan_steps(self, call: Call) -> Steps:
        """The steps that the call runs in; those that merge with others come after them."""
        return grouped_steps(call)

    def part_dtype(self, spec: CallSpec) -> torch.dtype:
        """What ``step_forward`` returns its output in."""
        return accumulation(spec.dtype)

    def forward(self, call: Call) -> Result:
        spec = call.spec
        if spec.pairs == 0:
            out = call.query.new_zeros(spec.batch, spec.heads, spec.queries, spec.value_dim)
            return Result(out, call.query.new_full(out.shape[:3], -torch.inf, dtype=accumulation(spec.dtype)))
        split = by_heads(call)
        out, lse = self.run_steps(split, self.plan_steps(split))
        if split is not call:
            lead = (spec.batch, spec.heads, spec.queries)
            out, lse = out.view(*lead, spec.value_dim), lse.view(lead)
        return Result(out, lse) if call.sinks is None else Result(*add_sinks(out, lse, call.sinks))

    def run_steps(self, call: Call, steps: Steps) -> tuple[Tensor, Tensor]:
        """(out, lse) without sinks."""
        spec, room = call.spec, Room()
        alone = steps[0] if len(steps) == 1 else None
        if isinstance(alone, Step) and alone.is_slice and alone.lines(spec) == spec.lines:
            return self.step_forward(call, alone, *alone.inputs(call, room), room)
        lead = (spec.batch, spec.heads, spec.queries)
        out = call.query.new_empty(*lead, spec.value_dim, dtype=self.part_dtype(spec))
        lse = call.query.new_empty(lead, dtype=accumulation(spec.dtype))
        if not _cover(steps, spec):
            out.zero_()
            lse.fill_(-torch.inf)
        for step in each_kind(steps, lambda step: step.size):
            self.forward_step(call, step, (out, lse), room)
        return out, lse

    def forward_step(self, call: Call, step: AnyStep, results: tuple[Tensor, Tensor], room: Room) -> None:
        """Writes a step's (out, lse) to those of the call, or merges them."""
        found = self.step_forward(step.local(call), step.piece, *step.inputs(call, room), room)
        step.write(results, found, call.spec.kv_heads)

    def backward(self, call: Call, grad_out: Tensor, out: Tensor, lse: Tensor, needs: tuple[bool, ...]) -> Grads:
        spec, bias = call.spec, call.bias
        work = accumulation(spec.dtype)
        grad_bias = bias.new_zeros(bias.shape, dtype=work) if needs[3] and bias is not None else None
        grad_sinks = sink_gradient(call, grad_out, out, lse) if needs[4] else None
        if spec.empty:
            grads = [torch.zeros_like(t, dtype=work) for t in (call.query, call.key, call.value)]
        else:
            split = by_heads(call)
            if split is not call:
                grad_out, out, lse = (t.reshape(split.spec.batch, 1, *t.shape[2:]) for t in (grad_out, out, lse))
            grads = self._backward_steps(split, (grad_out, out, lse), grad_bias)
            if split is not call:  # heads that share keys add up
                lead, group = (spec.batch, spec.kv_heads), spec.heads // spec.kv_heads
                key, value = (g.view(*lead, group, *g.shape[2:]).sum(2) for g in grads[1:])
                grads = [grads[0].view(call.query.shape), key, value]
        made = tuple(g.to(spec.dtype) if need else None for g, need in zip(grads, needs, strict=False))
        return (*made, None if grad_bias is None or bias is None else grad_bias.to(bias.dtype), grad_sinks)

    def _backward_steps(self, call: Call, results: Three, grad_bias: Tensor | None) -> list[Tensor]:
        spec, room, steps = call.spec, Room(), self.plan_steps(call)
        tensors = (call.query, call.key, call.value)
        alone = steps[0] if len(steps) == 1 else None
        if isinstance(alone, Step) and alone.is_whole(spec):
            return list(self.step_backward(call, alone, tensors, results, grad_bias, room))
        totals = [torch.empty(t.shape, dtype=accumulation(spec.dtype), device=t.device) for t in tensors]
        for total in totals[_cover(steps, spec) :]:  # the query's is then written before it is added to
            total.zero_()
        for step in steps:
            self.backward_step(call, step, results, totals, grad_bias, room)
        return totals

    def backward_step(
        self, call: Call, step: AnyStep, results: Three, totals: list[Tensor], grad_bias: Tensor | None, room: Room
    ) -> None:
        """Adds a step's gradients to those of the call."""
        named = zip(("grad_out", "out", "lse"), results, strict=True)
        d_out, out, lse = (step.take_rows(room, name, tensor, call.spec.kv_heads) for name, tensor in named)
        inputs = step.inputs(call, room)
        step.add(totals, self.step_backward(step.local(call), step.piece, inputs, (d_out, out, lse), grad_bias, room))


def _cover(steps: Steps, spec: CallSpec) -> bool:
    """Whether every row is written by a step that does not merge."""
    return sum(step.lines(spec) for step in steps if not step.merges) == spec.lines


def by_heads(call: Call) -> Call:
    """A call whose mask tells heads apart (by tables, or by which of them are cut) as one of batch · head items with
    one head each; others as they are, and those of which other parts know the heads."""
    spec, mask = call.spec, call.mask
    if mask is None or mask.heads == 1 or spec.device != "cpu" or spec.bias is not None or spec.dropout:
        return call
    if not mask.readable() or (not mask.grain and spec.pairs <= FEW_PAIRS):
        return call
    B, H = spec.batch, spec.heads
    split = mask.remember(("by heads", B, H), 0, lambda: mask.per_head(B, H))
    if split is None:
        return call
    group = H // spec.kv_heads
    key, value = (t.repeat_interleave(group, 1) if group > 1 else t for t in (call.key, call.value))
    query, key, value = (t.reshape(B * H, 1, *t.shape[2:]) for t in (call.query, key, value))
    offset = call.offset.repeat_interleave(H) if isinstance(call.offset, torch.Tensor) else call.offset
    spec = spec._replace(batch=B * H, heads=1, kv_heads=1, mask=split.structure, sinks=False)
    return call.replace(spec=spec, query=query, key=key, value=value, mask=split, sinks=None, offset=offset)


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
