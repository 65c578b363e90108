"""Whole stories: a text through an untrained layer, or through one of a trained model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial

from regard._display.texts import text
from regard._walk._inputs import Layer, Settings, from_text
from regard._walk._steps import Teller
from regard._walk._story import Story
from regard._walk._words import STEPS


def walk_text(given: str, settings: Settings, lang: str = "en") -> Story:
    """Every step of multi-head attention for a text, through an untrained layer drawn from the seed."""
    layer = from_text(given, settings)
    say = partial(text, STEPS, lang)
    teller = Teller(layer, lang)
    steps = (*teller.inputs(), *teller.steps(mask_says(settings, lang)))
    title = say("title.cross" if layer.is_cross else "title.self")
    chosen = {"tokens": list(layer.tokens), "key_tokens": list(layer.key_tokens), **asdict(settings)}
    return Story(title, (sizes(layer, lang), say("drawn", seed=settings.seed)), steps, chosen)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a trained layer comes from, and how far the walk is from what the model itself computes there."""

    model: str
    layer: int
    layers: int
    difference: float


def walk_layer(layer: Layer, source: Source, settings: Settings, lang: str = "en") -> Story:
    """Every step of one layer of a trained model; `layer.before` has the numbers of the tokens."""
    say = partial(text, STEPS, lang)
    key, at = ("model_layer", {"layer": source.layer}) if source.layer else ("model_input", {})
    teller = Teller(layer, lang)
    shape = f"[{len(layer.tokens)}] → {list(layer.x.shape)}"
    first = (teller.tokens(say("tokens.model")), teller.given(say(f"{key}.title", **at), say(f"{key}.says"), shape))
    steps = (*first, *teller.steps(mask_says(settings, lang)))
    title = say("title.model", model=source.model)
    intro = [sizes(layer, lang), say("trained", **asdict(source) | {"difference": f"{source.difference:.1e}"})]
    chosen = {"--causal": settings.causal, "--window": settings.window is not None, "--no-scale": not settings.scale}
    if options := ", ".join(f"`{name}`" for name, given in chosen.items() if given):
        intro.append(say("changed", options=options))
    return Story(title, tuple(intro), steps, {"tokens": list(layer.tokens), **asdict(source)})


def sizes(layer: Layer, lang: str) -> str:
    width = layer.x.shape[1]
    counts = {"queries": len(layer.tokens), "width": width, "heads": layer.heads, "head_dim": layer.head_dim}
    if layer.is_cross:
        return text(STEPS, lang, "sizes.cross", keys=len(layer.key_tokens), **counts)
    return text(STEPS, lang, "sizes", **counts)


def mask_says(settings: Settings, lang: str) -> str:
    if settings.window is None:
        return text(STEPS, lang, "mask.causal" if settings.causal else "mask.none")
    return text(STEPS, lang, "mask.both" if settings.causal else "mask.window", window=settings.window)
