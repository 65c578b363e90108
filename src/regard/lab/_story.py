"""The experiments as stories of the walk: what was computed, what to look at, and what a note gets wrong about it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING

import numpy as np

from regard import lab
from regard._display.texts import Catalogue, text
from regard._walk._examples import check_options
from regard._walk._story import Panel, Step, Story
from regard._walk._words import EXAMPLES

if TYPE_CHECKING:
    from regard._walk._inputs import Settings
    from regard._walk._table import Table
    from regard.lab._result import Result

WORDS: Catalogue = {
    "measured": ("What was computed", "计算结果"),
    "look": ("What to look at", "看什么"),
    "note": ("What a widely copied note gets wrong", "流传笔记中的错误"),
    "right": ("Right: {said}", "正确：{said}"),
}
EXPERIMENTS = ("E3", "E4", "E5", "E7", "E8", "E10")


def walk_experiment(name: str, settings: Settings, lang: str = "en") -> Story:
    """Run an experiment and show what it found; an option that was set and that it does not have is a ValueError."""
    experiment = getattr(lab, lab.TOPICS[name])
    options = frozenset({"seed"}) & signature(experiment).parameters.keys()
    chosen = check_options(name, settings, options)
    drawn = {"seed": settings.seed} if options else {}
    intro = tuple(text(EXAMPLES, lang, "seed", seed=seed) for seed in drawn.values())
    return replace(walk_result(experiment(**drawn), lang, intro), settings=chosen)


def walk_result(found: Result, lang: str = "en", intro: tuple[str, ...] = ()) -> Story:
    """A result of the lab, shown as a walk is. Weights are drawn as matrices, everything else as tables."""
    say = partial(text, WORDS, lang)
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
