"""PyTorch's own fused kernels, asked for what they do right: flags instead of dense masks, and the log-sum-exp back.

The kernels are called below ``F.scaled_dot_product_attention``, because that function may silently choose ``math``,
hides the log-sum-exp, and gives NaN gradients on empty rows. Masks made of blocks go by plain products (``_products``).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from regard.backends import _cuda, _kernels, _products
from regard.backends._base import accumulation, reads_values
from regard.backends._bias import is_rule, may_hide, rule_bytes, short_steps
from regard.backends._one_call import OneKernelCall, show_nan
from regard.backends._pieces import Pieces, pieces_of
from regard.backends._schedule import Run, Step, permitted_of, steps_of
from regard.backends._stacks import Places, Stack, Stacks, Work, by_heads, stacks_of
from regard.backends._tiled import (
    Grads,
    TiledBackend,
    add_sinks,
    apart_bytes,
    bias_tile,
    boolean_bytes,
    gathered_bytes,
    is_whole,
    part_bytes,
    planned,
    result_bytes,
    sink_gradient,
    stack_bytes,
)
from regard.spec import Result

if TYPE_CHECKING:
    from torch import Tensor

    from regard.backends._base import Program
    from regard.backends._tiled import PartBytes
    from regard.masks import Mask
    from regard.spec import Call, CallSpec

# seconds to launch a step, and seconds a query-key pair takes at head dim 64, on an ordinary CPU; their ratio matters
STEP_SECONDS = 3e-5
PAIR_SECONDS = 1.6e-9
# what a pair of a stack costs, against one of a whole call: keys are to be gathered
STACK_PAIRS = 1.4

# the largest mask that is built whole; a larger one is built a step at a time, whatever that costs
MASK_NUMBERS = 1 << 22
# the largest that is kept with its mask for the next call
KEPT_NUMBERS = 1 << 18


class Sdpa(TiledBackend):
    name = "sdpa"
    about = "torch's fused kernels, one call or one a step"

    def refuse(self, spec: CallSpec) -> list[str]:
        if spec.mode == "transform":
            return ["torch.func transforms (vmap, grad, jvp) need operations that torch can see through: use eager"]
        if spec.mode == "dual":
            return ["it has no forward-mode derivative: use eager"]
        reasons = []
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

    def workspace(self, spec: CallSpec, kept_pairs: int) -> int:
        rows = spec.batch * spec.heads * spec.queries
        # with a mask the kernel may be called for parts of the call: see mask_bytes
        own = _kernels.workspace(spec, spec.queries, spec.keys) if spec.mask is None else 0
        if spec.device == "cpu" and spec.dtype.itemsize == 2:
            # all of it in float32: inputs, output, log-sum-exp
            keys = spec.batch * spec.kv_heads * spec.keys
            return 4 * (rows + keys) * (spec.head_dim + spec.value_dim) + 4 * rows + own
        return rows * (spec.value_dim * spec.dtype.itemsize + (8 if spec.dtype == torch.float64 else 4)) + own

    def run(self, call: Call, *, named: bool) -> Result:
        if call.spec.device == "cuda" and call.spec.grad and not call.spec.empty:
            return Result(*_cuda.run(call, named))
        return super().run(call, named=named)

    def program(self, call: Call, *, named: bool) -> Program:
        spec, mask = call.spec, call.mask
        usual = spec.dtype.itemsize > 2 and call.bias is None and not spec.sinks and spec.scale > 0
        if spec.device != "cpu" or not usual or spec.empty or spec.mode != "plain":
            return super().program(call, named=named)
        if mask is None:
            return OneKernelCall(self, spec, named=named, causal=False, masked=False)
        if isinstance(call.offset, torch.Tensor) or by_heads(call) is not None or self.plan_stacks(call) is not None:
            return super().program(call, named=named)
        steps = self.plan_steps(call)
        alone = steps[0] if len(steps) == 1 else None
        if not isinstance(alone, Step) or not is_whole(alone, spec):
            return super().program(call, named=named)
        if alone.kind != "tile":
            return OneKernelCall(self, spec, named=named, causal=alone.kind == "triangle", masked=False)
        if alone.lo is not None or not _is_small(call):
            return super().program(call, named=named)
        return OneKernelCall(self, spec, named=named, causal=False, masked=True)

    def whole_mask(self, call: Call) -> tuple[Tensor, Tensor | None]:
        return _whole_mask(call)

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

    def mask_bytes(self, call: Call) -> int:
        spec, mask = call.spec, call.mask
        if spec.empty or (spec.device != "cpu" and not is_rule(spec)):
            return 0
        if is_rule(spec):
            short = short_steps(steps_of(call), spec)
            return rule_bytes(short, spec) + (0 if mask is None else _kernels.workspace(spec, spec.queries, spec.keys))
        if mask is None:
            return 0
        itemsize = accumulation(spec.dtype).itemsize
        apart = apart_bytes(self, call, itemsize)
        if apart is not None:
            return apart
        steps, stacks = planned(self, call)
        found = [_step_bytes(call, mask, step, len(steps) == 1 and stacks is None) for step in steps]
        if stacks is not None:
            found.append(stack_bytes(stacks, call, itemsize, lambda stack, at: _part_bytes(stack, at, spec)))
        return max(found, default=0)

    def plan_steps(self, call: Call) -> list[Step | Pieces]:
        """Steps where they save work; one masked call where launching them would cost more than the pairs they skip."""
        spec, mask = call.spec, call.mask
        if is_rule(spec):
            return list(short_steps(steps_of(call), spec))
        if mask is None:
            return list(steps_of(call))
        sizes = (spec.queries, spec.keys, call.offset, spec.batch, spec.heads, spec.kv_heads, spec.head_dim)
        key = ("sdpa steps", *sizes, spec.bias is None)
        return mask.remember(key, call.offset, lambda: _worthwhile(pieces_of(call), spec))

    def plan_stacks(self, call: Call) -> Stacks | None:
        spec = call.spec
        stacks = stacks_of(call)
        if stacks is None or spec.device != "cpu":
            return None
        items = spec.batch if all(stack.item is None for stack in stacks.stacks) else 1
        area = items * (
            sum(stack.rows.size * stack.cols.shape[1] * stack.block**2 for stack in stacks.stacks)
            + sum(step.rows * step.width for step in stacks.rest)
        )
        launches = len(stacks.stacks) + len(stacks.rest)
        return None if _better_whole(launches, STACK_PAIRS * area, spec) else stacks

    def part_dtype(self, spec: CallSpec) -> torch.dtype:
        return spec.dtype

    def step_forward(self, call: Call, step: Step, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        query, scale = _positive_scale(query, call.spec.scale)
        causal, added, empty = self._mask(call, step)
        out, lse = _kernels.forward(query, key, value, causal, added, scale)
        if added is None:
            out, lse = show_nan(call, query, key, out, lse)
        if empty is not None:
            # the kernels give 0 and a lse of 0 to a row that sees nothing
            lse = lse.masked_fill(empty.expand(lse.shape), -torch.inf)
        return out, lse

    def stack_forward(self, work: Work, results: tuple[Tensor, Tensor]) -> None:
        products = _products.pay(work.stack, work.call.spec)
        (_products.forward if products else super().stack_forward)(work, results)

    def stack_backward(self, work: Work, results: tuple[Tensor, Tensor, Tensor], totals: list[Tensor]) -> None:
        products = _products.pay(work.stack, work.call.spec)
        (_products.backward if products else super().stack_backward)(work, results, totals)

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
        query, scale = _positive_scale(tensors[0], call.spec.scale)
        causal, added, empty = self._mask(call, step)
        if empty is not None:
            lse = lse.masked_fill(lse == -torch.inf, 0.0)
        grads = _kernels.backward(grad_out, query, tensors[1], tensors[2], out, lse, causal, added, scale)
        if call.spec.scale <= 0:
            grads = (grads[0] * math.copysign(1.0 if call.spec.scale else 0.0, call.spec.scale), grads[1], grads[2])
        return grads

    def _mask(self, call: Call, step: Step) -> tuple[bool, Tensor | None, Tensor | None]:
        """The causal flag; what is added to the logits, [B or 1, H or 1, rows, width]; which rows see nothing."""
        if call.bias is None:
            if step.kind != "tile":
                return step.kind == "triangle", None, None
            if step.lo is None and is_whole(step, call.spec):
                return False, *_whole_mask(call)
        rows = range(step.start, step.stop)
        parts = [self._added(call, step, rows, run) for run in step.runs]
        added = parts[0] if len(parts) == 1 else _side_by_side(parts)
        may_be_empty = may_hide(call.spec) or step.has_empty_rows
        return False, added, (added == -torch.inf).all(-1) if may_be_empty else None

    def _added(self, call: Call, step: Step, rows: range, run: Run) -> Tensor:
        dtype, device = call.spec.dtype, call.query.device
        bias = bias_tile(call, step, rows, run)
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


def _part_bytes(stack: Stack, at: Places, spec: CallSpec) -> PartBytes:
    itemsize = accumulation(spec.dtype).itemsize
    key, value = (gathered_bytes(stack, at, dim, itemsize) for dim in (spec.head_dim, spec.value_dim))
    if _products.pay(stack, spec):
        beside = 0 if at.first is not None and spec.queries % stack.block == 0 else result_bytes(stack, at, spec)
        return key, 0, _products.weights_bytes(stack, at, spec), beside + _products.sums_bytes(stack, spec)
    rows, keys = (blocks.shape[1] * stack.block for blocks in (stack.rows, stack.cols))
    return key, value, 0, result_bytes(stack, at, spec) + _kernels.workspace(spec, rows, keys)


def _step_bytes(call: Call, mask: Mask, step: Step | Pieces, alone: bool) -> int:
    """Bytes alive for one step beside output and log-sum-exp of the call."""
    one = step.one if isinstance(step, Pieces) else step
    found = _kernels.workspace(call.spec, one.rows, one.width) + part_bytes(call, step, alone)
    if one.kind == "tile":
        # what is added, and the booleans it is made from
        groups = 1 if one.lo is not None else max(mask.batch, 1) * max(mask.heads, 1)
        found += one.rows * one.width * (groups * call.spec.dtype.itemsize + boolean_bytes(mask, one))
    return found


def _worthwhile(steps: list[Step | Pieces], spec: CallSpec) -> list[Step | Pieces]:
    if not steps or (isinstance(steps[0], Step) and is_whole(steps[0], spec)):
        return steps
    items = spec.batch if steps[0].batch is None else 1
    if _better_whole(len(steps), items * sum(step.pairs for step in steps), spec):
        return [Step(None, 0, spec.queries, (Run(0, spec.keys, False),), "tile", None, None)]
    return steps


def _better_whole(launches: int, area: float, spec: CallSpec) -> bool:
    """Whether one masked call of all pairs is cheaper than some launches over an area of them."""
    pair = PAIR_SECONDS * spec.heads * spec.head_dim / 64
    whole = spec.batch * spec.queries * spec.keys
    return whole <= MASK_NUMBERS and whole * pair <= launches * STEP_SECONDS + area * pair


def _whole_mask(call: Call) -> tuple[Tensor, Tensor | None]:
    """The mask as one additive tensor, and its empty rows; kept with the mask while small, as small calls repeat."""
    spec, mask = call.spec, call.mask
    assert mask is not None

    def build() -> tuple[Tensor, Tensor | None]:
        tile = mask.tile(
            range(spec.queries), range(spec.keys), spec.queries, spec.keys, offset=call.offset, device=call.query.device
        )
        added = torch.zeros(tile.shape, dtype=spec.dtype, device=tile.device).masked_fill_(~tile, -torch.inf)
        empty = ~tile.any(-1)
        return added, empty if not reads_values(spec) or bool(empty.any()) else None

    if spec.mode == "fake" or not _is_small(call):
        return build()
    key = ("added", spec.queries, spec.keys, call.offset, spec.dtype, call.query.device)
    # it may be kept from inference mode to a call with gradients
    with torch.inference_mode(False):
        return mask.remember(key, call.offset, build)


def _is_small(call: Call) -> bool:
    """Whether the whole mask is small enough to be kept."""
    mask = call.mask
    return mask is None or call.spec.queries * call.spec.keys * mask.batch * mask.heads <= KEPT_NUMBERS


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
