"""Options that several commands have, in the same words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard.cli import complete

Device = Annotated[
    str, typer.Option(help="Device that runs the model.", autocompletion=complete.one_of(complete.DEVICES))
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Data type: float32, bfloat16, … (default: that of the weights).",
        autocompletion=complete.one_of(complete.DTYPES),
    ),
]
Trained = Annotated[list[Path] | None, typer.Option(help="Folder of a trained model; repeat for an ensemble.")]
LengthPenalty = Annotated[float, typer.Option(help="Length penalty α: scores are log P / ((5 + length) / 6)^α.")]
TopK = Annotated[int | None, typer.Option(help="Sample from the k likeliest tokens.")]
TopP = Annotated[float | None, typer.Option(help="Sample from the smallest set of tokens with this total probability.")]
# What commands that search or draw pass on under the same names: errors of the library say them as options.
WRITING = (
    "length_penalty", "temperature", "top_k", "top_p", "seed", "beams", "best", "batch_tokens", "max_new_tokens",
)  # fmt: skip
