"""Runs the tests that need a GPU in several processes, because most of their time is the compiling of kernels on a CPU.

    python tools/test_gpu.py [--jobs 8] [--seconds 600] [--logs build/test-gpu] [PATH ...]

`make test-gpu JOBS=8` does the same. Tests are dealt out in turn, those that compile most first. What has not ended
when the time is up is listed, and counts as failed; so are files that cannot be imported.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

# of the conformance suite, these backends compile kernels for every kind of call
COMPILING = ("[auto-", "[triton-", "-auto-", "-triton-")
OUTCOMES = ("PASSED", "FAILED", "ERROR", "SKIPPED")


def collected(paths: list[str]) -> tuple[list[str], list[str]]:
    """The tests, and the files that cannot be imported here."""
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", "-o", "addopts=", *paths]
    done = subprocess.run([*words, "--continue-on-collection-errors"], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    found = [line for line in lines if "::" in line]
    if not found:
        sys.exit(f"no tests were collected:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return found, [line.split()[1] for line in lines if line.startswith("ERROR ")]


def started(tests: list[str], log: Path) -> subprocess.Popen[bytes]:
    listed = log.with_suffix(".txt")
    listed.write_text("\n".join(tests) + "\n", encoding="utf-8")
    words = [sys.executable, "-m", "pytest", "-o", "addopts=", "-v", "-rfE", "--tb=short", "-m", "gpu", f"@{listed}"]
    # each process has the GPU's tests and nothing of a CPU's to share out
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as stream:
        return subprocess.Popen(words, stdout=stream, stderr=subprocess.STDOUT, env=settings)


def outcomes(log: Path) -> dict[str, str]:
    """What became of each test, from the lines that pytest prints as they end."""
    found = {}
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if ended := re.match(rf"(\S+::.+) ({'|'.join(OUTCOMES)}) +\[", line):  # names may have spaces
            found[ended[1]] = ended[2]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files or folders of tests (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes (default: 1)")
    parser.add_argument("--seconds", type=float, help="stop after this time (default: never)")
    parser.add_argument("--logs", type=Path, default=Path("build/test-gpu"), help="folder for what pytest prints")
    given = parser.parse_args()
    begun = time.monotonic()
    found, unread = collected(given.paths)
    tests = sorted(found, key=lambda test: not any(word in test for word in COMPILING))
    given.logs.mkdir(parents=True, exist_ok=True)
    shares = [share for job in range(given.jobs) if (share := tests[job :: given.jobs])]
    logs = [given.logs / f"{job}.log" for job in range(len(shares))]
    running = [started(share, log) for share, log in zip(shares, logs, strict=True)]
    for process in running:
        left = None if given.seconds is None else max(0.0, given.seconds - (time.monotonic() - begun))
        try:
            process.wait(left)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    ended = {name: outcome for log in logs for name, outcome in outcomes(log).items()}
    bad = {name: ended.get(name, "NOT ENDED") for name in tests if ended.get(name) not in ("PASSED", "SKIPPED")}
    for name, outcome in bad.items():
        print(f"{outcome} {name}")
    for name in unread:
        print(f"NOT READ {name} (a package that it imports is not installed here)")
    skipped = sum(outcome == "SKIPPED" for outcome in ended.values())
    print(f"{len(tests) - len(bad) - skipped} passed, {len(bad)} failed, {skipped} skipped")
    print(f"{time.monotonic() - begun:.0f} s in {len(shares)} processes; what they printed is in {given.logs}")
    sys.exit(1 if bad or unread else 0)


if __name__ == "__main__":
    main()
