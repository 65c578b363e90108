"""`regard train`, `translate` and `evaluate`, from the words a user types to the lines they see."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.train.small import DATA
from typer.testing import CliRunner

from regard import interop
from regard.cli import app, parse
from regard.cli.commands.train import _device
from regard.recording import Recording
from regard.train import LAST, Trainer, Translator, Words, align, compare, read_metrics

SIZES = "--set vocab_size=120 --set embed_dim=16 --set num_layers=1 --set num_heads=2 --set ff_dim=24"
PACE = "--set batch_tokens=150 --set warmup=5 --set validate_every=5 --set save_every=5"
LINES = DATA.valid.source


def run(words: str, **given: Any) -> Any:
    result = CliRunner().invoke(app, shlex.split(words), prog_name="regard", **given)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parallel text with a test, and a run on it."""
    here = tmp_path_factory.mktemp("translator")
    for name, pairs in (("train", DATA.train), ("val", DATA.valid), ("test", DATA.valid)):
        (here / f"{name}.en").write_text("".join(f"{line}\n" for line in pairs.source))
        (here / f"{name}.de").write_text("".join(f"{line}\n" for line in pairs.target))
    words = f"train --data {here} --source en --target de --out {here / 'run'} --steps 10 {SIZES} {PACE}"
    done = run(f"{words} --set dropout=0.1 --set attention_dropout=0 --set r_drop=0.5 --device cpu")
    assert done.exit_code == 0, done.output
    assert "million parameters on cpu from step 0 for 10 steps; a line every 5 steps" in done.stderr
    assert "step     10  loss" in done.stdout and "the best weights are those of step" in done.stdout
    return here


def test_a_run_leaves_a_model_its_tokenizer_settings_metrics_and_a_checkpoint(folder: Path) -> None:
    names = {each.name for each in (folder / "run").iterdir()}
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "settings.json", LAST, "metrics.jsonl"}
    assert names == wanted
    events = read_metrics(folder / "run" / "metrics.jsonl")
    assert [event["step"] for event in events] == [5, 10]
    assert {"loss", "valid_loss", "learning_rate", "tokens_per_second", "padding", "seconds"} <= events[0].keys()
    assert "valid_bleu" in events[-1]


def test_a_folder_with_a_run_is_not_overwritten_but_resumed(folder: Path) -> None:
    words = f"train --data {folder} --out {folder / 'run'} --device cpu"
    refused = run(f"{words} --steps 12")
    assert refused.exit_code == 2 and "holds a run already; go on with --resume" in refused.stderr
    refused = run(f"{words} --resume --set ff_dim=32")
    assert refused.exit_code == 2 and "ff_dim is 24 in" in refused.stderr and "only steps," in refused.stderr
    refused = run(f"{words} --resume --source de --target en")
    assert refused.exit_code == 2 and "source is en in" in refused.stderr
    refused = run(f"{words} --resume --seed 9")
    assert refused.exit_code == 2 and "seed is 1 in" in refused.stderr
    refused = run(f"train --toy --out {folder / 'run'} --device cpu --resume --steps 12")
    assert refused.exit_code == 2 and "was trained on another text than the one given" in refused.stderr
    done = run(f"{words} --resume --steps 12 --json")
    assert done.exit_code == 0, done.stderr
    assert [json.loads(line)["step"] for line in done.stdout.splitlines()] == [12]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train", "--data FOLDER is missing (or REGARD_DATA); --toy needs none"),
        ("train --data none", "none is not a folder"),
        (
            "train --toy --set nonsense=1",
            "there is no setting nonsense; regard train --settings lists them all",
        ),
        ("train --toy --set drop=0.1", "--set drop=0.1: there is no setting drop; did you mean r_drop or dropout?"),
        ("train --toy --set dropout", "--set dropout: expected name=value, such as --set dropout=0.2"),
        ("train --toy --steps -1", "--steps is -1; expected a number of steps to train for, at least 1"),
        ("train --toy --set minutes=0", "minutes must be above 0, or None, which sets no limit; got 0"),
        ("train --toy --source fr", "--source is for text of your own, and --toy makes its own: leave it out"),
        ("train --toy --set target=fr", "--target is for text of your own, and --toy makes its own: leave it out"),
        ("train --toy --set task=lm --text a", "--toy trains a translator; leave out --task lm"),
        ("train --task lm --text a --source en", "--source is for translators, and a language model has no use for it"),
        ("train --task lm --set task=translate", "--task and --set task were both given; give one"),
        ("train --data . --source de", "source and target are both 'de'; expected two languages"),
        ("train --data . --source ''", "source must be a word, got ''"),
        ("train --task lm --text /dev/null", "the text is empty"),
        ("train --toy --minutes 0", "--minutes is 0; expected a time to train for, above 0"),
        ("train --toy --set steps=many", "--set steps=many: expected a whole number"),
        ("train --toy --set lowercase=yes", "expected true or false"),
        ("train --toy --set num_heads=5", "embed_dim must be a multiple of num_heads=5, got 64"),
        ("train --toy --steps 3 --set steps=5", "--steps and --set steps were both given; give one"),
        (
            "train --toy --distill a --set vocab_size=99",
            "--distill: a student splits text as its teachers do; leave out --set vocab_size",
        ),
        ("train --toy --task lm", "--toy trains a translator; leave out --task lm"),
        ("train --toy --data .", "--data and --toy were both given; give one"),
        ("train --task lm --text a.txt --data .", "--data and --task lm were both given; give one"),
        ("train --toy --set dropout=2", "dropout must be in [0.0, 1.0), got 2.0"),
        ("train --toy --resume", "holds no checkpoint to resume from"),
        (f"train --toy --seed {2**63}", f"seed must be below 2^63, got {2**63}"),
        ("train --toy --device meta", "--device 'meta' cannot be used here: it has shapes and no numbers"),
        ("train --toy --shard", "--shard needs several processes: torchrun --nproc-per-node 2 -m regard train"),
        ("train --toy --tensor-parallel --shard", "--shard and --tensor-parallel were both given"),
        ("train --toy --set max_tokens=2", "all 3901 sentences have max_tokens=2 tokens or more; raise it"),
        ("train --task lm", "--task lm needs --text FILE"),
        ("train --task lm --text a --set norm=pre", "--set norm is for translators, and a language model has no use"),
        ("translate hello --model . --beams 4 --temperature 1", "--beams 4 and --temperature 1 were both given"),
        ("train --task lm --text none.txt", "none.txt: No such file"),
        ("train --text a.txt --toy", "--text is for --task lm"),
        ("train --task sing", "task must be one of translate, lm, got 'sing'"),
        ("translate hello", "--model FOLDER is missing"),
        ("translate hello --model none", "none is not a folder"),
        ("translate hello --model . --best 9", "--best 9 needs as many beams; --beams is 5"),
        ("translate hello --model . --page a.html", "--page names the page that --show writes; give --show too"),
        ("translate hello --model . --out none/a", "--out names the folder none, which is not there"),
        ("translate hello --model . --show --page none/a", "--page names the folder none, which is not there"),
        ("translate hello --model . --out .", "--out names ., which is a folder; give the name of a file"),
        ("translate hello --model . --file a", "sentences and --file were both given"),
        ("translate hello --model .", "config.json"),
        ("evaluate --test a b", "give --model FOLDER or --system FILE"),
        ("evaluate --test a b --system c --beams 3", "--beams is for --model; the translations of --system are there"),
        ("evaluate --test a b --system c --length-penalty 1", "--length-penalty is for --model; the translations of"),
        ("evaluate --test a b --system c --samples 5", "--samples is for --against FILE, which is missing"),
        ("evaluate --test a b --system c --against d --samples 0", "--samples is 0; expected at least 1"),
        ("evaluate --test a b --system c", "a: No such file"),
    ],
)
def test_bad_words_end_with_one_line(words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REGARD_DATA", raising=False)
    done = run(words)
    assert done.exit_code == 2 and message in done.stderr
    assert done.stderr.startswith("regard: ") and done.stderr.count("\n") == 1


def test_sentences_files_and_pipes_translate_alike(folder: Path, tmp_path: Path) -> None:
    model = f"--model {folder / 'run'}"
    said = run(f"translate {model} {shlex.join(LINES)}").stdout
    assert len(said.splitlines()) == len(LINES)
    assert run(f"translate {model} --file {folder / 'val.en'}").stdout == said
    assert run(f"translate {model}", input="".join(f"{line}\n" for line in LINES)).stdout == said
    assert run(f"translate {model} --file -", input="".join(f"{line}\n" for line in LINES)).stdout == said
    run(f"translate {model} --file {folder / 'val.en'} --out {tmp_path / 'found'}")
    assert (tmp_path / "found").read_text() == said


def test_what_is_piped_in_is_read_as_a_file_is(folder: Path) -> None:
    model = f"--model {folder / 'run'}"
    wrong = run(f"translate {model}", input=b"a cat.\n\xe9t\xe9\n")
    assert wrong.exit_code == 2 and "standard input, line 2: byte 0xe9 is not UTF-8" in wrong.stderr
    marked = run(f"translate {model}", input=b"\xef\xbb\xbf" + LINES[0].encode() + b"\r\n")
    assert marked.stdout == run(f"translate {model} {shlex.quote(LINES[0])}").stdout


def test_several_translations_scores_json_and_drawn_ones(folder: Path) -> None:
    words = f"translate --model {folder / 'run'} {shlex.quote(LINES[0])}"
    rows = [line.split("\t") for line in run(f"{words} --best 3 --scores").stdout.splitlines()]
    assert len(rows) == 3 and sorted(rows, key=lambda row: -float(row[0])) == rows
    found = json.loads(run(f"{words} --best 2 --json").stdout)
    assert found["source"] == LINES[0] and len(found["translations"]) == 2
    drawn = [run(f"{words} --temperature 1.5 --top-k 20 --seed {seed}").stdout for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_next_to_json_a_drawing_goes_where_messages_go(folder: Path, tmp_path: Path) -> None:
    words = f"translate --model {folder / 'run'} {shlex.quote(LINES[0])} --show --page {tmp_path / 'page.html'} --json"
    done = run(words)
    assert json.loads(done.stdout)["source"] == LINES[0]
    assert LINES[0] in done.stderr and f"wrote {tmp_path / 'page.html'}" in done.stderr


def test_an_ensemble_of_one_model_twice_is_that_model(folder: Path) -> None:
    alone, twice = (Translator.load(*[folder / "run"] * count)(LINES, best=2) for count in (1, 2))
    for one, other in zip(alone, twice, strict=True):
        assert [each.tokens for each in one] == [each.tokens for each in other]
        assert [each.score for each in one] == pytest.approx([each.score for each in other])


def test_a_batch_gives_what_each_sentence_alone_gives_without_a_cache(folder: Path) -> None:
    translator = Translator.load(folder / "run")
    together = translator([*LINES, ""], beams=3)
    alone = [translator([line], beams=3, use_cache=False)[0] for line in [*LINES, ""]]
    assert [[each.tokens for each in item] for item in together] == [[each.tokens for each in item] for item in alone]


def test_a_line_without_a_word_stays_empty(folder: Path) -> None:
    done = run(f"translate --model {folder / 'run'} --best 2 --show '' '  '")
    assert done.exit_code == 0 and done.stdout == "\n\n"
    done = run(f"translate --model {folder / 'run'} --scores", input=f"{LINES[0]}\n\n{LINES[1]}\n")
    first, empty, last, end = done.stdout.split("\n")
    assert empty == "0.0000\t" and end == "" and float(first.split("\t")[0]) < 0 > float(last.split("\t")[0])


def test_a_run_before_its_first_validation_says_how_to_go_on(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text((folder / "run" / "settings.json").read_text())
    said = run(f"translate --model {tmp_path} hello")
    assert (
        said.exit_code == 2 and f"go on with regard train --resume --out {tmp_path}, or start it again" in said.stderr
    )
    (tmp_path / LAST).touch()
    said = run(f"evaluate --model {tmp_path} --test {folder / 'test.en'} {folder / 'test.de'}")
    assert said.exit_code == 2 and said.stderr.strip().endswith(f"go on with regard train --resume --out {tmp_path}")


def test_pairs_that_are_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    for name, short, long in (("train.en", "a cat", "a dog"), ("train.de", "uno kato", "una hunta")):
        (tmp_path / name).write_text("\n".join([short] * 30 + [" ".join([long] * 40)] * 3 + [short] * 10) + "\n")
    words = f"train --data {tmp_path} --out {tmp_path / 'run'} --steps 2 {SIZES} --set max_tokens=32 --device cpu"
    done = run(words)
    assert done.exit_code == 0, done.output
    assert "3 pairs of sentences are left out: longer than max_tokens=32 tokens" in done.stderr


def test_an_endless_line_of_the_validation_text_is_left_out_too(tmp_path: Path) -> None:
    """A search through it would hold up every validation for hours."""
    for name, short, long in (("train.en", "a cat", "a dog"), ("train.de", "uno kato", "una hunta")):
        (tmp_path / name).write_text("\n".join([short] * 39 + [" ".join([long] * 20_000)]) + "\n")
    done = run(f"train --data {tmp_path} --out {tmp_path / 'run'} --steps 2 {SIZES} --device cpu")
    assert done.exit_code == 0, done.output
    assert "1 pairs of sentences are left out" in done.stderr and "BLEU" in done.stdout


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (10**20, f"pieces, not vocab_size={10**20}: the text has no more"),
        (5, "the vocabulary has 13 pieces, not vocab_size=5: each sign of the text is one"),
    ],
)
def test_a_vocabulary_that_the_text_cannot_have_is_told(size: int, told: str, tmp_path: Path) -> None:
    for name, line in (("train.en", "a cat."), ("train.de", "uno kato.")):
        (tmp_path / name).write_text(f"{line}\n" * 20)
    sizes = SIZES.replace("vocab_size=120", f"vocab_size={size}")
    done = run(f"train --data {tmp_path} --out {tmp_path / 'run'} --steps 2 {sizes} --device cpu")
    assert done.exit_code == 0, done.output
    assert told in done.stderr


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")]
)
def test_too_little_memory_is_told_in_one_line(
    error: Exception, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Trainer, "run", fail)
    done = run(f"train --toy --out {tmp_path} --steps 2 {SIZES} --device cpu")
    assert done.exit_code == 2 and "not enough memory for this run; lower batch_tokens" in done.stderr
    monkeypatch.setattr(Translator, "__call__", fail)
    done = run(f"translate --model {folder / 'run'} hello")
    assert done.exit_code == 2 and done.stderr.startswith("regard: there is not enough memory for this")
    monkeypatch.setattr(Trainer, "run", lambda *_: 1 / 0)
    with pytest.raises(AssertionError, match="division by zero"):  # what is no matter of memory is not called so
        run(f"train --toy --out {tmp_path / 'other'} --steps 2 {SIZES} --device cpu")


def test_settings_that_are_no_text_are_named(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "run"
    shutil.copytree(folder / "run", broken)
    (broken / "settings.json").write_bytes(b"\xff\xfe")
    done = run(f"train --data {folder} --out {broken} --resume")
    assert done.exit_code == 2 and f"{broken / 'settings.json'} does not hold the settings" in done.stderr


def test_a_seed_needs_a_temperature_and_is_one_that_torch_takes(folder: Path) -> None:
    words = f"translate --model {folder / 'run'} hello --seed"
    done = run(f"{words} 3")
    assert done.exit_code == 2 and "seed is given, but temperature 0 draws nothing" in done.stderr
    done = run(f"{words} {2**64} --temperature 1")
    assert done.exit_code == 2 and "seed must be from −2^63 to 2^64 − 1" in done.stderr


def test_columns_of_a_drawing_stand_under_their_signs_in_any_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from rich.cells import cell_len

    from regard import train as engine
    from regard.cli.commands.translate import show_alignment

    source, target = ["猫", "e\u0301a", "</s>"], ["狗狗", "x"]
    found = engine.Aligned("狗狗 x", source, target, [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], cast(Any, None))
    monkeypatch.setattr(engine, "align", lambda *_, **__: found)
    show_alignment(cast(Any, None), "猫 e\u0301a", None)
    rows = capsys.readouterr().out.splitlines()[2:]
    assert {cell_len(row) for row in rows} == {4 + 1 + 3 * 3}
    assert rows[3] == "      猫 a  > " and rows[2] == "         e\u0301  s "
    assert rows[4] == "狗狗 ███      " and rows[5] == "   x       ███"


def test_a_text_of_too_few_tokens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a b a b\na\n")
    done = run(f"train --task lm --text {tmp_path / 'text'} --out {tmp_path / 'run'} --steps 2 {SIZES} --device cpu")
    assert done.exit_code == 2 and "too few tokens: of its 2 lines, the first 1 and the other 1" in done.stderr


def test_a_text_of_one_line_is_cut_between_two_words(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the cat sees the dog and the dog sees the cat " * 60)
    words = f"train --task lm --text {tmp_path / 'text'} --out {tmp_path / 'run'} --steps 2 {SIZES} --device cpu"
    done = run(f"{words} --set max_tokens=32 --set batch_tokens=200")
    assert done.exit_code == 0, done.stderr


def test_what_a_run_left_that_saved_nothing_is_not_taken_over(tmp_path: Path, folder: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    for name in ("tokenizer.json", "metrics.jsonl"):
        shutil.copy(folder / "run" / name, out / name)
    words = f"train --data {folder} --out {out} --steps 2 {SIZES} {PACE} --set vocab_size=90 --device cpu"
    done = run(words)
    assert done.exit_code == 0, done.stderr
    assert len(json.loads((out / "tokenizer.json").read_text())["model"]["vocab"]) == 90
    assert [event["step"] for event in read_metrics(out / "metrics.jsonl")] == [2]
    (out / LAST).unlink()
    refused = run(words)
    assert refused.exit_code == 2 and "holds a model already" in refused.stderr
    refused = run(f"{words} --resume")
    assert refused.exit_code == 2 and "start without --resume, and with another --out, since" in refused.stderr
    (out / "model.safetensors").unlink()
    refused = run(f"{words} --resume")
    assert refused.exit_code == 2 and refused.stderr.endswith("start without --resume\n")


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        Recording("one").save(tmp_path / "out.regard")
    assert caught.value.filename == str(tmp_path / "out.regard")


def test_a_full_disk_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / LAST))

    words = f"train --toy --out {tmp_path} {SIZES} --device cpu"
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "save", full)
        done = run(f"{words} --steps 2")
        assert done.exit_code == 2 and done.stderr.splitlines()[-1] == (
            f"regard: {tmp_path / LAST}: No space left on device; nothing was saved yet: free some space and start "
            "again"
        )
    shutil.rmtree(tmp_path)
    assert run(f"{words} --steps 2").exit_code == 0
    monkeypatch.setattr(Trainer, "save", full)
    done = run(f"{words} --steps 4 --resume")
    assert done.exit_code == 2 and done.stderr.splitlines()[-1] == (
        f"regard: {tmp_path / LAST}: No space left on device; what was saved before is whole: free some space, then "
        "--resume"
    )


def test_a_long_run_says_early_how_long_it_takes(tmp_path: Path) -> None:
    done = run(f"train --toy --out {tmp_path} --steps 21 {SIZES} --set validate_every=100 --device cpu")
    # how long the last step takes depends on what else the machine does
    assert done.exit_code == 0 and re.search(r"step     20  of 21: about \d+ s to go", done.stderr)


def test_the_alignment_is_the_cross_attention_and_its_rows_sum_to_one(folder: Path, tmp_path: Path) -> None:
    translator = Translator.load(folder / "run")
    found = align(translator, LINES[0])
    assert len(found.weights) == len(found.target) and len(found.weights[0]) == len(found.source)
    assert [sum(row) for row in found.weights] == pytest.approx([1.0] * len(found.target), abs=1e-5)
    page = tmp_path / "page.html"
    shown = run(f"translate --model {folder / 'run'} --show --page {page} {shlex.quote(LINES[0])}")
    assert shown.exit_code == 0, shown.stderr
    assert f"wrote {page}" in shown.stdout and "<html" in page.read_text()[:500]


def test_the_page_of_an_alignment_opens_at_the_clearest_head_of_cross_attention(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(Recording, "to_html", lambda self, path, **given: opened.append((self, given)))
    run(f"translate --model {folder / 'run'} --show --page {tmp_path / 'page.html'} {shlex.quote(LINES[0])}")
    [(recording, given)] = opened
    [cross] = [call for call in recording if "cross_attention" in call.path]
    clear = cross.map[0, :, :, :-1].amax(-1).mean(-1)
    assert given == {"layer": cross.layer, "head": int(clear.argmax())}


def test_what_is_drawn_is_what_was_asked_for_and_each_sentence_has_its_page(folder: Path, tmp_path: Path) -> None:
    words = (
        f"translate --model {folder / 'run'} --temperature 2 --seed 4 {shlex.quote(LINES[0])} {shlex.quote(LINES[1])}"
    )
    said = run(words).stdout.splitlines()
    shown = run(f"{words} --show --page {tmp_path / 'page.html'}").stdout.splitlines()
    for line, text in zip(LINES, said, strict=False):
        assert shown[shown.index(line) + 1] == text and shown.count(text) == 1
    titles = [(tmp_path / name).read_text() for name in ("page.html", "page-2.html")]
    assert LINES[0] in titles[0] and LINES[1] in titles[1]


def test_an_evaluation_has_signatures_and_compares_systems(folder: Path, tmp_path: Path) -> None:
    test = f"--test {folder / 'test.en'} {folder / 'test.de'}"
    mine = tmp_path / "mine"
    done = run(f"evaluate --model {folder / 'run'} {test} --out {mine} --json")
    assert done.exit_code == 0, done.stderr
    found = {each["name"]: each for each in json.loads(done.stdout)["scores"]}
    assert found.keys() == {"BLEU, lower-cased", "BLEU, cased", "chrF2, lower-cased", "chrF2, cased"}
    assert "case:lc" in found["BLEU, lower-cased"]["signature"] and "tok:13a" in found["BLEU, cased"]["signature"]
    perfect = run(f"evaluate --system {folder / 'test.de'} {test} --against {mine} --samples 50")
    assert perfect.exit_code == 0, perfect.stderr
    assert "BLEU, lower-cased  100.00" in perfect.stdout
    compared = [line for line in perfect.stdout.splitlines() if "p = 0.0" in line]
    assert [line[:18].strip() for line in compared] == list(found)
    short = mine.with_name("short")
    short.write_text("one line\n")
    refused = run(f"evaluate --system {mine} {test} --against {short}")
    assert refused.exit_code == 2 and f"--against names {short}, which has 1 lines; expected" in refused.stderr
    refused = run(f"evaluate --system {mine} {test} --out {mine.parent / 'nowhere' / 'x'}")
    assert refused.exit_code == 2 and "--out names the folder" in refused.stderr
    same = run(f"evaluate --system {mine} {test} --against {mine} --samples 50 --json")
    assert same.exit_code == 0, same.output
    for each in json.loads(same.stdout)["compared"]:
        assert each["ours"] == each["theirs"] and each["p_value"] == 1.0 and len(each["interval"]) == 2
    assert "lower-cased: the cased" not in perfect.stderr
    for name, text in (("upper", "Uno Kato"), ("lower", "uno kato")):
        (tmp_path / name).write_text(f"{text}\n")
    told = run(f"evaluate --system {tmp_path / 'lower'} --test {tmp_path / 'upper'} {tmp_path / 'upper'}")
    assert "all translations are lower-cased: the cased scores count each capital as an error" in told.stderr
    assert "chrF2, lower-cased 100.00" in told.stdout
    short = tmp_path / "short"
    short.write_text("one line\n")
    wrong = run(f"evaluate --system {short} {test}")
    assert wrong.exit_code == 2 and "1 translations and 6 references" in wrong.stderr


def test_the_interval_of_a_score_stays_inside_its_scale(tmp_path: Path) -> None:
    references = [f"one two three four five {number}" for number in range(60)]
    near = [f"{references[0]} more", *references[1:]]
    for each in compare(near, references[::-1], references, samples=200):
        low, high = each.interval
        assert 95 < low < each.ours < high <= 100
    for each in compare(references[::-1], near, ["six"] * 60, samples=200):
        assert 0 <= each.interval[0] <= each.interval[1]


def test_each_process_of_a_group_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parse, "device", lambda name: name)
    for name, rank, expected in (("cuda", "3", "cuda:3"), ("cuda", None, "cuda"), ("cuda:1", "3", "cuda:1"),
                                 ("cpu", "3", "cpu")):  # fmt: skip
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if rank is not None:
            monkeypatch.setenv("LOCAL_RANK", rank)
        assert _device(name) == torch.device(expected)


def test_a_student_has_its_teachers_vocabulary_in_its_settings(folder: Path, tmp_path: Path) -> None:
    words = f"train --data {folder} --steps 2 {PACE} --device cpu --set embed_dim=16 --set num_layers=1"
    small = f"{words} --set num_heads=2 --set ff_dim=24"
    teacher, student = tmp_path / "teacher", tmp_path / "student"
    assert run(f"{small} --out {teacher} --set lowercase=true --set vocab_size=90").exit_code == 0
    done = run(f"{small} --out {student} --distill {teacher}")
    assert done.exit_code == 0, done.stderr
    held = json.loads((student / "settings.json").read_text())
    assert held["lowercase"] is True and held["vocab_size"] == 90
    again = run(f"{small.replace('--steps 2', '--steps 3')} --out {student} --distill {teacher} --resume")
    assert again.exit_code == 0, again.stderr


def test_a_language_model_learns_a_text_and_goes_on_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "book.txt"
    text.write_text("the cat sees the dog. the dog sees the cat.\n" * 60)
    out = tmp_path / "book"
    done = run(
        f"train --task lm --text {text} --out {out} --steps 30 {SIZES} --set batch_tokens=200 --set warmup=5 "
        "--set validate_every=10 --set max_tokens=32 --set attention_dropout=0 --set dropout=0 --device cpu"
    )
    assert done.exit_code == 0, done.output
    losses = [event["valid_loss"] for event in read_metrics(out / "metrics.jsonl")]
    assert losses[-1] < 0.8 * losses[0]
    model: Any = interop.load(out)
    assert type(model).__name__ == "Decoder"
    wrong = run(f"translate hello --model {out}")
    assert wrong.exit_code == 2 and "holds a Decoder; a Transformer translates" in wrong.stderr
    vocabulary = (out / "tokenizer.json").read_bytes()
    text.write_text("another text altogether.\n" * 60)
    other = run(f"train --task lm --text {text} --out {out} --resume --steps 40 --device cpu")
    assert other.exit_code == 2 and "was trained on another text" in other.stderr
    assert (out / "tokenizer.json").read_bytes() == vocabulary  # nothing was written before the refusal
    text.write_text("the cat sees the dog. the dog sees the cat.\n" * 60)
    monkeypatch.setattr(Words, "learn", None)  # its vocabulary is there, and another version might learn another one
    on = run(f"train --task lm --text {text} --out {out} --resume --steps 31 --device cpu")
    assert on.exit_code == 0, on.stderr
    said = run(f"generate --model {out} 'the cat' --max-new-tokens 3")
    assert said.exit_code == 0 and said.stdout.strip()


@pytest.mark.parametrize(("told", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_exits_with_its_status(told: signal.Signals, status: int, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = [sys.executable, "-m", "regard", "train", "--toy", "--out", str(out), "--device", "cpu"]
    sizes = shlex.split(f"{SIZES} {PACE}")
    pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*words, "--steps", "100000", *sizes], **pipes)
    deadline = time.monotonic() + 60
    while not (out / LAST).is_file() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(told)
    _, said = process.communicate(timeout=60)
    assert process.returncode == status, said
    assert "go on with --resume" in said
    stood = len(read_metrics(out / "metrics.jsonl"))
    assert stood >= 1
    held = json.loads((out / "settings.json").read_text())
    assert held["seed"] == 1 and os.path.getsize(out / LAST) > 1000
    assert torch.isfinite(next(iter(interop.load(out).parameters()))).all()


def test_event_files_are_written_on_request(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    out = tmp_path / "run"
    done = run(f"train --toy --out {out} --steps 3 {SIZES} --set validate_every=3 --tensorboard --device cpu")
    assert done.exit_code == 0, done.output
    assert list((out / "tensorboard").glob("events.*"))


def test_event_files_of_a_run_that_went_on_have_each_validation_once(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = tmp_path / "run"
    words = f"train --toy --out {out} {SIZES} --set validate_every=2 --tensorboard --device cpu --steps"
    run(f"{words} 2")
    checkpoint = (out / LAST).read_bytes()
    run(f"{words} 6 --resume")
    (out / LAST).write_bytes(checkpoint)  # as if the run had been killed before it saved again
    done = run(f"{words} 6 --resume")
    assert done.exit_code == 0, done.stderr
    events = reader.EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    assert [each.step for each in events.Scalars("valid_loss")] == [2, 4, 6]


def test_a_line_longer_than_any_in_training_is_told_before_it_begins(folder: Path, tmp_path: Path) -> None:
    run_of = tmp_path / "run"
    shutil.copytree(folder / "run", run_of)
    settings = json.loads((run_of / "settings.json").read_text())
    (run_of / "settings.json").write_text(json.dumps({**settings, "max_tokens": 3}))
    said = run(f"translate --model {run_of}", input=f"\n{LINES[0]}\n")
    assert said.exit_code == 0 and "line 2 has" in said.stderr and "sentences of fewer than 3" in said.stderr
    (run_of / "settings.json").write_text(json.dumps({**settings, "unknown": 3}))
    assert run(f"translate --model {run_of}", input=f"{LINES[0]}\n").exit_code == 0  # what it does needs none of it
    assert "has" not in run(f"translate --model {folder / 'run'} {shlex.quote(LINES[0])}").stderr


def test_a_folder_in_the_environment_is_no_word_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_DATA", f"{tmp_path}/")
    done = run(f"train --toy --out {tmp_path / 'run'} --steps 2 {SIZES} --set validate_every=2 --device cpu")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--length-penalty -1", "--length-penalty must be finite"),
        ("--length-penalty 9999", "--length-penalty 9999.0 makes"),
        ("--top-k 3", "--top-k is given, but temperature 0"),
        ("--temperature 1 --top-p 2", "--top-p must be a number in (0, 1]"),
        ("--seed 3", "--seed is given, but temperature 0"),
    ],
)
def test_errors_of_a_translation_name_the_options_that_were_typed(folder: Path, words: str, expected: str) -> None:
    done = run(f"translate --model {folder / 'run'} {words} hello")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1) and expected in done.stderr
    assert "length_penalty" not in done.stderr and "top_" not in done.stderr


def test_looking_at_a_run_says_what_to_do_instead(folder: Path, tmp_path: Path) -> None:
    here = folder / "run"
    done = run(f"look {here} hello --out {tmp_path / 'look'}")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert f"{here} is a run of regard train, and regard look reads Hugging Face's format" in done.stderr
    assert f"regard translate --model {here} --show" in done.stderr
    (tmp_path / "saved").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(here / name, tmp_path / "saved")
    done = run(f"look {tmp_path / 'saved'} hello --out {tmp_path / 'look'}")
    assert done.exit_code == 2 and "is a model in regard's own format" in done.stderr
    assert f"regard.interop.load('{tmp_path / 'saved'}')" in done.stderr and not list(tmp_path.glob("look*"))
