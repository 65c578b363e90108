"""What all commands have in common: help with examples, one line on bad words, JSON, pipes, signals, completion."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.shell_words import read_command
from typer.testing import CliRunner

import regard
from regard import backends, models
from regard.cli import app, complete, parse, terminal
from regard.cli.commands import look
from regard.testing import peers

NAMES = sorted(command.name or command.callback.__name__ for command in app.registered_commands if command.callback)
# Each command with words for which it works, quickly and without a file of its own.
QUICK = {
    "bench": "bench 1,2,7,8 --backend eager --rounds 3",
    "check": "check --rules 10 --dtype float32 --backend eager",
    "convert": "convert minilm ours",
    "cost": "cost gpt2",
    "evaluate": "evaluate --test a b --system c",  # ends with status 2: there is no such file
    "explain": "explain 1,2,63,8 --mask causal()",
    "generate": "generate --model minilm hello",  # ends with status 2: an encoder continues no text
    "info": "info",
    "lab": "lab E1",
    "look": "look minilm --length 7",
    "models": "models",
    "serve": "serve nowhere",  # ends with status 2: there is no such folder
    "train": "train --settings",
    "translate": "translate hello --model none",  # ends with status 2: there is no such folder
    "walk": "walk E1",
}
REFUSED = ("evaluate", "generate", "serve", "translate")
ESCAPE = "\x1b"


def run(words: str, **given: Any) -> Any:
    result = CliRunner().invoke(app, shlex.split(words), prog_name="regard", **given)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def command(*words: str, **given: Any) -> subprocess.CompletedProcess[str]:
    given = {"capture_output": True, **given}
    return subprocess.run([sys.executable, "-m", "regard", *words], text=True, check=False, **given)


def test_the_table_has_every_command() -> None:
    assert sorted(QUICK) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_help_has_examples_that_could_run(name: str) -> None:
    shown = run(f"{name} --help", env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).stdout
    assert "Examples:" in shown
    assert "<bool>" not in shown  # a flag takes no value
    assert not re.search(r"\(default: [^)]*\)\.?\s+\[default:", shown)  # said once
    examples = [line.strip() for line in shown.splitlines() if line.strip().startswith(f"regard {name}")]
    assert examples
    for example in examples:
        read_command(shlex.split(example))


@pytest.mark.parametrize("words", [*(f"{name} --no-such-option" for name in NAMES), "no-such-command", "explain"])
def test_wrong_words_are_one_line_that_points_to_the_help(words: str) -> None:
    result = run(words)
    assert (result.exit_code, result.stdout) == (2, "")
    said = result.stderr
    assert said.startswith("regard: ") and said.count("\n") == 1 and " --help)" in said


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some commands write where they stand


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


@pytest.mark.parametrize("name", NAMES)
def test_a_pipe_gets_no_colours_and_json_is_json(name: str) -> None:
    plain = run(QUICK[name])
    assert plain.exit_code == (2 if name in REFUSED else 0), plain.stderr
    assert ESCAPE not in plain.stdout + plain.stderr
    if plain.exit_code == 0:
        if name == "convert":
            os.rename("ours", "before")
        found = run(f"{QUICK[name]} --json")
        assert found.exit_code == 0 and json.loads(found.stdout, parse_constant=_no_constant)


def test_json_loses_nothing_in_ascii_and_has_no_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", errors="replace"))
    terminal.data({"token": "√猫", "entropy": [0.5, float("nan")]}, indent=None)
    sys.stdout.flush()
    assert json.loads(written.getvalue()) == {"token": "√猫", "entropy": [0.5, None]}


def test_no_arguments_show_the_help() -> None:
    result = run("")
    assert "Usage: regard" in result.output and all(name in result.output for name in NAMES)


@pytest.mark.parametrize(
    ("words", "package"),
    [
        ("look minilm", "transformers"),
        ("check --against x-transformers", "x_transformers"),
        ("lab E1 --out figures", "matplotlib"),
        ("cost gpt2 --plot cost.png", "matplotlib"),
    ],
)
def test_a_package_that_is_missing_is_named_in_one_line(
    words: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for loaded in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)
    result = run(words)
    assert result.exit_code == 2
    assert "pip install" in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("words", ["look minilm --file .", "look minilm --file none.txt", "walk --html none/page.html"])
def test_a_file_that_cannot_be_used_is_named_in_one_line(words: str) -> None:
    result = run(words)
    assert result.exit_code == 2
    assert result.stderr.startswith("regard: ") and result.stderr.count("\n") == 1


def test_ctrl_c_ends_with_130_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(regard, "watch", interrupted)
    result = run("look minilm")
    assert (result.exit_code, result.stderr) == (130, "")


def test_a_reader_that_leaves_ends_the_command_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as gone:
        done = command("--help", stdout=gone, stderr=subprocess.PIPE, capture_output=False)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["written at the end", "written at once"])
def test_a_full_disk_is_one_line(unbuffered: str) -> None:
    settings = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = command("--version", stdout=full, stderr=subprocess.PIPE, capture_output=False, env=settings)
    assert done.returncode == 2
    assert done.stderr == "regard: the output: No space left on device\n"


def on_a_terminal(**environment: str) -> str:
    """What `regard --help` prints there."""
    ours, theirs = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "TERM")}
    process = subprocess.Popen(
        [sys.executable, "-m", "regard.cli", "--help"], stdout=theirs, env={**kept, "TERM": "xterm", **environment}
    )
    os.close(theirs)
    found = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # how Linux says that the other end is closed
            break
        if not part:
            break
        found += part
    os.close(ours)
    assert process.wait() == 0
    return found.decode()


def test_a_terminal_gets_colours_unless_they_are_not_wanted() -> None:
    colour = re.compile(ESCAPE + r"\[(?:\d+;)*(?:3[0-7]|4[0-7]|9[0-7])[;m]")
    assert colour.search(on_a_terminal())
    assert not colour.search(on_a_terminal(NO_COLOR="1"))
    assert ESCAPE not in on_a_terminal(TERM="dumb")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("regard ", set(NAMES)),
        ("regard lo", {"look"}),
        ("regard look mi", {"minilm"}),
        ("regard generate --model smo", {"smollm2"}),
        ("regard explain 1,1,1,1 --backend s", {"sdpa"}),
        ("regard check --backend sdpa,b", {"sdpa,blockwise"}),
        ("regard check --against torch,torch-", {"torch,torch-math", "torch,torch-is_causal"}),
        ("regard explain 1,1,1,1 --dtype bf", {"bfloat16"}),
        ("regard cost gpt3-175", {"gpt3-175b"}),
        ("regard lab E1", {"E1", "E10", "E11", "E12", "E13", "E14"}),
        ("regard walk E1", {"E1", "E10"}),
        ("regard walk --lang z", {"zh"}),
    ],
)
def test_a_shell_is_offered_names(typed: str, offered: set[str]) -> None:
    words = typed.split(" ")
    asked = {"_REGARD_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    found = set(run("", env=asked).stdout.split())
    assert offered <= found if typed == "regard " else found == offered


def test_completion_can_be_shown_and_needs_no_torch() -> None:
    # the shell is the word given here; typer would look for it among the processes above, where there may be none
    named = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    script = command("--show-completion", "bash", env=named).stdout
    assert "_REGARD_COMPLETE=complete_bash" in script and "complete -o default -F" in script
    loaded = "import sys, regard.cli; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], check=False).returncode == 0


def test_the_names_offered_are_those_that_exist() -> None:
    assert set(complete.BACKENDS) == {"auto", *backends.ALL}
    assert list(complete.PEERS) == list(peers.PEERS)
    assert complete.DTYPES == parse.DTYPES
    assert list(complete.PACKAGED) == list(look.PACKAGED)
    for mask in complete.MASKS:
        parse.mask(mask)
    offered = set(
        run(
            "", env={"_REGARD_COMPLETE": "complete_bash", "COMP_WORDS": "regard cost ", "COMP_CWORD": "2"}
        ).stdout.split()
    )
    assert offered >= set(models.names())
