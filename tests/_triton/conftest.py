"""The kernels run here on Triton's interpreter, which must be chosen before Triton is loaded: in a process of its own.

``test_interpreted.py`` starts that process; the tests it runs are collected only there, or on a GPU by `make test-gpu`.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNELS = [
    "test_kernels.py",
    "test_top.py",
    "test_forward.py",
    "test_backward.py",
    "test_launches.py",
    "test_recipes.py",
    "test_scan.py",
    "test_stored.py",
    "test_stored_codes.py",
]

collect_ignore = []
if importlib.util.find_spec("triton") is None:
    collect_ignore = ["test_interpreted.py", "test_bounds.py", *KERNELS]
elif INTERPRETED:
    collect_ignore = ["test_interpreted.py"]
elif torch.cuda.is_available():
    collect_ignore = ["test_bounds.py"]
else:
    collect_ignore = ["test_bounds.py", *KERNELS]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not INTERPRETED:
        for item in items:
            if item.path.parent == Path(__file__).parent and item.path.name in KERNELS:
                item.add_marker("gpu")


if INTERPRETED:
    from triton import language as tl
    from triton.runtime import interpreter

    patch_language = interpreter._patch_lang

    def patched_once(function: Any) -> Any:
        """The interpreter looks through all of Triton's language again whenever one kernel function calls another, a
        third of its time, though the launch has done it already."""
        used = [module for module in (tl, tl.core) if module in function.__globals__.values()]
        done = not any(tl.core.is_builtin(module.load) for module in used)
        return interpreter._LangPatchScope() if used and done else patch_language(function)

    interpreter._patch_lang = patched_once

    @pytest.fixture(autouse=True)
    def held_to_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
        from tests._triton.bounds import hold

        hold(monkeypatch)
