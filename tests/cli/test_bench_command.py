"""`regard bench`: what it times is the call that was described, and its table follows from the samples."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import regard
from regard import masks
from regard.cli import app
from regard.cli.commands import bench


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["bench", *words])


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.causal() & masks.window(left=3), masks.padding([7, 5])])
@pytest.mark.parametrize(("kv_heads", "keys"), [(6, 7), (3, 11)])
def test_torch_is_given_the_same_call(mask: Any, kv_heads: int, keys: int) -> None:
    inputs = [torch.randn(2, 6, 7, 5), torch.randn(2, kv_heads, keys, 5), torch.randn(2, kv_heads, keys, 3)]
    torch.testing.assert_close(bench._of_torch(inputs, mask)(), regard.attention(*inputs, mask=mask))


def test_ratios_are_those_of_the_samples() -> None:
    result = run("1,2,11,8", "--mask", "causal()", "--backend", "eager, blockwise", "--rounds", "5", "--grad", "--json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert [row["name"] for row in rows] == ["torch", "torch again", "regard eager", "regard blockwise"]
    base = rows[0]["samples"]
    for row in rows:
        assert len(row["samples"]) == 5 and min(row["samples"]) > 0
        assert row["ratio"] == statistics.median(one / other for one, other in zip(row["samples"], base, strict=True))


def test_what_does_not_run_says_why() -> None:
    found = json.loads(run("1,2,7,8", "--softcap", "3", "--backend", "sdpa,eager", "--rounds", "3", "--json").stdout)
    assert [row["name"] for row in found["rows"]] == ["regard eager"]
    assert found["left_out"]["torch"] == "it has no softcap" and "softcap" in found["left_out"]["sdpa"]
    large = run("1,8,65536,64", "--rounds", "3", "--backend", "warp")
    assert large.exit_code == 2 and "'warp'" in large.stderr


def test_what_needs_too_much_memory_is_left_out_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ROOM", 1000)
    usual = json.loads(run("1,2,63,8", "--rounds", "3", "--json").stdout)
    assert "name it with --backend" in usual["left_out"]["eager"]
    named = json.loads(run("1,2,63,8", "--rounds", "3", "--backend", "eager", "--json").stdout)
    assert "eager" not in named["left_out"]


def test_a_call_that_no_backend_can_run_is_one_line() -> None:
    result = run("1,2,7,8", "--softcap", "3", "--backend", "sdpa", "--rounds", "3")
    assert result.exit_code == 2 and result.stderr.startswith("regard: ") and result.stderr.count("\n") == 1
