"""Weights of which a model keeps some after the softmax: read exactly and edited, or listed with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.watching.models import ByHand, Stack, check_statistics
from torch import Tensor, nn

import regard
from regard import edits

X = torch.randn(2, 7, 30, generator=torch.Generator().manual_seed(1))


class Thinned(nn.Module):
    """Three heads; what becomes of the weights, and of the values, is given."""

    def __init__(self, attend: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attend, self.num_heads, self.qkv = attend, 3, nn.Linear(30, 90)
        self.hidden: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (3, 10)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        logits = q @ k.mT
        if self.hidden is not None:
            logits = logits.index_fill(-1, torch.tensor([self.hidden]), -math.inf)
        return self.attend(logits, v).transpose(1, 2).flatten(2)


def weights_then(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, v: change(logits.softmax(-1)) @ v


def taken(v: Tensor, at: Tensor) -> Tensor:
    """The values of some keys for each query, [batch, head, query, key, dim]."""
    at = at.unsqueeze(-1).expand(*at.shape, v.shape[-1])
    return v.unsqueeze(2).expand(-1, -1, at.shape[2], -1, -1).gather(3, at)


def divided(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def exponentials(logits: Tensor, v: Tensor) -> Tensor:
    return divided(logits.exp().tril(3)) @ v


def in_place(weights: Tensor) -> Tensor:
    return weights.tril_(1)


EXACT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tril": weights_then(lambda w: w.tril()),
    "tril in place": weights_then(in_place),
    "triu": weights_then(lambda w: torch.triu(w, -2)),
    "divided again": weights_then(lambda w: divided(w.tril(1))),
    "threshold": weights_then(lambda w: F.threshold(w, 0.1, 0.0)),
    "small ones": weights_then(lambda w: F.hardshrink(w, 0.1)),
    "one key": weights_then(lambda w: w.index_fill(-1, torch.tensor([2]), 0.0)),
    "exponentials": exponentials,
    "numbers 0 and 1": weights_then(lambda w: w * torch.ones(7, 7, dtype=w.dtype).tril(1)),
    "booleans": weights_then(lambda w: w * (torch.arange(7) < 5)),
    "in place": weights_then(lambda w: w.mul_(torch.ones(7, 7, dtype=w.dtype).tril(1))),
    "normalized": weights_then(lambda w: F.normalize(w * (torch.arange(7) < 5), p=1.0, dim=-1)),
}


@pytest.mark.parametrize("name", list(EXACT))
def test_weights_of_which_some_become_0_are_read_and_edited(name: str) -> None:
    torch.manual_seed(0)
    kept: list[Tensor] = []

    def attend(logits: Tensor, v: Tensor) -> Tensor:
        out = EXACT[name](logits, v)
        kept.append(EXACT[name](logits, torch.eye(7, dtype=v.dtype).expand(2, 3, 7, 7)))
        return out

    model = Stack(ByHand(30), first := Thinned(attend)).double().eval()
    x = X.double()
    with torch.no_grad():
        expected = model(x)
        first.attend = EXACT[name]
        with regard.watch(model) as recording:
            assert torch.equal(model(x), expected)
        assert recording.missed == [] and len(recording) == 2
        check_statistics(recording.calls[1], kept[0])
        first.hidden = 1
        wanted, first.hidden = model(x), None
        with regard.edit(model, edits.cut(keys=1), layers=[1]):
            found = model(x)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def scattered(logits: Tensor, v: Tensor) -> Tensor:
    weights = logits.softmax(-1)
    largest, at = weights.topk(3, -1)
    return torch.zeros_like(weights).scatter(-1, at, largest) @ v


def scattered_in_place(logits: Tensor, v: Tensor) -> Tensor:
    weights = logits.softmax(-1)
    largest, at = weights.topk(3, -1)
    made = torch.zeros_like(weights)
    made.scatter_(-1, at, divided(largest))
    return made @ v


def summed(logits: Tensor, v: Tensor) -> Tensor:
    largest, at = logits.softmax(-1).topk(3, -1)
    return (divided(largest).unsqueeze(-1) * taken(v, at)).sum(3)


def multiplied(logits: Tensor, v: Tensor) -> Tensor:
    largest, at = logits.softmax(-1).topk(3, -1)
    return (largest.unsqueeze(-2) @ taken(v, at)).squeeze(-2)


def ordered(logits: Tensor, v: Tensor) -> Tensor:
    largest, at = logits.softmax(-1).sort(-1, descending=True)
    return (largest[..., :3].unsqueeze(-1) * taken(v, at[..., :3])).sum(3)


def looked_up(logits: Tensor, v: Tensor) -> Tensor:
    weights = logits.softmax(-1)
    at = weights.topk(3, -1).indices
    return torch.einsum("bhik,bhikd->bhid", weights.gather(-1, at), taken(v, at))


def of_exponentials(logits: Tensor, v: Tensor) -> Tensor:
    largest, at = logits.exp().topk(3, -1)
    return (divided(largest).unsqueeze(-1) * taken(v, at)).sum(3)


def of_scores(logits: Tensor, v: Tensor) -> Tensor:
    largest, at = logits.topk(3, -1)
    return (largest.softmax(-1).unsqueeze(-1) * taken(v, at)).sum(3)


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (scattered, "moved by topk"),
        (scattered_in_place, "moved by topk"),
        (summed, "moved by topk"),
        (multiplied, "moved by topk"),
        (ordered, "moved by sort"),
        (looked_up, "moved by gather"),
        (of_exponentials, "moved by topk"),
        (of_scores, "over scores that topk picked"),
        (lambda logits, v: logits.log_softmax(-1).tril().exp() @ v, "changed by tril before their exponential"),
        (lambda logits, v: (logits.log_softmax(-1) - 0.1).exp() @ v, "changed by sub before their exponential"),
        (lambda logits, v: logits.log_softmax(-1).flip(-1).exp() @ v, "changed by flip before their exponential"),
        (weights_then(lambda w: w.roll(1, -1)), "moved by roll"),
        (weights_then(lambda w: w.sqrt()), "changed by sqrt"),
        (weights_then(lambda w: w.cumsum(-1)), "changed by cumsum"),
        (weights_then(lambda w: w.round(decimals=2)), "changed by round"),
        (weights_then(lambda w: torch.lerp(w, torch.eye(7).to(w).expand_as(w), 0.1)), "changed by lerp"),
        (weights_then(lambda w: w.index_fill(-1, torch.tensor([2]), 0.5)), "filled with numbers other than 0"),
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_weights_that_are_picked_or_changed_are_listed_and_cannot_be_edited(
    attend: Any, reason: str, mode: Any
) -> None:
    model = Stack(ByHand(30), Thinned(attend))
    with mode():
        with pytest.warns(UserWarning, match="missed some attention calls"), regard.watch(model) as recording:
            model(X)
        assert [call.path for call in recording] == ["layers.0"]
        ((path, why),) = recording.missed
        assert path == "layers.1" and reason in why
        with pytest.raises(edits.CannotEdit, match=reason), regard.edit(model, edits.cut(keys=1)):
            model(X)
