"""Tables of the commands."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from regard.plan import Plan
from regard.testing import Report

COLOURS = {"pass": "green", "fail": "red", "refused": "yellow", "n.a.": "dim"}


def reports(console: Console, found: Sequence[Report], detailed: Collection[str]) -> None:
    """One line per rule, one column per implementation; then what failed, with its numbers, for those in `detailed`."""
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("rule", justify="right")
    table.add_column("what is promised", ratio=1)
    for report in found:
        table.add_column(escape(report.name), no_wrap=True)
    statements = {row.rule: row.statement for report in found for row in reversed(report.rows)}
    for rule, statement in sorted(statements.items()):
        table.add_row(str(rule), escape(statement), *(_coloured(report.outcome(rule)) for report in found))
    counts = [", ".join(f"{number} {outcome}" for outcome, number in report.counts.items()) for report in found]
    console.print(table)
    for report, line in zip(found, counts, strict=True):
        console.print(f"{report.name}: {line}", markup=False)
    for report in found:
        for fault in report.faults if report.name in detailed else ():
            console.print(f"{report.name}: {fault}", markup=False, highlight=False)


def _coloured(outcome: str) -> str:
    colour = COLOURS[outcome.split()[0]]
    return f"[{colour}]{outcome}[/{colour}]"


def plan(found: Plan) -> dict[str, Any]:
    """A plan as what JSON holds."""
    spec = found.spec
    sizes = ("batch", "heads", "kv_heads", "queries", "keys", "head_dim", "value_dim", "device")
    call = {name: getattr(spec, name) for name in sizes} | {"dtype": str(spec.dtype).removeprefix("torch.")}
    return {
        "call": call,
        "backend": found.backend,
        "reason": found.reason,
        "refusals": found.refusals,
        "cost": found.cost._asdict(),
    }
