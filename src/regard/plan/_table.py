"""Text of a plan, for people."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from regard import backends

if TYPE_CHECKING:
    from regard.plan import Plan


def plan_table(plan: Plan) -> str:
    spec, cost = plan.spec, plan.cost
    shape = f"B={spec.batch} H={spec.heads}"
    if spec.kv_heads != spec.heads:
        shape += f" Hkv={spec.kv_heads}"
    shape += f" L={spec.queries} S={spec.keys} D={spec.head_dim}"
    if spec.value_dim != spec.head_dim:
        shape += f" Dv={spec.value_dim}"
    total = spec.pairs
    share = f" ({100 * cost.kept_pairs / total:.3g} % of {total:,})" if total else ""
    pairs = f"{'' if cost.kept_exact else 'at most '}{cost.kept_pairs:,}{share}"
    memory = f"bytes {binary(cost.bytes)}   peak memory {binary(cost.peak_bytes)}"
    head = [
        ("call", f"{shape} {str(spec.dtype).removeprefix('torch.')} on {spec.device}"),
        ("backend", f"{plan.backend}: {plan.reason}"),
        *([("bias", f"{spec.bias.rule}: a rule, evaluated in the tile")] if spec.bias and spec.bias.rule else []),
        *([("observed by", plan.observer)] if plan.observer else []),
        ("kept pairs", pairs),
        ("flops", f"{si(cost.flops, 'FLOP')}   {memory}"),
    ]
    # the nearest miss is the one with the fewest reasons; it stands first
    others = sorted(
        (name for name in backends.ALL if name != plan.backend), key=lambda n: len(plan.refusals.get(n, ()))
    )
    tail = [(f"not {name}", "; ".join(plan.refusals.get(name, ["can run, not chosen"]))) for name in others]
    lines = [f"{label:<14} {text}" for label, text in [*head, *tail]]
    return "\n".join(textwrap.fill(line, 80, subsequent_indent=" " * 15) for line in lines)


def si(number: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G", "T", "P"):
        if number < 1000 or prefix == "P":
            return f"{number:.4g} {prefix}{unit}"
        number /= 1000
    raise AssertionError("unreachable")


def binary(number: float) -> str:
    for prefix in ("", "Ki", "Mi", "Gi", "Ti"):
        if number < 1024 or prefix == "Ti":
            return f"{number:.4g} {prefix}B"
        number /= 1024
    raise AssertionError("unreachable")
