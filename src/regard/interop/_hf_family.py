"""How a family of Hugging Face models is described."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from regard.interop._hf_fields import Fields
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


@dataclass(frozen=True)
class Family:
    """Args:
    prefix: what stands before the names of a model inside another one; names elsewhere are without it.
    configure: our configuration, of theirs.
    names: ours to theirs, of a configuration.
    renames: other spellings of their names, as pattern and replacement.
    copies: names under which a weight may be stored a second time.
    computed: a pattern of names that hold no weights.
    transposed: endings of our names whose matrices are stored the other way round.
    batched: endings of our names that are stored with a batch of one.
    """

    prefix: str
    configure: Callable[[Source], Config]
    names: Callable[[Any], dict[str, str]]
    renames: tuple[tuple[str, str], ...] = ()
    copies: Mapping[str, str] | None = None
    computed: str = r"(?!)"
    transposed: tuple[str, ...] = ()
    batched: tuple[str, ...] = ()


def both(ours: str, theirs: str) -> dict[str, str]:
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")}


def maybe(bias: bool, ours: str, theirs: str) -> dict[str, str]:
    return both(ours, theirs) if bias else {f"{ours}.weight": f"{theirs}.weight"}
