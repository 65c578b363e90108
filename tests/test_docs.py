"""The manual is true: every Python block of the README and of docs/ runs and prints what the page says it prints, and
so does every command of a shell block."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from tests.shell_words import commands_of, read_command
from typer.testing import CliRunner

from regard import lab
from regard.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```$)?", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


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


# Many pages show the same command: each is run once, by itself.
COMMANDS = list(dict.fromkeys(shlex.join(words) for page in PAGES for words in commands_of(page.read_text(), "sh")))


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_of_the_pages_runs(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write files where they stand
    words = shlex.split(line)
    if words[0] == "regard":
        result = CliRunner().invoke(app, words[1:])
        assert result.exit_code == 0, result.stderr
    else:
        assert words[0] == "make" and f"\n{words[1]}:" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_that_a_page_only_shows_could_run(page: Path) -> None:
    for words in commands_of(page.read_text(), "console"):
        if words[0] == "regard":
            read_command(words)
        else:
            assert words[0] in ("pip", "make", "python", "mkdocs"), words


def test_no_block_of_a_page_escapes_the_tests() -> None:
    """A block without a language would be run by nobody. `py` blocks need a large model and run with test-models."""
    known = {"python", "text", "sh", "console"}
    for page in PAGES:
        kinds = set(re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)[::2])
        assert kinds <= known | ({"py"} if page.name == "look-inside.md" else set()), page


def test_a_command_that_is_not_there_is_caught() -> None:
    text = "```sh\nregard info  # versions\n```\n\n```console\nregard look minilm --bogus\nregard lok\n```\n"
    assert commands_of(text, "sh") == [["regard", "info"]]
    for words in commands_of(text, "console"):
        with pytest.raises(typer.TyperException, match=r"No such (option|command)"):
            read_command(words)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_python_block_of_the_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # four pages of the lab train models: a few steps here, as what they learn is tested once, in tests/lab
    for topic in ("fixed_weights", "two_relations", "inverted_masks", "induction"):
        monkeypatch.setattr(lab, topic, functools.partial(getattr(lab, topic), steps=3), raising=False)
    text = page.read_text()
    assert run_page(text, page.name) == text.count("```python")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name_of)
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
