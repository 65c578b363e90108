"""tests/ mirrors src/regard/ folder by folder, so that the tests of a part are found without a search."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "regard"

ONLY_IN_TESTS = {"browser": "opens the page of src/regard/_page in Chromium; its sources are in frontend/"}


def folders(root: Path) -> set[str]:
    return {folder.name for folder in root.iterdir() if folder.is_dir() and any(folder.rglob("*.py"))}


def test_a_folder_of_tests_has_its_counterpart_and_the_other_way_round() -> None:
    assert folders(TESTS) - ONLY_IN_TESTS.keys() == folders(SOURCE)


def test_the_map_names_every_folder() -> None:
    written = (TESTS / "README.md").read_text()
    assert [name for name in sorted(folders(TESTS)) if f"`{name}/`" not in written] == []


def test_base_names_are_unique() -> None:
    names = [file.name for file in TESTS.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def statements(file: Path) -> int:
    """Lines of code but for imports, docstrings, and tables that stand in a module."""
    text = file.read_text(encoding="utf-8")
    left_out: set[int] = set()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        words = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if words or isinstance(node, (ast.Import, ast.ImportFrom)):
            left_out |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    for node in tree.body:
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        if isinstance(value, (ast.Dict, ast.List, ast.Set, ast.Tuple)):
            left_out |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(bool(line) and line[0] != "#" and at not in left_out for at, line in lines)


def test_contributing_says_how_large_each_part_is() -> None:
    page = (TESTS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d ]+) \| ([^|]+) \|", page, re.MULTILINE)
    counted: dict[str, int] = {}
    for file in SOURCE.rglob("*.py"):
        first, *more = file.relative_to(SOURCE).parts
        part = first if more else "the modules"
        counted[part] = counted.get(part, 0) + statements(file)
    told = {tuple(re.findall(r"`(\w+)`|(the modules)", parts)): int(number.replace(" ", "")) for number, parts in rows}
    assert sorted("".join(name) for parts in told for name in parts) == sorted(counted)
    for parts, number in told.items():
        found = sum(counted["".join(name)] for name in parts)
        assert abs(found - number) <= 0.1 * number, f"{parts}: {found} lines, and CONTRIBUTING.md says {number}"
    assert abs(sum(counted.values()) - sum(told.values())) <= 0.05 * sum(told.values())
