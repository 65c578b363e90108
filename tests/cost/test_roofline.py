"""The least time of a call, from fixed rates: no clock is read here."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forced
from tests.cost.small_bills import keep

from regard import cost, masks
from regard.cost import _measure

CPU = cost.Device("a CPU", {"float32": 1e9}, 1e8, 1e7, overlaps=False, source="made up", date="2026-11-15", threads=3)
GPU = cost.Device("a GPU", {"bfloat16": 1e9}, 1e8, 1e7, overlaps=True, source="made up", date="2026-11-15")
CALL: dict[str, Any] = {"length": 111, "heads": 6, "head_dim": 16, "batch": 5}


@pytest.mark.parametrize("causal", [False, True])
def test_on_a_cpu_products_and_softmax_take_their_times_one_after_the_other(causal: bool) -> None:
    pairs = 30 * (111 * 112 // 2 if causal else 111**2)
    call = cost.AttentionCall(**CALL, causal=causal)
    forward, backward = (cost.roofline(call, CPU, backward=back) for back in (False, True))
    assert forward.seconds == pytest.approx(4 * 16 * pairs / 1e9 + pairs / 1e7)
    assert backward.seconds == pytest.approx(10 * 16 * pairs / 1e9 + pairs / 1e7)
    assert (forward.bound, backward.bound) == ("softmax", "matrix products")
    assert forward.memory == pytest.approx((4 * 111 * 30 * 16 * 4 + 111 * 30 * 4) / 1e8)


def test_on_a_gpu_what_takes_longest_decides() -> None:
    call = cost.AttentionCall(**CALL, causal=True, kv_heads=2, dtype="bf16")
    found = cost.roofline(call, GPU)
    assert found.seconds == max(found.products, found.softmax, found.memory) == found.softmax
    short = cost.roofline(cost.AttentionCall(length=3, heads=6, head_dim=16, dtype="bf16"), GPU)
    assert short.bound == "memory" and short.seconds == short.memory


def test_an_unknown_rate_of_exponentials_is_left_out() -> None:
    found = cost.roofline(cost.AttentionCall(**CALL, dtype="bf16"), dataclasses.replace(GPU, exponentials=None))
    assert found.softmax == 0.0 and found.bound == "matrix products"


def test_a_window_costs_what_it_keeps() -> None:
    seen = (masks.causal() & masks.window(left=7)).dense(111, 111)
    assert cost.AttentionCall(**CALL, causal=True, window=7).pairs == 30 * int(seen.sum())


@pytest.mark.parametrize("name", cost.devices())
def test_published_figures_are_in_their_range_and_say_where_they_are_from(name: str) -> None:
    found = cost.device(name)
    assert 1e13 < found.flops["float16"] < 1e16 and found.flops["float32"] <= found.flops["float16"]
    assert 1e11 < found.bandwidth < 1e14 and found.source and found.date == cost.device("h200").date
    assert found.exponentials is None or 1e12 < found.exponentials < 1e13
    json.dumps(found.to_dict())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"length": 0}, "length must be at least 1"),
        ({"heads": 0}, "heads must be at least 1"),
        ({"head_dim": 1.5}, "head_dim must be an int"),
        ({"kv_heads": 4}, "kv_heads=4 must divide heads=6"),
        ({"kv_heads": 12}, "kv_heads=12 must divide heads=6"),
        ({"window": 3}, "it needs causal=True"),
        ({"window": -1, "causal": True}, "window must be at least 0"),
        ({"dtype": "int8"}, "dtype must be one of"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        cost.AttentionCall(**CALL | given)


def test_a_device_without_the_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="a GPU has no figure for float32; it has bfloat16"):
        cost.roofline(cost.AttentionCall(**CALL), GPU)
    with pytest.raises(ValueError, match="name must be one of h100"):
        cost.device("abacus")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every timed piece of work runs once, and takes a quarter of a second."""
    ran: list[str] = []

    def times(work: Any, where: str, seconds: float) -> list[float]:
        work()
        ran.append(where)
        return [0.5, 0.25, 0.75]

    forced.clock(monkeypatch, times)
    forced.sizes(monkeypatch, numbers_copied=1 << 12)
    return ran


def test_measuring_divides_work_by_time_and_leaves_the_threads_as_they_were(clock: list[str]) -> None:
    before = torch.get_num_threads()
    found = cost.measure(threads=1)
    rows, keys, dim, count = _measure.TILE
    assert found.flops["float32"] == 4 * rows * keys * dim * count / 0.25 == found.flops["bfloat16"]
    assert found.exponentials == rows * keys * count / 0.25 and found.bandwidth == 2 * (1 << 12) / 0.25
    assert found.threads == 1 and not found.overlaps and len(clock) == 4
    assert torch.get_num_threads() == before


def test_a_call_is_measured_forward_and_backward_by_its_median(clock: list[str]) -> None:
    call = cost.AttentionCall(length=11, heads=6, kv_heads=2, head_dim=5, causal=True, window=3)
    assert cost.measure_call(call, threads=1) == (0.5, 0.5)
    assert clock == ["cpu", "cpu"]
    with pytest.raises(ValueError, match="device must be one of cuda, cpu"):
        cost.measure("tpu")
    with pytest.raises(ValueError, match="threads must be at least 1"):
        cost.measure(threads=0)


def test_a_measurement_is_kept_by_threads_and_survives_a_broken_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cost.measured(3) is None
    keep(monkeypatch, CPU)
    assert cost.measured(3) == CPU and cost.measured(1) is None
    other = cost.Device(**CPU.to_dict() | {"threads": 1})
    keep(monkeypatch, other)
    assert cost.measured(3) == CPU and cost.measured(1) == other
    (stored,) = (tmp_path / "regard").iterdir()
    for broken in ("", "[]", "{", '{"a": 3}'):
        stored.write_text(broken)
        assert cost.measured(3) is None
    keep(monkeypatch, CPU)
    assert cost.measured(3) == CPU


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep(monkeypatch, CPU)
    assert cost.measured(3) is None
