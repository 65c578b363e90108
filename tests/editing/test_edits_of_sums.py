"""Written-out attentions whose outputs meet before heads are laid side by side: each has its own edit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import edits

HEADS, DIM = 4, 6
Cuts = tuple[int | None, int | None]


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(24, 72)

    def forward(self, x: Tensor, cut: int | None = None, keys: int | None = None) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        k, v = k[:, :, :keys], v[:, :, :keys]
        logits = q @ k.transpose(2, 3) / DIM**0.5
        if cut is not None and cut < k.shape[2]:
            logits = logits.index_fill(3, torch.tensor([cut]), -math.inf)
        return logits.softmax(-1) @ v


class Added(nn.Module):
    """Two attentions, which may have different numbers of keys."""

    def __init__(self, keys: int | None) -> None:
        super().__init__()
        self.near, self.far, self.out, self.keys = One(), One(), nn.Linear(24, 24), keys

    def forward(self, x: Tensor, cuts: Cuts = (None, None)) -> Tensor:
        near, far = self.near(x, cuts[0]), self.far(x, cuts[1], self.keys)
        return self.out((near + far).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("keys", [None, 4])
@pytest.mark.parametrize(
    ("given", "cuts"),
    [({}, (1, 1)), ({"layers": [0]}, (1, None)), ({"layers": [1]}, (None, 1))],
    ids=["both", "the first", "the second"],
)
def test_each_of_two_attentions_that_are_added_has_its_own_edit(
    given: dict[str, Any], cuts: Cuts, keys: int | None
) -> None:
    torch.manual_seed(0)
    model, x = Added(keys).double().eval(), torch.randn(2, 5, 24, dtype=torch.float64)
    with torch.no_grad():
        wanted = model(x, cuts)
        with regard.edit(model, edits.cut(keys=1), **given) as report:
            found = model(x)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert [call.layer for call in report.calls] == [at for at, cut in enumerate(cuts) if cut is not None]


def test_pieces_of_a_text_of_different_lengths_are_calls_of_their_own() -> None:
    """As vision towers read pictures."""

    class Pieces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.num_heads = nn.Linear(24, 72), HEADS

        def forward(self, x: Tensor, cut: int | None = None) -> Tensor:
            q, k, v = (t.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            made = []
            for start, stop in ((0, 3), (3, 8)):
                logits = q[:, :, start:stop] @ k[:, :, start:stop].mT
                if cut is not None:
                    logits = logits.index_fill(3, torch.tensor([cut]), -math.inf)
                made.append(logits.softmax(-1) @ v[:, :, start:stop])
            return torch.cat(made, 2).transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    model, x = Pieces().double().eval(), torch.randn(2, 8, 24, dtype=torch.float64)
    with torch.no_grad():
        wanted = model(x, 1)
        with regard.edit(model, edits.cut(keys=1)) as report:
            found = model(x)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert len(report.calls) == 2
