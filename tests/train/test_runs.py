"""A run's checkpoints: exact resume, kills, a full disk, SIGTERM's flag, early stopping, averages."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.held_files import checkpoint, read, write
from tests.train.small import DATA, PAD, SMALL, STOP, trainer

from regard import interop
from regard.train import (
    LAST,
    Data,
    Pairs,
    Stopped,
    Translation,
    Translator,
    Words,
    learn_from,
    read_metrics,
    translation_trainer,
)


class Interrupted(Exception):
    pass


def same(a: Path, b: Path) -> None:
    (one, about), (other, other_about) = checkpoint(a / LAST), checkpoint(b / LAST)
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert different == []
    ignored = ("seconds",)
    assert {k: v for k, v in about.items() if k not in ignored} == {
        k: v for k, v in other_about.items() if k not in ignored
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"average": "last", "last": 2, "validate_every": 3},
        {"average": "none", "r_drop": 0.5, "attention_dropout": 0.1},
        {"bpe_dropout": 0.2},
    ],
)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path: Path, changes: dict[str, Any]) -> None:
    trainer(tmp_path / "whole", **changes).run()

    def interrupt(event: dict[str, Any]) -> None:
        if cut.step >= 10:
            raise Interrupted

    cut = trainer(tmp_path / "cut", **changes)
    with pytest.raises(Interrupted):
        cut.run(interrupt)
    torch.manual_seed(999)  # whatever the process did meanwhile
    again = trainer(tmp_path / "cut", **changes)
    assert again.resume() and again.step == 5
    again.run()
    same(tmp_path / "whole", tmp_path / "cut")
    curves = [[{**each, "seconds": 0, "tokens_per_second": 0, "loss": 0, "padding": 0} for each in read_metrics(path)]
              for path in (tmp_path / "whole" / "metrics.jsonl", tmp_path / "cut" / "metrics.jsonl")]  # fmt: skip
    assert curves[0] == curves[1]


def test_being_asked_to_stop_saves_and_says_so(tmp_path: Path) -> None:
    trainer(tmp_path / "whole").run()
    run = trainer(tmp_path / "cut")

    def ask(event: dict[str, Any]) -> None:
        if run.step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped):
        run.run(ask)
    assert signal.getsignal(signal.SIGTERM) is before
    again = trainer(tmp_path / "cut")
    assert again.resume() and again.step == 7
    again.run()
    same(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forty_kills_at_random_moments_lose_no_checkpoint(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.save()
    began = time.monotonic()
    run.save()
    moments = max(0.06, 6 * (time.monotonic() - began))  # a few times what a save takes, on a busy machine too
    draw, seen = random.Random(1), set()
    for _ in range(40):
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                while True:
                    run.step += 1
                    run.save()
            os._exit(1)
        time.sleep(draw.uniform(0.0, moments))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        tensors, about = checkpoint(tmp_path / LAST)
        assert len(tensors) > 10 and about["step"] >= 0
        seen.add(about["step"])
        run.step = about["step"]
    assert len(seen) > 3  # the kills came while it was saving, not before


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(tmp_path)
    run.save()
    before = (tmp_path / LAST).read_bytes()
    run.step = 5

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run.save()
    monkeypatch.undo()
    assert (tmp_path / LAST).read_bytes() == before
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]  # nothing half-written stays
    assert trainer(tmp_path).resume()


@pytest.mark.parametrize("damage", ["cut", "other", "shape"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, damage: str) -> None:
    run = trainer(tmp_path)
    run.save()
    path = tmp_path / LAST
    changes: dict[str, Any] = {}
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-50])
    elif damage == "other":
        interop.save(run.model, tmp_path / "other")
        path.write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    else:
        changes = {"ff_dim": 32}
    with pytest.raises(ValueError, match=r"last.safetensors (cannot be read|does not fit these settings): \w"):
        trainer(tmp_path, **changes).resume()


def damaged(path: Path, tensors: dict[str, Any], about: Any) -> None:
    """As a checkpoint is written, but with this in it."""
    write(path, tensors, {**read(path)[1], "about": json.dumps(about)})


@pytest.mark.parametrize(
    "about",
    [{}, [], 5, {"step": "x"}, {"step": 3, "epoch": 0, "position": None, "best": {}, "since_best": 0, "seconds": 0.0}],
)
def test_a_checkpoint_that_does_not_say_where_the_run_stands_is_named(tmp_path: Path, about: Any) -> None:
    run = trainer(tmp_path)
    run.save()
    damaged(tmp_path / LAST, checkpoint(tmp_path / LAST)[0], about)
    with pytest.raises(ValueError, match="last.safetensors cannot be read: it does not say where the run stands"):
        trainer(tmp_path).resume()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("optimizer.9999.exp_avg", torch.zeros(3)),
        ("optimizer.0", torch.zeros(3)),
        ("optimizer.x.step", torch.zeros(())),
        ("random.cpu.0", torch.zeros(7)),
        ("random.cpu.0", torch.zeros(7, dtype=torch.uint8)),
    ],
)
def test_a_checkpoint_with_contents_of_another_kind_is_named(tmp_path: Path, name: str, content: torch.Tensor) -> None:
    run = trainer(tmp_path, steps=1)
    run.run()
    tensors, about = checkpoint(tmp_path / LAST)
    damaged(tmp_path / LAST, {**tensors, name: content}, about)
    with pytest.raises(ValueError, match="last.safetensors does not fit these settings: "):
        trainer(tmp_path).resume()


def test_there_is_nothing_to_resume_in_an_empty_folder(tmp_path: Path) -> None:
    assert trainer(tmp_path).resume() is False


def test_patience_ends_a_run_that_no_longer_gains(tmp_path: Path) -> None:
    run = trainer(tmp_path, steps=200, validate_every=2, patience=3, peak_lr=0.0, average="none")
    run.run()
    assert run.ended == "patience" and run.step == 8  # the first validation is the best


def test_where_bleu_decides_patience_counts_its_measurements(tmp_path: Path) -> None:
    """It is measured at every second validation: at steps 4, 8, 12 and 16."""
    changes: dict[str, Any] = {"validate_every": 2, "bleu_every": 2, "patience": 3, "peak_lr": 0.0, "average": "none"}
    run = trainer(tmp_path, with_bleu=True, steps=200, **changes)
    run.run()
    assert run.ended == "patience" and run.step == 16


def test_time_ends_a_run(tmp_path: Path) -> None:
    run = trainer(tmp_path, steps=10_000, minutes=0.002)
    run.run()
    assert run.ended == "time" and run.step < 10_000 and (tmp_path / "config.json").is_file()


def test_a_run_whose_time_is_used_up_takes_no_further_step(tmp_path: Path) -> None:
    run = trainer(tmp_path, steps=10_000, minutes=0.002)
    run.run()
    before = (tmp_path / LAST).read_bytes()
    again = trainer(tmp_path, steps=10_000, minutes=0.002)
    again.resume()
    again.run()
    assert again.step == run.step and (tmp_path / LAST).read_bytes() == before
    longer = trainer(tmp_path, steps=run.step + 2, minutes=5.0)
    longer.resume()
    longer.run()
    assert longer.step == run.step + 2 and longer.ended == "steps"


def test_a_loss_that_is_not_a_number_ends_the_run_with_advice(tmp_path: Path) -> None:
    run = trainer(tmp_path, validate_every=1)
    with torch.no_grad():
        next(run.model.parameters()).fill_(float("nan"))
    with pytest.raises(ValueError, match="the loss is nan at step 1: lower peak_lr"):
        run.run()


def test_padding_is_counted_on_both_sides(tmp_path: Path) -> None:
    """Batches are cut by the target's length: the source has most of the padding."""
    read: list[tuple[int, int]] = []  # of each batch: places, and those that hold a token

    def forward(module: Any, given: Any, named: dict[str, Any]) -> None:
        if module.training:
            source, target = given
            tokens = (source != PAD).sum() + ((target != PAD) & (target != STOP)).sum()  # nothing follows a stop
            read.append((source.numel() + target.numel(), int(tokens)))

    run = trainer(tmp_path, steps=5, validate_every=5)
    run.model.register_forward_pre_hook(forward, with_kwargs=True)
    run.run()
    places, tokens = map(sum, zip(*read, strict=True))
    [event] = read_metrics(tmp_path / "metrics.jsonl")
    assert len(read) == 5
    assert event["padding"] == pytest.approx(1 - tokens / places, abs=1e-6) and event["padding"] > 0.01


def test_the_mean_of_the_last_weights_is_what_is_validated(tmp_path: Path) -> None:
    run = trainer(tmp_path, average="last", last=2, steps=6, validate_every=2)
    seen = []

    def keep(event: dict[str, Any]) -> None:
        if "loss" in event:
            seen.append([each.detach().clone() for each in run.model.parameters()])

    run.run(keep)
    wanted = [torch.stack(pair).mean(0) for pair in zip(*seen[-2:], strict=True)]
    for own, mean in zip(run.average.model.parameters(), wanted, strict=True):
        assert torch.equal(own, mean)


def test_a_student_learns_from_its_teachers(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        trainer(tmp_path / name, seed=seed, steps=4, validate_every=4).run()
    teachers = Translator.load(tmp_path / "a", tmp_path / "b")
    student = trainer(tmp_path / "c", steps=3, distill=0.5)
    done: list[int] = []
    learn_from(student, teachers, DATA.train, beams=2, progress=done.append)
    assert done[-1] == len(DATA.train.source)
    corpus = student.encode(0)
    assert len(corpus.target.lengths) > len(DATA.train.source) and corpus.soft is not None
    weights = corpus.soft.weights[corpus.target.flat != 2]  # nothing is said of the start token
    assert (weights.sum(-1) <= 1 + 1e-5).all() and (weights.sum(-1) > 0).all()
    student.run()
    assert (tmp_path / "c" / "model.safetensors").is_file()
    again = trainer(tmp_path / "c", steps=5, distill=0.5)
    learn_from(again, Translator.load(tmp_path / "a"), DATA.train, beams=2)
    with pytest.raises(ValueError, match="the same teachers"):
        again.resume()
    again = trainer(tmp_path / "c", steps=5, distill=0.5)
    learn_from(again, Translator.load(tmp_path / "a", tmp_path / "b"), DATA.train, beams=2)
    assert again.resume()


def test_a_student_splits_a_text_in_one_way(tmp_path: Path) -> None:
    trainer(tmp_path / "a", steps=2).run()
    student = trainer(tmp_path / "b", bpe_dropout=0.1)
    with pytest.raises(ValueError, match="bpe_dropout is 0.1: what teachers say of a sentence"):
        learn_from(student, Translator.load(tmp_path / "a"), DATA.train)


@pytest.mark.parametrize("lowercase", [True, False])
def test_bleu_in_training_is_lower_cased_where_the_vocabulary_is(
    tmp_path: Path, lowercase: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cased, a word of a lower-cased translation would not be found in any reference."""

    def in_small_letters(self: Translator, lines: list[str], **how: Any) -> Any:
        wanted = dict(zip(*DATA.valid, strict=True))
        return [[Translation(wanted[line].lower(), 0.0, 0.0, [])] for line in lines]

    monkeypatch.setattr(Translator, "__call__", in_small_letters)
    words = Words.learn([*DATA.train.source, *DATA.train.target], vocab_size=120, lowercase=lowercase)
    assert words.lowercase is lowercase
    data = Data(DATA.train, Pairs(DATA.valid.source, [line.title() for line in DATA.valid.target]))
    run = translation_trainer(SMALL, data, tmp_path, words=words)
    assert run.score is not None
    score = run.score(run.model.eval())
    assert score > 99.9 if lowercase else score < 90


def test_a_run_in_the_background_goes_on_ignoring_ctrl_c(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run = trainer(tmp_path / "a", steps=4, validate_every=1)
        run.run(lambda event: signal.raise_signal(signal.SIGINT))
        assert run.step == 4 and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
