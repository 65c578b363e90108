"""A walk as the page: its Walk view, opened with what the command was given. The page computes the numbers again.

A text needs its settings only: Python and the page draw the same numbers from a seed (``_draws``). A trained layer
carries its vectors. Readers without scripts get the words of the story.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from regard._page import stand_alone
from regard._page._document import as_text
from regard._walk._inputs import Layer, Settings
from regard._walk._steps import traced
from regard._walk._story import Numbers, Story

MOST_WIDTH = 512  # of a layer that the page draws again at every change


@dataclass(frozen=True, kw_only=True)
class Begin:
    """What the page begins with: a text, an example by name, or a layer with its numbers."""

    settings: Settings
    text: str = ""
    words: tuple[str, ...] = ()
    cross: tuple[str, ...] = ()
    example: str | None = None
    layer: Layer | None = None
    stories: dict[str, Story] = field(default_factory=dict)  # of the layer, by language: its title and introduction


def html(begin: Begin, story: Story, lang: str) -> str:
    """The page, in the language of the story. Tokens are data: no element of the file depends on what they say.

    Raises:
        ValueError: the layer is wider than a page can compute at once.
    """
    if begin.layer is None and begin.settings.d_model > MOST_WIDTH:
        raise ValueError(
            f"--d-model is {begin.settings.d_model}; a page computes layers up to {MOST_WIDTH} wide: "
            "make it smaller, or leave --html out"
        )
    packed = zlib.compress(json.dumps(_data(begin, lang)).encode(), 9, wbits=-15)
    plain = [f"<p>{as_text(line)}</p>" for line in story.intro]
    plain += [
        f"<h2>{as_text(step.title)}</h2><p><code>{as_text(step.formula)}</code></p><p>{as_text(step.says)}</p>"
        for step in story.steps
    ]
    return stand_alone(story.title, plain, "regard-walk", packed, lang)


def _data(begin: Begin, lang: str) -> dict[str, Any]:
    given = begin.settings
    mask = {(False, False): "none", (True, False): "causal", (False, True): "window", (True, True): "both"}
    settings: dict[str, Any] = {
        "heads": given.heads,
        "width": given.d_model,
        "seed": given.seed,
        "scale": given.scale,
        "mask": mask[given.causal, given.window is not None],
        "window": 1 if given.window is None else given.window,
    }
    data: dict[str, Any] = {"lang": lang}
    if begin.example is not None:
        wanted = {name: value for name, value in settings.items() if value != _PLAIN[name]}
        return data | {"example": begin.example, "settings": wanted}
    data |= {"text": begin.text, "cross": given.cross or ""}
    settings |= {"words": list(begin.words), "cross": list(begin.cross)}
    if begin.layer is not None:
        settings |= {"heads": begin.layer.heads, "width": begin.layer.x.shape[1], "given": _numbers(begin.layer)}
        stories = [begin.stories["en"], begin.stories["zh"]]
        data |= {"title": [story.title for story in stories], "intro": [list(story.intro) for story in stories]}
    return data | {"settings": settings}


_PLAIN = {"heads": 2, "width": 8, "seed": 0, "scale": True, "mask": "none", "window": 1}


def _numbers(layer: Layer) -> dict[str, Any]:
    """A layer as the page takes it: its input, queries, keys and values, and the matrix that follows the heads."""
    found = traced(layer)
    bias = layer.weights.get("out_bias")
    return {
        "x": _packed(layer.x),
        "ids": layer.before["ids"].tolist(),
        "projected": {name[0]: _packed(found[name][0]) for name in ("query", "key", "value")},
        "out": _packed(layer.weights["out"]),
    } | ({} if bias is None else {"outBias": bias.tolist()})


def _packed(values: Numbers) -> dict[str, Any]:
    """A matrix in bytes: those of float32 where they say all of it, as they do of a trained model's weights."""
    kind = "f4" if np.array_equal(values.astype(np.float32), values) else "f8"
    held = np.ascontiguousarray(values, dtype="<" + kind)
    return {kind: base64.b64encode(held.tobytes()).decode(), "columns": values.shape[1]}
