"""The manual is true: every Python block of the README and of docs/ runs, and prints what the page says it prints."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```$)?", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")


def run_page(text: str, name: str) -> int:
    """Run the page's blocks from top to bottom in one namespace, as a reader would, and count them."""
    namespace: dict[str, object] = {"__name__": name}
    count = 0
    for match in BLOCK.finditer(text):
        line = text[: match.start()].count("\n") + 1
        code = compile("\n" * line + match["code"], name, "exec")  # tracebacks show the page's own line numbers
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if match["output"] is not None:
            assert _trimmed(printed.getvalue()) == _trimmed(match["output"]), f"{name}, line {line}: the output differs"
        count += 1
    return count


def _trimmed(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_of_the_page_runs(page: Path) -> None:
    text = page.read_text()
    assert run_page(text, page.name) == text.count("```python")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_every_relative_link_of_the_page_leads_to_a_file(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert missing == []


def test_a_page_whose_code_or_output_is_wrong_is_caught() -> None:
    assert run_page("```python\nprint(2 + 2)\n```\n\n```text\n4\n```\n", "right.md") == 1
    with pytest.raises(AssertionError, match=r"wrong.md, line 1: the output differs"):
        run_page("```python\nprint(2 + 2)\n```\n\n```text\n5\n```\n", "wrong.md")
    with pytest.raises(ZeroDivisionError):
        run_page("```python\n1 / 0\n```\n", "broken.md")


def test_the_demo_runs_where_the_output_has_ascii_only() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "examples" / "demo.py"],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert run.returncode == 0, run.stderr.decode()
    printed = run.stdout.decode("ascii")
    assert "bit for bit: True" in printed
    assert "##" in printed[printed.index("head 0: key ->") :]


def test_the_demo_runs_and_is_readable_when_piped() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "examples" / "demo.py"], capture_output=True, check=False
    )
    printed = run.stdout.decode()
    assert run.returncode == 0, run.stderr.decode()
    assert "bit for bit: True" in printed
    picture = printed[printed.index("head 0") :]
    assert "█" in picture and "\x1b" not in picture
    assert max(len(line) for line in picture.splitlines()) <= 80
