"""What settings make of a model before its first step."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.train.small import SMALL

from regard.models import Transformer
from regard.train import Settings
from regard.train._build import model_of


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_branches_start_small_where_the_norm_follows_the_sum(norm: str) -> None:
    settings = dataclasses.replace(SMALL, norm=norm, branch_init=0.25)
    torch.manual_seed(1)
    model = model_of(settings, 50)
    assert isinstance(model, Transformer)
    torch.manual_seed(1)
    plain = dict(Transformer(model.config).named_parameters())
    for name, weight in model.named_parameters():
        last = name.endswith(("out_proj.weight", "down.weight"))
        assert torch.equal(weight, plain[name] * (0.25 if last and norm == "post" else 1.0)), name


def test_a_negative_start_is_refused() -> None:
    with pytest.raises(ValueError, match=r"branch_init.*-1"):
        Settings(branch_init=-1.0)
