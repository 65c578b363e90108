"""Runs that are smaller than the command's toy: seconds, not a minute."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from regard.train import Settings, Trainer, toy, toy_settings, translation_trainer

PAD, UNKNOWN, START, STOP = range(4)  # <pad>, <unk>, <s> and </s> in every vocabulary
DATA = toy(60, 6, seed=3)
SMALL = dataclasses.replace(
    toy_settings(),
    vocab_size=120,
    embed_dim=16,
    num_layers=1,
    num_heads=2,
    ff_dim=24,
    batch_tokens=150,
    steps=14,
    warmup=5,
    validate_every=7,
    bleu_every=1,
    save_every=5,
)


def trainer(out: Path, *, with_bleu: bool = False, **changes: Any) -> Trainer:
    settings: Settings = dataclasses.replace(SMALL, **changes)
    found = translation_trainer(settings, DATA, out, with_bleu=with_bleu)
    found.start()
    return found
