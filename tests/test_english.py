"""Manual, help and code say things as a practitioner would: phrases that went must not come back."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest
import typer

from regard.cli import app
from regard.cli.commands.look import TEXT
from regard.lab._head_roles import ROLES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

SAMPLES = {TEXT, *ROLES.values()}  # for models to read
INSTEAD = {
    r"\bbeside\b": "next to, with, in addition to, compared with",
    r"\b(number|row|logit|vector|byte|line|tensor|factor)s? a (query|head|layer|token|key|number|item|step)\b": (
        "one … per …"
    ),
    r"\b(one|bytes?|pairs) a (step|head|layer|token|thread|rule)\b": "once per …, … per …",
    r"\bwith commas\b": "comma-separated",
    r"\b(is|means) much weight\b": "brighter means more weight",
    r"\bso many\b": "maximum number of …, about this many",
    r"\bsooner (had|done|reached)\b": "fast path, less overhead",
    r"\bdoes not pay\b|\bwhen it pays\b": "is not worthwhile",
}


def oblique(text: str) -> list[str]:
    words = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)  # code says what it says
    return [
        f"{found[0]!r}: write {better}" for phrase, better in INSTEAD.items() for found in re.finditer(phrase, words)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_has_no_oblique_phrase(page: Path) -> None:
    assert oblique(page.read_text(encoding="utf-8")) == []


def said(code: str) -> str:
    """Comments and texts of a module: docstrings, error messages, words of tables."""
    texts = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return "\n".join([*(text for text in texts if isinstance(text, str) and text not in SAMPLES), *comments])


def test_comments_and_texts_of_the_code_have_no_oblique_phrase() -> None:
    for module in sorted((ROOT / "src").rglob("*.py")):
        assert oblique(said(module.read_text(encoding="utf-8"))) == [], module.relative_to(ROOT)
    for words in ("lab/words.json", "lab/labels.json", "_walk/steps.json", "cost/words.json"):
        assert oblique((ROOT / "src" / "regard" / words).read_text(encoding="utf-8")) == [], words


def test_help_is_written_in_sentences_without_oblique_phrases() -> None:
    group = typer.main.get_command(app)
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        assert oblique(command.help or "") == [], name
        for param in command.params:
            told = getattr(param, "help", None) or ""
            assert oblique(told) == [], f"{name}: {param.name}"
            assert told[:1] == told[:1].upper() and told.endswith("."), f"{name}: {param.name}: {told!r}"


def test_an_oblique_phrase_is_found() -> None:
    assert oblique("It gives a number a query, beside the output.\n") == [
        "'beside': write next to, with, in addition to, compared with",
        "'number a query': write one … per …",
    ]
    assert oblique(said('def f():\n    """A row a layer."""\n    return 1  # had beside it\n')) == [
        "'beside': write next to, with, in addition to, compared with",
        "'row a layer': write one … per …",
    ]
