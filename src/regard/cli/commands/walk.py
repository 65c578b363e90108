"""`regard walk`: every step of multi-head attention with real numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from regard._display.texts import language
from regard._display.texts import text as say
from regard.cli import complete, options, terminal
from regard.cli.options import about

if TYPE_CHECKING:
    from regard._walk import Begin, Settings, Story

NAMES = tuple(f"E{number}" for number in range(1, 11))


def walk(
    text: Annotated[
        str | None,
        typer.Argument(
            help="A text, or the name of a worked example, E1 to E10 (default: 'The cat sat on the mat.').",
            autocompletion=complete.one_of(NAMES),
        ),
    ] = None,
    heads: Annotated[int | None, about("Number of heads (default: 2).")] = None,
    d_model: Annotated[int | None, about("Width of the vectors, a multiple of --heads (default: 8).")] = None,
    causal: Annotated[bool, about("Causal mask: a token attends to itself and to earlier tokens.", "--causal")] = False,
    window: Annotated[int | None, about("Window mask: a token attends to this many tokens on either side.")] = None,
    no_scale: Annotated[bool, about("Do not divide the scores by √d_k.", "--no-scale")] = False,
    seed: Annotated[int | None, about("Seed of the random vectors and matrices (default: 0).")] = None,
    cross: Annotated[str | None, about("Cross attention: attend to this text.")] = None,
    model: Annotated[
        str | None, options.one_of(("minilm",), "Use trained weights: minilm, or a folder with a text encoder.")
    ] = None,
    layer: Annotated[int | None, about("Layer of --model, counted from 0 (default: 0).")] = None,
    html: Annotated[Path | None, about("Write an HTML page to this file.")] = None,
    as_json: Annotated[bool, about("Print all numbers as JSON.", "--json")] = False,
    lang: Annotated[str, options.language("Language: en (English) or zh (Chinese).")] = "en",
) -> None:
    """Walk through multi-head attention step by step, with real numbers: from tokens to the output.

    Examples:
      regard walk "The cat sat on the mat."
      regard walk "The cat sat on the mat." --causal --heads 4 --html cat.html
      regard walk "The cat sat." --cross "Die Katze sass."
      regard walk "The cat sat on the mat." --model minilm --layer 3
      regard walk E1 --lang zh
    """
    from regard._files.write import write_atomically
    from regard._walk import Settings, View
    from regard._walk import html as as_page
    from regard._walk._words import STEPS

    with terminal.one_line(ValueError, ImportError, file=html):
        language(lang)
        given = {"heads": heads, "d_model": d_model, "seed": seed}
        numbers = {name: value for name, value in given.items() if value is not None}
        settings = Settings(causal=causal, window=window, scale=not no_scale, cross=cross, **numbers)
        if layer is not None and model is None:
            raise ValueError("--layer names a layer of --model; give --model minilm too")
        if model is not None and numbers:
            option = terminal.flag(next(iter(numbers)))
            raise ValueError(f"{option} does not apply to --model, which has its own; leave it out")
        story, begin = _story_of(text, settings, model, layer or 0, lang)
        if html is not None:
            write_atomically(html, [as_page(begin, story, lang).encode()])
    if as_json:
        terminal.data(story.data(), indent=None)
    elif html is None:
        terminal.console().print(View(story, lang))
    if html is not None:
        typer.echo(say(STEPS, lang, "wrote", file=html), err=as_json)


def _story_of(text: str | None, settings: Settings, model: str | None, layer: int, lang: str) -> tuple[Story, Begin]:
    """The story, and what a page of it begins with."""
    from regard._walk import Begin, walk_example, walk_layer, walk_text
    from regard._walk._words import STEPS
    from regard.lab import TOPICS
    from regard.lab._story import EXPERIMENTS, walk_experiment

    given = "E6" if text is None else text.strip()
    name = given.upper() if re.fullmatch(r"[Ee]\d{1,4}", given) else None
    read = "The cat sat on the mat." if name == "E6" else given
    if name in TOPICS and name not in NAMES:
        raise ValueError(f"there is no example {name} to walk; regard lab {name} runs it")
    if model is None:
        with terminal.saying(say(STEPS, lang, "computing")):
            if name is None:
                story = walk_text(given, settings, lang)
            else:
                story = (walk_experiment if name in EXPERIMENTS else walk_example)(name, settings, lang)
        if name not in (None, "E6"):
            return story, Begin(settings=settings, example=name)
        words, cross = (tuple(cast("list[str]", story.settings[side])) for side in ("tokens", "key_tokens"))
        return story, Begin(settings=settings, text=read, words=words, cross=() if settings.cross is None else cross)
    if name not in (None, "E6"):
        raise ValueError(f"--model reads a text, and {name} has its own numbers; give a text")
    if settings.cross is not None:
        raise ValueError("--cross has no place in --model: its layers read one text; leave one of the two out")
    settings.check_mask()
    if not read:
        raise ValueError("the text is empty; expected some words, such as 'The cat sat on the mat.'")
    from regard.cli.layers import trained

    with terminal.saying(say(STEPS, lang, "loading", model=model)):
        found, source = trained(model, read, layer, settings)
    stories = {each: walk_layer(found, source, settings, each) for each in ("en", "zh")}
    begin = Begin(settings=settings, text=read, words=found.tokens, layer=found, stories=stories)
    return stories[lang], begin
