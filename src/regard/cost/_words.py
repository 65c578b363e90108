"""Texts of a bill and of one call, English and Chinese side by side: words.json."""

from __future__ import annotations

import re

from regard._display.texts import parsed, read

BILL = read("regard.cost", "words.json", "bill")
CALL = read("regard.cost", "words.json", "call")


def named(said: str, lang: str) -> str:
    """A name or a note of a bill in a language. Bills hold them as data, in English."""
    if lang == "zh":
        for pattern, chinese in parsed("regard.cost", "words.json")["names"].items():
            said = re.sub(pattern, chinese, said)
    return said
