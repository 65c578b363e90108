"""A pass of a model under an edit against the plain pass, in time and memory; and gradients through statistics.

    python benchmarks/acting.py [--only time --only memory --only gradients --only host] [--quick] [--save]

The model is two layers of causal attention (torch's SDPA) between linear layers. On a CPU: float32, 4 heads of
64, one thread and the time that it ran, up to 4096 tokens in time and 8192 in memory. Where there is a CUDA device it
is used instead: bfloat16, 16 heads of 128, up to 131072 tokens. Short passes are repeated inside the block of an edit;
opening and closing it is a part of the time. Ratios are medians of interleaved pairs, printed with
their control: the peer against itself. Memory is the peak beyond the model and its inputs, of a plain pass and of an
edited one. "host" is what Python adds to a pass: µs for each call of attention, and for each other operator, of eight
layers over eight tokens, with which a device has nothing to do.
--quick takes 3 rounds and short lengths: it shows that the tool works, and nothing else.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from time import perf_counter, process_time
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from _harness import RESULTS, Row, Samples, Work, at_most, child, interleave, main, overhead
from regard import edits, masks

GPU = torch.cuda.is_available()
PLACE = f"cuda: {torch.cuda.get_device_name()}" if GPU else "cpu"
HEADS, DIM = (16, 128) if GPU else (4, 64)
FACTORY = {"device": "cuda", "dtype": torch.bfloat16} if GPU else {"device": "cpu", "dtype": torch.float32}
LAYERS = 2

HALF = range(0, HEADS, 2)

# of a length: the edit, and the heads that are edited
EDITS: dict[str, Callable[[int], tuple[edits.Edit, range | None]]] = {
    "cut by a rule, the first four keys": lambda length: (edits.cut(masks.columns(4)), None),
    "cut by a rule, far keys": lambda length: (edits.cut(~masks.window(left=length // 2)), None),
    "cut by positions": lambda length: (edits.cut(queries=slice(length // 2, None), keys=[0, 5, length // 3]), None),
    "cut by positions in half of the heads": lambda length: (edits.cut(keys=[0, 5, length // 3]), HALF),
    "ablate": lambda length: (edits.ablate("zero"), HALF),
    "steer": lambda length: (edits.steer([0, 5, length // 3], 2.0), HALF),
}


WATCH = "watch"


class Sizes:
    def __init__(self, quick: bool) -> None:
        self.rounds = 3 if quick else 5 if GPU else 3
        self.lengths = [512] if quick else [4096, 32768, 131072] if GPU else [1024, 4096]
        self.trained = [256] if quick else [4096, 16384] if GPU else [1024, 2048, 4096]
        self.memory = [1024] if quick else [4096, 32768, 131072] if GPU else [4096, 8192]


class Model(nn.Module):
    """``more``: operators of each layer that are no part of attention, next to those around it."""

    def __init__(self, layers: int = LAYERS, dim: int = DIM, more: int = 0) -> None:
        super().__init__()
        width = HEADS * dim
        self.given = nn.ModuleList(nn.Linear(width, 3 * width, **FACTORY) for _ in range(layers))
        self.taken = nn.ModuleList(nn.Linear(width, width, **FACTORY) for _ in range(layers))
        self.dim, self.more = dim, more

    def forward(self, x: Tensor) -> Tensor:
        for given, taken in zip(self.given, self.taken, strict=True):
            query, key, value = given(x).unflatten(-1, (3, HEADS, self.dim)).permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + taken(out.transpose(1, 2).flatten(2))
            for _ in range(self.more):
                x = x * 1.0
        return x


def model_and_input(length: int) -> tuple[Model, Tensor]:
    torch.manual_seed(length)
    return Model(), torch.randn(1, length, HEADS * DIM, **FACTORY)  # type: ignore[arg-type]


def run(model: Model, x: Tensor, name: str | None, passes: int = 1) -> Work:
    """Passes, plain or with an edit, whose block is opened before the first and closed after the last."""

    def work() -> Tensor:
        block: Any = nullcontext()
        if name == WATCH:
            block = regard.watch(model)
        elif name is not None:
            edit, heads = EDITS[name](x.shape[1])
            block = regard.edit(model, edit, heads=heads)
        with torch.no_grad(), block:
            for _ in range(passes):
                out: Tensor = model(x)
        if GPU:
            torch.cuda.synchronize()
        return out

    return work


def compared(ours: Work, peer: Work, sizes: Sizes) -> Samples:
    torch.set_num_threads(1)
    return interleave(ours, peer, rounds=sizes.rounds, clock=perf_counter if GPU else process_time)


def time(sizes: Sizes) -> Iterator[Row]:
    for length in sizes.lengths:
        model, x = model_and_input(length)
        for name in EDITS:
            passes = max(1, (32768 if GPU else 8192) // length)
            samples = compared(run(model, x, name, passes), run(model, x, None, passes), sizes)
            yield at_most("time", f"{name}, L={length} against the plain pass", samples, 1.1)


# On a CPU: a process of its own has none of the memory that earlier work gave back. A short pass first loads what any
# pass loads.
MEMORY = """
import json, sys, torch
from pathlib import Path
sys.path.insert(0, {folder!r})
import acting
torch.set_num_threads(1)
def status(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
def once(length, name):
    model, x = acting.model_and_input(length)
    work = acting.run(model, x, name)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    work()
    return status("VmHWM") - before
once(512, {name!r})
print(json.dumps({{"MiB": once({length}, {name!r}) / 2**20}}))
"""


# memory that is freed goes back at once, so that a peak is what is in use
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def peak(length: int, name: str | None) -> float:
    """MiB beyond the model and its inputs."""
    if not GPU:
        folder = os.path.dirname(os.path.abspath(__file__))
        return float(child(MEMORY.format(folder=folder, name=name, length=length), **AT_ONCE)["MiB"])
    model, x = model_and_input(length)
    gc.collect()  # what earlier work left must not be freed in between
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(model, x, name)()
    return float(torch.cuda.max_memory_allocated() - before) / 2**20


def memory(sizes: Sizes) -> Iterator[Row]:
    """An edited pass may take a little more than the plain one, far from the L×L numbers of weights written out."""
    for length in sizes.memory:
        found = {name: peak(length, name) for name in (None, *EDITS)}
        plain = found.pop(None)
        for name, taken in found.items():
            samples = {"edited MiB": [taken], "plain MiB": [plain]}
            note = f"{taken:.0f} MiB, plain {plain:.0f}; one head's weights would be {4 * length**2 / 2**20:.0f}"
            yield Row("memory", f"{name}, L={length}", taken / plain, "×", 1.5, note=note, samples=samples)


def gradients(sizes: Sizes) -> Iterator[Row]:
    """The backward pass of output and statistics against that of the output alone; forward passes are not timed."""
    wants = {
        "entropy": regard.Want.none().but(rows=True),
        "entropy, key mass and first mass": regard.Want(map=None, top_k=0, distance=False, first=4),
    }
    for length in sizes.trained:
        torch.manual_seed(length)
        given = [torch.randn(1, HEADS, length, DIM, requires_grad=True, **FACTORY) for _ in range(3)]  # type: ignore[arg-type]
        grad = torch.randn_like(given[0])
        plain = regard.attention(*given, mask=masks.causal())
        for name, want in wants.items():
            seen = regard.observe(*given, mask=masks.causal(), want=want, differentiable=True)
            parts = [getattr(seen, part) for part in ("entropy", "key_mass", "first_mass") if hasattr(seen, part)]
            ours = backward([seen.out, *parts], given, [grad, *(torch.randn_like(part) for part in parts)])
            samples = compared(ours, backward([plain], given, [grad]), sizes)
            yield at_most("gradients", f"{name}, L={length} against the plain backward pass", samples, 2.0)


DEEP, TOKENS, PASSES, MORE = 8, 8, 100, 100


def host(sizes: Sizes) -> Iterator[Row]:
    """What Python takes: a pass of eight tokens, edited or watched, less the plain one. For each other operator, a
    mode of torch's own that does nothing takes 1 µs for each function that it is shown, 3 µs for each operator."""
    torch.manual_seed(0)
    dim = DIM if GPU else 8
    x = torch.randn(1, TOKENS, HEADS * dim, **FACTORY)  # type: ignore[arg-type]
    models = Model(DEEP, dim), Model(DEEP, dim, MORE)
    for name in (*EDITS, WATCH):
        alone, longer = (
            _each(compared(run(model, x, name, PASSES), run(model, x, None, PASSES), sizes), PASSES * DEEP)
            for model in models
        )
        yield overhead("host", f"{name}, a call of attention", alone, 600 if name == WATCH else 150)
        more = 1e6 * (longer.difference() - alone.difference()) / MORE
        yield Row(
            "host",
            f"{name}, another operator",
            more,
            "µs",
            4.0,
            samples={"edited": longer.ours, "plain": longer.peer},
        )


def _each(samples: Samples, count: int) -> Samples:
    """Of one among so many."""
    return Samples(*([each / count for each in part] for part in (samples.ours, samples.peer, samples.again)))


def backward(outputs: list[Tensor], inputs: list[Tensor], grads: list[Tensor]) -> Work:
    def work() -> object:
        found = torch.autograd.grad(outputs, inputs, grads, retain_graph=True)
        if GPU:
            torch.cuda.synchronize()
        return found

    return work


GROUPS: dict[str, Callable[[Sizes], Iterator[Row]]] = {
    "time": time,
    "memory": memory,
    "gradients": gradients,
    "host": host,
}


if __name__ == "__main__":
    settings = {"heads": HEADS, "head_dim": DIM, "layers": LAYERS, "device": PLACE, "threads": 1}
    file = RESULTS / ("acting_gpu.json" if GPU else "acting.json")
    sys.exit(main(__doc__, GROUPS, Sizes, file, settings | ({"dtype": "bfloat16"} if GPU else {})))
