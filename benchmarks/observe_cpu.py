"""Exact statistics beside the attention they describe, on a CPU: float32, 2 threads, 8 heads of 64, causal.

python benchmarks/observe_cpu.py [--only time --only memory ...] [--quick] [--save]

Ratios are medians of at least 15 interleaved pairs, printed beside their control: the peer against itself.
--quick takes 3 rounds and a short length: it shows that the tool works, and nothing else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from _harness import RESULTS, THREADS, Row, Work, at_most, child, faster, interleave, main
from regard import Want, masks

HEADS, DIM = 8, 64
ALL_BUT_TOP = Want(top_k=0, first=4)
EVERYTHING = Want(top_k=8, first=4)
WANTS = {"all but the largest weights": ALL_BUT_TOP, "all with the exact top 8": EVERYTHING}


class Sizes:
    def __init__(self, quick: bool) -> None:
        self.rounds = 3 if quick else 15
        self.length = 512 if quick else 4096
        self.long = 2048 if quick else 32768
        self.children = 1 if quick else 3


def inputs(length: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randn(1, HEADS, length, DIM, generator=generator) for _ in range(3))  # type: ignore[return-value]


def observed(tensors: tuple[Tensor, Tensor, Tensor], want: Want) -> Work:
    def work() -> object:
        with torch.no_grad():
            return regard.observe(*tensors, mask=masks.causal(), want=want)

    return work


def plain(tensors: tuple[Tensor, Tensor, Tensor]) -> Work:
    def work() -> Tensor:
        with torch.no_grad():
            return F.scaled_dot_product_attention(*tensors, is_causal=True)

    return work


def kept_whole(tensors: tuple[Tensor, Tensor, Tensor]) -> Work:
    """The output and the whole matrix of weights, as torch's manual writes attention out; no statistic is taken."""
    query, key, value = tensors
    hidden = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(1)
    bias = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)

    def work() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            weights = query @ key.transpose(-2, -1) * DIM**-0.5
            weights += bias
            weights = torch.softmax(weights, -1)
            return weights @ value, weights

    return work


def times(sizes: Sizes) -> Iterator[Row]:
    tensors = inputs(sizes.length)
    for (name, want), bar in zip(WANTS.items(), (2.8, 4.0), strict=True):
        samples = interleave(observed(tensors, want), plain(tensors), rounds=sizes.rounds)
        yield at_most("time", f"{name}, L={sizes.length} against plain causal SDPA", samples, bar)
    samples = interleave(observed(tensors, ALL_BUT_TOP), kept_whole(tensors), rounds=sizes.rounds)
    yield faster("time", f"{next(iter(WANTS))}, L={sizes.length} against weights kept whole", samples, 2.5)


# In a process of its own, which has none of the memory that earlier work gave back, and no more than it may use. The
# small call first loads what any call loads; then the kernel is told to forget the highest resident size so far.
MEMORY = """
import json, resource, time, torch, regard
from pathlib import Path
from regard import Want, masks
torch.set_num_threads({threads})
resource.setrlimit(resource.RLIMIT_AS, ({limit} * 2**30,) * 2)
def call(tensors):
    with torch.no_grad():
        return regard.observe(*tensors, mask=masks.causal(), want={want})
def make(length):
    return [torch.randn(1, {heads}, length, {dim}) for _ in range(3)]
def status(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
call(make(512))
given = make({length})
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
start = time.perf_counter()
seen = call(given)
seconds = time.perf_counter() - start
peak = status("VmHWM")
output = seen.out.numel() * seen.out.element_size()
print(json.dumps({{"extra": (peak - before - output) / 2**20, "seconds": seconds}}))
"""
LIMIT = 24  # GiB of address space


def _memory(want: Want, length: int) -> dict[str, float]:
    return child(MEMORY.format(threads=THREADS, limit=LIMIT, want=want, heads=HEADS, dim=DIM, length=length))


def memory(sizes: Sizes) -> Iterator[Row]:
    """Peak resident memory beyond inputs and output; the statistics themselves are counted."""
    for name, want in WANTS.items():
        found = [_memory(want, sizes.length)["extra"] for _ in range(sizes.children)]
        note = f"worst of {len(found)}"
        yield Row("memory", f"{name}, L={sizes.length}", max(found), "MiB", 150, note=note, samples={"MiB": found})


def long(sizes: Sizes) -> Iterator[Row]:
    """One byte for each pair of one head: a process that stays below it cannot have held any L×S tensor."""
    found = _memory(EVERYTHING, sizes.long)
    smallest = sizes.long**2 / 2**20
    note = f"{found['seconds']:.1f} s, {LIMIT} GiB of address space"
    name = f"all with the exact top 8, L={sizes.long}"
    yield Row("long", name, found["extra"], "MiB", smallest, note=note, samples={k: [v] for k, v in found.items()})


GROUPS: dict[str, Callable[[Sizes], Iterator[Row]]] = {"time": times, "memory": memory, "long": long}


if __name__ == "__main__":
    sys.exit(main(__doc__, GROUPS, Sizes, RESULTS / "observe_cpu.json", {"heads": HEADS, "head_dim": DIM}))
