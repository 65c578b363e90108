"""PyTorch's own fused kernels, asked for what they do right: flags instead of dense masks, and the log-sum-exp back.

The kernels are called below ``F.scaled_dot_product_attention``, because that function may silently choose ``math``,
hides the log-sum-exp, and gives NaN gradients on empty rows. Masks made of blocks go by plain products (``_products``).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.backends import _areas, _cuda, _kernels, _products
from regard.backends._base import Program, refuse_transforms
from regard.backends._bias import bias_over, is_rule, may_hide, short_steps
from regard.backends._grouped import Steps, grouped_steps
from regard.backends._kernel_call import KernelCall, is_small, show_nan, whole_mask
from regard.backends._schedule import STEP_PAIRS, permitted_of, steps_of, worth
from regard.backends._steps import AnyStep, Gathered, Room, Run, Step, Three
from regard.backends._tiled import Grads, TiledBackend, add_sinks, by_heads, sink_gradient
from regard.spec import Call, CallSpec, Result

# the largest mask that is built whole; a larger one is built a step at a time, whatever that costs
MASK_NUMBERS = 1 << 22


class Sdpa(TiledBackend):
    name = "sdpa"
    about = "torch's fused kernels, one call, or one per step"

    def refuse(self, spec: CallSpec) -> list[str]:
        if reasons := refuse_transforms(spec):
            return reasons
        if spec.softcap is not None:
            reasons.append("the fused kernels have no softcap")
        if not spec.unit_stride:
            reasons.append("the last dim of query, key or value is strided: call .contiguous()")
        if spec.device == "cuda":
            return reasons + _cuda.refuse(spec)
        if spec.dropout:
            reasons.append("dropout would go to torch's unfused math path")
        if spec.value_dim != spec.head_dim:
            reasons.append(
                f"value dim {spec.value_dim} differs from head dim {spec.head_dim}: torch would use its math path"
            )
        if spec.bias is not None and spec.bias.needs_grad and spec.grad:
            reasons.append("the bias requires grad, which the fused kernels do not give")
        return reasons + _kernels.refuse(spec)

    def takes_rules(self, spec: CallSpec) -> bool:
        return spec.device == "cpu"

    def peak_bytes(self, call: Call) -> int:
        if call.spec.device == "cpu":
            return super().peak_bytes(call)
        return self.result_bytes(call.spec) + (0 if call.spec.areas is None else _areas.extra_bytes(call.spec))

    def leaves_out_padding(self, spec: CallSpec) -> bool:
        return spec.areas is not None  # keys that no row may see are in no area

    def run(self, call: Call, *, named: bool) -> Result:
        if call.spec.device == "cuda" and call.spec.grad and not call.spec.empty:
            return Result(*_cuda.run(call, named))
        return super().run(call, named=named)

    def program(self, call: Call, *, named: bool) -> Program:
        spec = call.spec
        if spec.device == "cuda" and _cuda.is_one_call(spec):
            return _cuda.CudnnCall(self, spec, named=named)
        usual = spec.dtype.itemsize > 2 and call.bias is None and not spec.sinks and spec.scale > 0
        if spec.device != "cpu" or not usual or spec.empty or spec.mode != "plain":
            return super().program(call, named=named)
        if isinstance(call.offset, torch.Tensor) or by_heads(call) is not call:
            return super().program(call, named=named)
        steps = self.plan_steps(call)
        alone = steps[0] if len(steps) == 1 else None
        if not isinstance(alone, Step) or not alone.is_whole(spec):
            return super().program(call, named=named)
        masked = alone.kind == "tile"
        if masked and (alone.lo is not None or not is_small(call)):
            return super().program(call, named=named)
        return KernelCall(self, spec, named=named, causal=alone.kind == "triangle", masked=masked)

    def forward(self, call: Call) -> Result:
        if call.spec.device == "cpu" or call.spec.empty:
            return super().forward(_in_float32(call))
        out, lse = _cuda.forward(call)
        return Result(out, lse) if call.sinks is None else Result(*add_sinks(out, lse, call.sinks))

    def backward(self, call: Call, grad_out: Tensor, out: Tensor, lse: Tensor, needs: tuple[bool, ...]) -> Grads:
        if call.spec.device == "cpu" or call.spec.empty:
            if call.spec.dtype.itemsize > 2:
                return super().backward(call, grad_out, out, lse, needs)
            # a compiled call hands its output back in its own dtype
            grads = super().backward(_in_float32(call), grad_out.float(), out.float(), lse, needs)
            return (*(None if grad is None else grad.to(call.spec.dtype) for grad in grads[:3]), *grads[3:])
        grads = _cuda.backward(call, grad_out, out, lse)
        sinks = sink_gradient(call, grad_out, out, lse) if needs[4] else None
        return (*(grad if need else None for grad, need in zip(grads, needs, strict=False)), None, sinks)

    def plan_steps(self, call: Call) -> Steps:
        """Steps where they save work; one masked call where launching them would cost more than the pairs they skip."""
        spec, mask = call.spec, call.mask
        if is_rule(spec):
            return Steps(short_steps(steps_of(call), spec))
        if mask is None:
            return Steps(steps_of(call))
        return mask.remember(("sdpa steps", spec), call.offset, lambda: _worthwhile(grouped_steps(call), spec))

    def part_dtype(self, spec: CallSpec) -> torch.dtype:
        return spec.dtype

    def step_forward(
        self, call: Call, step: Step, query: Tensor, key: Tensor, value: Tensor, room: Room
    ) -> tuple[Tensor, Tensor]:
        query, scale = _positive_scale(query, call.spec.scale)
        causal, added, empty = self._mask(call, step)
        out, lse = _kernels.forward(query, key, value, causal, added, scale)
        if added is None:
            out, lse = show_nan(call, query, key, out, lse)
        if empty is not None:
            # the kernels give 0 and a lse of 0 to a row that sees nothing
            lse = lse.masked_fill(empty.expand(lse.shape), -torch.inf)
        return out, lse

    def step_backward(
        self, call: Call, step: Step, tensors: Three, results: Three, grad_bias: Tensor | None, room: Room
    ) -> Three:
        query, scale = _positive_scale(tensors[0], call.spec.scale)
        causal, added, empty = self._mask(call, step)
        grad_out, out, lse = results
        if empty is not None:
            lse = lse.masked_fill(lse == -torch.inf, 0.0)
        grads = _kernels.backward(grad_out, query, tensors[1], tensors[2], out, lse, causal, added, scale)
        if call.spec.scale <= 0:
            grads = (grads[0] * math.copysign(1.0 if call.spec.scale else 0.0, call.spec.scale), grads[1], grads[2])
        return grads

    def forward_step(self, call: Call, step: AnyStep, results: tuple[Tensor, Tensor], room: Room) -> None:
        if isinstance(step, Gathered) and _products.are_faster(step):
            _products.forward(call, step, results, room)
        else:
            super().forward_step(call, step, results, room)

    def backward_step(
        self, call: Call, step: AnyStep, results: Three, totals: list[Tensor], grad_bias: Tensor | None, room: Room
    ) -> None:
        if isinstance(step, Gathered) and _products.are_faster(step):
            _products.backward(call, step, results, totals, room)
        else:
            super().backward_step(call, step, results, totals, grad_bias, room)

    def _mask(self, call: Call, step: Step) -> tuple[bool, Tensor | None, Tensor | None]:
        """The causal flag; what is added to the logits, [B or 1, H or 1, rows, width]; which rows see nothing."""
        if call.bias is None:
            if step.kind != "tile":
                return step.kind == "triangle", None, None
            if step.lo is None and step.is_whole(call.spec):
                return False, *whole_mask(call)
        rows = range(step.start, step.stop)
        if step.kind != "tile" and not is_rule(call.spec) and call.bias is not None and call.bias.shape[2] == 1:
            return self._alike_for_rows(call, step, rows)
        parts = [self._added(call, step, rows, run) for run in step.runs]
        added = parts[0] if len(parts) == 1 else _side_by_side(parts)
        may_be_empty = may_hide(call) or step.has_empty_rows
        return False, added, (added == -torch.inf).all(-1) if may_be_empty else None

    def _alike_for_rows(self, call: Call, step: Step, rows: range) -> tuple[bool, Tensor, Tensor]:
        """A bias that is the same for every row stays one row, next to the causal flag."""
        parts = [bias_over(call, rows, range(run.start, run.stop), step.items) for run in step.runs]
        wide = [part.expand(*part.shape[:3], run.stop - run.start) for part, run in zip(parts, step.runs, strict=True)]  # type: ignore[union-attr]
        row = (wide[0] if len(wide) == 1 else torch.cat(wide, -1)).to(call.spec.dtype)
        hidden = row[:, :, 0] == -torch.inf
        # of a triangle, row r sees the keys 0..r
        empty = hidden.cummin(-1).values if step.kind == "triangle" else hidden.all(-1, keepdim=True)
        return step.kind == "triangle", row.expand(-1, -1, len(rows), -1), empty

    def _added(self, call: Call, step: Step, rows: range, run: Run) -> Tensor:
        dtype, device = call.spec.dtype, call.query.device
        bias = bias_over(call, rows, range(run.start, run.stop), step.items)
        permitted = permitted_of(step, call, rows, run)
        if bias is not None:
            added = bias.to(dtype)
            if permitted is not None:
                added = torch.where(permitted, added, -torch.inf)
        elif permitted is None:
            added = torch.zeros(1, 1, 1, 1, dtype=dtype, device=device)
        else:
            added = torch.zeros(permitted.shape, dtype=dtype, device=device).masked_fill_(~permitted, -torch.inf)
        return added.expand(*added.shape[:2], len(rows), run.stop - run.start)


def _worthwhile(steps: Steps, spec: CallSpec) -> Steps:
    whole = Step(None, 0, spec.queries, (Run(0, spec.keys, False),), "tile", None, None)
    if not steps or (isinstance(steps[0], Step) and steps[0].is_whole(spec)):
        return steps
    saved = worth(spec, whole.pairs(spec) - sum(step.pairs(spec) for step in steps))
    if spec.batch * spec.queries * spec.keys > MASK_NUMBERS or saved > STEP_PAIRS * len(steps):
        return steps
    return Steps([whole])


def _side_by_side(parts: list[Tensor]) -> Tensor:
    """The masks of several runs as one; a part may be the same for all items or heads, and another not."""
    lead = torch.broadcast_shapes(*(part.shape[:3] for part in parts))  # type: ignore[no-untyped-call]
    return torch.cat([part.expand(*lead, part.shape[3]) for part in parts], -1)


def _in_float32(call: Call) -> Call:
    """Half precision in float32: the kernel's own gradients suffer from an output that is already rounded."""
    if call.spec.dtype.itemsize > 2:
        return call
    tensors = {name: getattr(call, name).float() for name in ("query", "key", "value")}
    return call.replace(spec=call.spec._replace(dtype=torch.float32), **tensors)


def _positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    # with the causal flag the kernels scale after masking: a negative scale would turn -inf into +inf
    if scale > 0:
        return query, scale
    return query * math.copysign(1.0 if scale else 0.0, scale), abs(scale) or 1.0
