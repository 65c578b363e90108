"""Everything that decides what a run does, in one value that is written next to its checkpoints."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard._checks import check_count

TASKS = ("translate", "lm")
SCHEDULES = ("inverse-sqrt", "cosine", "constant")
AVERAGES = ("ema", "last", "none")
PRECISIONS = ("auto", "float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of a training run; the defaults are the recipe for a small parallel corpus (docs: Training).

    Args:
        task: "translate" (an encoder-decoder `Transformer`) or "lm" (a `Decoder` that continues a text).
        source, target: the endings of the two text files, which name the languages.
        vocab_size: pieces of the byte-pair vocabulary, which both languages share.
        lowercase: everything is lower-cased before it is split.
        bpe_dropout: the probability with which a merge is skipped when a training sentence is split.
        batch_tokens: maximum number of tokens per step on either side, including padding.
        peak_lr, warmup, schedule: the learning rate rises to its peak in `warmup` steps, then falls.
        r_drop: α of R-Drop: each batch passes twice, and the two outputs are pulled together.
        branch_init: with norm "post", what the last matrix of each branch starts at, as a multiple of Xavier's weights.
        ff_dropout: inside feed-forward layers, after the activation; of translators alone.
        distill: how much of the loss is the teachers' distribution, where the data has one.
        average: "ema" (with `ema_decay`), "last" (the mean of the `last` newest validated weights), or "none".
        validate_every: steps between validations; `patience` of them without a gain end the run (0: never).
        minutes: stop after so long, whatever `steps` says.
    """

    task: str = "translate"
    source: str = "en"
    target: str = "de"
    vocab_size: int = 10_000
    lowercase: bool = False
    bpe_dropout: float = 0.0
    max_tokens: int = 256

    embed_dim: int = 192
    num_layers: int = 4
    num_heads: int = 6
    ff_dim: int = 384
    norm: str = "post"
    branch_init: float = 0.25
    activation: str = "relu"
    dropout: float = 0.3
    attention_dropout: float = 0.0
    ff_dropout: float = 0.0

    batch_tokens: int = 7_500
    round_lengths: int = 1
    steps: int = 6_000
    warmup: int = 1_000
    peak_lr: float = 5e-3
    schedule: str = "inverse-sqrt"
    beta1: float = 0.9
    beta2: float = 0.98
    weight_decay: float = 0.0
    clip: float = 1.0
    smoothing: float = 0.1
    r_drop: float = 1.0
    distill: float = 0.5
    average: str = "ema"
    ema_decay: float = 0.999
    last: int = 5

    validate_every: int = 250
    bleu_every: int = 4
    patience: int = 0
    save_every: int = 500
    minutes: float | None = None
    seed: int = 1
    precision: str = "auto"
    graphs: bool = True

    def __post_init__(self) -> None:
        _choose(self, "task", TASKS)
        _choose(self, "schedule", SCHEDULES)
        _choose(self, "average", AVERAGES)
        _choose(self, "precision", PRECISIONS)
        for name in ("vocab_size", "embed_dim", "num_layers", "num_heads", "ff_dim", "batch_tokens", "round_lengths",
                     "steps", "last", "validate_every", "bleu_every", "save_every", "max_tokens"):  # fmt: skip
            check_count(name, getattr(self, name), kind=int)
        if self.embed_dim % self.num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads={self.num_heads}, got {self.embed_dim}")
        for name in ("warmup", "patience", "seed"):
            check_count(name, getattr(self, name), 0, kind=int)
        if self.seed >= 2**63:
            raise ValueError(f"seed must be below 2^63, got {self.seed}")
        for name in ("dropout", "attention_dropout", "ff_dropout", "bpe_dropout", "smoothing", "beta1", "beta2",
                     "ema_decay"):  # fmt: skip
            _between(self, name, 0.0, 1.0, open_end=True)
        _between(self, "distill", 0.0, 1.0)
        for name in ("peak_lr", "clip", "branch_init", "r_drop", "weight_decay"):
            _between(self, name, 0.0, math.inf, open_end=True)
        if self.minutes is not None:
            _between(self, "minutes", 0.0, math.inf, open_end=True)

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def read_settings(path: Path) -> Settings:
    """The settings of a run, as `as_json` wrote them.

    Raises:
        ValueError: the file holds something else; the message names it.
        OSError: the file cannot be read.
    """
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(given, dict):
            raise ValueError("expected an object")
        unknown = given.keys() - {field.name for field in dataclasses.fields(Settings)}
        if unknown:
            raise ValueError(f"unknown option {', '.join(sorted(unknown))}")
        return Settings(**given)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} does not hold the settings of a training run: {error}") from None


def _choose(settings: Settings, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(settings, name)
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _between(settings: Settings, name: str, low: float, high: float, *, open_end: bool = False) -> None:
    value: Any = getattr(settings, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (low <= value < high if open_end else low <= value <= high):
        raise ValueError(f"{name} must be in [{low}, {high}{')' if open_end else ']'}, got {value}")
