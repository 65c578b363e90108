"""What training minimises, against torch's own functions: values and gradients."""

from __future__ import annotations

import pytest
import torch
from tests.train.small import PAD
from torch.nn import functional as F

from regard.train import Settings
from regard.train._batches import Soft
from regard.train._loss import loss_of
from regard.train._schedule import learning_rate


@pytest.fixture
def outputs() -> torch.Tensor:
    found = torch.randint(4, 11, (3, 5), generator=torch.Generator().manual_seed(1))
    found[1, 3:] = found[2, 1:] = PAD
    return found


def logits(passes: int) -> torch.Tensor:
    drawn = torch.randn(passes * 3, 5, 11, generator=torch.Generator().manual_seed(2))
    return drawn.requires_grad_()


def check(ours: torch.Tensor, wanted: torch.Tensor, *inputs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, wanted)
    for a, b in zip(torch.autograd.grad(ours, inputs), torch.autograd.grad(wanted, inputs), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_one_pass_is_torchs_cross_entropy(smoothing: float, outputs: torch.Tensor) -> None:
    x = logits(1)
    found = loss_of(x, outputs, smoothing=smoothing)
    wanted = F.cross_entropy(x.flatten(0, 1), outputs.flatten(), ignore_index=PAD, label_smoothing=smoothing)
    check(found.total, wanted, x)
    plain = F.cross_entropy(x.flatten(0, 1), outputs.flatten(), ignore_index=PAD, reduction="sum")
    torch.testing.assert_close(found.nll, plain.detach())
    assert int(found.tokens) == 9


def test_two_passes_are_pulled_together_by_both_divergences(outputs: torch.Tensor) -> None:
    x = logits(2)
    found = loss_of(x, outputs, smoothing=0.1, r_drop=0.7)
    both = outputs.repeat(2, 1)
    wanted = F.cross_entropy(x.flatten(0, 1), both.flatten(), ignore_index=PAD, label_smoothing=0.1)
    p, q = x.log_softmax(-1)[:3], x.log_softmax(-1)[3:]
    real = outputs != PAD
    there = F.kl_div(q, p, log_target=True, reduction="none").sum(-1)[real].mean()
    back = F.kl_div(p, q, log_target=True, reduction="none").sum(-1)[real].mean()
    check(found.total, wanted + 0.7 * 0.5 * (there + back), x)


def test_teachers_probabilities_are_the_target_where_all_of_them_are_given(outputs: torch.Tensor) -> None:
    x = logits(1)
    taught = torch.randn(3, 5, 11, generator=torch.Generator().manual_seed(3)).softmax(-1)
    every = torch.arange(11).expand(3, 5, 11)
    found = loss_of(x, outputs, smoothing=0.1, soft=Soft(every, taught), distill=0.4)
    real = outputs != PAD
    hard = F.cross_entropy(x.flatten(0, 1), outputs.flatten(), ignore_index=PAD, label_smoothing=0.1)
    soft = F.cross_entropy(x[real], taught[real])
    check(found.total, 0.6 * hard + 0.4 * soft, x)


def test_what_teachers_leave_is_spread_evenly(outputs: torch.Tensor) -> None:
    x = logits(1)
    top = torch.randn(3, 5, 11, generator=torch.Generator().manual_seed(3)).softmax(-1).topk(2)
    found = loss_of(x, outputs, soft=Soft(top.indices, top.values), distill=1.0)
    whole = ((1 - top.values.sum(-1, keepdim=True)) / 11).expand(3, 5, 11).scatter_add(-1, top.indices, top.values)
    real = outputs != PAD
    check(found.total, F.cross_entropy(x[real], whole[real]), x)


def test_a_batch_of_padding_alone_has_no_loss_and_no_gradient() -> None:
    x = logits(2)
    found = loss_of(x, torch.full((3, 5), PAD), smoothing=0.1, r_drop=1.0)
    assert float(found.total.detach()) == 0.0
    assert not torch.autograd.grad(found.total, x)[0].any()


def test_the_learning_rate_rises_and_falls_as_its_schedule_says() -> None:
    root = Settings(warmup=10, steps=110, peak_lr=2.0)
    assert [learning_rate(root, step) for step in (1, 5, 10, 40)] == pytest.approx([0.2, 1.0, 2.0, 1.0])
    wave = Settings(warmup=10, steps=110, peak_lr=2.0, schedule="cosine")
    assert [learning_rate(wave, step) for step in (5, 10, 60, 110)] == pytest.approx([1.0, 2.0, 1.0, 0.0])
    flat = Settings(warmup=0, peak_lr=2.0, schedule="constant")
    assert [learning_rate(flat, step) for step in (1, 99)] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"schedule": "sqrt"}, "schedule must be one of inverse-sqrt, cosine, constant, got 'sqrt'"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0.0, 1.0\), got 1.0"),
        ({"peak_lr": float("nan")}, "peak_lr must be"),
        ({"batch_tokens": 1.5}, "batch_tokens must be an int, got 1.5"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Settings(**given)
