"""The parts of a call's bias that backends ask for: of a tensor a view, of a rule the numbers of that tile alone."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends._base import reads_values
from regard.backends._steps import Run, Step
from regard.spec import Call, CallSpec

ALL = slice(None)
# numbers of a rule's bias that are made at once for kernels that take tensors only, and rows that are worth a launch
NUMBERS = 1 << 19
FEWEST_ROWS = 64


def bias_over(call: Call, rows: range, cols: range, items: slice = ALL, heads: slice = ALL) -> Tensor | None:
    """The bias over some rows and columns, broadcastable to [items, heads, rows, columns]; None where there is none."""
    bias, described = call.bias, call.spec.bias
    if bias is None or described is None:
        return None
    if described.rule is not None:
        offset = call.offset[items] if isinstance(call.offset, Tensor) else call.offset
        return described.rule.tile(described.rule.of_heads(bias, heads), rows, cols, offset)
    return bias[_index(bias, rows, cols, items, heads)]


def add_bias_gradient(
    call: Call, grad_bias: Tensor, grad_tile: Tensor, rows: range, cols: range, items: slice, heads: slice
) -> None:
    """Add what a tile's logits [items, heads, rows, columns] give to the gradient of the bias, or of a rule's table."""
    assert call.spec.bias is not None
    rule = call.spec.bias.rule
    if rule is None:
        index = _index(grad_bias, rows, cols, items, heads)
        into = grad_bias[index]
        if into.shape == (1, *grad_tile.shape[1:]):
            for one in grad_tile:  # without their sum as a tensor of its own
                into[0].add_(one)
            return
        into += grad_tile.sum_to_size(into.shape)
        return
    offset = call.offset[items] if isinstance(call.offset, Tensor) else call.offset
    rule.add_gradient(rule.of_heads(grad_bias, heads), grad_tile, rows, cols, offset)


def _index(bias: Tensor, rows: range, cols: range, items: slice, heads: slice) -> tuple[slice, slice, slice, slice]:
    return (
        ALL if bias.shape[0] == 1 else items,
        ALL if bias.shape[1] == 1 else heads,
        ALL if bias.shape[2] == 1 else slice(rows.start, rows.stop),
        ALL if bias.shape[3] == 1 else slice(cols.start, cols.stop),
    )


def is_rule(spec: CallSpec) -> bool:
    return spec.bias is not None and spec.bias.rule is not None


def may_hide(call: Call) -> bool:
    """Whether the bias may hold -inf; the table of a rule, which is small, is read where that is allowed."""
    bias, described = call.bias, call.spec.bias
    if bias is None or described is None or (described.rule is not None and not described.rule.may_hide):
        return False
    unread = described.rule is None or bias.is_meta or not reads_values(call.spec)
    return unread or bool((bias.detach() == -torch.inf).any())


def short_steps(steps: list[Step], spec: CallSpec) -> list[Step]:
    """The steps cut into few rows each, so that the bias over one of them stays small."""
    short = []
    for step in steps:
        at_once = max(FEWEST_ROWS, NUMBERS // max(1, _lines(step, spec) * step.width))
        for start in range(step.start, step.stop, at_once):
            part = _rows_of(step, start, min(start + at_once, step.stop))
            if part.runs:
                short.append(part)
    return short


def _lines(step: Step, spec: CallSpec) -> int:
    """Heads, and items where each has an offset of its own."""
    return spec.heads * (spec.batch if spec.offset is None and step.batch is None else 1)


def _rows_of(step: Step, start: int, stop: int) -> Step:
    if step.lo is None or step.hi is None:
        return step._replace(start=start, stop=stop)
    lo, hi = step.lo[:, start - step.start : stop - step.start], step.hi[:, start - step.start : stop - step.start]
    runs = step.runs
    if lo.shape[0] == 1 and step.kind == "triangle":
        runs = tuple(Run(run.start, min(run.stop, int(hi.max())), False) for run in runs)
    kind = "tile" if step.kind == "triangle" else step.kind
    return step._replace(start=start, stop=stop, runs=runs, kind=kind, lo=lo, hi=hi)
