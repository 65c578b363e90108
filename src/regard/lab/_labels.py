"""The labels of the figures in Chinese. Figures are drawn in English; `translate` goes over a finished one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from string import Formatter
from typing import TYPE_CHECKING

from regard._display.texts import parsed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@cache
def labels() -> dict[str, str]:
    """English as a figure has it, with a {name} for each number: its Chinese. Labels that the experiment's own texts
    have are not among them."""
    groups = parsed("regard.lab", "labels.json").values()
    return {english: chinese for group in groups for english, chinese in group.items()}


def translate(figure: Figure, words: Mapping[str, str]) -> None:
    """Every label of a figure that is among these words, or in labels.json, in Chinese."""
    from matplotlib.text import Text

    known = {**words, **labels()}
    for drawn in figure.findobj(Text):
        assert isinstance(drawn, Text)
        drawn.set_text(in_chinese(drawn.get_text(), known))
        drawn.set_fontweight("normal")  # many Chinese fonts have no bold, and matplotlib would say so
    for axes in figure.axes:  # a tick gets its text from the axis again whenever it is drawn
        for axis in (axes.xaxis, axes.yaxis):
            names = [tick.get_text() for tick in axis.get_ticklabels()]
            said = [in_chinese(name, known) for name in names]
            if said != names:
                axis.set_ticks(axis.get_ticklocs(), said)


def in_chinese(label: str, words: Mapping[str, str]) -> str:
    """The first of the words that fits the label, its numbers filled in; a label that none fits stays as it is."""
    for english, chinese in words.items():
        if found := pattern(english).fullmatch(label):
            return chinese.format(**found.groupdict())
    return label


def pattern(english: str) -> re.Pattern[str]:
    """What a text with {names} for numbers looks like when they are filled in."""
    parts = [(re.escape(said), name) for said, name, *_ in Formatter().parse(english)]
    return re.compile("".join(said + (rf"(?P<{name}>[-\d .%]+)" if name else "") for said, name in parts))
