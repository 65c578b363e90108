"""Texts in English and Chinese, and lines that line up where a character is two columns wide.

A catalogue gives every key its two texts side by side, so that neither can be without the other:

    WORDS = {"rows": ("{count} rows", "{count} 行")}
    text(WORDS, "zh", "rows", count=3)

A long one is a JSON file of its package, which `read` gives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size

if TYPE_CHECKING:
    from rich.text import Text

LANGUAGES = ("en", "zh")
Catalogue = Mapping[str, tuple[str, str]]  # key: (English, Chinese)


def language(given: str) -> str:
    """The language itself when there are texts in it; ValueError otherwise."""
    if given not in LANGUAGES:
        raise ValueError(f"--lang is {given!r}; expected en (English) or zh (Chinese)")
    return given


def text(catalogue: Catalogue, lang: str, key: str, /, **values: object) -> str:
    """The text of a key in a language, its `{names}` filled in. An unknown key is a KeyError: a mistake of ours."""
    chosen = catalogue[key][LANGUAGES.index(lang)]
    return chosen.format(**values) if values else chosen


@cache
def parsed(package: str, name: str) -> Any:
    """What a JSON file of a package holds."""
    return json.loads(files(package).joinpath(name).read_text(encoding="utf-8"))


def read(package: str, name: str, part: str | None = None) -> Catalogue:
    """The catalogue in a JSON file of a package, or that under one name in it."""
    found = parsed(package, name)
    return {key: (english, chinese) for key, (english, chinese) in (found if part is None else found[part]).items()}


def visible(given: str) -> str:
    """Text from elsewhere as it can be shown: control characters get a sign, and nothing turns the line around."""
    return "".join(_shown(letter) for letter in given)


def _shown(letter: str) -> str:
    code = ord(letter)
    if code < 32:
        return {"\n": "↵", "\t": "⇥"}.get(letter, chr(0x2400 + code))
    unshown = 127 <= code < 160 or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069 or 0xD800 <= code < 0xE000
    return "\ufffd" if unshown else letter


def beginning(given: str, most: int = 60) -> str:
    """The beginning of a text, in one line: what a recording of it is called."""
    line = visible(" ".join(given.split(maxsplit=most)[:most])[: most + 1])  # of more words, nothing is shown
    return line if len(line) <= most else f"{line[: most - 1].rstrip()}…"


def reason(error: BaseException, most: int = 300, otherwise: str = "") -> str:
    """What went wrong, in one line: the first of the error's own, or what stands for an error that says nothing."""
    return (str(error).strip().splitlines() or [otherwise or type(error).__name__])[0][:most]


def width(shown: str) -> int:
    """How many columns of a terminal a line takes: a Chinese character takes two."""
    return cell_len(shown)


def left(shown: str, columns: int) -> str:
    """Exactly this many columns, cut or filled on the right; what is cut ends with an ellipsis."""
    return set_cell_size(shown, columns) if width(shown) <= columns else set_cell_size(shown, columns - 1) + "…"


def right(shown: str, columns: int) -> str:
    """As `left`, but filled on the left, as numbers are."""
    return " " * max(columns - width(shown), 0) + left(shown, min(columns, width(shown)))


def breaks(line: str, columns: int) -> list[int]:
    """Where a line is broken so that no piece is wider than `columns`: the indices at which new pieces begin.

    After spaces, and next to characters that are two columns wide, which are written without spaces; but no piece
    begins with a closing sign or ends with an opening one. A word that is too long for a line of its own is cut.
    """
    found, start, room, chance = [], 0, columns, 0
    for at, letter in enumerate(line):
        if at > start and _may_break(line, at):
            chance = at
        room -= width(letter)
        if room < 0 and letter != " ":
            start = chance if chance > start else at
            found.append(start)
            room = columns - width(line[start : at + 1])
    return found


def with_code(line: str) -> Text:
    """A text whose `quoted` parts are code: these are bold."""
    from rich.text import Text

    pieces = enumerate(line.split("`"))
    return Text.assemble(*((piece, "bold") if at % 2 else piece for at, piece in pieces))


def folded(line: Text, columns: int) -> list[Text]:
    """A styled line in pieces of at most this many columns: broken by us, as rich breaks Chinese only at spaces."""
    pieces = list(line.divide(breaks(line.plain, columns)))
    for piece in pieces:
        piece.rstrip()
    return pieces


def _may_break(line: str, at: int) -> bool:
    before, after = line[at - 1], line[at]
    if after == " " or after in _CLOSING or before in _OPENING:
        return False
    return before == " " or width(before) == 2 or width(after) == 2


_OPENING = frozenset("（《「『【“‘([")
_CLOSING = frozenset("，。、；：！？）》」』】”’…,.;:!?)]")
