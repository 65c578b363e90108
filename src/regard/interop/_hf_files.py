"""Folders with a `config.json` and weights in safetensors files, one or several."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# A configuration or an index of the largest models has a few megabytes.
_LARGEST_JSON = 64 << 20
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read_json(path: Path) -> dict[str, Any]:
    """An object without duplicate keys.

    Raises:
        ValueError: the file is missing, too large, or no JSON object.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing: a model's folder has it")
    if path.stat().st_size > _LARGEST_JSON:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; {_LARGEST_JSON} are the most that is read")
    return parse_json(path.read_bytes(), str(path))


def parse_json(text: bytes | str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text if isinstance(text, str) else text.decode("utf-8"), object_pairs_hook=_unique)
    except (UnicodeDecodeError, RecursionError, json.JSONDecodeError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where} holds a {type(found).__name__}; expected an object")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return found


class Weight(NamedTuple):
    """A weight of a model: its name where it is stored, its shape, and how to get at its numbers."""

    stored: str
    shape: list[int]
    read: Callable[[], Tensor]


class Tensors:
    """The tensors of a folder by name, each read from its file when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._open = ExitStack()
        self._of: dict[str, Any] = {}
        self.metadata: dict[str, str] = {}  # of all files together
        try:
            files = _files(folder)
            for file in files:
                self._add(file, files[file])
        except BaseException:
            self._open.close()
            raise

    def _add(self, file: Path, expected: list[str]) -> None:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise ImportError("reading weights needs safetensors: pip install safetensors") from None
        try:
            there = self._open.enter_context(safe_open(file, framework="pt"))
            names = list(there.keys())
            self.metadata |= there.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} cannot be read as safetensors: {error}") from None
        if twice := [name for name in names if name in self._of]:
            raise ValueError(f"{file} holds {twice[0]}, which another file of the folder holds too")
        if missing := sorted(set(expected) - set(names)):
            raise ValueError(f"{file} does not hold {missing[0]}, which the index says it does")
        self._of |= dict.fromkeys(names, there)

    def __enter__(self) -> Tensors:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def weights(self) -> dict[str, Weight]:
        return {name: Weight(name, self.shape(name), partial(self.__getitem__, name)) for name in self}

    def shape(self, name: str) -> list[int]:
        found: list[int] = self._of[name].get_slice(name).get_shape()
        return found

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = self._of[name].get_tensor(name)
        return found


def _files(folder: Path) -> dict[Path, list[str]]:
    """The files with weights, and what an index says is in each."""
    if (folder / WHOLE).is_file():
        return {folder / WHOLE: []}
    if (folder / INDEX).is_file():
        named = read_json(folder / INDEX).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
            raise ValueError(f"{folder / INDEX} has no weight_map from names to files")
        files: dict[Path, list[str]] = {folder / name: [] for name in sorted(set(named.values()))}
        for name in sorted(set(named.values())):
            if Path(name).name != name or not (folder / name).is_file():
                raise ValueError(f"{folder / INDEX} names the file {name!r}, which is not in the folder")
        for weight, name in named.items():
            files[folder / name].append(weight)
        return files
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        raise ValueError(
            f"{folder} has its weights in {pickles[0]}, a pickle, which can run any code when it is opened: it is not "
            "read. Save the model again with save_pretrained, which writes safetensors"
        )
    raise ValueError(f"{folder} has no weights: expected {WHOLE}, or {INDEX} with the files it names")
