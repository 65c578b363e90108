"""The command: what it prints, and that bad input gives one short message and status 2."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import os
import re
import subprocess
import sys

import pytest
import rich.console
import torch
from typer.testing import CliRunner

import regard
from regard import masks
from regard.cli import app, parse, show
from regard.testing.report import Report, Row


def run(*words: str):
    return CliRunner().invoke(app, list(words))


def test_check_prints_a_column_for_each_backend():
    result = run("check", "--rules", "3,10", "--dtype", "float64")
    assert result.exit_code == 0, result.output
    for name in ("auto", *regard.backends.available("cpu")):
        assert f"regard {name}" in result.output
    assert "no permitted key" in result.output


def test_check_json_holds_every_row():
    result = run("check", "--rules", "10", "--dtype", "float32", "--backend", "eager", "--json")
    (report,) = json.loads(result.stdout)
    assert report["name"] == "regard eager"
    assert {row["dtype"] for row in report["rows"]} == {"float32"}
    assert {row["rule"] for row in report["rows"]} == {10}


def test_check_against_a_peer_prints_it_beside_ours_and_its_failures_are_not_ours():
    result = run("check", "--rules", "10", "--dtype", "float32", "--against", "torch,torch-is_causal")
    assert result.exit_code == 0, result.output
    assert "regard auto" in result.output
    assert "fail" in next(line for line in result.output.splitlines() if "query_offset" in line)
    assert "torch-is_causal: rule 10" not in result.output


def test_check_lists_what_failed_in_a_peer_on_request():
    result = run("check", "--rules", "10", "--dtype", "float32", "--against", "torch-is_causal", "--details")
    assert "torch-is_causal: rule 10" in result.output


def test_check_fails_with_status_1_when_ours_fails(monkeypatch):
    right = regard.attention
    monkeypatch.setattr(regard, "attention", lambda *given, **named: right(*given, **named) + 1)
    result = run("check", "--rules", "10", "--dtype", "float64", "--backend", "eager")
    assert result.exit_code == 1
    assert "rule 10" in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "--rules", "3,x"], "'x'"),
        (["check", "--rules", "667"], "[667]"),
        (["check", "--rules", "9-"], "'9-'"),
        (["check", "--rules", "9-7"], "'9-7', which is empty"),
        (["check", "--rules", ""], "--rules holds ''"),
        (["check", "--rules", "3-99999999999"], "'3-99999999999'"),
        (["check", "--backend", ""], "--backend holds ''"),
        (["check", "--dtype", ""], "--dtype holds ''"),
        (["check", "--dtype", "int8"], "'int8'"),
        (["check", "--backend", "warp"], "'warp'"),
        (["check", "--device", "nowhere"], "'nowhere'"),
        (["check", "--against", "jax"], "--against holds 'jax'; expected some of torch, "),
        (["explain", "2,8,128"], "'2,8,128'"),
        (["explain", "2,8,128,sixty"], "sixty"),
        (["explain", "2,8,128,64", "--key", "2,3,128,64"], "8 heads"),
        (["explain", "2,8,128,64", "--mask", "causal("], "not an expression"),
        (["explain", "2,8,128,64", "--mask", "open('x')"], "open('x')"),
        (["explain", "2,8,128,64", "--mask", "causal() & 3"], "'3'"),
        (["explain", "2,8,128,64", "--mask", "window()"], "window"),
        (["explain", "2,8,128,64", "--mask", "window(left=1e3)"], "left must be an int, got float"),
        (["explain", "2,8,128,64", "--mask", "window(left=-1)"], "left must be in 0"),
        (["explain", "2,8,128,64", "--mask", "window(open('x'))"], "no number, string or list"),
        (["explain", "2,8,128,64", "--mask", "causal"], "'causal' without its parentheses"),
        (["explain", "2,8,128,64", "--mask", "causal() and columns(3)"], "where a mask is expected"),
        (["explain", "2,8,128,64", "--mask", ""], "not an expression"),
        (["explain", "2,8,128,64", "--mask", "~" * 100000 + "causal()"], "not an expression"),
        (["explain", "2,8,128,64", "--bias", ""], "--bias is ''"),
        (["explain", "2,8,128,64", "--mask", "padding([3, 4, 5])"], "padding"),
        (["explain", "2,8,128,64", "--backend", "warp"], 'regard: --backend must be "auto" or one of '),
        (["explain", "2,8,128,64", "--dropout", "1.5"], "regard: --dropout must be a probability in [0, 1], got 1.5"),
        (["explain", "2,8,128,64", "--bias", "1,8,3,64"], "regard: --bias has shape [1, 8, 3, 64]"),
        (["bench", "1,2,7,8", "--softcap", "-3"], "regard: --softcap must be a number above 0"),
        (["explain", "2,8,128,64", "--dtype", "float16,float32"], "one dtype"),
        (["explain", "99999999,99999999,99999,64"], "no tensor has as many elements"),
        (["explain", "1,1,100000000000000000000,64"], "no tensor has as many elements"),
    ],
)
def test_bad_input_is_one_short_message_and_status_2(words, said):
    result = run(*words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.startswith("regard: ")
    assert len(result.stderr.strip().splitlines()) == 1
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize(
    "mask", ["causal", "causal(", "causal() and columns(3)", "window(left=1e3)", "open('x')", "causal() & 3", "5"]
)
def test_a_wrong_mask_is_answered_with_an_example_and_how_to_join(mask):
    said = run("explain", "2,8,128,64", "--mask", mask).stderr
    assert "join them with & | ~" in said and "'causal() & (window(left=256) | columns(4))'" in said


def test_the_example_in_those_messages_is_a_mask():
    example = parse.EXAMPLE.split("'")[1]
    assert parse.mask(example) == masks.causal() & (masks.window(left=256) | masks.columns(4))


def test_missing_peer_is_one_line_and_status_2(monkeypatch):
    monkeypatch.setitem(sys.modules, "x_transformers", None)
    monkeypatch.setitem(sys.modules, "x_transformers.attend", None)
    result = run("check", "--against", "x-transformers")
    assert result.exit_code == 2
    assert "pip install x-transformers" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_unknown_option_has_no_traceback():
    done = subprocess.run(
        [sys.executable, "-m", "regard.cli", "check", "--bogus"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--bogus" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_output_that_has_ascii_only_loses_signs_and_nothing_else():
    done = subprocess.run(
        [sys.executable, "-m", "regard.cli", "check", "--rules", "10", "--dtype", "float32", "--backend", "eager"],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr.decode()
    assert "sees key j iff j ? i + query_offset" in done.stdout.decode("ascii")


def test_explain_prints_the_plan():
    result = run("explain", "2,8,33,16", "--key", "2,4,65,16", "--mask", "~(causal() & window(left=9)) | columns(2)")
    assert result.exit_code == 0, result.output
    assert "B=2 H=8 Hkv=4 L=33 S=65" in result.output
    assert "backend" in result.output


def test_explain_takes_every_modifier():
    modifiers = ["--softcap", "2", "--scale", "0.5", "--sinks", "--bias", "1,1,5,7", "--query-offset", "1", "--grad"]
    result = run("explain", "1,2,5,8", "--key", "1,2,7,8", *modifiers, "--dtype", "bfloat16", "--backend", "eager")
    assert result.exit_code == 0, result.output
    assert "bfloat16" in result.output


def test_explain_makes_no_tensor_of_the_calls_size():
    result = run("explain", "1,1,1000000000,64", "--bias", "1,1,1000000000,1000000000", "--grad")
    assert result.exit_code == 0, result.output
    assert "L=1000000000 S=1000000000" in result.output


def test_explain_prints_the_plan_as_json():
    result = run("explain", "2,8,33,16", "--key", "2,4,65,16", "--mask", "causal()", "--json")
    found = json.loads(result.stdout)
    assert found["backend"] in regard.backends.available("cpu")
    assert found["call"]["kv_heads"] == 4 and found["call"]["keys"] == 65 and found["call"]["dtype"] == "float32"
    assert found["cost"]["kept_pairs"] == 2 * 8 * sum(range(33, 66))


def test_info_as_json_holds_what_the_table_does():
    found = json.loads(run("info", "--json").stdout)
    assert found["regard"] == regard.__version__
    assert found["backends on cpu"].split(", ") == regard.backends.available("cpu")


def test_version_is_printed():
    result = run("--version")
    assert (result.exit_code, result.stdout.strip()) == (0, f"regard {regard.__version__}")


def test_check_says_at_once_what_it_runs_and_keeps_it_out_of_the_output():
    result = run("check", "--rules", "10", "--dtype", "float32", "--backend", "eager,reference")
    assert result.stderr.startswith("regard: checking regard eager, regard reference")
    assert "\nregard: regard eager: " in result.stderr and result.stderr.count("checks, none failed\n") == 2
    assert "checking" not in result.stdout
    assert "minutes" not in result.stderr  # one rule is done in a moment


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_table_of_the_check_is_whole_in_a_narrow_terminal(width):
    row = Row(3, "a row with no permitted key gives output 0, weights 0 and lse -inf", "case", "float32", "pass")
    names = ["regard auto", "regard sdpa", "regard blockwise", "regard eager", "regard reference"]
    found = [Report(name, [row, dataclasses.replace(row, outcome="refused")]) for name in names]
    console = rich.console.Console(width=width, file=io.StringIO())
    show.reports(console, found, ())
    lines = console.file.getvalue().split("\nregard auto: ")[0].splitlines()
    assert max(map(len, lines)) <= width
    columns = zip(*(re.split("[┃│]", line) for line in lines if "━" not in line), strict=True)
    written = [" ".join(" ".join(column).split()) for column in columns]
    assert written[0] == "rule 3" and written[1] == f"what is promised {row.statement}"
    assert written[2:] == [f"{name} refused 1/2" for name in names]


def test_check_reports_its_progress_row_by_row(monkeypatch):
    seen = []
    monkeypatch.setattr("rich.progress.Progress.update", lambda self, task, **now: seen.append((task, now)))
    run("check", "--rules", "10", "--dtype", "float32", "--backend", "eager,reference")
    for task in (0, 1):
        counts = [(now["completed"], now["total"]) for which, now in seen if which == task]
        total = counts[0][1]
        assert total > 1 and counts == [(done, total) for done in range(total + 1)]


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), "cuda", "cuda:1", torch.device("cuda", 0)])
def test_available_takes_a_name_or_a_device(device):
    kind = torch.device(device).type
    names = regard.backends.available(device)
    assert ("reference" in names) == (kind == "cpu") and ("flex" in names) == (kind == "cuda")


def test_available_refuses_what_is_no_device():
    with pytest.raises(ValueError, match=r"device is 'foo'; expected a device of torch"):
        regard.backends.available("foo")
    with pytest.raises(TypeError, match="device"):
        regard.backends.available(3)


def test_info_names_versions_and_backends():
    result = run("info")
    assert result.exit_code == 0
    assert regard.__version__ in result.output
    assert "backends on cpu" in result.output
    assert ("not installed" in result.output) or importlib.util.find_spec("triton")
