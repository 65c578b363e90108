"""The tutorial of docs/look-inside.md runs as it is printed, at 8000 tokens."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

pytestmark = pytest.mark.models

PAGE = Path(__file__).parents[2] / "docs" / "look-inside.md"


def test_the_tutorial_runs_and_its_claims_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    transformers.utils.logging.set_verbosity_error()
    code = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(code) == 6
    namespace: dict[str, Any] = {"__name__": "tutorial"}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for block in code:
            exec(block, namespace)
    recording = namespace["recording"]
    assert recording.calls[0].queries == 8000
    labels = {layer: [row["label"] for row in recording.to_dicts() if row["layer"] == layer] for layer in (0, 25)}
    assert labels[0].count("broad") >= 5
    assert labels[25].count("first-token") >= 7
    assert recording[25, 0].weights.shape == (8, 8)
    written = ("layer-25-head-0.png", "layer-12-keys.png", "smollm2.regard", "smollm2.html")
    assert all((tmp_path / name).stat().st_size > 1000 for name in written)
    assert recording.bytes < 300 << 20
