"""Batches by tokens: every sentence once, within the limit, little padding, the same order for the same seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.train.small import PAD, START, STOP

from regard.train._batches import Soft, join, parallel, plan_epoch, ragged, running


def corpus(count: int = 700) -> Any:
    """Lengths as of image captions: around 12, target and source alike but not the same."""
    draw = torch.Generator().manual_seed(1)
    length = (12 + 4 * torch.randn(count, generator=draw)).clamp(3, 40).int().tolist()
    other = torch.randint(-2, 3, (count,), generator=draw).tolist()
    return parallel(
        [list(range(10, 10 + each)) for each in length],
        [list(range(50, 50 + max(each + more, 1))) for each, more in zip(length, other, strict=True)],
    )


@pytest.mark.parametrize("multiple", [1, 2])
def test_every_sentence_comes_once_within_the_limit_with_little_padding(multiple: int) -> None:
    data = corpus()
    batches = plan_epoch(data, 500, seed=1, epoch=0, multiple=multiple)
    assert sorted(row for each in batches for row in each.rows) == list(range(700))
    assert all(len(each.rows) * max(each.widths) <= 500 for each in batches)
    assert all(width % multiple == 0 for each in batches for width in each.widths)
    source, target = data.source.lengths.tolist(), (data.target.lengths - 1).tolist()
    real = sum(source[row] + target[row] for each in batches for row in each.rows)
    assert real > 0.9 * sum(len(each.rows) * sum(each.widths) for each in batches)


def test_seed_and_epoch_decide_the_order() -> None:
    data = corpus(90)
    first = plan_epoch(data, 200, seed=1, epoch=0)
    assert first == plan_epoch(data, 200, seed=1, epoch=0)
    assert first != plan_epoch(data, 200, seed=1, epoch=1) and first != plan_epoch(data, 200, seed=2, epoch=0)


def test_the_shapes_of_an_epoch_come_back_in_the_next() -> None:
    data = corpus()
    shapes = [sorted((len(each.rows), each.widths) for each in plan_epoch(data, 500, seed=1, epoch=n)) for n in (0, 1)]
    assert shapes[0] == shapes[1]


def test_a_sentence_longer_than_the_limit_stands_alone() -> None:
    data = parallel([[9] * 30, [9, 9], [9]], [[8] * 30, [8], [8]])
    batches = plan_epoch(data, 10, seed=1, epoch=0)
    assert [each.rows for each in batches if 0 in each.rows] == [[0]] and len(batches) == 2


def test_a_batch_holds_its_tokens_and_nothing_else() -> None:
    data = parallel([[11, 12], [13]], [[21], [22, 23, 24]])
    batch = data.take(torch.tensor([1, 0]), (3, 4))
    assert batch.source is not None and batch.source_lengths is not None
    assert batch.source.tolist() == [[13, STOP, PAD], [11, 12, STOP]]
    assert batch.source_lengths.tolist() == [2, 3]
    assert batch.inputs.tolist() == [[START, 22, 23, 24], [START, 21, STOP, PAD]]
    assert batch.outputs.tolist() == [[22, 23, 24, STOP], [21, STOP, PAD, PAD]]


def test_soft_targets_travel_with_their_tokens_and_corpora_join() -> None:
    parts = []
    for start in (20, 30):
        made = parallel([[11], [12, 13]], [[start], [start + 1, start + 2]])
        soft = Soft(made.target.flat.unsqueeze(1), made.target.flat.unsqueeze(1) / 100)
        parts.append(made._replace(soft=soft))
    together = join(parts)
    batch = together.take(torch.tensor([0, 3]), (3, 3))
    assert batch.soft is not None
    real = batch.outputs != PAD
    assert batch.soft.tokens[..., 0][real].tolist() == batch.outputs[real].tolist()
    assert batch.outputs[1].tolist() == [31, 32, STOP]
    with pytest.raises(ValueError, match="all have soft targets, or none"):
        join([parts[0], parts[1]._replace(soft=None)])


def test_a_running_text_is_read_whole_and_each_token_is_predicted_once() -> None:
    data = running(list(range(4, 27)), 5)
    assert data.source is None
    predicted = []
    for row in range(len(data.target.lengths)):
        batch = data.take(torch.tensor([row]), (1, int(data.target.lengths[row]) - 1))
        assert torch.equal(batch.outputs[0, :-1], batch.inputs[0, 1:])
        predicted += batch.outputs[0].tolist()
    assert predicted == list(range(5, 27))
    assert len(ragged([]).flat) == 0
