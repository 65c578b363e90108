"""What every experiment returns: numbers, tables in words, a figure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from regard import api, lab
from regard._checks import check_count
from regard._display import texts
from regard._walk._table import Matrix, Row, Table
from regard.statistics import Want

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor, nn

    from regard.masks import Mask
    from regard.observation import Observation

__all__ = ["Matrix", "Result", "Row", "Table"]


class Words:
    """The texts of an experiment in one language: one, several, or the frame of a table."""

    def __init__(self, catalogue: texts.Catalogue, lang: str) -> None:
        self.lang = lang
        self._text = partial(texts.text, catalogue, lang)

    def __call__(self, key: str, **values: object) -> str:
        return self._text(key, **values)

    def each(self, *keys: str, **values: object) -> tuple[str, ...]:
        return tuple(self(key, **values) for key in keys)

    def table(self, title: str, columns: Iterable[str], rows: Iterable[Iterable[str]], **values: object) -> Table:
        """A table whose title is the text of a key, with its `values`."""
        return Table(self(title, **values), tuple(columns), tuple(map(tuple, rows)))


class Result:
    """The base of all results. A result is a frozen dataclass of plain numbers, and says what it found:

    found = lab.variance()
    found.raw                # a number
    found.to_dict()          # all of them, as JSON holds them
    found.figure()           # a matplotlib figure
    found.tables("zh")       # what the command prints, in Chinese
    found.figure("zh")       # with labels in Chinese
    """

    name: ClassVar[str]  # "E3"
    topic: ClassVar[str]  # "variance": the function, its file, and its part of words.json

    def __init_subclass__(cls) -> None:
        package, _, topic = cls.__module__.rpartition("._")
        if package == "regard.lab":
            cls.topic, cls.name = topic, lab.find(topic)

    def to_dict(self, lang: str = "en") -> dict[str, Any]:
        """All numbers as what JSON holds, and the title in a language."""
        numbers = dataclasses.asdict(self)  # type: ignore[call-overload]
        return {
            "experiment": self.name,
            "title": self.say("title", lang),
            "torch": torch.__version__,
            "numbers": numbers,
        }

    @classmethod
    def words(cls) -> texts.Catalogue:
        """All texts of the experiment, by key; `claim`, `right` and `why` only where a note is wrong."""
        return lab.words(cls.topic)

    def say(self, key: str, lang: str = "en", **values: object) -> str:
        """One text of the experiment."""
        return texts.text(self.words(), lang, key, **values)

    def tables(self, lang: str = "en") -> list[Table]:
        """What the command prints, in a language."""
        return self._tables(Words(self.words(), lang))

    def _tables(self, say: Words) -> list[Table]:
        raise NotImplementedError

    def figure(self, lang: str = "en") -> Figure:
        """A matplotlib figure, in English, or in Chinese with ``lang="zh"``, which needs a font that has Chinese."""
        from regard.lab._draw import drawn

        return drawn(self._figure, texts.language(lang), self.words())

    def _figure(self) -> Figure:
        raise NotImplementedError


def look(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Mask | None = None, scale: float | None = None
) -> Observation:
    """One attention call, with all of its weights."""
    want = Want(map=None, top_k=0, distance=False, weights=(slice(None), slice(None)))
    return api.observe(query, key, value, mask=mask, scale=scale, want=want)


def check_counts(**given: int) -> None:
    """Arguments that count something: whole numbers from 1 on."""
    for name, value in given.items():
        check_count(name, value, kind=int)


def rows(tensor: Tensor) -> Matrix:
    """A matrix as plain numbers; leading axes must have one element."""
    flat = tensor.detach().reshape(tensor.shape[-2:])
    return tuple(tuple(row) for row in flat.tolist())


def numbers(label: str, values: Row, digits: int = 4) -> tuple[str, ...]:
    """A row of a table: its name, then its numbers."""
    return (label, *(f"{round(value, digits) + 0.0:.{digits}f}" for value in values))  # + 0.0: no minus before a zero


def named_rows(names: Iterable[str], values: Matrix, digits: int = 4) -> Iterator[tuple[str, ...]]:
    """The rows of a table of numbers."""
    return (numbers(name, row, digits) for name, row in zip(names, values, strict=True))


def parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
