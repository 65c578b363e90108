"""Text of a plan, for people."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from regard import backends
from regard._display.units import flop, size
from regard.spec import CallSpec

if TYPE_CHECKING:
    from regard.plan import Plan


def plan_table(plan: Plan) -> str:
    spec, cost = plan.spec, plan.cost
    total = spec.pairs
    share = f" ({100 * cost.kept_pairs / total:.3g} % of {total:,})" if total else ""
    pairs = f"{'' if cost.kept_exact else 'at most '}{cost.kept_pairs:,}{share}"
    memory = f"bytes {size(cost.bytes)}   peak memory {size(cost.peak_bytes)}"
    head = [
        ("call", call_in_words(spec)),
        ("backend", f"{plan.backend}: {plan.reason}"),
        *([("bias", f"{spec.bias.rule}: a rule, evaluated in the tile")] if spec.bias and spec.bias.rule else []),
        *([("observed by", plan.observer)] if plan.observer else []),
        ("kept pairs", pairs),
        ("flops", f"{flop(cost.flops)}   {memory}"),
    ]
    # the nearest miss is the one with the fewest reasons; it stands first
    others = sorted(
        (name for name in backends.ALL if name != plan.backend), key=lambda n: len(plan.refusals.get(n, ()))
    )
    return in_lines([*head, *not_chosen(plan, others)])


def not_chosen(plan: Plan, others: Iterable[str]) -> list[tuple[str, str]]:
    """Why the others did not run."""
    return [(f"not {name}", "; ".join(plan.refusals.get(name, ["can run, not chosen"]))) for name in others]


def call_in_words(spec: CallSpec) -> str:
    """Sizes, dtype and device."""
    heads = f"H={spec.heads}" if spec.kv_heads == spec.heads else f"H={spec.heads} Hkv={spec.kv_heads}"
    dims = f"D={spec.head_dim}" if spec.value_dim == spec.head_dim else f"D={spec.head_dim} Dv={spec.value_dim}"
    dtype = str(spec.dtype).removeprefix("torch.")
    return f"B={spec.batch} {heads} L={spec.queries} S={spec.keys} {dims} {dtype} on {spec.device}"


def in_lines(rows: list[tuple[str, str]]) -> str:
    """Labels and what they stand for, in 80 columns."""
    return "\n".join(textwrap.fill(f"{label:<14} {text}", 80, subsequent_indent=" " * 15) for label, text in rows)
