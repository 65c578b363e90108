"""Text of a plan, for people."""

from __future__ import annotations

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
    bound = "" if cost.kept_exact else " at most"
    lines = [
        f"call        {shape} {str(spec.dtype).removeprefix('torch.')} on {spec.device}",
        f"backend     {plan.backend}: {plan.reason}",
        f"kept pairs {bound} {cost.kept_pairs:,}{share}",
        f"flops       {_si(cost.flops, 'FLOP')}   bytes {_binary(cost.bytes)}   peak memory {_binary(cost.peak_bytes)}",
    ]
    for name in backends.ALL:
        if name == plan.backend:
            continue
        # the nearest miss is the one with the fewest reasons; it stands first
        why = plan.refusals.get(name)
        lines.append(f"not {name:<11} {'; '.join(why) if why else 'can run, not chosen'}")
    head, tail = lines[:4], lines[4:]
    tail.sort(key=lambda line: line.count(";") + ("can run" not in line))
    return "\n".join([*head, *tail])


def _si(number: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G", "T", "P"):
        if number < 1000 or prefix == "P":
            return f"{number:.4g} {prefix}{unit}"
        number /= 1000
    raise AssertionError("unreachable")


def _binary(number: float) -> str:
    for prefix in ("", "Ki", "Mi", "Gi", "Ti"):
        if number < 1024 or prefix == "Ti":
            return f"{number:.4g} {prefix}B"
        number /= 1024
    raise AssertionError("unreachable")
