"""The backend's answers before it runs: where it can, and where "auto" takes it. Its numbers: tests/_triton."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard import masks
from regard._arguments import _flags, prepare
from regard.backends import _cuda, triton
from regard.bias import alibi
from regard.plan import _choose

HALF = torch.bfloat16


def spec_of(dtype: torch.dtype = HALF, **given: Any) -> Any:
    query, key, value = (torch.zeros(2, 4, n, 64, dtype=dtype) for n in (1111, 1300, 1300))
    names = ("mask", "bias", "scale", "softcap", "sinks")
    spec = prepare(query, key, value, *(given.get(name) for name in names), 0.0, None).spec
    return spec._replace(device="cuda", flags=None)


def test_on_a_cpu_it_refuses_by_name() -> None:
    query = torch.zeros(1, 2, 3, 5)
    with pytest.raises(regard.Refused, match="CUDA"):
        regard.attention(query, query, query, backend="triton")
    assert "triton" not in regard.backends.available("cpu")


def test_without_triton_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "has_triton", lambda: False)
    assert triton.Triton().refuse(spec_of()) == ["triton is not installed"]


@pytest.mark.parametrize(
    ("dtype", "given", "chosen"),
    [
        (HALF, {"mask": masks.causal(), "softcap": 20.0}, "triton"),
        (HALF, {"mask": masks.causal() | masks.prefix(63)}, "triton"),
        (HALF, {"mask": masks.causal(), "bias": alibi(4)}, "triton"),
        (torch.float32, {"mask": masks.window(left=63), "softcap": 3.0}, "triton"),
        (HALF, {"mask": masks.causal() & masks.strided(7)}, "flex"),
        (HALF, {"mask": masks.causal() & ~masks.columns(4)}, "triton"),
        (HALF, {"mask": ~masks.strided(7)}, "flex"),
        (HALF, {"bias": torch.zeros(1, 4, 1111, 1300)}, "flex"),
        (HALF, {}, "sdpa"),
        (torch.float64, {}, "blockwise"),
    ],
    ids=str,
)
def test_auto_takes_it_where_it_was_measured_to_win(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, given: dict[str, Any], chosen: str
) -> None:
    monkeypatch.setattr("regard.backends.flex.has_triton", lambda: True)
    monkeypatch.setattr(triton, "has_triton", lambda: True)
    assert _choose(spec_of(dtype, **given), "auto").backend.name == chosen


@pytest.mark.parametrize(
    ("case", "given"),
    [
        ("causal or prefix", {"mask": masks.causal() | masks.prefix(63)}),
        ("softcap, causal", {"mask": masks.causal(), "softcap": 20.0}),
        ("bias tensor", {"bias": torch.zeros(1, 4, 1111, 1300)}),
        ("strided or window", {"mask": masks.strided(7) | masks.window(left=63)}),
        ("random blocks or window", {"mask": masks.random_blocks(3, 64, 0) | masks.window(left=63)}),
    ],
)
def test_the_rules_agree_with_the_stored_measurement(
    monkeypatch: pytest.MonkeyPatch, case: str, given: dict[str, Any]
) -> None:
    """Where a rule puts it before FlexAttention, it was faster in the run that is stored; where after, slower."""
    stored = Path(__file__).parents[2] / "benchmarks" / "results" / "backends_gpu.json"
    figures = json.loads(stored.read_text())["figures"][case]
    monkeypatch.setattr("regard.backends.flex.has_triton", lambda: True)
    monkeypatch.setattr(triton, "has_triton", lambda: True)
    faster = "triton" if figures["triton ms"] < figures["flex ms"] else "flex"
    assert _choose(spec_of(**given), "auto").backend.name == faster


@pytest.mark.parametrize("mask", [masks.window(left=1023), masks.documents(lengths=[512] * 8) & masks.causal()])
def test_windows_and_documents_are_its_own_on_hopper(monkeypatch: pytest.MonkeyPatch, mask: masks.Mask) -> None:
    monkeypatch.setattr("regard.backends.flex.has_triton", lambda: True)
    monkeypatch.setattr(triton, "has_triton", lambda: True)
    chosen = {}
    for length in (4096, 65_536):
        flags = _flags(mask, length, length, 0)
        spec = spec_of()._replace(mask=mask.structure, queries=length, keys=length, offset=0, flags=flags)
        for hopper in (False, True):
            monkeypatch.setattr(_cuda, "is_hopper", lambda hopper=hopper: hopper)
            chosen[length, hopper] = _choose(spec, "auto").backend.name
    assert chosen == {(4096, False): "sdpa", (4096, True): "triton", (65_536, False): "sdpa", (65_536, True): "triton"}


def test_with_windows_and_documents_it_was_faster_in_the_run_that_is_stored() -> None:
    stored = Path(__file__).parents[2] / "benchmarks" / "results" / "observe_gpu.json"
    figures = json.loads(stored.read_text())["figures"]
    masked = [name for name in figures if "window" in name or "documents" in name]
    assert len(masked) == 2
    assert all(figures[name]["sdpa ms"] > 1.2 * figures[name]["triton ms"] for name in masked)


def test_calls_that_need_gradients_may_be_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.backends.flex.has_triton", lambda: True)
    monkeypatch.setattr(triton, "has_triton", lambda: True)
    spec = spec_of(mask=masks.causal(), softcap=20.0)
    assert _choose(spec._replace(grad=True), "auto").backend.name == "triton"
