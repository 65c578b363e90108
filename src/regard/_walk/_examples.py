"""The worked examples that are walked step by step: E1, E2, E6 and E9. The lab computes the others and shows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from regard._display.texts import text
from regard._walk._draws import Draws
from regard._walk._inputs import Layer, Settings
from regard._walk._steps import Teller, traced
from regard._walk._story import Numbers, Step, Story, number
from regard._walk._table import Matrix
from regard._walk._tell import sizes, walk_text
from regard._walk._words import EXAMPLES, STEPS

CAT = "The cat sat on the mat."

# The lab's examples of the same names begin with these.
E1_X = ((1.0, 0.0, 1.0, 0.0), (0.0, 1.0, 0.0, 1.0))
E2_X = ((1.0, 0.5, -1.0, 2.0), (-0.5, 1.0, 0.3, -2.0))
E2_W1 = ((0.1, 0.4), (-0.2, 0.3), (1.0, -0.5), (0.5, 0.2))
E2_W2 = ((-0.3, 0.2), (1.1, 0.6), (-0.4, 0.8), (0.7, -0.1))
E2_OUT = ((0.5, -0.2, 1.1, 0.3), (0.1, 0.8, -0.4, 0.6), (-0.3, 0.7, 0.2, 1.0), (0.9, -0.5, 0.3, -0.8))
E9_X = ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (0.7, 0.8, 0.9), (0.5, 0.2, 0.4))


class Example(NamedTuple):
    tell: Callable[[Settings, str], Story]
    options: frozenset[str]  # what may be chosen: all other numbers are the example's own


def walk_example(name: str, settings: Settings, lang: str = "en") -> Story:
    """The example of that name; an option that was set and that it does not have is a ValueError."""
    if name not in BY_NAME:
        raise ValueError(f"there is no example {name}; expected one of E1 to E10, or a text of some words")
    tell, options = BY_NAME[name]
    chosen = check_options(name, settings, options)
    story = tell(settings, lang)
    return replace(story, settings={**story.settings, **chosen})


def check_options(name: str, settings: Settings, options: frozenset[str]) -> dict[str, object]:
    """What an example was told, of the options that it has. Another one that was set is a ValueError."""
    plain = asdict(Settings())
    for option, value in asdict(settings).items():
        if value != plain[option] and option not in options:
            flag = "--no-scale" if option == "scale" else f"--{option.replace('_', '-')}"
            raise ValueError(f"{flag} does not apply to {name}, which has its own numbers; leave it out")
    settings.check()
    return {"example": name} | {option: value for option, value in asdict(settings).items() if option in options}


def _e1(settings: Settings, lang: str) -> Story:
    identity = dict.fromkeys(("q", "k", "v", "out"), np.eye(4))
    layer = _given(E1_X, identity, heads=1, scale=1.0)
    scaled = Teller(replace(layer, scale=None), lang)
    say = partial(text, EXAMPLES, lang)
    weighting, output = scaled.weighting(), scaled.output()
    more = replace(
        weighting,
        name="with_scaling",
        title=say("E1.scaled.title"),
        says=say("E1.scaled.says"),
        formula="softmax(S / √4),  Y = A V",
        panels=(*weighting.panels, *output.panels),
        links=(),
        arrays={**weighting.arrays, "output": output.arrays["output"]},
    )
    small = number(float(traced(layer)["weights"].min()), 4)
    return _whole("E1", layer, lang, (say("E1.intro", small=small),), [more])


def _e2(settings: Settings, lang: str) -> Story:
    joined = np.concatenate([np.array(E2_W1), np.array(E2_W2)], axis=1)
    layer = _given(E2_X, {"q": joined, "k": joined, "v": joined, "out": np.array(E2_OUT)}, heads=2)
    return _whole("E2", layer, lang, (text(EXAMPLES, lang, "E2.intro"),))


def _e6(settings: Settings, lang: str) -> Story:
    return replace(walk_text(CAT, settings, lang), title=text(EXAMPLES, lang, "E6.title"))


def _e9(settings: Settings, lang: str) -> Story:
    draws = Draws(settings.seed)
    drawn = {name: draws.normal(3, 3) for name in "qkv"}
    layer = _given(E9_X, {**drawn, "out": np.eye(3)}, heads=1)
    return _whole("E9", layer, lang, (text(EXAMPLES, lang, "E9.intro", seed=settings.seed),))


def _given(x: Matrix, weights: dict[str, Numbers], heads: int, scale: float | None = None) -> Layer:
    vectors = np.array(x, dtype=np.float64)
    tokens = tuple(f"x{index}" for index in range(1, len(vectors) + 1))
    return Layer(tokens=tokens, key_tokens=tokens, x=vectors, memory=vectors, weights=weights, heads=heads, scale=scale)


def _whole(name: str, layer: Layer, lang: str, intro: tuple[str, ...], more: list[Step] | None = None) -> Story:
    """An example that gives its vectors: the input as it is, then every step."""
    teller = Teller(layer, lang)
    first = teller.given(text(STEPS, lang, "input.title"), text(EXAMPLES, lang, "input"), str(list(layer.x.shape)))
    steps = (first, *teller.steps(), *(more or []))
    return Story(text(EXAMPLES, lang, f"{name}.title"), (sizes(layer, lang), *intro), steps, {})


_EVERY = frozenset(asdict(Settings()))
BY_NAME: dict[str, Example] = {
    "E1": Example(_e1, frozenset()),
    "E2": Example(_e2, frozenset()),
    "E6": Example(_e6, _EVERY),
    "E9": Example(_e9, frozenset({"seed"})),
}
