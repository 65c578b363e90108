"""Every experiment, the trained ones with few steps: enough for what does not depend on what they learned."""

from __future__ import annotations

import functools

from regard import lab
from regard._walk import Settings, Story, walk_example
from regard.lab import run
from regard.lab._story import EXPERIMENTS, walk_result

TRAINED = ("E7", "X2", "X3", "X6")


@functools.cache
def quick(name: str) -> lab.Result:
    if name in TRAINED:
        return getattr(lab, lab.TOPICS[name])(steps=3)
    return run(name)


@functools.cache
def story_of(name: str, lang: str) -> Story:
    """An example as the walk shows it."""
    return walk_result(quick(name), lang) if name in EXPERIMENTS else walk_example(name, Settings(), lang)
