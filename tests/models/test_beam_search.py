"""Targets from a Transformer: greedy and beam search, against enumeration, with and without caches."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tests.models import peers, small
from torch import Tensor

from regard import models
from regard.models import Hypothesis

START, STOP = 1, 2
LENGTHS = [7, 11, 3]
HOW: dict[str, Any] = {"start": START, "stop": STOP, "max_new_tokens": 13}


@pytest.fixture
def source() -> Tensor:
    return small.tokens(3, 11)


def tokens_of(found: list[list[Hypothesis]]) -> list[list[list[int]]]:
    return [[hypothesis.tokens for hypothesis in item] for item in found]


def check_same(found: list[list[Hypothesis]], wanted: list[list[Hypothesis]]) -> None:
    assert tokens_of(found) == tokens_of(wanted)
    for a, b in zip(itertools.chain(*found), itertools.chain(*wanted), strict=True):
        assert a.score == pytest.approx(b.score, rel=1e-9) and a.finished == b.finished


def plain(model: models.Transformer, source: Tensor, count: int) -> list[int]:
    """Greedy decoding as anybody would write it."""
    target = [START]
    while len(target) <= count:
        target.append(int(model(source.unsqueeze(0), torch.tensor([target]))[0, -1].argmax()))
        if target[-1] == STOP:
            return target[1:-1]
    return target[1:]


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_the_likeliest_tokens_follow_with_and_without_a_cache_batched_and_alone(norm: str, source: Tensor) -> None:
    model = small.translator(norm=norm)
    wanted = [plain(model, row[:length], 13) for row, length in zip(source, LENGTHS, strict=True)]
    found = model.generate(source, source_lengths=LENGTHS, **HOW)
    assert tokens_of(found) == [[tokens] for tokens in wanted]
    check_same(model.generate(source, source_lengths=LENGTHS, use_cache=False, **HOW), found)
    check_same(model.generate(source, source_lengths=torch.tensor(LENGTHS), **HOW), found)
    left = torch.stack([row.roll(11 - length) for row, length in zip(source, LENGTHS, strict=True)])
    check_same(model.generate(left, source_lengths=LENGTHS, side="left", **HOW), found)


@pytest.mark.parametrize("beams", [2, 5])
def test_beams_are_the_same_with_and_without_a_cache_batched_and_alone(beams: int, source: Tensor) -> None:
    model = small.translator(vocab_size=37)
    found = model.generate(source, source_lengths=LENGTHS, beams=beams, best=beams, **HOW)
    assert [len(item) for item in found] == [beams] * 3
    check_same(model.generate(source, source_lengths=LENGTHS, beams=beams, best=beams, use_cache=False, **HOW), found)
    for row, length, item in zip(source, LENGTHS, found, strict=True):
        check_same(model.generate(row[None, :length], beams=beams, best=beams, **HOW), [item])


def with_stop(model: models.Transformer, amount: float) -> models.Transformer:
    """The model with this added to the logit of the stop token."""
    plain_logits, change = model.logits, torch.zeros(model.config.vocab_size).double()
    change[STOP] = amount
    model.logits = lambda states: plain_logits(states) + change
    return model


def enumerate_all(model: models.Transformer, source: Tensor, limit: int, alpha: float) -> list[tuple[float, list[int]]]:
    """Every target that ends within the limit, with its score, best first."""
    words = [token for token in range(model.config.vocab_size) if token != STOP]
    found = []
    for length in range(limit):
        for middle in itertools.product(words, repeat=length):
            target = torch.tensor([[START, *middle, STOP]])
            log_p = model(source, target[:, :-1]).log_softmax(-1)
            total = log_p[0, torch.arange(length + 1), target[0, 1:]].sum().item()
            found.append((total / ((5 + length + 1) / 6) ** alpha, list(middle)))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 3.0])
def test_a_beam_as_wide_as_everything_finds_the_best_of_all_targets(alpha: float) -> None:
    model, source = small.translator(vocab_size=5), small.tokens(1, 7, 5)
    wanted = enumerate_all(model, source, 4, alpha)
    [found] = model.generate(source, start=START, stop=STOP, max_new_tokens=4, beams=256, best=85, length_penalty=alpha)
    assert len(wanted) == 85 == len(found)
    assert [hypothesis.tokens for hypothesis in found] == [tokens for _, tokens in wanted]
    assert [hypothesis.score for hypothesis in found] == pytest.approx([score for score, _ in wanted])
    assert all(hypothesis.finished for hypothesis in found)


def test_a_narrow_beam_never_beats_enumeration_and_its_probabilities_are_the_models() -> None:
    model, source = small.translator(vocab_size=5), small.tokens(1, 7, 5)
    best = enumerate_all(model, source, 5, 0.6)[0][0]
    [found] = model.generate(source, start=START, stop=STOP, max_new_tokens=5, beams=3, best=3)
    scores = [hypothesis.score for hypothesis in found if hypothesis.finished]
    assert scores == sorted(scores, reverse=True) and scores[0] <= best + 1e-12
    for tokens, score, log_probability, finished in found:
        target = torch.tensor([[START, *tokens] + [STOP] * finished])
        log_p = model(source, target[:, :-1]).log_softmax(-1)
        length = target.shape[1] - 1
        assert log_p[0, torch.arange(length), target[0, 1:]].sum().item() == pytest.approx(log_probability)
        assert score == pytest.approx(log_probability / ((5 + length) / 6) ** 0.6)


def test_a_larger_penalty_prefers_longer_targets(source: Tensor) -> None:
    model = small.translator(norm="pre")

    def length(alpha: float) -> int:
        found = model.generate(source, beams=4, length_penalty=alpha, start=START, stop=9, max_new_tokens=25)
        return sum(len(item[0].tokens) for item in found)

    assert length(5.0) > length(0.0)


@pytest.mark.parametrize(("beams", "stop"), [(1, 31), (3, 5)])
def test_items_whose_search_is_settled_leave_the_batch(beams: int, stop: int, source: Tensor) -> None:
    model = small.translator(norm="pre")

    def rows_of(given: Tensor) -> list[int]:
        rows: list[int] = []
        hook = model.decoder_layers[0].register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].shape[0]))
        model.generate(given, beams=beams, length_penalty=0.0, start=START, stop=stop, max_new_tokens=25)
        hook.remove()
        return rows

    together, alone = rows_of(source), [rows_of(row[None]) for row in source]
    assert len(set(map(len, alone))) > 1  # items end at different times
    assert together == [sum(column) for column in itertools.zip_longest(*alone, fillvalue=0)]


@pytest.mark.parametrize("beams", [1, 3])
def test_beams_that_can_only_end_end_at_once(beams: int, source: Tensor) -> None:
    model = small.translator()
    plain_logits, only = model.logits, torch.full((model.config.vocab_size,), -float("inf")).double()
    only[STOP] = 0.0
    model.logits = lambda states: plain_logits(states) + only
    found = model.generate(source, beams=beams, best=beams, **HOW)
    assert found == [[Hypothesis([], 0.0, 0.0, True)]] * 3  # one target has a probability, however many are asked for


def test_beams_that_all_but_end_at_once_are_still_ranked(source: Tensor) -> None:
    model = with_stop(small.translator(), 50.0)
    found = model.generate(source, beams=3, best=3, **HOW)
    for item in found:
        assert item[0].tokens == [] and all(hypothesis.finished for hypothesis in item)
        assert [len(hypothesis.tokens) for hypothesis in item[1:]] == [1, 1]
        assert item[0].score > -1e-9 and item[1].score < -20.0


def test_more_beams_than_there_are_targets_give_each_target_once() -> None:
    model, source = small.translator(vocab_size=5), small.tokens(1, 7, 5)
    [found] = model.generate(source, start=START, stop=STOP, max_new_tokens=2, beams=50, best=50)
    wanted = [[], *([token] for token in range(5) if token != STOP)]
    assert sorted(hypothesis.tokens for hypothesis in found if hypothesis.finished) == sorted(wanted)
    whole = [tuple(hypothesis.tokens) for hypothesis in found]
    assert len(set(whole)) == len(whole) == 5 + 16


def test_an_empty_batch_gives_nothing(source: Tensor) -> None:
    for beams in (1, 3):
        assert small.translator().generate(source[:0], beams=beams, **HOW) == []


@pytest.mark.parametrize("beams", [1, 3])
def test_a_model_that_gives_nan_is_told_of(beams: int, source: Tensor) -> None:
    model = with_stop(small.translator(), float("nan"))
    with pytest.raises(ValueError, match="gives NaN after 0 new tokens"):
        model.generate(source, beams=beams, **HOW)


def test_what_has_not_ended_at_the_limit_is_given_as_such() -> None:
    model, source = with_stop(small.translator(), -float("inf")), small.tokens(1, 7)
    for beams in (1, 3):
        [found] = model.generate(source, beams=beams, best=beams, **HOW)
        assert [len(hypothesis.tokens) for hypothesis in found] == [13] * beams
        assert not any(hypothesis.finished for hypothesis in found)


def test_several_start_tokens_and_whisper() -> None:
    theirs, ours = peers.whisper()
    sound = torch.randn(2, 7, 30, dtype=torch.float64)
    found = ours.generate(sound, start=[3, 5, 7], stop=2, max_new_tokens=15)
    for item in range(2):
        ids = [3, 5, 7]
        while len(ids) < 18 and ids[-1] != 2:
            logits = theirs(input_features=sound[item : item + 1], decoder_input_ids=torch.tensor([ids])).logits
            ids.append(int(logits[0, -1].argmax()))
        assert found[item][0].tokens == [token for token in ids[3:] if token != 2]
    check_same(ours.generate(sound, start=[3, 5, 7], stop=2, max_new_tokens=15, use_cache=False), found)


def test_whisper_says_at_once_where_its_positions_end() -> None:
    model, sound = small.whisper(), torch.randn(1, 7, 30).double()
    most = model.config.max_tokens - 1  # after two start tokens; the last one written is not read again
    plain_logits = model.logits
    model.logits = lambda states: plain_logits(states).index_fill(-1, torch.tensor([STOP]), -float("inf"))
    [[found]] = model.generate(sound, start=[3, 5], stop=STOP, max_new_tokens=most)
    assert len(found.tokens) == most
    with pytest.raises(ValueError, match=f"beyond the model's {most + 1} positions; at most {most} can follow"):
        model.generate(sound, start=[3, 5], stop=STOP, max_new_tokens=most + 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"beams": 3, "best": 4}, "best=4 must be from 1 to beams=3"),
        ({"beams": 0}, "beams must be at least 1, got 0"),
        ({"length_penalty": -1.0}, "length_penalty must be finite and at least 0, got -1.0"),
        ({"start": 37}, "start holds 37; the model's tokens are 0 … 36"),
        ({"start": []}, "start must be one token or more"),
        ({"stop": -1}, "stop holds -1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"beams": 2.0}, r"beams must be an int, got 2.0 \(float\)"),
        ({"beams": 3, "best": True}, r"best must be an int, got True \(bool\)"),
        ({"beams": 3, "best": 0}, "best must be at least 1, got 0"),
        ({"stop": [2, 3]}, r"stop must be one token number, got \[2, 3\]"),
        ({"stop": None}, "stop must hold token numbers"),
        ({"start": True}, "start must hold token numbers"),
        ({"length_penalty": "a"}, "length_penalty must be a number, got 'a'"),
        ({"length_penalty": 1e4}, "larger than any number"),
        ({"seed": 3}, "seed is given, but temperature 0 draws nothing"),
        ({"beams": 2, "temperature": 0.7}, "beams=2 with a temperature"),
    ],
)
def test_what_cannot_be_searched_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        small.translator().generate(small.tokens(1, 3), **{**HOW, **given})
