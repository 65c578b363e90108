"""`regard look`: run a model on a text, an image or a sound and show what its attention did."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard._display.texts import beginning, language
from regard._display.texts import text as say
from regard.cli import acting, complete, loading, options, reading, terminal
from regard.cli.loading import Loaded
from regard.cli.loading import load as _load
from regard.cli.names import PACKAGED
from regard.cli.options import about
from regard.cli.reading import WORDS, Read

if TYPE_CHECKING:
    from regard.recording import Recorded, Recording
    from regard.statistics import Want

TEXT = (
    "The cat sat on the mat, because it was tired. The dog, which had followed the cat all morning, lay down beside it "
    "and slept as well. When the door opened, the cat looked up, but the dog did not. Later the child who had opened "
    "the door gave the cat some milk, gave the dog a bone, and sat down on the mat between the two of them."
)


def look(
    model: Annotated[
        str,
        typer.Argument(
            help=f"Model: a folder in Hugging Face's format, a hub name (gpt2, org/name), {' or '.join(PACKAGED)}.",
            autocompletion=complete.one_of(complete.PACKAGED),
        ),
    ],
    text: Annotated[
        str | None,
        typer.Argument(help="Text for the model to read (default: a short built-in text).", show_default=False),
    ] = None,
    file: Annotated[Path | None, about("Read the text from this file; - is standard input.")] = None,
    image: Annotated[Path | None, about("Image for a vision model.")] = None,
    audio: Annotated[Path | None, about("WAV file for a speech model.")] = None,
    length: Annotated[int, about("Maximum number of tokens (default: the model's limit).", show_default=False)] = 0,
    out: Annotated[Path, about("Base name of the output: writes NAME.regard and NAME.html.")] = Path("look"),
    as_json: Annotated[bool, about("Print one object per head, as JSON.", "--json")] = False,
    open_page: Annotated[bool, about("Open the page in the browser.", "--open")] = False,
    layer: Annotated[int | None, about("Layer that the page shows first.")] = None,
    head: Annotated[int | None, about("Head that the page shows first.")] = None,
    cut: Annotated[
        list[str] | None,
        about(
            "Cut edges and show the difference: KEYS or QUERIES>KEYS, by position, range or word, after LAYER@ or "
            "LAYER.HEAD@ for one place ('0:4', 'it>cat', '3.5@-1>cat'); repeat for several.",
            show_default=False,
        ),
    ] = None,
    ablate: Annotated[
        list[str] | None,
        about("Set the output of a head, LAYER.HEAD, or of a LAYER to zero; repeat for several.", show_default=False),
    ] = None,
    lang: Annotated[str, options.language("Language of messages and page: en or zh.")] = "en",
) -> None:
    """Run a model on a text, an image or a sound, print a summary of its heads, and write the recording and a page.

    A hub name is looked up in Hugging Face's cache first, and downloaded if it is not there.

    Examples:
      regard look minilm "The cat sat on the mat." --open
      regard look path/to/model --file book.txt --length 2000 --out book
      regard look openai-community/gpt2 --file book.txt
      regard look path/to/vit --image cat.png
      regard look path/to/whisper --audio speech.wav
      regard look minilm --json
      regard look minilm "The cat sat, because it was tired." --cut "it>cat"
      regard look smollm2 "The capital of France is" --ablate 0.3 --ablate 1
    """
    from regard._files.write import write_atomically
    from regard._page._image import as_seen
    from regard._page._show import open_in_browser

    with terminal.one_line(ValueError, ImportError, IndexError, file=out):
        language(lang)
        edits = acting.typed(cut or [], ablate or [])
        words = _words(text, file, image, audio)
        if length < 0:
            raise ValueError(f"--length is {length}; expected at least 1, or 0 for what the model takes")
        if not out.parent.is_dir():
            raise ValueError(f"--out names the folder {out.parent}, which is not there")
        with terminal.saying(say(WORDS, lang, "loading", model=model)):
            loaded = _load(model, answers=bool(edits))
        spoken, given = TEXT if words is None else words, image or audio
        read = loading.read(loaded, spoken, words is None, image, audio, length)
        recording, made = _run(loaded, read, lang, edits)
        # a page that is passed on says what was done to the model
        changed = [f" · --cut {each}" for each in cut or []] + [f" · --ablate {each}" for each in ablate or []]
        recording.title = f"{model}: {beginning(spoken if given is None else given.name)}{''.join(changed)}"
        if given is None and not edits and not length:
            recording.origin = {"model": model, "text": read.words or spoken}
        with terminal.saying(say(WORDS, lang, "writing")):
            seen = None if image is None else as_seen(read.given.get("pixel_values"))
            page = recording.to_html(layer=layer, head=head, lang=lang, picture=seen)
            recording.save(f"{out}.regard")
            write_atomically(Path(f"{out}.html"), [page.encode()])
    if note := read.note(lang):
        typer.echo(note, err=True)
    if as_json:
        terminal.data(recording.to_dicts() if made is None else {**made, "heads": recording.to_dicts()})
        return
    terminal.console().print(recording.summary(lang))
    if made is not None:
        typer.echo("\n".join([*made["edits"], *acting.lines(made["answer"], lang)]))
    typer.echo(say(WORDS, lang, "wrote", out=out))
    if not open_page:
        typer.echo(say(WORDS, lang, "open", out=out))
    elif not open_in_browser(Path(f"{out}.html")):
        typer.echo(say(WORDS, lang, "no-browser", out=out), err=True)


def _words(text: str | None, file: Path | None, image: Path | None, audio: Path | None) -> str | None:
    """The text, where there is one: none is needed with an image or a sound."""
    for name, given in (("--image", image), ("--audio", audio)):
        if given is not None and not given.is_file():
            raise ValueError(f"{name} names {given}, which is not a file")
    if text is None and file is None and (image or audio) is not None:
        return None
    return reading.given_text(text, file, TEXT)


def _run(loaded: Loaded, read: Read, lang: str, edits: list[acting.Typed]) -> tuple[Recording, dict[str, Any] | None]:
    """The recording; and with edits, which are then in it, what they changed and the difference to the answer."""
    import torch

    from regard.recording._tokens import ids_to_text

    model, tokenizer = loaded.model, loaded.tokenizer
    if read.ids is not None and not read.ids.numel():
        raise ValueError("the text is empty")
    given = loading.arguments(loaded, read)
    layers = getattr(model.config, "num_hidden_layers", None)
    tokens = 0 if read.ids is None else read.ids.shape[1]
    ids = given.get("decoder_input_ids", read.ids)
    texts = [] if ids is None or tokenizer is None else ids_to_text(tokenizer, ids)
    want = _want(tokens, is_image="pixel_values" in given)
    before = None
    if edits:
        with torch.inference_mode():
            before = acting.answer(loading.outputs(model, given), ids)
    with _progress(layers, tokens, lang) as advance, acting.edited(model, edits, texts) as reports:
        recording, out = loading.watched(loaded, given, read, on_call=advance, want=want)
    if before is None:
        return recording, None
    words = str if tokenizer is None else lambda n: ids_to_text(tokenizer, torch.tensor([[n]]))[0][0]
    answer = acting.difference(before, acting.answer(out, ids), texts[0] if texts else [], words)
    return recording, {"edits": [str(report) for report in reports], "answer": answer}


def _want(tokens: int, *, is_image: bool = False) -> Want:
    """Every single weight where the text is short or the patches are few, so that the page has all of them; the usual
    thumbnail elsewhere. An image has more of its largest weights: eight patches are hardly a picture."""
    from regard import Want

    if is_image:
        return Want(map=(256, 256), top_k=32)
    return Want(map=(128, 128)) if tokens <= 128 else Want()


@contextlib.contextmanager
def _progress(layers: int | None, tokens: int, lang: str) -> Iterator[Any]:
    with terminal.progress() as bars:
        task = bars.add_task(say(WORDS, lang, "layers", tokens=tokens), total=layers)

        def advance(call: Recorded) -> None:
            bars.advance(task)

        yield advance
