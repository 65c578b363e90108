"""Two and four processes (gloo) train one model as one process does, and a killed one ends the run resumably."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.held_files import checkpoint
from tests.train.group import together
from tests.train.small import DATA, SMALL

import regard
from regard import models
from regard.train import LAST, Data, Pairs, on_all, read_metrics, translation_trainer

WORDS = (
    "train --toy --device cpu --set vocab_size=120 --set embed_dim=16 --set num_layers=1 --set num_heads=2 "
    "--set ff_dim=24 --set dropout=0 --set attention_dropout=0 --set batch_tokens=150 --set warmup=5 --set save_every=5"
)


def command(processes: int, words: str) -> list[str]:
    launch = [sys.executable, "-m"]
    if processes > 1:
        launch += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    return [*launch, "regard", *shlex.split(words)]


def learn(out: str, how: str, tokens: int = SMALL.batch_tokens) -> float:
    """A short run without dropout, alone or as one of a group."""
    settings = dataclasses.replace(
        SMALL, dropout=0.0, attention_dropout=0.0, steps=6, validate_every=3, r_drop=0.5, batch_tokens=tokens
    )
    run = translation_trainer(settings, DATA, out, with_bleu=False, how=how)
    run.start()
    run.run()
    return run.best["valid_loss"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    learn(str(out), "copies")
    return out


@pytest.mark.parametrize(("processes", "how"), [(2, "copies"), (4, "shards"), (2, "heads")])
def test_processes_together_learn_what_one_learns(alone: Path, tmp_path: Path, processes: int, how: str) -> None:
    out = tmp_path / "run"
    assert len(set(together(processes, learn, str(out), how))) == 1
    curves = [read_metrics(path / "metrics.jsonl") for path in (alone, out)]
    for one, several in zip(*curves, strict=True):
        assert several["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert several["valid_loss"] == pytest.approx(one["valid_loss"], rel=1e-4)
    (wanted, about), (found, other) = checkpoint(alone / LAST), checkpoint(out / LAST)
    assert other["step"] == about["step"] == 6
    for name, weight in wanted.items():
        if name.startswith(("model.", "average.", "optimizer.")):
            torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("processes", "how"), [(2, "copies"), (4, "shards")])
def test_batches_of_fewer_sentences_than_processes_are_learnt_too(tmp_path: Path, processes: int, how: str) -> None:
    """One sentence of 12 tokens, or two of 6: some processes have none."""
    learn(str(tmp_path / "alone"), "copies", 12)
    together(processes, learn, str(tmp_path / "run"), how, 12)
    (wanted, _), (found, _) = checkpoint(tmp_path / "alone" / LAST), checkpoint(tmp_path / "run" / LAST)
    for name, weight in wanted.items():
        if name.startswith(("model.", "average.")):
            torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=1e-4)


def look(rank_that_fails: int) -> str:
    def looks() -> int:
        if torch.distributed.get_rank() == rank_that_fails:
            raise ValueError(f"process {rank_that_fails} has no checkpoint")
        return 5

    try:
        return str(on_all(looks))
    except ValueError as error:
        return str(error)


def test_what_one_process_refuses_all_refuse(tmp_path: Path) -> None:
    assert together(2, look, 1) == ["process 1 has no checkpoint"] * 2
    assert together(2, look, 7) == ["5", "5"]


def begin_here(folder: str, of_its_own: bool) -> str:
    """Each process trains in a folder of its own, as two machines do that share none; then both go on as one group."""
    rank = torch.distributed.get_rank()
    out, data = Path(folder) / str(rank), DATA
    if of_its_own:
        data = Data(DATA.train, Pairs(*(side[: 5 - rank] for side in DATA.valid)))
    else:
        shutil.copytree(Path(folder) / f"after-{4 + 2 * rank}", out)
    run = translation_trainer(dataclasses.replace(SMALL, steps=9), data, out, with_bleu=False)
    run.start()
    try:
        run.resume()
        run.run()
    except ValueError as error:
        return str(error)
    return f"trained to step {run.step}"


@pytest.mark.parametrize(("of_its_own", "what"), [(False, "checkpoints"), (True, "texts")])
def test_processes_that_read_different_files_refuse(tmp_path: Path, of_its_own: bool, what: str) -> None:
    for steps in (4, 6):
        begin(str(tmp_path / f"after-{steps}"), steps, "copies")
        settings = dataclasses.replace(SMALL, steps=9).as_json()
        (tmp_path / f"after-{steps}" / "settings.json").write_text(settings)
    for said in together(2, begin_here, str(tmp_path), of_its_own):
        assert said.startswith(f"the {what} of the processes differ: on several machines --data and --out must be")


def go_on(out: str, how: str) -> int:
    settings = dataclasses.replace(SMALL, steps=14)
    run = translation_trainer(settings, DATA, out, with_bleu=False, how=how)
    run.start()
    assert run.resume()
    at = run.step
    run.run()
    return at


def test_a_group_goes_on_exactly_from_its_checkpoint(tmp_path: Path) -> None:
    """With dropout, whose draws differ from process to process, and with weights in parts."""
    how = "shards"
    for name, steps in (("whole", 14), ("cut", 7)):
        together(2, begin, str(tmp_path / name), steps, how)
    assert together(2, go_on, str(tmp_path / "cut"), how) == [7, 7]
    one, other = (checkpoint(tmp_path / name / LAST)[0] for name in ("whole", "cut"))
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def begin(out: str, steps: int, how: str) -> None:
    settings = dataclasses.replace(SMALL, steps=steps)
    run = translation_trainer(settings, DATA, out, with_bleu=False, how=how)
    run.start()
    run.run()


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
    step = checkpoint(out / LAST)[1]["step"]
    assert step >= 5
    done = subprocess.run(command(1, f"{words} {step + 2} --resume"), env=settings, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert checkpoint(out / LAST)[1]["step"] == step + 2
    assert json.loads((out / "settings.json").read_text())["embed_dim"] == 16


def watched() -> dict[str, torch.Tensor]:
    """A model that is wrapped for several processes is seen as the model itself is."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(1)
    model = models.Transformer(
        models.TransformerConfig(vocab_size=20, embed_dim=8, num_layers=1, num_heads=2, ff_dim=8)
    )
    source, target = torch.randint(4, 20, (2, 5)), torch.randint(4, 20, (2, 3))
    found = []
    for each in (model.eval(), DistributedDataParallel(model.eval())):
        with torch.no_grad(), regard.watch(each, gather=False) as recording:
            each(source, target, source_lengths=[5, 4])
        found.append({call.path.removeprefix("module."): call.lse for call in recording})
    assert found[0].keys() == found[1].keys() and len(found[0]) == 3
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    return found[1]


def test_a_model_under_ddp_is_seen_by_each_process_as_the_model_itself() -> None:
    one, other = together(2, watched)
    assert all(torch.equal(one[name], other[name]) for name in one)
