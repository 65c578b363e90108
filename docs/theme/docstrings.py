"""Docstrings are written to be read in a terminal. For the site, what must keep its lines is put into fences: sessions
(>>>) and tables between lines of ===."""

from __future__ import annotations

import re
from typing import Any

import griffe

# a prompt and what follows it, up to an empty line or the end
SESSION = re.compile(r"^(?P<indent> *)>>> .*?(?=\n *\n|\Z)", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"^(?P<indent> *)={3,} .*?^ *={3,} [= ]*$", re.MULTILINE | re.DOTALL)


def fenced(text: str) -> str:
    for pattern, language in ((SESSION, "pycon"), (TABLE, "text")):
        text = pattern.sub(lambda found, to=language: _fence(found["indent"], found[0], to), text)  # type: ignore[misc]
    return text.replace("<BLANKLINE>", "")


def _fence(indent: str, block: str, language: str) -> str:
    return f"{indent}```{language}\n{block}\n{indent}```"


class Fences(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
