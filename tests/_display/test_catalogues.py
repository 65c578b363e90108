"""Texts in two languages: every table of them, wherever it stands, has both texts of every key."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from string import Formatter
from typing import Any

import pytest

import regard

SOURCE = Path(regard.__file__).parent
LABELS = "lab/labels.json"  # {English: Chinese}


def is_catalogue(value: object) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(texts, (tuple, list)) and list(map(type, texts)) == [str, str] for texts in value.values())
    )


def within(value: Any, where: str) -> Iterator[tuple[str, dict[str, tuple[str, str]]]]:
    if is_catalogue(value):
        yield where, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from within(part, f"{where}:{key}")


def found() -> dict[str, dict[str, tuple[str, str]]]:
    """The catalogues of the package: those in JSON files, and those that a module writes as WORDS."""
    every: dict[str, dict[str, tuple[str, str]]] = {}
    for file in sorted(SOURCE.rglob("*.json")):
        name = str(file.relative_to(SOURCE))
        held = json.loads(file.read_text(encoding="utf-8"))
        if name == LABELS:
            held = {part: {text: (text, other) for text, other in labels.items()} for part, labels in held.items()}
        every |= dict(within(held, name))
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict):
                names = [ast.unparse(name) for name in getattr(node, "targets", None) or [node.target]]  # type: ignore[union-attr]
                if "WORDS" in names:
                    every[str(file.relative_to(SOURCE))] = ast.literal_eval(node.value)
    return every


def problems(catalogue: dict[str, tuple[str, str]]) -> list[str]:
    """What is wrong with a catalogue: an empty text, or names that only one of the two languages fills in."""

    def names(pattern: str) -> list[str]:
        return sorted({name for _, name, _, _ in Formatter().parse(pattern) if name is not None})

    wrong = []
    for key, (english, chinese) in catalogue.items():
        if not english.strip() or not chinese.strip():
            wrong.append(f"{key}: a text is empty")
        elif names(english) != names(chinese):
            wrong.append(f"{key}: English fills in {names(english)}, Chinese {names(chinese)}")
    return wrong


def test_those_that_the_package_has_are_found() -> None:
    modules = ["cli/acting.py", "cli/commands/lab.py", "cli/commands/serve.py", "cli/reading.py", "lab/_folder.py"]
    modules += ["lab/_story.py", "recording/_plots.py", "recording/_summary_words.py"]
    files = ["_walk/examples.json", "_walk/steps.json", "cost/words.json:bill", "cost/words.json:call"]
    assert {*modules, *files} <= CATALOGUES.keys()
    assert {name for name in CATALOGUES if name.startswith("lab/words.json")} >= {"lab/words.json:variance"}


CATALOGUES = found()


@pytest.mark.parametrize("name", CATALOGUES)
def test_every_key_has_both_texts_and_the_same_numbers_in_both(name: str) -> None:
    assert problems(CATALOGUES[name]) == []


def test_a_gap_and_other_names_in_one_language_are_seen() -> None:
    wrong = {"gap": ("something", " "), "names": ("{count} rows", "{number} 行"), "right": ("{a} rows", "{a} 行")}
    assert [line.split(":")[0] for line in problems(wrong)] == ["gap", "names"]
