"""Two and four processes (gloo) train one model as one process does, and a killed one ends the run resumably."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from regard.train import LAST, read_metrics
from regard.train._checkpoint import read

WORDS = (
    "train --toy --device cpu --set vocab_size=120 --set embed_dim=16 --set num_layers=1 --set num_heads=2 "
    "--set ff_dim=24 --set dropout=0 --set attention_dropout=0 --set batch_tokens=150 --set warmup=5 --set save_every=5"
)


def command(processes: int, words: str) -> list[str]:
    launch = [sys.executable, "-m"]
    if processes > 1:
        launch += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    return [*launch, "regard", *shlex.split(words)]


def run(processes: int, words: str) -> None:
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command(processes, words), capture_output=True, text=True, env=settings, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    run(1, f"{WORDS} --out {out} --steps 6 --set validate_every=3")
    return out


@pytest.mark.parametrize(("processes", "more"), [(2, ""), (4, "--shard")])
def test_processes_together_learn_what_one_learns(alone: Path, tmp_path: Path, processes: int, more: str) -> None:
    out = tmp_path / "run"
    run(processes, f"{WORDS} --out {out} --steps 6 --set validate_every=3 {more}")
    curves = [read_metrics(path / "metrics.jsonl") for path in (alone, out)]
    for one, several in zip(*curves, strict=True):
        assert several["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert several["valid_loss"] == pytest.approx(one["valid_loss"], rel=1e-4)
    (wanted, about), (found, other) = read(alone / LAST), read(out / LAST)
    assert other["step"] == about["step"] == 6
    for name, weight in wanted.items():
        if name.startswith(("model.", "average.")):
            torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=1e-4)


def test_a_killed_process_ends_the_run_with_a_message_and_it_goes_on_alone(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = f"{WORDS} --out {out} --set validate_every=5 --steps"
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    launcher = subprocess.Popen(
        command(2, f"{words} 100000"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=settings
    )
    end = time.monotonic() + 90
    while not (out / LAST).is_file() and launcher.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    workers = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True, check=False).stdout
    os.kill(int(workers.split()[-1]), signal.SIGKILL)
    _, said = launcher.communicate(timeout=100)
    assert launcher.returncode != 0
    assert "another process of this run ended" in said or "saved, go on with --resume" in said
    step = read(out / LAST)[1]["step"]
    assert step >= 5
    run(1, f"{words} {step + 2} --resume")
    assert read(out / LAST)[1]["step"] == step + 2
    assert json.loads((out / "settings.json").read_text())["embed_dim"] == 16
