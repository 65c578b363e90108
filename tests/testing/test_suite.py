"""The suite passes what is right and catches what is wrong, each mutant by the rule it breaks."""

from __future__ import annotations

import json

import pytest
import torch
from tests.testing.mutants import MUTANTS
from tests.testing.plain import Plain

from regard.testing import check, numbers

RULES = [*range(1, 60), 67, 68, 71, 72]
PAIRS = [(rule, mutant) for rule, mutants in sorted(MUTANTS.items()) for mutant in mutants]


def test_every_rule_has_a_check():
    assert numbers() == RULES


@pytest.mark.parametrize("rule", RULES)
def test_plain_implementation_passes_rule(rule):
    plain = Plain()
    rows = check(plain, rules=[rule], surface=plain.surface()).rows
    assert rows
    assert [row for row in rows if row.outcome != "pass"] == []


@pytest.mark.parametrize(("rule", "mutant"), PAIRS, ids=[f"{rule}-{mutant.__name__}" for rule, mutant in PAIRS])
def test_rule_catches_mutant(rule, mutant):
    broken = mutant()
    report = check(broken, rules=[rule], surface=broken.surface())
    assert report.failures
    assert not report.ok


def test_every_rule_has_a_mutant():
    assert sorted(MUTANTS) == RULES


def test_refusal_is_reported_as_refusal():
    def refuses(query, key, value, **given):
        raise NotImplementedError("nothing is implemented")

    report = check(refuses, rules=[3], dtype=torch.float32)
    assert {row.outcome for row in report.rows} == {"refused", "n.a."}
    assert report.ok
    assert "nothing is implemented" in report.rows[0].detail


def test_missing_surface_is_not_applicable():
    report = check(Plain(), rules=[13, 14, 25, 36, 57], surface=object())
    assert {row.outcome for row in report.of(13)} == {"n.a."}
    assert {row.outcome for row in report.of(25)} == {"n.a."}
    assert report.outcome(36) == "n.a."


def test_any_exception_of_the_function_is_a_failure_with_its_text():
    def breaks(query, key, value, **given):
        raise RuntimeError("the kernel exploded")

    report = check(breaks, rules=[17], dtype=torch.float32, surface=object())
    assert "the kernel exploded" in report.failures[0].detail


def test_report_reads_as_table_and_as_json():
    report = check(Plain(), rules=[3, 10], dtype=torch.float32, surface=object(), name="plain")
    table = report.table()
    assert "no permitted key" in table
    assert " 10 " in table
    body = json.loads(report.to_json())
    assert body["ok"] is True
    assert body["rows"][0]["rule"] == 3
    assert sum(body["counts"].values()) == len(report.rows)


def test_failures_carry_their_numbers():
    report = check(MUTANTS[10][0](), rules=[10], dtype=torch.float64, surface=object())
    assert "error" in report.failures[0].detail
    assert "failures:" in report.table()


def test_failures_that_differ_in_numbers_are_told_once_and_counted():
    class WithoutAlignment(Plain):
        def __call__(self, query, key, value, **given):
            if query.shape[2] > key.shape[2]:
                raise RuntimeError(f"{query.shape[2]} rows are too many")
            return super().__call__(query, key, value, **given)

    report = check(WithoutAlignment(), rules=[10], dtype=[torch.float32, torch.float64], surface=object())
    assert len(report.failures) > 2
    first = report.failures[0]
    assert report.faults == [
        f"rule 10, {first.case} [{first.dtype}]: {first.detail} (and {len(report.failures) - 1} more like it)"
    ]
    assert report.faults[0] in report.table() and report.table().count("rows are too many") == 1
    assert "rows are too many" not in report.table(details=False)


def test_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="rules holds \\[66\\]"):
        check(Plain(), rules=[66], surface=object())


def test_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="int64"):
        check(Plain(), dtype=torch.int64, surface=object())
