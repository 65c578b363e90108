"""How a family of Hugging Face models is described: tables of ours next to theirs, which are read in both directions.

The tables say where a configuration has each field, and how each weight is called. `from_hf` reads them from theirs to
ours, `to_hf` from ours to theirs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from regard.interop._hf_fields import ACTIVATIONS, Fields
from regard.models import Config


@dataclass(frozen=True)
class Source:
    """What a configuration is made from: its fields, the class it belongs to, and which weights there are."""

    fields: Fields
    architecture: str
    weights: frozenset[str]
    equal: Callable[[str, str], bool]  # whether two weights hold the same numbers

    @property
    def has_head(self) -> bool:
        """Whether a decoder predicts tokens: that of a class …Model does not, but for GPT-2's …LMHeadModel."""
        return not self.architecture.endswith("Model") or self.architecture.endswith("LMHeadModel")


def _as_it_is(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Field:
    """A field of their configuration: its name, what their class has there by default, and the way to and from ours."""

    theirs: str
    usual: Any
    read: Callable[[Fields, str, Any], Any]
    write: Callable[[Any], Any] = _as_it_is

    @staticmethod
    def size(theirs: str, usual: int | None = None) -> Field:
        return Field(theirs, usual, Fields.size)

    @staticmethod
    def size_or_none(theirs: str, usual: int | None = None) -> Field:
        return Field(theirs, usual, Fields.size_or_none)

    @staticmethod
    def number(theirs: str, usual: float) -> Field:
        return Field(theirs, usual, Fields.number)

    @staticmethod
    def flag(theirs: str, usual: bool) -> Field:
        return Field(theirs, usual, Fields.flag)

    @staticmethod
    def activation(theirs: str, usual: str) -> Field:
        return Field(theirs, usual, Fields.activation, _WRITTEN_ACTIVATIONS.__getitem__)


# several of their names mean one of ours: the first is written
_WRITTEN_ACTIVATIONS = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
Given = dict[str, Any]
# for fields that tokens with a meaning have in theirs: ours do not say which those are
NO_TOKENS: Given = {"bos_token_id": None, "eos_token_id": None}


@dataclass(frozen=True, kw_only=True)
class Family:
    """Args:
    name: as people write it.
    config: the class of our configuration; `theirs` is the name of theirs.
    fields: of our configuration, and where theirs has each.
    fixed: what our configuration says of every model of this family, and theirs need not say.
    usual: the same, of fields that are as they are by default.
    chosen: the same, but `to_hf` takes models that differ: how weights are stored and how they start.
    further: fields of ours that depend on more than one of theirs, from the source and what was read so far.
    written: fields of theirs that depend on more than one of ours.
    lacking: what a configuration may have and this family cannot express, in words.
    weights: modules (or single weights) of ours and how theirs are called, of a configuration; "#" is a number.
    only: fields of theirs of which only these values have a counterpart; the first is their default.
    ignored: fields of theirs that do not change what is computed.
    overwritten: fields that their class changes when it is made, and that are set again afterwards.
    prefix: what stands before the names of a model inside another one; names elsewhere are without it.
    renames: other spellings of their names, as pattern and replacement.
    copies: names under which a weight may be stored a second time.
    computed: a pattern of names that hold no weights.
    transposed: endings of our names whose matrices are stored the other way round.
    batched: endings of our names that are stored with a batch of one.
    """

    name: str
    config: type[Any]
    theirs: str
    fields: Mapping[str, Field]
    weights: Callable[[Any], Mapping[str, str]]
    further: Callable[[Source, Given], Given]
    written: Callable[[Any], Given] = lambda config: {}
    lacking: Callable[[Any], Mapping[str, bool]] = lambda config: {}
    fixed: Mapping[str, Any] = field(default_factory=dict)
    usual: tuple[str, ...] = ()
    chosen: Mapping[str, Any] | None = None
    only: Mapping[str, tuple[Any, ...]] | None = None
    ignored: tuple[str, ...] = ()
    overwritten: tuple[str, ...] = ()
    prefix: str = ""
    renames: tuple[tuple[str, str], ...] = ()
    copies: Mapping[str, str] | None = None
    computed: str = r"(?!)"
    transposed: tuple[str, ...] = ()
    batched: tuple[str, ...] = ()

    def configured(self, source: Source) -> Config:
        """Our configuration, of theirs."""
        for name, allowed in (self.only or {}).items():
            source.fields.only(name, *allowed)
        given = {ours: each.read(source.fields, each.theirs, each.usual) for ours, each in self.fields.items()}
        given = {**self.fixed, **(self.chosen or {}), **given}
        config: Config = self.config(**{**given, **self.further(source, given)})
        self.close(source)
        return config

    def close(self, source: Source) -> None:
        """Refuse fields that nobody read."""
        source.fields.close(*self.ignored)

    def said(self, config: Any) -> Given:
        """The fields of their configuration, of ours."""
        usual = {each.name: each.default for each in dataclasses.fields(self.config) if each.name in self.usual}
        fixed = {**usual, **self.fixed}
        lacking = {f"{name}={getattr(config, name)!r}": getattr(config, name) != fixed[name] for name in fixed}
        first: dict[str, str] = {}
        for name, each in self.fields.items():  # one field of theirs may stand for several of ours
            other = first.setdefault(each.theirs, name)
            one, two = getattr(config, other), getattr(config, name)
            lacking[f"{other}={one} with {name}={two}"] = one != two
        refuse(self.name, {**lacking, **self.lacking(config)})
        given = {each.theirs: each.write(getattr(config, name)) for name, each in self.fields.items()}
        return {**given, **self.written(config)}

    def names(self, config: Any, ours: Iterable[str]) -> dict[str, str]:
        """Our names of weights, and theirs."""
        table = self.weights(config)
        return {name: _renamed(table, name) for name in ours}


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def _renamed(table: Mapping[str, str], name: str) -> str:
    pattern, numbers = _NUMBER.sub("#", name), iter(_NUMBER.findall(name))
    module = pattern if pattern in table else pattern.rpartition(".")[0]
    return re.sub("#", lambda _: next(numbers), table[module]) + pattern.removeprefix(module)


def refuse(family: str, lacking: Mapping[str, bool], what: str = "the model") -> None:
    if found := [name for name, present in lacking.items() if present]:
        raise ValueError(f"{what} has {', '.join(found)}, which {family} cannot express")


def changed(fields: Mapping[str, Field], **usual: Any) -> dict[str, Field]:
    """The same fields, of a class that has other defaults."""
    return {ours: dataclasses.replace(each, usual=usual.get(ours, each.usual)) for ours, each in fields.items()}


def projections(ours: str, theirs: str, names: Mapping[str, str]) -> dict[str, str]:
    """Several modules that stand next to each other."""
    return {f"{ours}.{our}": f"{theirs}.{their}" for our, their in names.items()}
