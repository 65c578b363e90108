"""While a block is open, operators of tensors of other kinds run as ever: they may have no kernel for plain ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import regard
from regard import edits

NET = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
OTHER = nn.Linear(16, 16)


def fake(x: Tensor) -> object:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return OTHER(mode.from_tensor(x)).shape


def exported(x: Tensor) -> object:
    return torch.export.export(OTHER, (x,))


def jagged(x: Tensor) -> object:
    return OTHER(torch.nested.nested_tensor([x[0], x[0, :3]], layout=torch.jagged)).values().sum().backward()


@pytest.mark.parametrize("work", [fake, exported, jagged])
@pytest.mark.parametrize("edited", [False, True])
def test_tensors_of_other_kinds_run_inside_a_block(work: object, edited: bool) -> None:
    x = torch.randn(1, 5, 16)
    block = regard.edit(NET, edits.ablate("zero"), heads=[0]) if edited else regard.watch(NET)
    with block:
        NET(x)
        work(x)  # type: ignore[operator]
