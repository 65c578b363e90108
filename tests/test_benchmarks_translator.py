"""The benchmark that trains translators, at toy scale on a CPU: its phases, second calls, what it reports."""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.small import DATA, SMALL

from regard.train import Translator, Words, toy
from regard.train._build import encode_pairs

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
WORDS = ["--toy", "--sentences", "60", "--steps", "6", "--teachers", "2", "--seeds", "1"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    found = importlib.import_module("translator_seeds")
    monkeypatch.setattr(found, "BEGAN", found.time.monotonic())
    return found


def report(out: Path) -> Any:
    return json.loads((out / "report.json").read_text())


def test_calls_go_on_where_the_one_before_stopped(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "run"
    given = [*WORDS, "--out", str(out)]
    script.main([*given, "--seconds", "0"])
    assert "call again with the same --out to go on" in capsys.readouterr().out
    assert report(out)["teachers"] == report(out)["students"] == []

    script.main([*given, "--until", "lessons"])
    found = report(out)
    assert [each["seed"] for each in found["teachers"]] == [1, 2] and found["students"] == []
    assert found["lessons"]["sentences"] == found["lessons"]["of"]
    assert found["calls"][-1]["did"] == ["teacher 1", "teacher 2", "lessons", "ensemble"]
    assert found["ensemble"]["models"] == 2

    script.main(given)
    found = report(out)
    assert found["calls"][-1]["did"] == ["student 1"]
    real = len(toy(60, 20).train.source)
    assert found["sentences"]["real"] == real and 0 < found["sentences"]["closest"] <= real
    [student] = found["students"]
    assert student["steps"] == 6 and not student["cut short"]
    assert found["mean of students"] == {"seeds": 1} | {
        name: round(student[name], 3) for name in ("valid", "test", "chrf")
    }
    assert len(list(out.iterdir())) == 6  # two teachers, lessons, one student, the best of them, the report

    # what is kept is what was measured
    with tarfile.open(out / "best.tar") as packed:
        packed.extractall(tmp_path, filter="data")
    best = Translator.load(tmp_path / "best")
    best.models[0].float()
    test = toy(1, 20, seed=5).valid.source
    lines = [each[0].text for each in best(test, length_penalty=student["length penalty"])]
    assert lines == student["translated"]

    script.main(given)
    assert report(out)["calls"][-1]["did"] == [] and report(out)["students"] == found["students"]
    with pytest.raises(SystemExit, match="holds a run with another r_drop; give another --out"):
        script.main([*given, "--r-drop", "0.1"])


def test_lessons_of_both_directions(script: Any, tmp_path: Path) -> None:
    real = script.engine.Pairs(["A man.", "Two dogs.", "Snow."], ["Ein Mann.", "Zwei Hunde.", "Schnee."])
    made = script.Lessons(real.source, [["ein mensch.", "ein mann."], ["", "  "], ["schnee.", "schnee."]])
    assert script.closest(made, real) == (["A man.", "Snow."], ["ein mann.", "schnee."])
    back = script.Lessons(real.target, [["a man.", "one man.", "man.", "a guy."], ["", "two dogs."], ["the snow."]])
    assert script.turned(back, real) == (
        ["one man.", "man.", "the snow."],
        ["Ein Mann.", "Ein Mann.", "Schnee."],
    )


def test_students_learn_from_the_other_direction_too(script: Any, tmp_path: Path) -> None:
    real = toy(60, 20).train
    other = tmp_path / "other"
    given = [*WORDS, "--out", str(tmp_path / "run"), "--back", str(other)]
    with pytest.raises(SystemExit, match="has no lessons.json.gz; run that direction with --until lessons"):
        script.main(given)
    other.mkdir()
    for sources, refused in ((real.source, True), (real.target, False)):
        made = script.Lessons(sources, [[f"{each} again"] for each in real.source])
        (other / "lessons.json.gz").write_bytes(gzip.compress(json.dumps(made).encode()))
        if refused:
            with pytest.raises(SystemExit, match="lessons of another text or direction"):
                script.main(given)
    script.main(given)
    assert report(tmp_path / "run")["sentences"]["back"] == len(real.source)


def test_students_that_start_too_late_wait_for_the_next_call(script: Any, tmp_path: Path) -> None:
    session = script.Session(script.parse(["--toy", "--out", str(tmp_path), "--seconds", "60"]))
    session.read()
    runs = script.prepared(session, session.settings, session.corpus)
    runs.milliseconds = 100.0
    session.report["steps"] = {"teacher": 100}
    with pytest.raises(script.Late):
        script.steps_of(session, runs, "student")  # 20 s for three evaluations and 300 steps of 0.1 s
    runs.milliseconds = 10.0
    assert 100 <= script.steps_of(session, runs, "student") < 2000


def test_what_is_missing_is_said_before_anything_is_trained(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sacrebleu" else found(name))
    with pytest.raises(SystemExit, match="sacrebleu not installed: pip install"):
        script.main([*WORDS, "--out", str(tmp_path)])


def test_another_vocabulary_is_refused(script: Any, tmp_path: Path) -> None:
    given = [*WORDS, "--out", str(tmp_path), "--seconds", "0"]
    script.main(given)
    held = report(tmp_path)
    (tmp_path / "report.json").write_text(json.dumps({**held, "vocabulary": "another"}))
    with pytest.raises(SystemExit, match="made with another text or vocabulary; give another --out"):
        script.main(given)


def test_a_failed_capture_goes_on_in_a_new_process(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = script.Session(script.parse([*WORDS, "--out", str(tmp_path), "--seconds", "300"]))
    session.read()
    session.device = torch.device("cuda")  # nothing is moved there: the first thing fails

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    called: list[list[str]] = []
    monkeypatch.setattr(script, "Runs", fail)
    monkeypatch.setattr(script.subprocess, "call", lambda words: called.append(words) or 7)
    for act, words in (
        (lambda: script.choose_attention(session), ["--attention", "torch"]),
        (lambda: script.prepared(session, session.settings, session.corpus), ["--no-graphs"]),
    ):
        with pytest.raises(SystemExit) as ended:
            act()
        assert ended.value.code == 7
        again = script.parse(called[-1][2:])
        assert called[-1][2 : 2 + len(WORDS)] == WORDS and called[-1][-2 - len(words) : -2] == words
        assert 0 < again.seconds <= 300 and again.out == str(tmp_path)
    assert "stream is capturing" in report(tmp_path)["calls"][-1]["did"][0]
    session.given.no_graphs = True
    with pytest.raises(RuntimeError, match="capturing"):
        script.prepared(session, session.settings, session.corpus)


def test_a_run_that_learns_nothing_is_tried_again_with_a_lower_rate(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    session = script.Session(script.parse([*WORDS, "--out", str(tmp_path)]))
    session.read()
    session.settings = script.engine.Settings(**{**vars(session.settings), "peak_lr": float("1e30"), "warmup": 0})
    runs = script.prepared(session, session.settings, session.corpus)
    tried = []
    train = runs.train

    def watched(*given: Any, peak: float, **how: Any) -> Any:
        tried.append(peak)
        return train(*given, peak=peak if len(tried) == 1 else 1e-3, **how)

    monkeypatch.setattr(runs, "train", watched)
    assert script.trained(session, runs, "teacher", 1)["steps"] == 6
    assert tried == [1e30, 0.5e30] and "again with a lower rate" in capsys.readouterr().out


def test_a_run_does_not_depend_on_those_before_it(script: Any) -> None:
    from _graph_training import Runs

    words = Words.learn([*DATA.train.source, *DATA.train.target], vocab_size=SMALL.vocab_size)
    runs = Runs(SMALL, words, encode_pairs(words, DATA.train, SMALL), torch.device("cpu"), epochs=2)
    runs.prepare(timed=1)
    found = []
    for seed in (3, 5, 3):
        runs.train(seed, 4, peak=1e-3)
        found.append([each.clone() for each in runs.average.model.parameters()])
    assert all(map(torch.equal, found[0], found[2]))
    assert not all(map(torch.equal, found[0], found[1]))


def test_epochs_have_the_same_shapes(script: Any) -> None:
    """Else a graph would be captured for shapes that hardly ever come again."""
    from _graph_training import Runs

    words = Words.learn([*DATA.train.source, *DATA.train.target], vocab_size=SMALL.vocab_size)
    runs = Runs(SMALL, words, encode_pairs(words, DATA.train, SMALL), torch.device("cpu"), epochs=4)
    shapes = [sorted((len(each.rows), each.widths) for each in epoch) for epoch in runs.epochs]
    assert shapes[0] == shapes[1] == shapes[2] == shapes[3]
    rows = [sorted(tuple(sorted(each.rows)) for each in epoch) for epoch in runs.epochs]
    assert rows[0] != rows[1]  # other sentences meet in a batch
