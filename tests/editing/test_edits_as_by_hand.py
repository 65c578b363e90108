"""Every edit gives what the same edit gives that is made by hand on eager weights: Llama with grouped heads, BERT,
GPT-2 with its packed projection, Bloom, which writes its softmax out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.editing.by_hand import CASES, HEADS, OTHER, by_hand, edited_by_hand, model_of, only, run
from torch import Tensor

import regard
from regard import edits, masks

pytestmark = pytest.mark.parametrize(("name", "how"), CASES)


def check(out: Tensor, expected: Tensor, plain: Tensor, how: str) -> None:
    close = 1e-9 if how == "sdpa" else 1e-5  # Hugging Face's own eager code takes its softmax in float32
    torch.testing.assert_close(out, expected, rtol=close, atol=close)
    assert (expected - plain).abs().max() > 1e-3  # the edit matters


@torch.no_grad()
def test_cut_by_positions(name: str, how: str) -> None:
    model = model_of(name)
    edges = torch.zeros(7, 7, dtype=torch.bool)
    edges[3:, [0, 2]] = True
    expected = by_hand(model, logits_edit=only([1, 3], [1], lambda x: x.masked_fill(edges, -torch.inf)))
    with regard.edit(model, edits.cut(queries=slice(3, None), keys=[0, 2]), layers=[1], heads=[1, -1]) as report:
        out = run(model, how=how)
    check(out, expected, run(model, how=how), how)
    assert report.layers == [1] and report.heads == [(1, 1), (1, 3)] and len(report) == 1


@torch.no_grad()
def test_cut_by_a_rule_and_its_joins(name: str, how: str) -> None:
    model = model_of(name)
    i, j = torch.arange(7)[:, None], torch.arange(7)
    edges = ((i - j).abs() > 1) & ~(j == 3) | (j == i)
    rule = ~edits.cut(masks.window(1, 1)) & ~edits.cut(keys=3) | edits.cut(masks.window(0))
    seen = by_hand(model, logits_edit=lambda layer, x: hidden(x, edges))
    with regard.edit(model, rule) as report:
        out = run(model, how=how)
    check(out, seen, run(model, how=how), how)
    assert len(report.heads) == 2 * HEADS


@torch.no_grad()
def test_cut_by_a_rule_that_asks_which_item_and_head_it_is(name: str, how: str) -> None:
    model = model_of(name)
    item, head, j = torch.arange(2).view(2, 1, 1, 1), torch.arange(HEADS).view(1, HEADS, 1, 1), torch.arange(7)
    expected = by_hand(model, logits_edit=lambda layer, x: hidden(x, (head == item + 1) & (j < 3)))
    with regard.edit(model, edits.cut(masks.rule(lambda b, h, i, j: (h == b + 1) & (j < 3)))):
        out = run(model, how=how)
    check(out, expected, run(model, how=how), how)


def hidden(x: Tensor, edges: Tensor) -> Tensor:
    """Logits with edges taken away; what the model hides stays hidden, also where nothing else is left."""
    shown = (x > -1e4) & ~edges
    return x.masked_fill(~shown, -torch.inf)


@torch.no_grad()
def test_a_query_that_loses_all_its_keys_gets_zeros(name: str, how: str) -> None:
    model = model_of(name)
    expected = by_hand(model, logits_edit=lambda layer, x: hidden(x, torch.arange(7) < 4))
    with regard.edit(model, edits.cut(keys=slice(0, 4))):
        out = run(model, how=how)
    check(out, expected, run(model, how=how), how)


@torch.no_grad()
def test_steer(name: str, how: str) -> None:
    model = model_of(name)
    more = torch.zeros(7, 7, dtype=torch.float64)
    more[2:, [1, 4]] = 1.7
    expected = by_hand(model, logits_edit=only([0, 1], [0, 1], lambda x: x + more))
    with regard.edit(model, edits.steer([1, 4], 1.7, queries=slice(2, None)), heads=[0, 1]):
        out = run(model, how=how)
    check(out, expected, run(model, how=how), how)


@torch.no_grad()
def test_ablate_by_zeros_and_by_the_mean_of_another_run(name: str, how: str) -> None:
    model = model_of(name)
    plain = run(model, how=how)
    expected = by_hand(model, output_edit=only([2], [0], torch.zeros_like))
    with regard.edit(model, edits.ablate("zero"), layers=[0], heads=[2]):
        check(run(model, how=how), expected, plain, how)
    with regard.watch(model, keep=["output"]) as reference:
        run(model, OTHER, how)
    kept: dict[int, Tensor] = {}
    by_hand(model, OTHER, output_edit=lambda layer, x: kept.setdefault(layer, x))
    mean = {layer: x.mean((0, 2), keepdim=True) for layer, x in kept.items()}
    expected = by_hand(model, output_edit=only([2, 3], [1], lambda x: mean[1].expand_as(x)))
    with regard.edit(model, edits.ablate("mean", reference), heads={1: [2, 3]}):
        check(run(model, how=how), expected, plain, how)


@torch.no_grad()
def test_patch_the_output_of_another_run_at_some_tokens(name: str, how: str) -> None:
    model = model_of(name)
    kept: dict[int, Tensor] = {}
    by_hand(model, OTHER, output_edit=lambda layer, x: kept.setdefault(layer, x))
    at = torch.arange(7)[:, None] >= 4
    expected = by_hand(model, output_edit=only([0, 3], [0], lambda x: torch.where(at, kept[0], x)))
    with regard.watch(model, keep=["output"], layers=[0]) as recording:
        run(model, OTHER, how)
    with regard.edit(model, edits.patch(recording, queries=slice(4, None)), layers=[0], heads=[0, 3]):
        out = run(model, how=how)
    check(out, expected, by_hand(model), how)


@torch.no_grad()
def test_outputs_that_are_kept_are_those_that_left_the_call(name: str, how: str) -> None:
    model = model_of(name)
    kept = []

    def zero() -> Any:
        return regard.edit(model, edits.ablate("zero"), heads=[0])

    def mean() -> Any:
        return regard.edit(model, edits.ablate("mean"), heads=[2])

    with zero(), mean(), regard.watch(model, keep=["output"]) as inside:
        run(model, how=how)
    with regard.watch(model, keep=["output"]) as outside, zero(), mean():
        run(model, how=how)
    with zero(), regard.watch(model, keep=["output"]) as between, mean():
        run(model, how=how)
    for recording in (inside, outside, between):
        kept.append([calls[0].output for calls in recording.kept.values()])
        assert all(len(calls) == 1 for calls in recording.kept.values()) and len(kept[-1]) == 2
    for one in kept:
        for layer, output in enumerate(one):
            assert (output[:, 0] == 0).all() and float(output[:, 2].std((0, 1)).max()) < 1e-9 and output[:, 1].any()
            torch.testing.assert_close(output, kept[0][layer], rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("heads", [None, [1, 2]])
def test_patch_the_pattern_of_another_run(name: str, how: str, heads: list[int] | None) -> None:
    model = model_of(name)
    with edited_by_hand(model) as weights:
        run(model, OTHER, "eager")
    chosen = list(range(HEADS)) if heads is None else heads
    expected = by_hand(model, logits_edit=only(chosen, [1], lambda x: weights[1].log()))
    with regard.watch(model, keep=["pattern"]) as recording:
        run(model, OTHER, how)
    with regard.edit(model, edits.patch(recording, "pattern"), layers=[1], heads=heads):
        out = run(model, how=how)
    check(out, expected, by_hand(model), how)


def test_gradients_pass_through_edits(name: str, how: str) -> None:
    model = model_of(name)
    edges = torch.zeros(7, 7, dtype=torch.bool)
    edges[3:, [0, 2]] = True
    more = torch.zeros(7, dtype=torch.float64)
    more[1] = -0.8

    def change(x: Tensor) -> Tensor:
        return (x + more).masked_fill(edges, -torch.inf)

    def gradients(out: Tensor) -> list[Tensor]:
        given = [weight for weight in model.parameters() if weight.requires_grad]
        return [g for g in torch.autograd.grad(out.sin().sum(), given, allow_unused=True) if g is not None]

    given = {"logits_edit": lambda layer, x: change(x), "output_edit": only([0], [1], torch.zeros_like)}
    expected = gradients(by_hand(model, **given))
    both = [edits.cut(queries=slice(3, None), keys=[0, 2]), edits.steer(1, -0.8)]
    with regard.edit(model, both), regard.edit(model, edits.ablate("zero"), heads={1: [0]}):
        found = gradients(run(model, how=how))
    for one, other in zip(found, expected, strict=True):
        close = 1e-9 if how == "sdpa" else 1e-5
        torch.testing.assert_close(one, other, rtol=close, atol=close * max(1.0, float(other.abs().max())))
