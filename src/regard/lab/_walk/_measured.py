"""The experiments of the lab as stories: what was computed, what to look at, and what a note gets wrong about it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from regard._display.texts import text
from regard.lab._walk._examples_words import EXAMPLES
from regard.lab._walk._story import Panel, Step, Story

if TYPE_CHECKING:
    from regard.lab._result import Result
    from regard.lab._table import Table


def walk_result(found: Result, lang: str = "en", intro: tuple[str, ...] = ()) -> Story:
    """A result of the lab, shown as a walk is. Weights are drawn as matrices, everything else as tables."""
    say = partial(text, EXAMPLES, lang)
    tables = found.tables(lang)
    panels = tuple(_drawn(table, table.weights) for table in tables if table.weights is not None)
    steps = [
        Step(
            "measured",
            say("measured"),
            found.say("question", lang),
            panels=panels,
            tables=tuple(table for table in tables if table.weights is None),
            arrays={f"weights{at}": panel.values for at, panel in enumerate(panels)},
        ),
        Step("look", say("look"), found.say("look", lang)),
    ]
    if "claim" in found.words():
        between = "" if lang == "zh" else " "
        claim, right, why = (found.say(key, lang) for key in ("claim", "right", "why"))
        steps.append(Step("note", say("note"), between.join([claim, say("right", said=right), why])))
    title = f"{found.name} · {found.say('title', lang)}"
    return Story(title, intro, tuple(steps), {}, found.to_dict(lang)["numbers"])


def _drawn(table: Table, weights: tuple[tuple[float, ...], ...]) -> Panel:
    return Panel(table.title, np.array(weights), tuple(row[0] for row in table.rows), table.columns[1:], "weights")
