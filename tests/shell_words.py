"""Commands as they stand in pages and in help: read into words, and tried without running anything."""

from __future__ import annotations

import re
import shlex

import typer

from regard.cli import app

SHELL = re.compile(r"^```(?P<kind>sh|console)\n(?P<lines>.*?)^```$", re.MULTILINE | re.DOTALL)


def commands_of(text: str, kind: str) -> list[list[str]]:
    """The commands of a page's shell blocks as words: ```sh blocks are run, ```console blocks are only read."""
    lines = [line for block in SHELL.finditer(text) if block["kind"] == kind for line in block["lines"].splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def read_command(words: list[str]) -> None:
    """Raise where a command of ours has no such name, option or argument; nothing runs."""
    group = typer.main.get_command(app)
    context = group.make_context("regard", words[1:2])
    name, command, _ = group.resolve_command(context, words[1:])  # type: ignore[attr-defined]
    command.make_context(name, words[2:], parent=context)
