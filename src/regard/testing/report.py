"""What a run of the conformance suite found, one row for each rule, case and dtype."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Literal

__all__ = ["Report", "Row"]

Outcome = Literal["pass", "fail", "refused", "n.a."]


@dataclass(frozen=True)
class Row:
    """One check on one dtype. `detail` holds the numbers, or the reason."""

    rule: int
    statement: str
    case: str
    dtype: str
    outcome: Outcome
    detail: str = ""


@dataclass(frozen=True)
class Report:
    """Rows in the order of the rules. A refusal is not a pass, and not a failure either: it is counted apart."""

    name: str
    rows: list[Row] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failures

    @property
    def failures(self) -> list[Row]:
        """The rows that failed."""
        return [row for row in self.rows if row.outcome == "fail"]

    @property
    def faults(self) -> list[str]:
        """What failed, in words: one line for failures of a rule that say the same but for their numbers."""
        alike: dict[tuple[int, str], list[Row]] = {}
        for row in self.failures:
            alike.setdefault((row.rule, re.sub(r"\d[\d.e+-]*", "", row.detail)), []).append(row)
        return [
            f"rule {first.rule}, {first.case} [{first.dtype}]: {first.detail}"
            + (f" (and {len(more)} more like it)" if more else "")
            for first, *more in alike.values()
        ]

    @property
    def counts(self) -> dict[str, int]:
        """How many rows passed, failed, were refused or did not apply."""
        found = Counter(row.outcome for row in self.rows)
        return {outcome: found.get(outcome, 0) for outcome in ("pass", "fail", "refused", "n.a.")}

    def of(self, rule: int) -> list[Row]:
        """The rows of one rule."""
        return [row for row in self.rows if row.rule == rule]

    def outcome(self, rule: int) -> str:
        """A rule in one word: the worst thing that happened, with how many of its rows passed when it is mixed."""
        rows = [row for row in self.of(rule) if row.outcome != "n.a."]
        if not rows:
            return "n.a."
        found = Counter(row.outcome for row in rows)
        if len(found) == 1:
            return rows[0].outcome
        word: Outcome = "fail" if found["fail"] else "refused"
        return f"{word} {found[word]}/{len(rows)}"

    def table(self, *, details: bool = True) -> str:
        """Plain text: a line for each rule, then what failed, with numbers."""
        statements = _statements(self.rows)
        width = max((len(text) for text in statements.values()), default=0)
        lines = [f"{rule:>4}  {text:<{width}}  {self.outcome(rule)}" for rule, text in statements.items()]
        if details and self.failures:
            lines += ["", "failures:", *(f"  {fault}" for fault in self.faults)]
        counts = ", ".join(f"{number} {outcome}" for outcome, number in self.counts.items())
        return "\n".join([self.name, *lines, "", counts])

    def to_json(self) -> str:
        """Every row, as JSON."""
        body = {"name": self.name, "ok": self.ok, "counts": self.counts, "rows": [asdict(row) for row in self.rows]}
        return json.dumps(body, indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        return self.table()


def _statements(rows: Iterable[Row]) -> dict[int, str]:
    first: dict[int, str] = {}
    for row in rows:
        first.setdefault(row.rule, row.statement)
    return dict(sorted(first.items()))
