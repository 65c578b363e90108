"""Times the observation on a GPU beside the fastest plain forward pass, in one run.

    python benchmarks/observe_gpu.py [--quick] [--tiles] [--json FILE]

Without a GPU this is a dry run, which computes every row at a few tokens and times nothing.

bfloat16, batch 1, Gaussian inputs. For each shape: the fastest plain forward pass that PyTorch has for it (cuDNN or
FlashAttention), then `regard.observe` as a multiple of it: row statistics alone (one pass by backend="triton", and two
by "auto"), all statistics but the largest weights, and all of them. The clock of a GPU changes with what it has done:
forward pass and observation are measured in turn, in rounds, each of them a median; the ratio told is the median of the
rounds' ratios, which are stored beside it, and from 16 384 tokens on each row says whether it meets its bar. --tiles:
the observation pass with other sizes of tiles too, to choose from. Memory is the peak beyond inputs and output. Then
masks with grouped heads, 131 072 tokens, host synchronisation, CUDA graphs, the same call twice, and the first call
from an empty cache of compiled kernels.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from triton import __version__ as triton_version
from triton.testing import do_bench

import regard
from regard import Want, masks

ROWS = Want.none().but(rows=True)
WANTS = {
    "rows in one pass": (ROWS, "triton"),
    "rows after auto": (ROWS, "auto"),
    "all but top": (Want(top_k=0), "auto"),
    "all": (Want(), "auto"),
}
# as multiples of the plain forward pass, from 16 384 tokens on
BARS = {"all but top": 1.75, "all": 2.2}
ROUNDS = 3
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DRY = 150  # tokens of a dry run
# sizes of tiles of the observation pass that are compared: rows, keys, stages of the pipeline, registers
TILES = ((128, 64, 3, 255), (128, 64, 2, 255), (64, 64, 2, 168), (64, 64, 3, 168), (64, 64, 3, 255))
# lengths at which the fastest forward pass takes more than a millisecond
MASKED = {
    "window of 1024": (65_536, masks.window(left=1023)),
    "8 documents, causal": (65_536, masks.documents(lengths=[8192] * 8) & masks.causal()),
    "grouped heads, causal": (16_384, masks.causal()),
}


def inputs(length: int, heads: int, kv_heads: int, dim: int) -> list[torch.Tensor]:
    shapes = [(1, count, length, dim) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for shape in shapes]


def median(call: Callable[[], Any], length: int) -> float:
    """Milliseconds; of a dry run 1, after one call."""
    if not GPU:
        call()
        return 1.0
    return float(do_bench(call, warmup=10, rep=60 if length < 40_000 else 120, return_mode="median"))


def plain_forward(tensors: list[torch.Tensor], causal: bool) -> float:
    """The faster of cuDNN and FlashAttention, in milliseconds."""
    aten = torch.ops.aten
    length = tensors[0].shape[2]
    if not GPU:
        return median(lambda: torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal), length)
    return min(
        median(lambda: aten._scaled_dot_product_cudnn_attention(*tensors, None, False, 0.0, causal, False), length),
        median(lambda: aten._scaled_dot_product_flash_attention(*tensors, 0.0, causal, False), length),
    )


def observed(tensors: list[torch.Tensor], mask: masks.Mask | None, forward: Callable[[], float]) -> dict[str, Any]:
    """``forward`` measures the plain forward pass, in milliseconds."""
    length = tensors[0].shape[2]
    calls = {
        name: partial(regard.observe, *tensors, mask=mask, want=want, backend=backend)
        for name, (want, backend) in WANTS.items()
        if GPU or backend == "auto"
    }
    memory = {name: extra_memory(call) for name, call in calls.items()}
    plain: list[float] = []
    ratios: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS if length < 100_000 else 1):
        plain.append(forward())
        for name, call in calls.items():
            ratios[name].append(median(call, length) / plain[-1])
    found: dict[str, Any] = {"forward ms": statistics.median(plain)}
    for name in calls:
        found[f"{name} MiB"] = memory[name]
        found[f"{name} ×"] = statistics.median(ratios[name])
        if GPU and name in BARS and 16_384 <= length < 100_000:
            found[f"{name} ≤ {BARS[name]}"] = found[f"{name} ×"] <= BARS[name]
    return {**found, "rounds": {"forward ms": plain, **ratios}}


def extra_memory(call: Callable[[], regard.Observation]) -> float:
    """MiB at the peak, beyond what is there before and the output; of a second call, when all is compiled."""
    call()
    if not GPU:
        return 0.0
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    seen = call()
    return float((torch.cuda.max_memory_allocated() - before - seen.out.nbytes) / 2**20)


def sizes_of_tiles(tensors: list[torch.Tensor], causal: bool) -> dict[str, Any]:
    """All but the largest weights, as multiples of the plain forward pass, with each of TILES."""
    from regard._triton import launcher, observing

    usual, length = observing._tiles, tensors[0].shape[2]
    mask = masks.causal() if causal else None
    found: dict[str, Any] = {}
    try:
        for rows, keys, stages, registers in TILES:
            made = {"BM": rows, "BN": keys, "num_warps": 4, "num_stages": stages, "maxnreg": registers}
            observing._tiles = lambda spec, grid, made=made: made
            observing._recipes.clear()
            launcher._kept.clear()
            call = partial(regard.observe, *tensors, mask=mask, want=Want(top_k=0))
            call()
            found[f"{rows}×{keys}, {stages} stages, {registers} registers ×"] = median(call, length) / plain_forward(
                tensors, causal
            )
    finally:
        observing._tiles = usual
        observing._recipes.clear()
        launcher._kept.clear()
    return found


def masked(length: int, mask: masks.Mask) -> dict[str, Any]:
    """Against the fastest backend that takes the mask."""
    tensors = inputs(length, 32, 8, 128)
    with torch.no_grad():
        backends = ("sdpa", "triton") if GPU else ("auto",)
        calls = {b: partial(regard.attention, *tensors, mask=mask, backend=b) for b in backends}
        times = {backend: median(call, length) for backend, call in calls.items()}
        fastest = calls[min(times, key=lambda backend: times[backend])]
        seen = observed(tensors, mask, lambda: median(fastest, length))
    return {**{f"{backend} ms": time for backend, time in times.items()}, **seen}


def behaviour() -> dict[str, Any]:
    """What must hold beside speed: nothing waits for the device, graphs can be captured, two calls have equal bits."""
    tensors = inputs(4096, 16, 16, 128)
    mask = masks.causal()
    call = lambda: regard.observe(*tensors, mask=mask)  # noqa: E731
    first = call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    second = call()
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        third = call()
    graph.replay()
    torch.cuda.synchronize()
    names = ("entropy", "max_weight", "key_mass", "map", "distance", "top_weights", "top_keys", "out")
    start = time.perf_counter()
    for _ in range(20):
        call()
    issue = (time.perf_counter() - start) / 20
    return {
        "no host synchronisation": True,
        "twice bitwise equal": all(torch.equal(getattr(first, n), getattr(second, n)) for n in names),
        "CUDA graph bitwise equal": all(torch.equal(getattr(first, n), getattr(third, n)) for n in names),
        "microseconds of the host for a call": issue * 1e6,
    }


FIRST_CALL = """
import time, torch, regard
tensors = [torch.randn(1, 16, 16384, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
regard.attention(*tensors); torch.cuda.synchronize(); start = time.perf_counter()
regard.observe(*tensors, mask=regard.masks.causal()); torch.cuda.synchronize(); print(time.perf_counter() - start)
"""


def first_call() -> float:
    with tempfile.TemporaryDirectory() as folder:
        settings = {**os.environ, "TRITON_CACHE_DIR": folder}
        run = subprocess.run(
            [sys.executable, "-c", FIRST_CALL], env=settings, capture_output=True, text=True, check=True
        )
    return float(run.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16 384 tokens only")
    parser.add_argument("--tiles", action="store_true", help="compare sizes of tiles of the observation pass")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    given = parser.parse_args()
    if not GPU and given.json:
        parser.error("there is no GPU: a dry run has no figures to write")
    figures: dict[str, Any] = {}
    about = {
        "machine": {"gpu": torch.cuda.get_device_name() if GPU else None},
        "versions": {"torch": torch.__version__, "triton": triton_version, "cudnn": torch.backends.cudnn.version()},
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/observe_gpu.py --json FILE",
    }

    def tell(name: str, found: dict[str, Any]) -> None:
        if not GPU:
            print(
                f"{name}: {', '.join(key for key in found if key.endswith('×'))} (computed at {DRY} tokens, not timed)"
            )
            return
        figures[name] = found
        told = {key: value for key, value in found.items() if key != "rounds"}
        parts = (f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in told.items())
        print(name, *parts, sep="  ", flush=True)
        if given.json:  # at once: a run that is cut short keeps what it has measured
            given.json.write_text(json.dumps({**about, "figures": figures}, indent=1, ensure_ascii=False) + "\n")

    for length in (16_384,) if given.quick else (4096, 16_384, 65_536):
        for heads, dim in ((16, 128), (32, 64)):
            for causal in (False, True):
                tensors = inputs(length if GPU else DRY, heads, heads, dim)
                name = f"{length} tokens {heads}×{dim} {'causal' if causal else 'full'}"
                tell(
                    name, observed(tensors, masks.causal() if causal else None, partial(plain_forward, tensors, causal))
                )
                if given.tiles and GPU:
                    tell(f"{name}, tiles", sizes_of_tiles(tensors, causal))
    if not given.quick:
        for name, (length, mask) in MASKED.items():
            if not GPU and "documents" in name:
                mask = masks.documents(lengths=[50, DRY - 50]) & masks.causal()
            tell(f"{length} tokens 32 heads on 8 ×128, {name}", masked(length if GPU else DRY, mask))
        tensors = inputs(131_072 if GPU else DRY, 16, 16, 128)
        tell("131072 tokens 16×128 causal", observed(tensors, masks.causal(), partial(plain_forward, tensors, True)))
        del tensors
        if GPU:
            tell("behaviour", behaviour())
            tell("first call", {"seconds": first_call()})


if __name__ == "__main__":
    main()
