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
    statements = {row.rule: row.statement for report in found for row in reversed(report.rows)}
    columns = [[report.name, *map(report.outcome, statements)] for report in found]
    # names and outcomes in one line where there is room; else in several, and never cut
    wide = [max(map(len, texts)) for texts in columns]
    narrow = [max(map(len, " ".join(texts).split())) for texts in columns]
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("rule", justify="right", no_wrap=True)
    table.add_column("what is promised", ratio=1)
    room = console.width - sum(wide) - 3 * len(found) - len("rule") - 3
    for report, width in zip(found, wide if room >= 24 else narrow, strict=True):
        table.add_column(escape(report.name), width=width)
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
