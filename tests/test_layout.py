"""tests/ mirrors src/regard/ folder by folder, so that the tests of a part are found without a search."""

from __future__ import annotations

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
