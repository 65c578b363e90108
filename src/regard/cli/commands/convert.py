"""`regard convert`: a Hugging Face model into a folder of regard's format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli import complete, options, terminal
from regard.cli.options import about

if TYPE_CHECKING:
    from regard.cli.folders import Found


def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="Model: a folder in Hugging Face's format, a GGUF file, minilm or smollm2.",
            autocompletion=complete.one_of(complete.PACKAGED),
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Output folder; it is created if needed.")],
    dtype: options.Dtype = None,
    layer: Annotated[int | None, about("For DeepSeek-V3: convert only this layer's attention.")] = None,
    ignore: Annotated[list[str] | None, about("Pattern of weight names to leave out; repeat for several.")] = None,
    as_json: Annotated[bool, about("Print a summary of what was written as JSON.", "--json")] = False,
) -> None:
    """Write a model in regard's own format, config.json and model.safetensors, with its tokenizer.

    Examples:
      regard convert minilm ours
      regard convert path/to/hugging-face/folder ours --dtype bfloat16
    """
    from regard import interop
    from regard.cli import folders, parse

    with terminal.one_line(ValueError, TypeError, ImportError, file=out):
        kind = parse.one_dtype(dtype)
        if any((out / name).exists() for name in ("config.json", "model.safetensors")):
            raise ValueError(f"{out} holds a model already; give a folder that does not")
        with terminal.saying(f"reading {source}"):
            found = folders.load(source, dtype=kind, ignore=ignore or (), layer=layer)
        with terminal.saying(f"writing {out}"):
            interop.save(found.model, out, stop=found.stop)
            kept = _keep_tokenizer(found, out)
    count = sum(parameter.numel() for parameter in found.model.parameters())
    if as_json:
        wrote = {"folder": str(out), "model": type(found.model).__name__, "parameters": count, "tokenizer": kept}
        terminal.data(wrote)
        return
    typer.echo(f"wrote {out}: {type(found.model).__name__}, {count} parameters{', tokenizer' if kept else ''}")


def _keep_tokenizer(found: Found, out: Path) -> bool:
    """Models of images and sound have none, and some folders lack it."""
    try:
        found.words().save(out)
    except (ValueError, ImportError):
        return False
    return True
