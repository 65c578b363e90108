"""What settings make of a model before its first step."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.small import DATA, SMALL

from regard.models import Transformer
from regard.train import Settings, translation_trainer


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_branches_start_small_where_the_norm_follows_the_sum(norm: str, tmp_path: Path) -> None:
    settings = dataclasses.replace(SMALL, norm=norm, branch_init=0.25)
    model = translation_trainer(settings, DATA, tmp_path).model
    assert isinstance(model, Transformer)
    torch.manual_seed(settings.seed)
    plain = dict(Transformer(model.config).named_parameters())
    for name, weight in model.named_parameters():
        last = name.endswith(("out_proj.weight", "down.weight"))
        assert torch.equal(weight, plain[name] * (0.25 if last and norm == "post" else 1.0)), name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"branch_init": -1.0}, r"branch_init must be in \[0.0, inf\), got -1.0"),
        ({"dropout": 1.0}, r"dropout must be in \[0.0, 1.0\), got 1.0"),
        ({"distill": 1.5}, r"distill must be in \[0.0, 1.0\], got 1.5"),
        ({"peak_lr": float("nan")}, "peak_lr .* got nan"),
        ({"clip": "1"}, r"clip must be a number in \[0.0, inf\), got '1'"),
        ({"lowercase": "yes"}, "lowercase must be True or False, got 'yes'"),
        ({"norm": "middle"}, "norm must be one of post, pre, got 'middle'"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"patience": -1}, "patience must be at least 0, got -1"),
        ({"minutes": 0.0}, "minutes must be above 0, or None"),
        ({"source": "de", "target": "de"}, "source and target are both 'de'; expected two languages"),
        ({"source": ""}, "source must be a word, got ''"),
        ({"round_lengths": 300}, "round_lengths must be at most max_tokens=256, got 300"),
        ({"embed_dim": 63, "num_heads": 5}, "embed_dim must be a multiple of num_heads=5, got 63"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Settings(**given)


def test_the_ends_of_a_range_are_settings_too() -> None:
    Settings(distill=1.0, dropout=0.0, smoothing=0, warmup=0, patience=0, seed=0, minutes=0.5, round_lengths=256)
