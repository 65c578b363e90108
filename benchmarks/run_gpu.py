"""Every benchmark of a GPU, one after another, each in a process of its own and for a limited time.

    python benchmarks/run_gpu.py [--seconds 600] [--only NAME,NAME] [--out build/bench-gpu]

`make bench-gpu` does the same. The order is that of importance: when the time ends, what is left is listed, and the
next run of the same command begins there. Raw figures and logs are in the folder; a stage that was cut off keeps
its rows. Without a GPU the stages run dry, as far as they can.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent


class Stage(NamedTuple):
    name: str
    seconds: int  # at most
    words: tuple[str, ...]  # FILE stands for where the raw figures go


def groups(*names: str) -> tuple[str, ...]:
    return ("gpu.py", "--only", ",".join(names), "--json", "FILE")


STAGES = (
    Stage("generation", 120, ("generation_gpu.py", "--json", "FILE")),
    Stage("observe", 150, ("observe_gpu.py", "--quick", "--json", "FILE")),
    Stage("watch", 120, groups("watch", "observed")),
    Stage("decode", 90, groups("decode", "stored", "latent")),
    Stage("sparse", 150, groups("sparse")),
    Stage("biases", 120, groups("biases", "heads")),
    Stage("first", 120, groups("first")),
    Stage("gaps", 120, groups("gaps")),
    Stage("acting", 120, ("acting.py", "--save")),
    Stage("linear", 150, ("linear_gpu.py", "--json", "FILE")),
    Stage("host", 40, groups("host")),
    Stage("training", 120, groups("padding", "dropout", "sentences")),
    Stage("observe-long", 240, ("observe_gpu.py", "--json", "FILE")),
    Stage("grid", 400, groups("grid")),
)


def run(stage: Stage, out: Path, seconds: float) -> str:
    """How the stage ended, in a word."""
    figures, log = out / f"{stage.name}.json", out / f"{stage.name}.log"
    words = [str(figures) if word == "FILE" else word for word in stage.words]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, str(HERE / words[0]), *words[1:]],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            return "done" if process.wait(seconds) == 0 else f"failed with status {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return "cut off"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [stage.name for stage in STAGES]
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time for all of them (default: no limit)")
    parser.add_argument("--only", help=f"stages to run, comma-separated: {', '.join(names)}")
    parser.add_argument("--out", type=Path, default=Path("build/bench-gpu"), help="folder for figures and logs")
    given = parser.parse_args()
    wanted = given.only.split(",") if given.only else names
    if unknown := sorted(set(wanted) - set(names)):
        parser.error(f"--only: no stage is called {', '.join(unknown)}; there are {', '.join(names)}")
    given.out.mkdir(parents=True, exist_ok=True)
    end, left = time.monotonic() + given.seconds, []
    for stage in STAGES:
        done = given.out / f"{stage.name}.done"
        if stage.name not in wanted or (done.exists() and not given.only):
            continue
        begun = time.monotonic()
        seconds = min(float(stage.seconds), end - begun)
        # less than a quarter of its time would go to loading and compiling
        if seconds < stage.seconds / 4:
            left.append(stage.name)
            continue
        how = run(stage, given.out, seconds)
        lines = (given.out / f"{stage.name}.log").read_text(encoding="utf-8", errors="replace").splitlines()
        print(f"== {stage.name}: {how} after {time.monotonic() - begun:.0f} s", *lines[-60:], sep="\n", flush=True)
        if how == "done":
            done.touch()
        else:
            left.append(stage.name)
    if left:
        print(f"not finished: {', '.join(left)}")


if __name__ == "__main__":
    main()
