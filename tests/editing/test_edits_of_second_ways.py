"""Models that use their weights by a second way: what depends on them is right under an edit, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard import edits

Ways = Callable[[Any, Tensor, Tensor], Tensor]


class Twice(nn.Module):
    def __init__(self, way: Ways) -> None:
        super().__init__()
        self.way, self.num_heads, self.qkv, self.out = way, 3, nn.Linear(24, 72), nn.Linear(24, 24)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor, cut: bool = False) -> Tensor:
        q, k, v = (part.unflatten(-1, (3, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        logits = q @ k.mT
        if cut:
            logits = logits.index_fill(-1, torch.tensor([1]), -torch.inf)
        return self.way(self, logits.softmax(-1), v)

    def joined(self, out: Tensor) -> Tensor:
        made: Tensor = self.out(out.transpose(1, 2).flatten(2))
        return made


def made(model: Ways) -> tuple[Twice, Tensor]:
    torch.manual_seed(0)
    return Twice(model).double().eval(), torch.randn(2, 5, 24, dtype=torch.float64)


def largest_times(m: Twice, w: Tensor, v: Tensor) -> Tensor:
    return m.joined((w @ v) * w.amax(-1, keepdim=True))


def of_max(m: Twice, w: Tensor, v: Tensor) -> Tensor:
    return m.joined((w @ v) * w.max(-1, keepdim=True).values)


def sum_times(m: Twice, w: Tensor, v: Tensor) -> Tensor:
    left = w.tril()
    return m.joined((left @ v) * left.sum(-1, keepdim=True))


def log_sum(m: Twice, w: Tensor, v: Tensor) -> Tensor:
    return m.joined((w @ v) + w.logsumexp(-1, keepdim=True))


def afterwards(m: Twice, w: Tensor, v: Tensor) -> Tensor:
    return m.joined(w @ v) * w.amax(-1).amax(1).unsqueeze(-1)


def with_values_before(m: Twice, w: Tensor, v: Tensor) -> Tensor:
    gate = (v * w.std(-1, keepdim=True)).mean((1, 3))
    return m.joined(w @ v) * gate.unsqueeze(-1)


def a_part(m: Twice, w: Tensor, v: Tensor) -> Tensor:
    return m.joined(w @ v) * w[:, 0, :, :1]


def picked_tokens(m: Twice, w: Tensor, v: Tensor) -> Tensor:
    out = m.joined(w @ v)
    most = w.mean((1, 2)).topk(3, -1).indices
    return out.gather(1, most.unsqueeze(-1).expand(-1, -1, 24))


@pytest.mark.parametrize(
    "way", [largest_times, of_max, sum_times, log_sum, afterwards, with_values_before, a_part, picked_tokens]
)
def test_an_output_that_depends_on_the_weights_by_a_second_way_is_refused(way: Ways) -> None:
    model, x = made(way)
    with (
        torch.no_grad(),
        pytest.raises(edits.CannotEdit, match="computed from"),
        regard.edit(model, edits.cut(keys=1)),
    ):
        model(x)


class Gone(Twice):
    """The weights live no more when what was computed from them is used."""

    def attended(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (part.unflatten(-1, (3, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        w = (q @ k.mT).softmax(-1)
        return self.joined(w @ v), w.amax((1, 2))

    def forward(self, x: Tensor, cut: bool = False) -> Tensor:
        out, most = self.attended(x)
        x = F.layer_norm(x + out, (24,)) * 1.5
        if self.way is afterwards:
            return x * most.sqrt().unsqueeze(-1)
        return x.gather(1, most.argsort(-1)[:, -3:, None].expand(-1, -1, 24))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("way", [afterwards, picked_tokens])
def test_what_was_computed_from_weights_that_are_gone_is_a_second_way_too(way: Ways, mode: Any) -> None:
    torch.manual_seed(0)
    model, x = Gone(way).double().eval(), torch.randn(2, 5, 24, dtype=torch.float64)
    with mode(), pytest.raises(edits.CannotEdit, match="computed from"), regard.edit(model, edits.cut(keys=1)):
        model(x)


def entropy(m: Twice, w: Tensor, v: Tensor) -> Tensor:
    m.seen = -(w * (w + 1e-9).log()).sum(-1).mean()
    return m.joined(w @ v)


def two_products(m: Twice, w: Tensor, v: Tensor) -> Tensor:
    return m.joined(w @ v) + m.joined(w @ v.sin())


def two_that_meet(m: Twice, w: Tensor, v: Tensor) -> Tensor:
    return m.joined(w @ v + w @ v.sin())


@pytest.mark.parametrize("way", [entropy, two_products, two_that_meet])
def test_what_is_only_looked_at_and_two_products_are_no_second_way(way: Ways) -> None:
    model, x = made(way)
    with torch.no_grad():
        wanted = model(x, cut=True)
        with regard.edit(model, edits.cut(keys=1)):
            found = model(x)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
