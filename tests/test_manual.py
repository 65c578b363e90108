"""The site: every page is in its navigation, every public name in its reference, and it builds without a warning."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import regard

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
REFERENCE = "\n".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.md")))
# Public for those who write a backend or read a mask's blocks; a reader of the manual does not meet them.
INSIDE = {
    "backends": {"ALL", "Backend"},
    "masks": {"BlockTable", "Documents", "Fused", "Padding", "RowIntervals", "rebuild"},
    "lab": {"TOPICS"},
    "models": {"Config"},
    "recording": {"THRESHOLDS", "Recording"},
    "linear": {"linear_attention"},
    "attributing": {"attribute", "rollout"},
}
MODULES = [name for name in regard.__all__ if inspect.ismodule(getattr(regard, name)) and name != "statistics"]


def pages_of(nav: Any) -> Iterator[str]:
    for entry in nav:
        for where in entry.values() if isinstance(entry, dict) else [entry]:
            yield from [where] if isinstance(where, str) else pages_of(where)


def public_names() -> Iterator[tuple[str, Any]]:
    for name in regard.__all__:
        found = getattr(regard, name)
        if name != "__version__" and not inspect.ismodule(found):
            yield f"regard.{name}", found
    for module in MODULES:
        inside = importlib.import_module(f"regard.{module}")
        for name in inside.__all__:
            if name not in INSIDE.get(module, set()):
                yield f"regard.{module}.{name}", getattr(inside, name)


PUBLIC = dict(public_names())


def test_the_navigation_lists_every_page_once() -> None:
    listed = list(pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


def test_every_public_name_is_in_the_reference() -> None:
    assert sorted(PUBLIC) == sorted(re.findall(r"^::: (\S+)$", REFERENCE, re.MULTILINE))


def test_every_public_name_has_a_docstring_of_its_own() -> None:
    docs = {
        name: vars(found).get("__doc__") if inspect.isclass(found) else found.__doc__ for name, found in PUBLIC.items()
    }
    assert [name for name, doc in docs.items() if not doc] == []


def described(doc: str) -> list[str]:
    """The names that an `Args:` section describes; several may share a line, with commas."""
    section = re.search(r"^Args:\n((?:(?:    .*)?\n?)*)", doc, re.MULTILINE)
    lines = section.group(1).splitlines() if section else []
    heads = [found.group(1) for line in lines if (found := re.match(r"    ([\w*]+(?:, [\w*]+)*):(?: |$)", line))]
    return [name.strip("*") for head in heads for name in head.split(", ")]


def functions() -> Iterator[tuple[str, Any]]:
    for name, found in PUBLIC.items():
        yield name, found
        if inspect.isclass(found):
            for attribute, value in vars(found).items():
                if inspect.isfunction(value) and not attribute.startswith("_"):
                    yield f"{name}.{attribute}", value


def test_what_a_docstring_describes_is_a_parameter() -> None:
    wrong = []
    for name, found in functions():
        names = described(inspect.getdoc(found) or "") if callable(found) else []
        if names and not set(names) <= set(inspect.signature(found).parameters):
            wrong.append((name, names))
    assert wrong == []


def test_a_wrong_parameter_in_a_docstring_is_found() -> None:
    text = "Adds.\n\nArgs:\n    a, b: what is added.\n        More: of it.\n    scale: by\n\nRaises:\n    E: x"
    assert described(text) == ["a", "b", "scale"]


def test_the_site_builds_without_a_warning_and_asks_nobody_for_anything(tmp_path: Path) -> None:
    # without --quiet, under which --strict sees no warnings
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    fetched = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=\"(?:https?:)?//[^\"]*")
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("*.md")))  # one for each, and the page of what is not found
    assert [found for page in pages for found in fetched.findall(page.read_text())] == []
