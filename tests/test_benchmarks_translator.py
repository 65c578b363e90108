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

from regard.train import Translator, Words, toy, translation_trainer

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
WORDS = ["--toy", "--sentences", "60", "--steps", "6", "--teachers", "2", "--seeds", "1"]
ALONE = ["--teacher-r-drop", "0", "--lessons-by", "teachers"]


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
    given = [*WORDS, "--out", str(out), *ALONE]
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
    assert student["steps"] == student["planned"] == 6
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


def test_a_call_that_is_cut_anywhere_loses_nothing(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Each call ends in the middle of a model, or of the lessons; in the end there is what one long call gives."""
    import _graph_training

    given = [*WORDS, "--steps", "3", "--out"]
    script.main([*given, str(tmp_path / "whole")])

    def short_of_time(*args: Any, seconds: float, **how: Any) -> Any:
        return train(*args, seconds=-1.0, **how)  # after the first step it is too late

    train, calls = _graph_training.Runs.train, 0
    monkeypatch.setattr(_graph_training.Runs, "train", short_of_time)
    out = tmp_path / "cut"
    while not (out / "report.json").is_file() or not report(out)["students"]:
        script.main([*given, str(out)])
        calls += 1
    assert calls == 7  # a step each; the call that finishes a model begins the next one
    said = [what for call in report(out)["calls"] for what in call["did"]]
    assert said[:3] == ["teacher 1 up to step 1", "teacher 1 up to step 2", "teacher 1"]
    assert not (out / "unfinished.safetensors").exists()
    assert "teacher 1 came to step 2 of 3: call again with the same --out to go on" in capsys.readouterr().out
    whole, cut = (report(tmp_path / name) for name in ("whole", "cut"))
    assert [each["translated"] for each in whole["students"]] == [each["translated"] for each in cut["students"]]
    assert cut["students"][0]["seconds"] > 0
    for name in ("teacher-1", "teacher-2", "student-1"):
        one, other = (script.load_file(tmp_path / each / f"{name}.safetensors") for each in ("whole", "cut"))
        assert all(torch.equal(one[weight], other[weight]) for weight in one), name


def test_lessons_go_on_where_a_call_ended(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [*WORDS, "--out", str(tmp_path), "--until", "lessons"]
    script.main([*given[:-2], "--until", "teachers"])
    asked: list[int] = []

    def killed(session: Any, teachers: Any, lines: list[str]) -> Any:
        asked.append(len(lines))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return [[f"{line} one", line] for line in lines]

    real = toy(300, 20).train
    monkeypatch.setattr(script, "translated", killed)
    monkeypatch.setattr(script, "together", lambda session: None)
    read = script.Session.read

    def longer(session: Any) -> None:
        read(session)
        session.data = script.engine.Data(real, session.data.valid)

    monkeypatch.setattr(script.Session, "read", longer)
    with pytest.raises(KeyboardInterrupt):
        script.main(given)
    assert report(tmp_path)["lessons"]["sentences"] == 200 == len(script.read_lessons(tmp_path).source)
    script.main(given)
    assert asked == [200, *[min(200, len(real.source) - 200)] * 2]
    found = script.read_lessons(tmp_path)
    assert found.source == real.source and found.texts[-1] == [f"{real.source[-1]} one", real.source[-1]]
    script.main(given)
    assert len(asked) == 3  # they are done


def test_teachers_learn_with_r_drop_and_translate_together(script: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    given = [*WORDS, "--out", str(out), "--until", "lessons"]
    used = []
    prepared = script.prepared
    script.prepared = lambda session, settings, corpus: (
        used.append(settings.r_drop) or prepared(session, settings, corpus)
    )
    try:
        script.main(given)
    finally:
        script.prepared = prepared
    assert used == [1.0]
    made = script.read_lessons(out)
    session = script.Session(script.parse(given))
    session.read()
    found = Translator(script.ensemble(session), session.words)(made.source[:3], beams=5, best=5)
    assert made.texts[:3] == [[one.text for one in several] for several in found]
    with pytest.raises(SystemExit, match="holds a run with another teacher_r_drop, lessons_by"):
        script.main([*WORDS, "--out", str(out), *ALONE])


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


def encoded(words: Words, out: Path) -> Any:
    """What a run in this folder would read."""
    return translation_trainer(SMALL, DATA, out, words=words).encode(0)


def test_a_killed_run_goes_on_where_it_was_written_last(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import _graph_training

    monkeypatch.setattr(_graph_training, "LOOK", 1)
    monkeypatch.setattr(_graph_training, "SAVE", -1.0)
    words = Words.learn([*DATA.train.source, *DATA.train.target], vocab_size=SMALL.vocab_size)
    corpus, cpu = encoded(words, tmp_path), torch.device("cpu")

    def fresh() -> Any:
        runs = _graph_training.Runs(SMALL, words, corpus, cpu, epochs=2)
        runs.prepare(timed=1)
        return runs

    whole, held, seen = fresh(), tmp_path / "unfinished", list[int]()
    whole.train(3, 8, peak=1e-3)

    def killed(step: int, loss: float) -> None:
        seen.append(step)
        if step == 7 and len(seen) == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fresh().train(3, 8, peak=1e-3, held=held, progress=killed)
    again = fresh()
    found = again.train(3, 8, peak=0.5, held=held, progress=killed)  # its own rate is in the file
    assert seen == [1, 2, 3, 4, 5, 6, 7, 7, 8] and found["steps"] == 8 and found["peak_lr"] == 1e-3
    for one, other in zip(whole.average.model.parameters(), again.average.model.parameters(), strict=True):
        assert torch.equal(one, other)
    fresh().train(5, 2, peak=1e-3, held=held, progress=killed)  # another run is not mistaken for it
    assert seen[-2:] == [1, 2]


def test_a_run_does_not_depend_on_those_before_it(script: Any, tmp_path: Path) -> None:
    from _graph_training import Runs

    words = Words.learn([*DATA.train.source, *DATA.train.target], vocab_size=SMALL.vocab_size)
    runs = Runs(SMALL, words, encoded(words, tmp_path), torch.device("cpu"), epochs=2)
    runs.prepare(timed=1)
    found = []
    for seed in (3, 5, 3):
        runs.train(seed, 4, peak=1e-3)
        found.append([each.clone() for each in runs.average.model.parameters()])
    assert all(map(torch.equal, found[0], found[2]))
    assert not all(map(torch.equal, found[0], found[1]))


def test_epochs_have_the_same_shapes(script: Any, tmp_path: Path) -> None:
    """Else a graph would be captured for shapes that hardly ever come again."""
    from _graph_training import Runs

    words = Words.learn([*DATA.train.source, *DATA.train.target], vocab_size=SMALL.vocab_size)
    runs = Runs(SMALL, words, encoded(words, tmp_path), torch.device("cpu"), epochs=4)
    shapes = [sorted((len(each.rows), each.widths) for each in epoch) for epoch in runs.epochs]
    assert shapes[0] == shapes[1] == shapes[2] == shapes[3]
    rows = [sorted(tuple(sorted(each.rows)) for each in epoch) for epoch in runs.epochs]
    assert rows[0] != rows[1]  # other sentences meet in a batch
