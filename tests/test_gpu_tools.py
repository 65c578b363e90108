"""What runs the tests and the benchmarks of a GPU: shared among processes, and held to a time."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import time
import pytest
pytestmark = pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "eager", "of two words"])
def test_right(backend): pass
def test_wrong(): assert False
def test_other(): pass
"""
SLOW = """
import time
import pytest
@pytest.mark.gpu
def test_endless(): time.sleep(600)
"""


def test_gpu_tests_are_dealt_out_and_what_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    words = [sys.executable, str(ROOT / "tools/test_gpu.py"), "--jobs", "2", "--logs", str(tmp_path / "logs")]
    done = subprocess.run([*words, "test_some.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "FAILED test_some.py::test_wrong" in done.stdout and "4 passed, 1 failed, 0 skipped" in done.stdout
    assert len(list((tmp_path / "logs").glob("*.log"))) == 2


def test_the_others_run_where_a_file_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_other.py").write_text("import a_package_that_is_not_there")
    words = [sys.executable, str(ROOT / "tools/test_gpu.py"), "--logs", str(tmp_path / "logs")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "NOT READ test_other.py" in done.stdout and "4 passed, 1 failed, 0 skipped" in done.stdout


def test_gpu_tests_that_do_not_end_count_as_failed(tmp_path: Path) -> None:
    (tmp_path / "test_slow.py").write_text(SLOW)
    words = [sys.executable, str(ROOT / "tools/test_gpu.py"), "--seconds", "3", "--logs", str(tmp_path / "logs")]
    done = subprocess.run([*words, "test_slow.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "NOT ENDED test_slow.py::test_endless" in done.stdout


@pytest.fixture
def stages() -> Any:
    spec = importlib.util.spec_from_file_location("run_gpu", ROOT / "benchmarks/run_gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_stage_names_a_benchmark_and_groups_that_exist(stages: Any) -> None:
    known = (ROOT / "benchmarks/gpu.py").read_text() + (ROOT / "benchmarks/_gpu_groups.py").read_text()
    for stage in stages.STAGES:
        assert (ROOT / "benchmarks" / stage.words[0]).exists()
        if stage.words[0] == "gpu.py":
            assert all(f'"{group}":' in known for group in stage.words[2].split(",")), stage


def test_stages_that_are_cut_off_or_not_begun_are_said_and_done_ones_not_repeated(
    stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "quick.py").write_text("print('a row')")
    (tmp_path / "slow.py").write_text("import time; time.sleep(600)")
    monkeypatch.setattr(stages, "HERE", tmp_path)
    made = [stages.Stage(name, seconds, (f"{name}.py",)) for name, seconds in {"quick": 60, "slow": 1}.items()]
    monkeypatch.setattr(stages, "STAGES", (*made, stages.Stage("late", 900, ("quick.py",))))
    monkeypatch.setattr(sys, "argv", ["run_gpu.py", "--out", str(tmp_path / "out"), "--seconds", "100"])
    stages.main()
    told = capsys.readouterr().out
    assert "quick: done" in told and "a row" in told and "slow: cut off" in told
    assert "not finished: slow, late" in told
    stages.main()
    assert "quick" not in capsys.readouterr().out
