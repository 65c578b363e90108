"""Runs the tests of the kernels on Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests._triton.conftest import KERNELS

HERE = Path(__file__).parent


@pytest.mark.parametrize("file", [*KERNELS, "test_bounds.py"])
def test_the_kernels_pass_their_tests_on_the_interpreter(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(HERE / file)]
    settings = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=HERE.parent.parent, env=settings, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
