"""What this machine does in fact: rates of products, softmax and memory, and the time of a call."""

from __future__ import annotations

import datetime
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from regard import api, masks
from regard.cost import _given
from regard.cost._devices import EVERY, Device, processor
from regard.cost._roofline import AttentionCall

# of the tiles that a fused kernel works on: rows, keys, head dim, and how many of them at once
TILE = (256, 512, 64, 8)
LARGE = 8192  # rows of a matrix that keeps a GPU busy
COPY = 1 << 28  # bytes that no cache holds

Work = Callable[[], object]


def measure(where: str = "cpu", *, threads: int | None = None, seconds: float = 3.0) -> Device:
    """Measure this machine's rates, in about this many seconds.

    On a CPU products and softmax are those of tiles as attention works on them, in float32; half precision is computed
    in float32 too. On a GPU products are those of large matrices, in each dtype, and exponentials stay unknown.

    Args:
        where: "cpu" or "cuda".
        threads: of the CPU; as many as torch uses now when None.
        seconds: how long it may take.
    """
    _given.check_device(where)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    source = f"measured, torch {torch.__version__}"
    if where == "cuda":
        flops = {dtype: _large_products(getattr(torch, dtype), seconds / 6) for dtype in EVERY}
        name = torch.cuda.get_device_name()
        return Device(name, flops, _copy(where, seconds / 6), None, True, source, today)
    with using_threads(threads) as used:
        single, double = (_tile_products(dtype, seconds / 5) for dtype in (torch.float32, torch.float64))
        flops = {"float64": double, "float32": single, "bfloat16": single, "float16": single}
        softmax = _softmax(seconds / 5)
        return Device(processor(), flops, _copy(where, seconds / 5), softmax, False, source, today, used)


def measure_call(
    call: AttentionCall, where: str = "cpu", *, threads: int | None = None, seconds: float = 1.0
) -> tuple[float, float]:
    """Seconds of one forward and of one backward pass of a call here: medians over about this many seconds each.

    Args:
        call: what is computed, of random numbers.
        where: "cpu" or "cuda".
        threads: of the CPU; as many as torch uses now when None.
        seconds: how long each may take; three runs are made in any case.
    """
    _given.check_device(where)
    made: dict[str, Any] = {"dtype": getattr(torch, call.dtype), "device": where}
    heads = (call.heads, call.shared_heads, call.shared_heads)
    inputs = [torch.randn(call.batch, count, call.length, call.head_dim, **made) for count in heads]
    mask = masks.causal() if call.causal else None
    if call.window is not None:
        mask = masks.causal() & masks.window(left=call.window)
    with using_threads(threads):
        forward = statistics.median(times(lambda: api.attention(*inputs, mask=mask), where, seconds))
        learned = [x.requires_grad_() for x in inputs]
        out = api.attention(*learned, mask=mask)
        grad = torch.randn_like(out)

        def back() -> object:
            return torch.autograd.grad(out, learned, grad, retain_graph=True)

        return forward, statistics.median(times(back, where, seconds))


@contextmanager
def using_threads(threads: int | None) -> Iterator[int]:
    """This many threads of torch inside the block."""
    before = torch.get_num_threads()
    if threads is not None:
        _given.check_count("threads", threads)
        most = os.cpu_count() or threads
        if threads > most:  # nothing becomes faster, and some thousands of them end the process
            raise ValueError(f"threads must be at most {most}, the processors there are, got {threads}")
        torch.set_num_threads(threads)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def times(work: Work, where: str, seconds: float) -> list[float]:
    """Seconds of each run, after one that pays for plans and memory; three runs at least."""
    wait = waiting(where)
    work()
    wait()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        wait()
        found.append(time.perf_counter() - start)
    return found


def waiting(device: str) -> Callable[[], None]:
    """Until the device has done what it was given; a CPU does it at once."""
    kind = torch.device(device).type
    return torch.cuda.synchronize if kind == "cuda" else torch.mps.synchronize if kind == "mps" else _nothing


def _nothing() -> None:
    pass


def _tile_products(dtype: torch.dtype, seconds: float) -> float:
    """FLOP/s of scores and of weighted values, the one after the other, as attention does them."""
    rows, keys, dim, count = TILE
    query, weights = torch.randn(count, rows, dim, dtype=dtype), torch.randn(count, rows, keys, dtype=dtype)
    key, value = torch.randn(count, dim, keys, dtype=dtype), torch.randn(count, keys, dim, dtype=dtype)
    scores, out = torch.empty_like(weights), torch.empty_like(query)

    def work() -> None:
        torch.bmm(query, key, out=scores)
        torch.bmm(weights, value, out=out)

    # the best run: the others shared the machine with something else
    return 4 * count * rows * keys * dim / min(times(work, "cpu", seconds))


def _softmax(seconds: float) -> float:
    rows, keys, _, count = TILE
    logits = torch.randn(count, rows, keys)
    return logits.numel() / min(times(lambda: torch.softmax(logits, -1), "cpu", seconds))


def _large_products(dtype: torch.dtype, seconds: float) -> float:
    side = LARGE // 4 if dtype == torch.float64 else LARGE
    matrix = torch.randn(side, side, dtype=dtype, device="cuda")
    return 2 * side**3 / min(times(lambda: matrix @ matrix, "cuda", seconds))


def _copy(where: str, seconds: float) -> float:
    """Bytes/s of a copy, which reads and writes."""
    source = torch.ones(COPY // 4, device=where)
    target = torch.empty_like(source)
    return 2 * COPY / min(times(lambda: target.copy_(source), where, seconds))
