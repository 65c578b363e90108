"""Weights that are made of queries and keys by something else than a softmax: listed, and refused by edits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.watching.models import ByHand, Stack
from torch import Tensor, nn

import regard
from regard import edits

X = torch.randn(2, 7, 30, generator=torch.Generator().manual_seed(1))
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


class Attends(nn.Module):
    """Three heads; what becomes of queries, keys and values is given."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way, self.num_heads, self.qkv, self.base = way, 3, nn.Linear(30, 90), nn.Parameter(torch.rand(3, 1, 1) + 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (3, 10)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        out = self.way(q, k, v) if self.way is not of_a_learned_base else self.way(q, k, (v, self.base))  # type: ignore
        return out.transpose(1, 2).flatten(2)


def by(curve: Callable[[Tensor], Tensor]) -> Way:
    return lambda q, k, v: curve(q @ k.mT / 10**0.5) @ v


def masked(logits: Tensor) -> Tensor:
    return (logits.sigmoid() * torch.ones(7, 7).tril()).view(6, 7, 7).view(2, 3, 7, 7)


def divided(logits: Tensor) -> Tensor:
    weights = F.softplus(logits)
    return F.dropout(weights / weights.sum(-1, keepdim=True), 0.1)


def sparsemax(logits: Tensor) -> Tensor:
    ordered = logits.sort(-1, descending=True).values
    sums, count = ordered.cumsum(-1) - 1, torch.arange(1, 8)
    some = (count * ordered > sums).sum(-1, keepdim=True)
    return (logits - sums.gather(-1, some - 1) / some).clamp(min=0)


def entmax(logits: Tensor) -> Tensor:
    least = logits.amax(-1, keepdim=True) - 1
    weights = (logits - least).clamp(min=0) ** 2
    return weights / weights.sum(-1, keepdim=True)


def with_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).relu(), v)


def of_a_learned_base(q: Tensor, k: Tensor, rest: Any) -> Tensor:
    v, base = rest
    logits = q @ k.mT
    numbers = base ** (logits - logits.amax(-1, keepdim=True))
    return (numbers / numbers.sum(-1, keepdim=True)) @ v


@pytest.mark.parametrize(
    ("way", "name"),
    [
        (by(torch.sigmoid), "sigmoid"),
        (by(masked), "sigmoid"),
        (by(lambda logits: logits.sigmoid().tril()), "sigmoid"),
        (by(F.relu6), "hardtanh"),
        (by(F.hardswish), "hardswish"),
        (by(F.mish), "mish"),
        (by(lambda logits: logits.relu().square() / 7), "relu"),
        (by(lambda logits: logits**2), "pow"),
        (by(F.gelu), "gelu"),
        (by(lambda logits: F.elu(logits) + 1), "elu"),
        (by(divided), "softplus"),
        (by(sparsemax), "clamp"),
        (by(entmax), "clamp"),
        (with_einsum, "relu"),
        (of_a_learned_base, "pow"),
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_weights_of_no_softmax_are_listed_next_to_others_and_not_edited(way: Way, name: str, mode: Any) -> None:
    model = Stack(ByHand(30), Attends(way))
    with mode():
        with pytest.warns(UserWarning, match="missed some attention calls"), regard.watch(model) as recording:
            model(X)
        assert [call.path for call in recording] == ["layers.0"]
        ((path, why),) = recording.missed
        assert path == "layers.1" and f"made by {name}" in why
        with pytest.raises(edits.CannotEdit, match=f"layers.1 .*made by {name}"), regard.edit(model, edits.cut(keys=1)):
            model(X)
        with regard.edit(model, edits.cut(keys=1), layers=[0]) as report:
            model(X)
        assert len(report) == 1


class Scored(nn.Module):
    """Scores that pick or weigh heads, and experts: no attention."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.qkv = how, nn.Linear(30, 90)
        self.up, self.down = (nn.Parameter(torch.randn(2, *size)) for size in ((30, 40), (40, 30)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, _ = (part.unflatten(-1, (3, 10)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.how == "indexer":  # the heads' scores are summed with a gate for each, as DeepSeek does it
            scores = torch.einsum("bhqk,bqh->bqk", (q @ k.mT).relu(), x[..., :3])
            return x.gather(1, scores.topk(1, -1).indices.expand(-1, -1, 30))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.how == "autocast"):
            return torch.bmm(torch.bmm(x, self.up).relu(), self.down).float()


@pytest.mark.parametrize("how", ["indexer", "experts", "autocast"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_scores_and_products_with_learned_matrices_that_are_no_attention_give_no_alarm(how: str, mode: Any) -> None:
    model = Stack(ByHand(30), Scored(how))
    with mode(), regard.watch(model) as recording:
        model(X)
    assert recording.missed == [] and [call.path for call in recording] == ["layers.0"]
