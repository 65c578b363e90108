"""Weights that are multiplied by more than one tensor, outputs that are values of another attention, and dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard import edits

X = torch.randn(2, 7, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
ALL = regard.Want(weights="all")
Way = Callable[["Attends", Tensor, Tensor, Tensor], Tensor]


class Attends(nn.Module):
    """Three heads; the same edit by hand is on the logits (a key is hidden) and on the output (a head is silent)."""

    num_heads = 3

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way, self.qkv, self.out, self.far = (
            way,
            nn.Linear(30, 90),
            nn.Linear(30, 30),
            nn.Parameter(torch.randn(7, 7, 10)),
        )
        self.hidden: int | None = None
        self.silent: int | None = None
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (3, 10)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(self.way(self, q, k, v).transpose(1, 2).flatten(2))

    def weights(self, logits: Tensor, axis: int = -1) -> Tensor:
        if self.hidden is not None:
            logits = logits.index_fill(axis, torch.tensor([self.hidden]), -torch.inf)
        self.seen.append(logits.softmax(axis))
        return logits.softmax(axis)

    def heads(self, out: Tensor) -> Tensor:
        return out if self.silent is None else out.index_fill(1, torch.tensor([self.silent]), 0.0)


def relative_last(m: Attends, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = m.weights(q @ k.mT)
    return m.heads(w @ v + torch.einsum("bhij,ijd->bhid", w, m.far * 1.0))


def relative_first(m: Attends, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = m.weights(q @ k.mT)
    near = torch.einsum("bhij,ijd->bhid", w, m.far * 1.0)
    return m.heads(w @ v + near)


def relative_moved(m: Attends, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As VITS lays weights out by distance: padded, seen as longer rows, and cut."""
    w = m.weights(q @ k.mT)
    out = w @ v
    out += F.pad(F.pad(w, (0, 6)).flatten(2), (7, 0)).view(2, 3, 7, 14)[..., 1:] @ (m.far.flatten(0, 1)[:13] * 1.0)
    return m.heads(out)


def relative_in_turn(m: Attends, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A product for each query, which is laid out as the other one afterwards."""
    w = m.weights(q @ k.mT)
    out = w @ v
    near = w.flip(-1).permute(2, 0, 1, 3).flatten(1, 2) @ (m.far * 1.0)
    return m.heads(out + near.unflatten(1, (2, 3)).permute(1, 2, 0, 3) * 0.5)


def over_channels(m: Attends, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return m.heads((m.weights(q.mT @ k) @ v.mT).mT)


def of_features(m: Attends, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Efficient attention: a softmax over the features of queries, one over the tokens of keys."""
    return m.heads(m.weights(q) @ m.heads(m.weights(k, 2).mT @ v))


def by_landmarks(m: Attends, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    marks = q[:, :, ::2]
    return m.heads(m.weights(q @ marks.mT) @ m.heads(m.weights(marks @ k.mT) @ v))


def by_one_key(m: Attends, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    one = (q * k).mean(-1, keepdim=True)
    return m.heads(one.softmax(-1) * v)


def of_dropout(m: Attends, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = F.dropout(m.weights(q @ k.mT), 0.4)
    return F.dropout(m.heads(w @ v), 0.3, inplace=True)


WAYS = [
    relative_last,
    relative_first,
    relative_moved,
    relative_in_turn,
    over_channels,
    of_features,
    by_landmarks,
    of_dropout,
]


def made(way: Way) -> Attends:
    torch.manual_seed(0)
    return Attends(way).double()


def run(model: nn.Module) -> tuple[Tensor, Tensor]:
    """The output, and what is drawn next."""
    torch.manual_seed(5)
    return model(X), torch.rand(3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("watched", [False, True])
def test_a_cut_and_an_ablation_are_those_made_by_hand(way: Way, mode: Any, watched: bool) -> None:
    model = made(way)
    with mode():
        model.hidden = 1
        cut, model.hidden = run(model), None
        model.silent = 2
        silent, model.silent = run(model), None
        for edit, heads, expected in ((edits.cut(keys=1), None, cut), (edits.ablate("zero"), [2], silent)):
            with regard.edit(model, edit, heads=heads):
                if watched:
                    with regard.watch(model, count_padding=True):
                        found = run(model)
                else:
                    found = run(model)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("way", WAYS)
def test_weights_are_recorded_as_they_are_and_what_is_kept_changes_nothing(way: Way) -> None:
    model = made(way)
    with torch.no_grad():
        expected = run(model)
        model.seen.clear()
        with regard.watch(model, want=ALL) as recording:
            assert torch.equal(run(model)[0], expected[0])
        assert recording.missed == []
        truth = list(model.seen)
        if way is of_features:
            truth[1] = truth[1].mT  # the features of keys are its queries
        assert len(recording) == len(truth)
        for weights in truth:  # in whatever order they came to their end
            assert any(c.weights.shape == weights.shape and torch.allclose(c.weights, weights) for c in recording)
        with regard.watch(model, keep=["output", "pattern"]) as kept:
            again = run(model)
        assert torch.equal(again[0], expected[0]) and torch.equal(again[1], expected[1])
        for what in ("output", "pattern"):
            with regard.edit(model, edits.patch(kept, what)):
                torch.testing.assert_close(run(model)[0], expected[0], rtol=0, atol=1e-10)


def test_a_cut_of_a_query_is_of_a_query_where_relative_positions_come_first() -> None:
    model = made(relative_first)
    with torch.no_grad():
        plain = model(X)
        model.hidden = 1
        wanted, model.hidden = model(X), None
        with regard.edit(model, edits.cut(queries=3, keys=1)):
            found = model(X)
    torch.testing.assert_close(found[:, 3], wanted[:, 3], rtol=0, atol=1e-10)
    torch.testing.assert_close(found[:, 4:], plain[:, 4:], rtol=0, atol=1e-10)


@torch.no_grad()
def test_a_softmax_of_one_key_is_edited_though_nothing_is_summed() -> None:
    model = made(by_one_key)
    with regard.watch(model) as recording:
        plain = model(X)
    assert recording.calls[0].keys == 1 and recording.missed == []
    with regard.edit(model, edits.steer(0, 2.0)):
        torch.testing.assert_close(model(X), plain)
    with regard.edit(model, edits.cut(keys=0)):
        torch.testing.assert_close(model(X), model.out.bias.expand(2, 7, 30))


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_edits_in_blocks_around_each_other_are_those_of_a_list(way: Way) -> None:
    model = made(way)
    one, other = edits.cut(keys=1), edits.ablate("zero")
    with regard.edit(model, [one, other], heads=[2]) as report:
        wanted = run(model)
    with regard.edit(model, other, heads=[2]), regard.edit(model, one, heads=[2]) as inner:
        found = run(model)
    assert len(inner) == len(report) and torch.equal(found[1], wanted[1])
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=1e-10)


@torch.no_grad()
def test_two_outputs_of_the_same_weights_that_are_not_added_are_cut_and_not_ablated() -> None:
    def side_by_side(m: Attends, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        w = m.weights(q @ k.mT)
        return torch.cat([w @ v[..., :4], w @ v[..., 4:].sin()], -1)

    model = made(side_by_side)
    model.hidden = 1
    wanted, model.hidden = model(X), None
    with regard.edit(model, edits.cut(keys=1)) as report:
        torch.testing.assert_close(model(X), wanted, rtol=0, atol=1e-10)
    assert len(report) == 1
    with (
        pytest.raises(edits.CannotEdit, match="several values, whose outputs are not added"),
        regard.edit(model, edits.ablate("zero"), heads=[1]),
    ):
        model(X)


@torch.no_grad()
def test_a_second_product_that_is_never_added_to_the_first_is_refused() -> None:
    class Apart(Attends):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (3, 10)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            w = self.weights(q @ k.mT)
            out = w @ v
            self.second = F.pad(w, (0, 1))[..., 1:] @ v
            return self.out(out.transpose(1, 2).flatten(2))

    model = Apart(relative_last).double()
    with (
        pytest.raises(edits.CannotEdit, match=r"\(root\) .*multiplied by other values too"),
        regard.edit(model, edits.cut(keys=1)),
    ):
        model(X)


@torch.no_grad()
@pytest.mark.parametrize("where", ["softmax into its logits", "written over"])
def test_what_cannot_be_done_again_names_the_module(where: str) -> None:
    def way(m: Attends, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = q @ k.mT
        if where == "softmax into its logits":
            return torch.softmax(logits, -1, out=logits) @ v
        w = logits.softmax(-1)
        logits.zero_()
        return w @ v

    model = nn.Sequential(nn.Identity(), made(way))
    with regard.watch(model, want=ALL) as recording:
        model(X)
    assert recording.missed == [] and len(recording) == 1
    torch.testing.assert_close(recording.calls[0].weights.sum(-1), torch.ones(2, 3, 7, dtype=torch.float64))
    with (
        pytest.raises(edits.CannotEdit, match=r"^1 \(layer 0\) cannot be edited"),
        regard.edit(model, edits.cut(keys=1)),
    ):
        model(X)
