"""The measuring tool itself, without a clock: what it computes from samples, and what it stores."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import _harness as harness


def samples(ours: list[float], peer: list[float], again: list[float]) -> harness.Samples:
    return harness.Samples(ours, peer, again)


def test_a_ratio_is_the_median_of_the_pairs_and_not_the_ratio_of_medians() -> None:
    found = samples([1, 8, 3], [1, 4, 9], [1, 4, 9])
    assert found.ratio() == 1
    assert found.speedup() == 1
    assert samples([3, 5, 7], [1, 1, 1], [1, 1, 1]).ratio() == 5


def test_a_level_bar_is_widened_by_how_far_the_peer_is_from_itself() -> None:
    quiet = harness.at_most("g", "n", samples([1.1] * 3, [1.0] * 3, [1.0] * 3), 1.05)
    noisy = harness.at_most("g", "n", samples([1.1] * 3, [1.0] * 3, [0.93] * 3), 1.05)
    assert not quiet.passed
    assert noisy.passed and noisy.allowance == pytest.approx(0.07)


def test_a_speedup_must_reach_its_bar_whatever_the_control_says() -> None:
    assert harness.faster("g", "n", samples([1.0] * 3, [5.0] * 3, [9.0] * 3), 5).passed
    assert not harness.faster("g", "n", samples([1.0] * 3, [4.9] * 3, [9.0] * 3), 5).passed


def test_an_overhead_is_a_difference_in_microseconds() -> None:
    row = harness.overhead("g", "n", samples([31e-6] * 3, [5e-6] * 3, [6e-6] * 3), 30)
    assert row.measured == pytest.approx(26) and row.control == pytest.approx(1) and row.passed


def test_ours_runs_between_two_runs_of_the_peer_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(harness, "_repeats", lambda work, least: 1)
    found = harness.interleave(lambda: order.append("ours"), lambda: order.append("peer"), rounds=3)
    assert order == ["peer", "ours", "peer"] * 3
    assert len(found.ours) == len(found.peer) == len(found.again) == 3


def test_saving_a_group_leaves_the_others_and_names_no_machine(tmp_path: Path) -> None:
    file = tmp_path / "cpu.json"
    row = harness.at_most("first", "n", samples([1.0], [1.0], [1.0]), 1.05)
    harness.save(file, [row], {"threads": 2})
    row.group = "second"
    harness.save(file, [row], {"threads": 2})
    stored = json.loads(file.read_text())
    assert set(stored) == {"first", "second"}
    assert stored["first"]["rows"][0]["samples"]["ours"] == [1.0]
    assert {"machine", "versions", "date", "commit", "settings"} <= set(stored["second"])
    assert set(stored["second"]["machine"]) == {"cpu", "cores", "system", "architecture"}
    assert str(harness.ROOT) not in file.read_text()


def test_the_table_says_whether_all_bars_are_met(capsys: pytest.CaptureFixture[str]) -> None:
    good = harness.Row("g", "small enough", 1.0, "µs", 2.0)
    bad = harness.Row("g", "too slow", 3.0, "µs", 2.0)
    assert harness.show([good])
    assert not harness.show([good, bad])
    assert "FAIL" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="a dry run is for machines without a GPU")
def test_rows_of_a_gpu_are_computed_in_a_dry_run() -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--only", "padding,observed,gaps"]
    done = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True, check=True)
    rows = done.stdout.splitlines()
    assert len(rows) == 8 + 3 + 28
    assert not [row for row in rows if "FAIL" in row]
