"""Weights of which no product with values is met: listed and refused, and only where there really is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.watching.models import ByHand, Stack
from torch import Tensor, nn

import regard
from regard import edits

X = torch.randn(2, 7, 30, generator=torch.Generator().manual_seed(1))
Way = Callable[[Tensor, Tensor], Tensor]


class Attends(nn.Module):
    """Three heads; what becomes of the scores and the values is given."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way, self.num_heads, self.qkv = way, 3, nn.Linear(30, 90)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (3, 10)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.way(q @ k.mT, v).transpose(1, 2).flatten(2)


def scaled_by(weights: Tensor, v: Tensor) -> Tensor:
    return weights.unsqueeze(-1) * v.unsqueeze(2)


def mean_of_heads(logits: Tensor, v: Tensor) -> Tensor:
    return logits.softmax(-1).mean(1, keepdim=True) @ v


def stacked(logits: Tensor, v: Tensor) -> Tensor:
    return torch.stack([logits.softmax(-1), (2 * logits).softmax(-1)]).mean(0) @ v


def by_mean(logits: Tensor, v: Tensor) -> Tensor:
    return scaled_by(logits.softmax(-1), v).mean(3) * 7


def by_cumulative_sum(logits: Tensor, v: Tensor) -> Tensor:
    return scaled_by(logits.softmax(-1), v).cumsum(3)[:, :, :, -1]


def key_by_key(logits: Tensor, v: Tensor) -> Tensor:
    weights, out = logits.softmax(-1), torch.zeros_like(v)
    for key in range(7):
        out = out + weights[..., key : key + 1] * v[:, :, key : key + 1]
    return out


def key_by_key_fused(logits: Tensor, v: Tensor) -> Tensor:
    weights, out = logits.softmax(-1), torch.zeros_like(v)
    for key in range(7):
        out = torch.addcmul(out, weights[..., key : key + 1], v[:, :, key : key + 1])
    return out


def chosen(logits: Tensor, v: Tensor) -> Tensor:
    weights = logits.softmax(-1)
    left, large = torch.zeros_like(weights), weights > 0.1
    left[large] = weights[large]
    return left @ v


def largest(logits: Tensor, v: Tensor) -> Tensor:
    weight, at = logits.softmax(-1).max(-1, keepdim=True)
    return weight * v.gather(2, at.expand(-1, -1, -1, 10))


def block_diagonal(logits: Tensor, v: Tensor) -> Tensor:
    weights = torch.block_diag(*logits.softmax(-1).flatten(0, 1))
    return (weights @ v.flatten(0, 2)).view_as(v)


@pytest.mark.parametrize(
    "way",
    [mean_of_heads, stacked, by_mean, by_cumulative_sum, key_by_key, key_by_key_fused, chosen, largest, block_diagonal],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_attention_without_a_product_that_can_be_followed_is_listed_and_refused(way: Way, mode: Any) -> None:
    torch.manual_seed(0)
    model = Stack(ByHand(30), Attends(way))
    with mode():
        expected = model(X)
        with pytest.warns(UserWarning, match="missed some attention calls"), regard.watch(model) as recording:
            assert torch.equal(model(X), expected)
        assert [call.path for call in recording] == ["layers.0"]
        ((path, why),) = recording.missed
        assert path == "layers.1" and "no product of them with values can be followed" in why
        with pytest.raises(edits.CannotEdit, match=r"layers.1 .*no product"), regard.edit(model, edits.cut(keys=1)):
            model(X)
        with regard.edit(model, edits.cut(keys=1), layers=[0]) as report:
            model(X)
        assert len(report) == 1


class Looks(nn.Module):
    """Its weights come from a module of their own, which also says how they are spread."""

    class Weights(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            weights = (q @ k.mT).softmax(-1)
            return weights, weights.mean(1)

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.num_heads, self.qkv = self.Weights(), 3, nn.Linear(30, 90)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (3, 10)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        weights, self.mean = self.weights(q, k)
        return (weights @ v).transpose(1, 2).flatten(2)


def divided_again(logits: Tensor, v: Tensor) -> Tensor:
    weights = logits.softmax(-1)
    weights.amin(1)
    weights = weights * (torch.arange(7) < 5)
    return (weights / weights.sum(-1, keepdim=True)) @ v


@pytest.mark.parametrize("make", [Looks, lambda: Attends(divided_again)])
@pytest.mark.parametrize("inner", [True, False])
def test_weights_that_are_only_looked_at_before_their_product_are_read(make: Any, inner: bool) -> None:
    torch.manual_seed(0)
    model = Stack(ByHand(30), make())
    with torch.no_grad():
        with regard.watch(model, keep=["output"]) as recording:
            expected = model(X)
        assert recording.missed == [] and [call.path for call in recording] == ["layers.0", "layers.1"]
        cut, look = regard.edit(model, edits.cut(keys=1)), regard.watch(model, want=regard.Want(weights="all"))
        one, other = (look, cut) if inner else (cut, look)
        with one as a, other as b:
            found = model(X)
        seen = a if inner else b
        assert seen.missed == [] and all((call.weights[..., 1] == 0).all() for call in seen)
        assert not torch.allclose(found, expected)
        with regard.edit(model, edits.steer(2, 1.0)), regard.edit(model, edits.cut(keys=1)):
            nested = model(X)
        with regard.edit(model, [edits.cut(keys=1), edits.steer(2, 1.0)]):
            torch.testing.assert_close(nested, model(X))


def over_queries_twice(logits: Tensor, v: Tensor) -> Tensor:
    return logits.softmax(-2) @ v + (2 * logits).softmax(-2) @ v


def test_two_softmaxes_of_one_module_that_are_over_queries_are_listed() -> None:
    model = Stack(ByHand(30), Attends(over_queries_twice))
    with torch.no_grad(), pytest.warns(UserWarning, match="not over the keys"), regard.watch(model) as recording:
        model(X)
    assert [path for path, _ in recording.missed] == ["layers.1"]


def halves(logits: Tensor, v: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    parts = [logits[..., :3], logits[..., 3:]]
    outs = [parts[0].softmax(-1) @ v[:, :, :3], parts[1].softmax(-1) @ v[:, :, 3:]]
    return [part.logsumexp(-1) for part in parts], outs


def joined_by_log_sum_exp(logits: Tensor, v: Tensor) -> Tensor:
    (a, b), (one, other) = halves(logits, v)
    both = torch.logaddexp(a, b)
    return one * (a - both).exp().unsqueeze(-1) + (b - both).exp()[..., None] * other


def joined_by_the_larger(logits: Tensor, v: Tensor) -> Tensor:
    (a, b), (one, other) = halves(logits, v)
    largest = torch.maximum(a, b)
    a, b = (a - largest).exp(), (b - largest).exp()
    return one * (a / (a + b)).unsqueeze(-1) + other * (b / (a + b)).unsqueeze(-1)


def with_a_sink(logits: Tensor, v: Tensor) -> Tensor:
    return (logits.softmax(-1) @ v) * (logits.logsumexp(-1, keepdim=True) - 0.3).sigmoid()


@pytest.mark.parametrize("way", [joined_by_log_sum_exp, joined_by_the_larger, with_a_sink])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_attention_to_some_of_the_keys_that_is_joined_to_others_is_listed_and_refused(way: Way, mode: Any) -> None:
    model = Stack(ByHand(30), Attends(way))
    with mode():
        with pytest.warns(UserWarning, match="weighed by the log-sum-exp"), regard.watch(model) as recording:
            model(X)
        assert [call.path for call in recording] == ["layers.0"]
        assert {path for path, _ in recording.missed} == {"layers.1"}
        with pytest.raises(edits.CannotEdit, match=r"layers.1 .*log-sum-exp"), regard.edit(model, edits.cut(keys=1)):
            model(X)


def with_a_loss_of_the_sums(logits: Tensor, v: Tensor) -> Tensor:
    logits.logsumexp(-1).square().mean()
    return logits.softmax(-1) @ v


def test_log_sum_exps_that_are_only_looked_at_give_no_alarm() -> None:
    model = Stack(ByHand(30), Attends(with_a_loss_of_the_sums))
    with torch.no_grad(), regard.watch(model) as recording:
        model(X)
    assert recording.missed == [] and len(recording) == 2
