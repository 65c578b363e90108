"""CONTRIBUTING.md leads to files and names that exist, and nothing in the package has left out one of its steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import regard
from regard import masks
from regard.cli import complete
from regard.recording import _calls
from regard.testing import _rules_of_masks

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
STEPS = re.findall(r"^\| (\d\. [^|]+) \| ([^|]+) \|", PAGE, re.MULTILINE)
STATISTICS = [name for name in regard.Observation.__annotations__ if name not in ("out", "lse")]


def manual(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("where", dict.fromkeys(where for _, where in STEPS))
def test_a_step_names_files_and_what_is_in_them(where: str) -> None:
    places = [(place, re.findall(r"`([\w./]+)`", place)) for place in where.split("; ")]
    for place, (first, *others) in places:
        files = [name for name in (first, *others) if "/" in name]
        assert all((ROOT / name).is_file() for name in files), place
        # names without a file of their own stand in the files of the same section
        text = "\n".join((ROOT / name).read_text() for name in files) or package()
        for name in {first, *others} - set(files):
            assert re.search(rf"\b{name.split('.')[-1]}\b", text), f"{name} is not in {files}"


def package() -> str:
    return "\n".join(file.read_text() for file in (ROOT / "src" / "regard").rglob("*.py"))


def test_there_are_three_worked_examples() -> None:
    assert [PAGE.count(f"\n## Add a {what}\n") for what in ("mask", "backend", "statistic")] == [1, 1, 1]
    assert len(STEPS) == 7 + 5 + 7 + 7 + 8  # the first seven follow a call, and five more its sixth step


def test_every_mask_has_its_meaning_in_the_suite_and_its_row_in_the_manual() -> None:
    made = {name for name in masks.__all__ if name[0].islower() and name not in ("rebuild", "rule")}
    assert made == {name.split("_l")[0].split("_ids")[0] for name in _rules_of_masks.CONSTRUCTORS}
    assert [name for name in sorted(made) if f"`{name}(" not in manual("masks.md")] == []


def test_every_backend_can_be_completed_and_has_its_row_in_the_manual() -> None:
    assert set(complete.BACKENDS) == {"auto", *regard.backends.ALL}
    assert [name for name in regard.backends.ALL if f"\n| `{name}` |" not in manual("backends.md")] == []


def test_every_statistic_is_defined_recorded_and_in_the_manual() -> None:
    defined = regard.statistics.__doc__ or ""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    assert set(STATISTICS) == _calls.AXES.keys() - {"lse"}
    for name in STATISTICS:
        if not name.startswith("value_"):  # those are the others once more, of weights times lengths
            assert name in _calls.ASK
            assert re.search(rf"^  {name.removesuffix('_keys').removesuffix('_weights')} ", defined, re.MULTILINE), name
        assert re.search(rf"\b{name}\b", pages), name
