"""The least time that `regard.cost` predicts for an attention call, beside the time that the call takes here.

python benchmarks/roofline.py [--only "1 thread" --only "2 threads"] [--quick] [--save]

The machine is measured first (products and softmax of tiles, memory), for each number of threads; then dense and causal
calls, forward and backward, in float32. "ours" is the measured time and "peer" the predicted one; measured is how far
the one is from the other, whichever is larger. The bar is 2.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
from torch import Tensor

from _harness import RESULTS, Row, main, seconds
from regard import attention, cost, masks

BAR = 2.0


@dataclass
class Sizes:
    """What a full run measures, and what --quick makes of it."""

    lengths: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]  # heads and head dim
    rounds: int
    patience: float  # seconds for measuring the machine


def sizes(quick: bool) -> Sizes:
    if quick:
        return Sizes((256,), ((2, 64),), 2, 0.2)
    return Sizes((2048, 4096, 8192), ((8, 64), (4, 128)), 7, 5.0)


def with_threads(threads: int, wanted: Sizes) -> Iterator[Row]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        device = cost.measure(threads=threads, seconds=wanted.patience)
        group = "1 thread" if threads == 1 else f"{threads} threads"
        for length, (heads, dim), causal in itertools.product(wanted.lengths, wanted.shapes, (False, True)):
            call = cost.AttentionCall(length=length, heads=heads, head_dim=dim, causal=causal)
            yield from _rows(group, call, device, wanted.rounds)
    finally:
        torch.set_num_threads(before)


def _rows(group: str, call: cost.AttentionCall, device: cost.Device, rounds: int) -> Iterator[Row]:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, call.heads, call.length, call.head_dim) for _ in range(3))
    mask = masks.causal() if call.causal else None
    inputs = [x.clone().requires_grad_() for x in (query, key, value)]
    out = attention(*inputs, mask=mask)
    grad = torch.randn_like(out)

    def forward() -> Tensor:
        return attention(query, key, value, mask=mask)

    def backward() -> Any:
        return torch.autograd.grad(out, inputs, grad, retain_graph=True)

    for way, work in (("forward", forward), ("backward", backward)):
        work()
        samples = [seconds(work, 1) for _ in range(rounds)]
        measured = statistics.median(samples)
        found = cost.roofline(call, device, backward=way == "backward")
        kind = "causal" if call.causal else "dense"
        yield Row(
            group,
            f"{kind} {way}, L={call.length}, H={call.heads}, D={call.head_dim}",
            max(measured / found.seconds, found.seconds / measured),
            "×",
            BAR,
            ours=measured,
            peer=found.seconds,
            note=f"measured / predicted {measured / found.seconds:.2f}",
            samples={"ours": samples, "peer": [found.products, found.softmax, found.memory], **_rates(device)},
        )


def _rates(device: cost.Device) -> dict[str, list[float]]:
    """What the machine was measured to do: FLOP/s, exponentials/s, bytes/s."""
    rates = asdict(device)
    return {"rates": [rates["flops"]["float32"], rates["exponentials"], rates["bandwidth"]]}


GROUPS = {
    "1 thread": lambda wanted: with_threads(1, wanted),
    "2 threads": lambda wanted: with_threads(2, wanted),
}

if __name__ == "__main__":
    sys.exit(main(__doc__, GROUPS, sizes, RESULTS / "roofline.json", {"threads": "as the group says"}))
