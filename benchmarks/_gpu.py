"""What the benchmarks of a GPU share: rows of a table, contenders that take turns, and files that are kept row by row.

Without a CUDA device they run dry: on a CPU, in float32, at sizes that time nothing worth keeping. That shows, before a
GPU is borrowed, that every row of a table can be computed.
"""

from __future__ import annotations

import datetime
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DRY = not torch.cuda.is_available()
DEVICE = "cpu" if DRY else "cuda"
DTYPE = torch.float32 if DRY else torch.bfloat16
ROUNDS = 1 if DRY else 7
Work = Callable[[], Any]


@dataclass
class Row:
    group: str
    name: str
    bar: float
    unit: str = "×"
    ratio: float = 0.0
    control: float = 0.0
    backend: str = ""
    error: float = 0.0  # of ours against float32, as a multiple of what bfloat16 may have
    milliseconds: dict[str, float] = field(default_factory=dict)
    note: str = ""


def length(tokens: int) -> int:
    """That many, or a few of them in a dry run."""
    return max(32, tokens // 128) if DRY else tokens


def normal(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE).requires_grad_(grad)


def qkv(B: int, H: int, L: int, D: int, Dv: int | None = None, Hkv: int | None = None) -> tuple[Tensor, ...]:
    Hkv = Hkv or H
    return normal(B, H, L, D), normal(B, Hkv, L, D), normal(B, Hkv, L, Dv or D)


def wait() -> None:
    if not DRY:
        torch.cuda.synchronize()


def once(work: Work, repeats: int) -> float:
    """Milliseconds of one run."""
    if DRY:
        begun = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - begun) / repeats * 1e3
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        work()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / repeats


def replayed(work: Work) -> Work:
    """The work as a recorded graph: the time of the device alone, where the host takes longer. Dry, the work itself."""
    if DRY:
        return work
    work()
    wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def in_turn(works: dict[str, Work], budget_ms: float = 20.0) -> dict[str, list[float]]:
    """Milliseconds of each work in each round."""
    repeats = {}
    for name, work in works.items():
        work()
        wait()
        repeats[name] = 1 if DRY else max(2, min(200, int(budget_ms / max(once(work, 3), 1e-3))))
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            found[name].append(once(work, repeats[name]))
    return found


def against(
    found: dict[str, list[float]], peer: str, again: str | None = None
) -> tuple[float, float, dict[str, float]]:
    """The median over the rounds of ours to the peer's time; the peer's to itself; and the medians of all."""
    ratio = statistics.median(o / p for o, p in zip(found["ours"], found[peer], strict=True))
    control = 1.0
    if again is not None:
        control = statistics.median(o / p for o, p in zip(found[again], found[peer], strict=True))
    return ratio, control, {name: statistics.median(times) for name, times in found.items()}


def failed(group: str, name: str, bar: float, problem: Exception) -> Row:
    """One row that fails must not lose the others."""
    return Row(group, name, bar, note=f"{type(problem).__name__}: {problem}"[:300])


def with_backward(call: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> Work:
    grad = torch.randn_like(call())
    return lambda: torch.autograd.grad(call(), leaves, grad)


def plain_sdpa(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **more)


def show(row: Row) -> None:
    if row.note:
        print(f"{row.group:8} {row.name:44} FAIL {row.note}", flush=True)
        return
    good = row.ratio <= row.bar + max(0.0, row.control - (row.unit == "×")) and row.error <= 2
    times = " ".join(f"{name} {time:.3f}" for name, time in row.milliseconds.items() if name != "again")
    print(
        f"{row.group:8} {row.name:44} {row.ratio:7.2f}{row.unit} (bar {row.bar:g}, control {row.control:.2f}) "
        f"{'ok  ' if good else 'MISS'} error {row.error:.2f} {row.backend:9} {times}",
        flush=True,
    )


def save(rows: list[Row], path: Path | None) -> None:
    """After every row: a run that is cut off leaves what it has."""
    if path is None:
        return
    import triton

    about = {
        "device": "none: a dry run" if DRY else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "date": datetime.date.today().isoformat(),
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(about, indent=1))
