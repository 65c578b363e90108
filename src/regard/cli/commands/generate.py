"""`regard generate`: a language model continues a text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli import complete, options, terminal
from regard.cli.options import about

if TYPE_CHECKING:
    from regard.cli.folders import Found, Words


def generate(
    prompt: Annotated[str, typer.Argument(help="Text for the model to continue.")],
    model: Annotated[
        str,
        options.one_of(
            complete.PACKAGED,
            "Model: a folder (regard's or Hugging Face's format), a GGUF file, or smollm2 (from its package).",
        ),
    ],
    max_new_tokens: Annotated[int, about("Maximum number of tokens to generate.")] = 64,
    temperature: Annotated[float, about("Sampling temperature; 0 always takes the likeliest token.")] = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: Annotated[int | None, about("Seed for sampling; the same seed gives the same text.")] = None,
    dtype: options.Dtype = None,
    device: options.Device = "cpu",
    as_json: Annotated[bool, about("Print prompt and text as JSON when generation ends.", "--json")] = False,
) -> None:
    """Continue a prompt with a language model, and print the text as it is generated.

    Examples:
      regard generate --model smollm2 "The capital of Italy is" --max-new-tokens 20
      regard generate --model path/to/model "Once upon a time" --temperature 0.8 --seed 3
    """
    from regard.cli import folders, parse

    with terminal.one_line(ValueError, TypeError, ImportError, options=options.WRITING):
        where = parse.device(device)
        with terminal.saying(f"loading {model}"):
            found = folders.load(model, dtype=parse.one_dtype(dtype), device=where)
            _refuse_others(found)
            words = found.words()
        ids = _checked(found, words, prompt, max_new_tokens)
        how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "stop": found.stop}
        steps = found.model.stream([ids], max_new_tokens=max_new_tokens, **how)
        pieces = []
        for piece in _pieces(words, found.stop, (step[0] for step in steps)):
            pieces.append(piece)
            if not as_json:
                typer.echo(piece, nl=False)
    if as_json:
        terminal.data({"prompt": prompt, "text": "".join(pieces)})
    else:
        typer.echo()


def _refuse_others(found: Found) -> None:
    from regard.models import Decoder

    if not isinstance(found.model, Decoder):
        kind = type(found.model).__name__
        raise ValueError(f"the model in {found.folder} is of kind {kind}; a Decoder (GPT-2, Llama) continues a text")


def _checked(found: Found, words: Words, prompt: str, most: int) -> list[int]:
    """The prompt's tokens, when this model can continue them."""
    ids = words.encode(terminal.readable(prompt, "the prompt"))
    if not ids:
        raise ValueError("the prompt is empty; give at least one word")
    config = found.model.config
    if max(ids) >= config.vocab_size:
        raise ValueError(
            f"the tokenizer gives token {max(ids)}, and the model knows {config.vocab_size}: they do not fit together"
        )
    if most < 1:
        raise ValueError(f"--max-new-tokens is {most}; expected at least 1")
    if config.positions == "learned" and len(ids) + most - 1 > config.max_tokens:
        raise ValueError(
            f"a prompt of {len(ids)} tokens and --max-new-tokens {most} go beyond the {config.max_tokens} positions "
            "that the model has learned"
        )
    return ids


def _pieces(words: Words, stop: list[int], tokens: Iterable[int | None]) -> Iterator[str]:
    """The text of each token as soon as it is certain: a letter may be several tokens."""
    ids: list[int] = []
    shown = 0
    for token in tokens:
        if token is None or token in stop:
            break
        ids.append(token)
        text = words.decode(ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[shown:]
            shown = len(text)
    rest: Any = words.decode(ids)[shown:] if ids else ""
    if rest:
        yield rest
