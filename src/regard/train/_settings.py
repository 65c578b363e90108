"""Everything that decides what a run does, in one value that is written next to its checkpoints."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard._checks import check_choice, check_field

CHOICES = {
    "task": ("translate", "lm"),
    "norm": ("post", "pre"),
    "schedule": ("inverse-sqrt", "cosine", "constant"),
    "average": ("ema", "last", "none"),
    "precision": ("auto", "float32", "bfloat16"),
}
FROM_ZERO = ("warmup", "patience", "seed")  # the other whole numbers are at least 1
# the other numbers are at least 0, without a bound
BELOW_ONE = ("dropout", "attention_dropout", "ff_dropout", "bpe_dropout", "smoothing", "beta1", "beta2", "ema_decay")


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
        validate_every: steps between validations; each `bleu_every`th also measures BLEU, where the task has it.
        patience: measurements of BLEU (of a language model: of the loss) without a gain that end the run (0: never).
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
        for field in dataclasses.fields(self):
            _check(field.name, str(field.type), getattr(self, field.name))
        if self.source == self.target:
            raise ValueError(f"source and target are both {self.source!r}; expected two languages")
        if self.embed_dim % self.num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads={self.num_heads}, got {self.embed_dim}")
        if self.round_lengths > self.max_tokens:
            raise ValueError(f"round_lengths must be at most max_tokens={self.max_tokens}, got {self.round_lengths}")
        if self.seed >= 2**63:
            raise ValueError(f"seed must be below 2^63, got {self.seed}")
        if self.minutes == 0:
            raise ValueError("minutes must be above 0, or None, which sets no limit; got 0")

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


def _check(name: str, kind: str, value: Any) -> None:
    """One setting, by the type of its field."""
    if name in CHOICES:
        check_choice(name, value, CHOICES[name])
    if kind == "str" and (not isinstance(value, str) or not value):
        raise ValueError(f"{name} must be a word, got {value!r}")
    closed = name == "distill"  # a student may learn from its teachers alone
    high = 1.0 if closed or name in BELOW_ONE else math.inf
    expected = f"in [0.0, {high}{']' if closed else ')'}"
    least = 0 if name in FROM_ZERO else 1
    check_field(name, kind, value, least, expected, lambda x: 0.0 <= x < high or (closed and x == high))
