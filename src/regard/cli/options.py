"""Options that several commands have, in the same words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli import complete


def about(said: str, *flags: str, **more: Any) -> Any:
    """An option, and what its help says; a switch names its one flag."""
    return typer.Option(*flags, help=said, **more)


def one_of(names: Sequence[str], said: str, *flags: str) -> Any:
    """An option whose value is one of these names; a shell completes it."""
    return about(said, *flags, autocompletion=complete.one_of(names))


def some_of(names: Sequence[str], said: str) -> Any:
    """An option that takes several of these names, comma-separated."""
    return about(said, autocompletion=complete.some_of(names))


def language(said: str) -> Any:
    return one_of(("en", "zh"), said)


Device = Annotated[str, one_of(complete.DEVICES, "Device that runs the model.")]
Dtype = Annotated[
    str | None, one_of(complete.DTYPES, "Data type: float32, bfloat16, … (default: that of the weights).")
]
Trained = Annotated[list[Path] | None, about("Folder of a trained model; repeat for an ensemble.")]
LengthPenalty = Annotated[float, about("Length penalty α: scores are log P / ((5 + length) / 6)^α.")]
TopK = Annotated[int | None, about("Sample from the k likeliest tokens.")]
TopP = Annotated[float | None, about("Sample from the smallest set of tokens with this total probability.")]
# What commands that search or draw pass on under the same names: errors of the library say them as options.
WRITING = (
    "length_penalty", "temperature", "top_k", "top_p", "seed", "beams", "best", "batch_tokens", "max_new_tokens",
)  # fmt: skip
