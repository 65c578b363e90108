"""Models that commands are given: folders of ours, of Hugging Face's, GGUF files, and names of packages."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from regard._checks import is_int
from regard._display.texts import reason
from regard.cli.loading import TOKENIZER_FILES, transformers_for
from regard.cli.names import find as _find
from regard.cli.names import quiet as _quiet


class Words(NamedTuple):
    """A tokenizer: from text to numbers and back."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    save: Callable[[Path], None]


class Found(NamedTuple):
    model: Any
    stop: list[int]
    folder: Path
    words: Callable[[], Words]  # read only when it is needed


def load(
    name: str, *, dtype: Any = None, device: str | None = None, ignore: Sequence[str] = (), layer: int | None = None
) -> Found:
    """The model that a folder, a GGUF file or a package holds, as one of regard.models.

    Raises:
        ValueError, ImportError, OSError: with a message fit to be shown.
    """
    from regard import interop, models
    from regard.interop._hf_files import read_json
    from regard.interop._saved import description

    if name in models.names() and not Path(name).exists():
        raise ValueError(f"{name} is a configuration, and has no weights: give a folder that has them")
    folder, gguf = _find(name)
    ours = None if gguf is not None else description(folder)
    if (ours is not None or gguf is not None) and (ignore or layer is not None):
        raise ValueError(f"--ignore and --layer are for folders of Hugging Face's, and {name} is none")
    if gguf is not None:
        return _from_gguf(folder, gguf, dtype, device)
    made: dict[str, Any] = {"dtype": dtype, "device": device}
    if ours is not None:
        model: Any = interop.load(folder, **made)
        stop = _numbers(ours.get("stop"))
    else:
        given = read_json(folder / "config.json")
        model = interop.from_hf(folder, ignore=ignore, layer=layer, **made)
        generation = folder / "generation_config.json"
        settings = {**given, **(read_json(generation) if generation.is_file() else {})}
        stop = _numbers(settings.get("eos_token_id"))
    return Found(model, stop, folder, lambda: _words(folder))


def _numbers(given: object) -> list[int]:
    found: list[Any] = given if isinstance(given, list) else [] if given is None else [given]
    if not all(is_int(number) for number in found):
        raise ValueError(f"the tokens that end a text are {given!r}; expected numbers")
    return found


def _from_gguf(folder: Path, gguf: str, dtype: Any, device: str | None) -> Found:
    """Hugging Face's transformers reads the file; the numbers in it are unpacked to float32 first."""
    from regard import interop

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = transformers_for("a GGUF file is read by transformers: pip install transformers gguf accelerate")
    local: dict[str, Any] = {"gguf_file": gguf, "local_files_only": True}
    with _quiet(transformers):
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, **local)
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **local)
        except Exception as error:  # whatever goes wrong in there, it is about this file
            raise ValueError(f"{folder / gguf} cannot be read: {reason(error)}") from None
    stop = _numbers(model.generation_config.eos_token_id)
    found = interop.from_hf(model.eval(), dtype=dtype, device=device)
    return Found(found, stop, folder, lambda: _of_transformers(tokenizer))


def _words(folder: Path) -> Words:
    file = folder / "tokenizer.json"
    if not file.is_file():
        return _by_transformers(folder)
    tokenizer = tokenizer_in(file)

    def save(into: Path) -> None:
        for name in TOKENIZER_FILES:
            if (folder / name).is_file():
                (into / name).write_bytes((folder / name).read_bytes())

    return Words(lambda text: tokenizer.encode(text).ids, lambda ids: tokenizer.decode(ids), save)


def tokenizer_in(file: Path) -> Any:
    """The tokenizer of a tokenizer.json."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ImportError("reading a tokenizer needs tokenizers: pip install tokenizers") from None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # that library raises this class and no other
        raise ValueError(f"{file} cannot be read: {reason(error)}") from None


def _by_transformers(folder: Path) -> Words:
    missing = f"{folder} has no tokenizer.json"
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"{missing}, and no other tokenizer's files")  # transformers would make up an empty one
    transformers = transformers_for(f"{missing}; to read another tokenizer: pip install transformers")
    with _quiet(transformers):
        try:
            return _of_transformers(transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True))
        except Exception as error:
            raise ValueError(f"{missing}, and no other tokenizer: {reason(error, 200)}") from None


def _of_transformers(tokenizer: Any) -> Words:
    return Words(
        lambda text: list(tokenizer(text)["input_ids"]),
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        lambda into: tokenizer.save_pretrained(into),
    )
