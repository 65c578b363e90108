"""Settings that every test shares. What must precede `import torch` or `import regard` stands at the top."""

from __future__ import annotations

import importlib
import os
import sys
import typing

# Read by oneDNN when torch is loaded: one instruction set for bfloat16, whatever the CPU offers.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import hypothesis
import jaxtyping
import numpy as np
import pytest
import torch

# What lies behind the public calls. The entry points (api, masks, compat, nn, reference, testing) are not among them:
# what they say about a wrong argument is tested, and must be theirs. Nor is spec: the compiler traces its constructors.
CHECKED = ["_hash", "backends", "plan", "_guard", "_observing", "observation"]


def load_with_checked_annotations() -> None:
    """Import these so that every function of theirs checks its arguments and its result against its annotations.

    Names that only annotations need are imported under TYPE_CHECKING; a check whose names are missing would be passed
    over in silence.
    """
    for name in ("beartype", "regard.masks"):  # these must not be loaded as a type checker sees them
        importlib.import_module(name)
    with jaxtyping.install_import_hook([f"regard.{name}" for name in CHECKED], "beartype.beartype"):
        typing.TYPE_CHECKING = True
        try:
            for name in CHECKED:
                importlib.import_module(f"regard.{name}")
        finally:
            typing.TYPE_CHECKING = False


load_with_checked_annotations()

# No deadline: the machines are shared, and a slow example is not a wrong one. Derandomised: what fails in CI fails
# everywhere; `make fuzz` is what searches at random.
hypothesis.settings.register_profile("default", max_examples=50, deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("long", max_examples=2000, deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _every_test_starts_alike() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    if "torch._dynamo" in sys.modules:
        # compiled code is kept by function, and after a few tests of one function there would be too much of it
        sys.modules["torch._dynamo"].reset()
