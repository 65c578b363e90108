"""`regard walk`: every step of multi-head attention with real numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli import complete, terminal

if TYPE_CHECKING:
    from regard._walk import Settings, Story

NAMES = tuple(f"E{number}" for number in range(1, 11))


def walk(
    text: Annotated[
        str | None,
        typer.Argument(
            help="A text, or a worked example by name: E1 to E10. By default 'The cat sat on the mat.'",
            autocompletion=complete.one_of(NAMES),
        ),
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Heads; 2 by default.")] = None,
    d_model: Annotated[int | None, typer.Option(help="Width of the vectors, a multiple of --heads; 8.")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Tokens look at what came before them, not ahead.")] = False,
    window: Annotated[int | None, typer.Option(help="Tokens look this far, to either side.")] = None,
    no_scale: Annotated[bool, typer.Option("--no-scale", help="Do not divide the scores by √d_k.")] = False,
    seed: Annotated[int | None, typer.Option(help="Where the random vectors and matrices come from; 0.")] = None,
    cross: Annotated[str | None, typer.Option(help="Cross attention: look at this text instead.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Trained weights: minilm, or a folder with an encoder of words.",
            autocompletion=complete.one_of(("minilm",)),
        ),
    ] = None,
    layer: Annotated[int | None, typer.Option(help="Which layer of --model, from 0; 0.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers as JSON.")] = False,
    lang: Annotated[
        str, typer.Option(help="en (English) or zh (Chinese).", autocompletion=complete.one_of(("en", "zh")))
    ] = "en",
) -> None:
    """Walk through multi-head attention step by step, with real numbers: from tokens to the output.

    Examples:
      regard walk "The cat sat on the mat."
      regard walk "The cat sat on the mat." --causal --heads 4 --html cat.html
      regard walk "The cat sat." --cross "Die Katze sass."
      regard walk "The cat sat on the mat." --model minilm --layer 3
      regard walk E1 --lang zh
    """
    from regard._display.texts import language
    from regard._display.texts import text as say
    from regard._walk import Settings
    from regard._walk import html as as_page
    from regard._walk._words import STEPS

    try:
        language(lang)
        given = {"heads": heads, "d_model": d_model, "seed": seed}
        numbers = {name: value for name, value in given.items() if value is not None}
        settings = Settings(causal=causal, window=window, scale=not no_scale, cross=cross, **numbers)
        if layer is not None and model is None:
            raise ValueError("--layer names a layer of --model; give --model minilm too")
        if model is not None and numbers:
            option = next(iter(numbers)).replace("_", "-")
            raise ValueError(f"--{option} does not apply to --model, which has its own; leave it out")
        story = _told(text, settings, model, layer or 0, lang)
        if html is not None:
            _write(html, as_page(story, lang))
    except (ValueError, ImportError) as error:
        terminal.stop(str(error))
    except OSError as error:
        terminal.stop(f"{error.filename or html}: {error.strerror or error}")
    if as_json:
        terminal.data(story.data(), indent=None)
    elif html is None:
        _show(story, lang)
    if html is not None:
        typer.echo(say(STEPS, lang, "wrote", file=html), err=as_json)


def _told(text: str | None, settings: Settings, model: str | None, layer: int, lang: str) -> Story:
    from regard._display.texts import text as say
    from regard._walk import walk_example, walk_layer, walk_text
    from regard._walk._words import STEPS

    given = "E6" if text is None else text.strip()
    is_example = re.fullmatch(r"[Ee]\d{1,4}", given) is not None
    if model is None:
        with terminal.saying(say(STEPS, lang, "computing")):
            return walk_example(given.upper(), settings, lang) if is_example else walk_text(given, settings, lang)
    if is_example and given.upper() != "E6":
        raise ValueError(f"--model reads a text, and {given.upper()} has its own numbers; give a text")
    if settings.cross is not None:
        raise ValueError("--cross has no place in --model: its layers read one text; leave one of the two out")
    settings.check_mask()
    read = "The cat sat on the mat." if is_example else given
    if not read:
        raise ValueError("the text is empty; expected some words, such as 'The cat sat on the mat.'")
    from regard.cli.layers import trained

    with terminal.saying(say(STEPS, lang, "loading", model=model)):
        found = trained(model, read, layer, settings)
    return walk_layer(*found, settings, lang)


def _write(path: Path, page: str) -> None:
    from regard._files.write import write_atomically

    write_atomically(path, [page.encode("utf-8")])


def _show(story: Story, lang: str) -> None:
    from regard._walk import View

    terminal.console().print(View(story, lang))
