"""Linear attention on a CPU: how its time grows with the length, and where it passes fused causal softmax attention.

python benchmarks/linear.py [--only slope --only causal --only decode] [--quick] [--save]

float32, 2 threads, 8 heads of 64; forward, and forward with backward. A full run takes about 15 minutes and 10 GB.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from _harness import RESULTS, Row, Work, faster, interleave, main, seconds
from regard import masks
from regard.linear import LinearState

HEADS, DIM = 8, 64
KINDS: dict[str, dict[str, object]] = {"elu": {}, "elu and decay": {"decay": [0.99] * HEADS}}


class Sizes:
    """What a full run measures, and what --quick makes of it."""

    def __init__(self, quick: bool) -> None:
        self.slope = (1024, 4096) if quick else (4096, 16384, 65536, 262144)
        self.slope_rounds = 2 if quick else 5
        # lengths, with the rounds that their time allows: forward, and forward with backward
        self.causal = {1024: (2, 2)} if quick else {8192: (15, 7), 16384: (7, 3), 32768: (3, 0)}
        self.decode = (1024,) if quick else (1024, 16384)


def inputs(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(1, HEADS, length, DIM, generator=generator) for _ in range(3)]


def linear(**given: object) -> Callable[..., Tensor]:
    return lambda q, k, v: regard.linear_attention(q, k, v, mask=masks.causal(), **given)  # type: ignore[arg-type]


def softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def forward(function: Callable[..., Tensor], length: int) -> Work:
    tensors = inputs(length)

    def work() -> Tensor:
        with torch.no_grad():
            return function(*tensors)

    return work


def training(function: Callable[..., Tensor], length: int) -> Work:
    leaves = [tensor.requires_grad_() for tensor in inputs(length)]
    grad = torch.ones_like(leaves[0])
    return lambda: torch.autograd.grad(function(*leaves), leaves, grad)


DIRECTIONS = {"forward": forward, "forward+backward": training}


def slope(sizes: Sizes) -> Iterator[Row]:
    """The exponent p of time ~ L^p."""
    for kind, given in KINDS.items():
        for name, direction in DIRECTIONS.items():
            times: dict[str, list[float]] = {}
            for length in sizes.slope:  # one length's tensors at a time: those of all would not fit beside each other
                work = direction(linear(**given), length)
                work()
                times[str(length)] = [seconds(work, max(1, 16384 // length)) for _ in range(sizes.slope_rounds)]
                del work
            medians = [statistics.median(found) for found in times.values()]
            exponent = statistics.linear_regression(
                [math.log(length) for length in sizes.slope], [math.log(median) for median in medians]
            ).slope
            note = ", ".join(f"{n}: {m:.3g} s" for n, m in zip(sizes.slope, medians, strict=True))
            yield Row("slope", f"{kind} {name}", exponent, "", 1.1, note=note, samples=times)


def causal(sizes: Sizes) -> Iterator[Row]:
    for length, all_rounds in sizes.causal.items():
        for (name, direction), rounds in zip(DIRECTIONS.items(), all_rounds, strict=True):
            if rounds:
                samples = interleave(direction(linear(), length), direction(softmax, length), rounds=rounds)
                yield faster("causal", f"against causal SDPA, L={length} {name}", samples, 1.0)


def decode(sizes: Sizes) -> Iterator[Row]:
    """One more token after many: the state is as large as ever, so the time must be too."""
    times: dict[str, list[float]] = {}
    for length in (1, *sizes.decode):
        state = LinearState()
        with torch.no_grad():
            regard.linear_attention(*inputs(length), mask=masks.causal(), state=state)
            token = inputs(1)
            step = linear(state=state)
            times[str(length)] = [seconds(lambda step=step, token=token: step(*token), 200) for _ in range(9)]
    first = statistics.median(times["1"])
    for length in sizes.decode:
        ratio = statistics.median(times[str(length)]) / first
        yield Row("decode", f"a token after {length} against a token after 1", ratio, "×", 1.2, samples=times)


GROUPS: dict[str, Callable[[Sizes], Iterator[Row]]] = {"slope": slope, "causal": causal, "decode": decode}


if __name__ == "__main__":
    sys.exit(main(__doc__, GROUPS, Sizes, RESULTS / "linear.json", {"heads": HEADS, "head_dim": DIM}))
