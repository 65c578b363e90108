"""Fair timings on a noisy machine: interleaved pairs, medians, and the peer measured against itself beside them."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import regard

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
THREADS = 2

Work = Callable[[], object]


@dataclass
class Row:
    """One line of a table: what was measured, the bar it has to meet, and the raw samples behind it."""

    group: str
    name: str
    measured: float
    unit: str  # "×", "µs", "MiB", "s", or "" for a plain number
    bar: float
    at_least: bool = False
    allowance: float = 0.0  # added to the bar: how far the peer is from itself
    control: float | None = None  # the peer against itself; 1 (or 0, for a difference) on a silent machine
    ours: float | None = None  # medians, in seconds
    peer: float | None = None
    note: str = ""
    samples: dict[str, list[float]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        if self.at_least:
            return self.measured >= self.bar
        return self.measured <= self.bar + self.allowance


@dataclass
class Samples:
    """Seconds for one run, round by round: ours, the peer, and the peer once more."""

    ours: list[float]
    peer: list[float]
    again: list[float]

    def ratio(self) -> float:
        return statistics.median(o / p for o, p in zip(self.ours, self.peer, strict=True))

    def speedup(self) -> float:
        return statistics.median(p / o for o, p in zip(self.ours, self.peer, strict=True))

    def control(self) -> float:
        return statistics.median(a / p for a, p in zip(self.again, self.peer, strict=True))

    def difference(self) -> float:
        return statistics.median(o - p for o, p in zip(self.ours, self.peer, strict=True))

    def control_difference(self) -> float:
        return statistics.median(a - p for a, p in zip(self.again, self.peer, strict=True))


def seconds(work: Work, repeats: int, clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    for _ in range(repeats):
        work()
    return (clock() - start) / repeats


def interleave(
    ours: Work, peer: Work, *, rounds: int, least: float = 0.02, clock: Callable[[], float] = time.perf_counter
) -> Samples:
    """Time both in turn. A sample lasts at least `least` seconds, so that the clock and the scheduler do not matter.

    Ours runs between two runs of the peer, which change places every round: a drift of the machine hits both alike.
    Where one run of the peer takes a second or more, it runs once a round, and is held against its own next run.
    On one thread `time.process_time` is the better clock: it leaves out what other programs take.
    """
    ours_repeats, peer_repeats = _repeats(ours, least), _repeats(peer, least)
    opening = seconds(peer, peer_repeats, clock)
    if opening > 1.0:
        peers, mine = [opening], []
        for _ in range(rounds):
            mine.append(seconds(ours, ours_repeats, clock))
            peers.append(seconds(peer, peer_repeats, clock))
        return Samples(mine, peers[:-1], peers[1:])
    samples = Samples([], [], [])
    for index in range(rounds):
        first, last = (samples.peer, samples.again) if index % 2 == 0 else (samples.again, samples.peer)
        first.append(seconds(peer, peer_repeats, clock) if index else opening)
        samples.ours.append(seconds(ours, ours_repeats, clock))
        last.append(seconds(peer, peer_repeats, clock))
    return samples


def _repeats(work: Work, least: float) -> int:
    work()  # the first run pays for plans, tables and memory
    return max(1, round(least / max(seconds(work, 1), 1e-7)))


def at_most(group: str, name: str, samples: Samples, bar: float, note: str = "") -> Row:
    """ours / peer ≤ bar, plus how far the peer is from itself."""
    control = samples.control()
    return _row(group, name, samples, samples.ratio(), "×", bar, control, allowance=abs(control - 1), note=note)


def faster(group: str, name: str, samples: Samples, bar: float, note: str = "") -> Row:
    """peer / ours ≥ bar."""
    return _row(group, name, samples, samples.speedup(), "×", bar, samples.control(), at_least=True, note=note)


def overhead(group: str, name: str, samples: Samples, bar: float, note: str = "") -> Row:
    """ours − peer ≤ bar, in µs."""
    control = samples.control_difference() * 1e6
    return _row(group, name, samples, samples.difference() * 1e6, "µs", bar, control, note=note)


def _row(
    group: str,
    name: str,
    samples: Samples,
    measured: float,
    unit: str,
    bar: float,
    control: float,
    *,
    at_least: bool = False,
    allowance: float = 0.0,
    note: str = "",
) -> Row:
    ours, peer = statistics.median(samples.ours), statistics.median(samples.peer)
    return Row(group, name, measured, unit, bar, at_least, allowance, control, ours, peer, note, asdict(samples))


def child(code: str, **environment: str) -> dict[str, float]:
    """Run code in an interpreter of its own; it prints one JSON object."""
    paths = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )
    if run.returncode != 0:
        raise RuntimeError(f"the measuring process failed:\n{run.stderr}")
    found: dict[str, float] = json.loads(run.stdout)
    return found


def line(row: Row) -> str:
    """A row in one line, for progress."""
    sign = "≥" if row.at_least else "≤"
    found, bar = _number(row.measured, row.unit), _number(row.bar, row.unit)
    return f"{'pass' if row.passed else 'FAIL'}  {row.group}: {row.name}: {found} ({sign} {bar})"


def show(rows: Iterable[Row]) -> bool:
    """Print the table; True when every bar is met."""
    from rich.console import Console
    from rich.table import Table

    table = Table("case", "ours", "peer", "measured", "control", "bar", "", box=None, pad_edge=False)
    ok = True
    for row in rows:
        ok &= row.passed
        sign = "≥" if row.at_least else "≤"
        bar = f"{sign} {_number(row.bar, row.unit)}" + (f" + {row.allowance:.3f}" if row.allowance else "")
        control = "" if row.control is None else _number(row.control, row.unit)
        verdict = "pass" if row.passed else "[bold red]FAIL"
        note = f" ({row.note})" if row.note else ""
        name = f"{row.group}: {row.name}{note}"
        table.add_row(name, _time(row.ours), _time(row.peer), _number(row.measured, row.unit), control, bar, verdict)
    console = Console()
    Console(width=max(console.width, 130), highlight=False).print(table)
    return ok


def _number(value: float, unit: str) -> str:
    digits = {"×": 3 if value < 3 else 1, "µs": 1, "MiB": 1, "s": 3}.get(unit, 2)
    return f"{value:.{digits}f} {unit}".rstrip()


def _time(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} µs"


def save(file: Path, rows: Iterable[Row], settings: dict[str, object]) -> None:
    """Store the raw figures of the groups that ran, each with what it was measured on; other groups stay as they are.

    Nothing in the file says where that machine stands.
    """
    groups = json.loads(file.read_text()) if file.exists() else {}
    origin = {
        "machine": machine(),
        "versions": {module.__name__: module.__version__ for module in (regard, torch, np)}
        | {"python": platform.python_version()},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "settings": settings,
    }
    rows = list(rows)
    for group in dict.fromkeys(row.group for row in rows):
        found = [asdict(row) | {"passed": row.passed} for row in rows if row.group == group]
        groups[group] = origin | {"rows": found}
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(groups, indent=1) + "\n")


def machine() -> dict[str, object]:
    model = platform.processor() or "unknown"
    information = Path("/proc/cpuinfo")
    if information.exists():
        named = [line.split(":", 1)[1].strip() for line in information.read_text().splitlines() if "model name" in line]
        model = named[0] if named else model
    return {"cpu": model, "cores": os.cpu_count(), "system": platform.system(), "architecture": platform.machine()}


def commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks/*.py")
    return (git("rev-parse", "HEAD") or "unknown") + ("+changes" if changed else "")


def main(
    about: str | None,
    groups: Mapping[str, Callable[[Any], Iterator[Row]]],
    sizes: Callable[[bool], Any],
    file: Path,
    settings: dict[str, object],
) -> int:
    """The command line of a benchmark: `sizes(quick)` says what to measure, `settings` what its figures hold for."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=groups, help="measure this group; may be repeated")
    parser.add_argument("--quick", action="store_true", help="few rounds and small sizes: shows that the tool works")
    parser.add_argument("--save", action="store_true", help="store the raw figures under benchmarks/results/")
    arguments = parser.parse_args()
    if arguments.save and arguments.quick:
        parser.error("--quick figures are not for keeping: leave out --quick or --save")
    torch.set_num_threads(THREADS)
    wanted = sizes(arguments.quick)
    rows = []
    for name in arguments.only or groups:
        for row in groups[name](wanted):
            print(line(row), file=sys.stderr, flush=True)  # a run takes long: what is known so far survives a Ctrl-C
            rows.append(row)
    ok = show(rows)
    if arguments.quick:
        print("--quick: too few rounds, and sizes for which most bars are not meant; the verdicts mean nothing.")
        return 0
    if arguments.save:
        rounds = {"rounds": wanted.rounds} if hasattr(wanted, "rounds") else {}
        save(file, rows, {"threads": THREADS, "dtype": "float32"} | settings | rounds)
    return 0 if ok else 1
