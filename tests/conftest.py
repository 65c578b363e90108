"""Settings that every test shares. What must precede `import torch` or `import regard` stands at the top."""

from __future__ import annotations

import os

# Read by oneDNN when torch is loaded: one instruction set for bfloat16, whatever the CPU offers.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import hypothesis
import numpy as np
import pytest
import torch

# No deadline: the machines are shared, and a slow example is not a wrong one. Derandomised: what fails in CI fails
# everywhere; `make fuzz` is what searches at random.
hypothesis.settings.register_profile("default", max_examples=50, deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("long", max_examples=2000, deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _same_seed_for_every_test() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
