"""Every experiment, the trained ones with few steps: enough for what does not depend on what they learned. And walks,
as the command `regard walk` makes, prints and writes them."""

from __future__ import annotations

import functools
import io
import re
from typing import Any, Literal

from rich.console import Console

from regard import lab
from regard._walk import Begin, Settings, View, html, walk_example, walk_text
from regard.lab import run  # not lab.run, which tests replace by quick
from regard.lab._story import EXPERIMENTS, walk_experiment, walk_result

TRAINED = ("E7", "X2", "X3", "X6")


@functools.cache
def quick(name: str) -> lab.Result:
    if name in TRAINED:
        return getattr(lab, lab.TOPICS[name])(steps=3)
    return run(name)


@functools.cache
def story_of(name: str, lang: str = "en") -> Any:
    """An example as the walk shows it."""
    return walk_result(quick(name), lang) if name in EXPERIMENTS else told(name, lang)


def told(what: str, lang: str = "en", **options: Any) -> Any:
    """What the walk tells of a text, or of an example by its name."""
    settings = Settings(**options)
    if what in EXPERIMENTS:
        return walk_experiment(what, settings, lang)
    return (walk_example if re.fullmatch(r"E\d+", what) else walk_text)(what, settings, lang)


def printed(story: Any, lang: str = "en", columns: int = 80, colours: Literal["standard", "256"] | None = None) -> str:
    """A story in a terminal of this width."""
    out = io.StringIO()
    Console(file=out, width=columns, force_terminal=colours is not None, color_system=colours).print(View(story, lang))
    return out.getvalue()


def page(story: Any, lang: str = "en", example: str | None = None, words: tuple[str, ...] = (), **options: Any) -> str:
    """A story as a page."""
    return html(Begin(settings=Settings(**options), example=example, text=" ".join(words), words=words), story, lang)
