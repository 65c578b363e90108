"""regard beside PyTorch's SDPA on a CPU: float32, 2 threads, heads of 64; forward, and forward with backward.

python benchmarks/cpu.py [--only dense --only window ...] [--quick] [--save]

Every ratio is the median of at least 15 interleaved pairs, printed beside its control: the peer against itself.
--quick takes 3 rounds and small sizes: it shows that the tool works, and nothing else.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from _harness import RESULTS, THREADS, Row, Samples, Work, at_most, child, faster, interleave, main, overhead, seconds
from regard import masks
from regard._arguments import prepare
from regard.masks import Mask
from regard.plan import FEW_PAIRS, choose

HEADS, DIM, WINDOW = 8, 64, 256
LEVEL_BAR = 1.05
sdpa = F.scaled_dot_product_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Sizes:
    """What a full run measures, and what --quick makes of it."""

    def __init__(self, quick: bool) -> None:
        self.rounds = 3 if quick else 15
        self.lengths = (512, 1024) if quick else (512, 1024, 2048, 4096, 8192)
        self.grouped = (512,) if quick else (512, 2048, 4096, 8192)
        self.windows = {1024: (1.0, 0.5)} if quick else {4096: (5.0, 2.0), 16384: (20.0, 7.0)}
        self.slope = (512, 1024, 2048, 4096) if quick else (2048, 4096, 8192, 16384)
        self.documents = 1024 if quick else 8192
        self.memory = 8192 if quick else 65536
        self.children = 3 if quick else 15


def inputs(length: int, heads: int = HEADS, kv_heads: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    kv = heads if kv_heads is None else kv_heads
    return tuple(torch.randn(1, h, length, DIM, generator=generator) for h in (heads, kv, kv))  # type: ignore[return-value]


def forward(function: Attention, tensors: tuple[Tensor, Tensor, Tensor]) -> Work:
    def work() -> Tensor:
        with torch.no_grad():
            return function(*tensors)

    return work


def recording(function: Attention, tensors: tuple[Tensor, Tensor, Tensor]) -> Work:
    """Forward, with what a backward pass would need kept."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    return lambda: function(*leaves)


def training(function: Attention, tensors: tuple[Tensor, Tensor, Tensor]) -> Work:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    grad = torch.ones_like(tensors[0])
    return lambda: torch.autograd.grad(function(*leaves), leaves, grad)


DIRECTIONS: dict[str, Callable[[Attention, tuple[Tensor, Tensor, Tensor]], Work]] = {
    "forward": forward,
    "forward+backward": training,
}


def ours(mask: Mask | None = None) -> Attention:
    return lambda q, k, v: regard.attention(q, k, v, mask=mask)


def compare(
    first: Attention, second: Attention, tensors: tuple[Tensor, Tensor, Tensor], rounds: int
) -> Iterator[tuple[str, Samples]]:
    for name, direction in DIRECTIONS.items():
        yield name, interleave(direction(first, tensors), direction(second, tensors), rounds=rounds)


def dense(sizes: Sizes) -> Iterator[Row]:
    for length in sizes.lengths:
        for name, samples in compare(ours(), sdpa, inputs(length), sizes.rounds):
            yield at_most("dense", f"L={length} {name}", samples, LEVEL_BAR)


def causal(sizes: Sizes) -> Iterator[Row]:
    def peer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, is_causal=True)

    for length in sizes.lengths:
        for name, samples in compare(ours(masks.causal()), peer, inputs(length), sizes.rounds):
            yield at_most("causal", f"L={length} {name}", samples, LEVEL_BAR)


def gqa(sizes: Sizes) -> Iterator[Row]:
    for length in sizes.grouped:
        tensors = inputs(length, heads=16, kv_heads=4)
        for is_causal in (False, True):

            def peer(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = is_causal) -> Tensor:
                return sdpa(q, k, v, is_causal=is_causal, enable_gqa=True)

            mask = masks.causal() if is_causal else None
            kind = "causal" if is_causal else "dense"
            for name, samples in compare(ours(mask), peer, tensors, sizes.rounds):
                yield at_most("gqa", f"16 over 4, {kind} L={length} {name}", samples, LEVEL_BAR)


def window(sizes: Sizes) -> Iterator[Row]:
    """Each bar is for forward and for forward+backward alike."""
    mask = masks.causal() & masks.window(left=WINDOW)
    for length, (over_mask, over_causal) in sizes.windows.items():
        tensors = inputs(length)
        allowed = mask.dense(length, length)
        for name, samples in compare(ours(mask), _with_mask(allowed), tensors, sizes.rounds):
            yield faster("window", f"{WINDOW}, L={length} {name} against SDPA with a mask", samples, over_mask)

        def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sdpa(q, k, v, is_causal=True)

        for name, samples in compare(ours(mask), plain, tensors, sizes.rounds):
            yield faster("window", f"{WINDOW}, L={length} {name} against causal SDPA", samples, over_causal)


def _with_mask(allowed: Tensor) -> Attention:
    return lambda q, k, v: sdpa(q, k, v, attn_mask=allowed)


def slope(sizes: Sizes) -> Iterator[Row]:
    """The exponent of time in L, with the lengths interleaved too."""
    mask = masks.causal() & masks.window(left=WINDOW)
    for name, direction in DIRECTIONS.items():
        works = {length: direction(ours(mask), inputs(length)) for length in sizes.slope}
        for work in works.values():
            work()
        times: dict[str, list[float]] = {str(length): [] for length in works}
        for _ in range(sizes.rounds):
            for length, work in works.items():
                times[str(length)].append(seconds(work, max(1, 8192 // length)))
        medians = [statistics.median(found) for found in times.values()]
        exponent = statistics.linear_regression(
            [math.log(length) for length in works], [math.log(median) for median in medians]
        ).slope
        note = f"L={sizes.slope[0]}…{sizes.slope[-1]}"
        yield Row("slope", f"window {WINDOW} {name}", exponent, "", 1.1, note=note, samples=times)


def documents(sizes: Sizes) -> Iterator[Row]:
    length, count = sizes.documents, 16
    equal = [length // count] * count
    cuts = torch.randperm(length - 1, generator=torch.Generator().manual_seed(0))[: count - 1].add(1).sort().values
    edges = [0, *cuts.tolist(), length]
    unequal = [after - before for before, after in itertools.pairwise(edges)]
    # the unequal bar is half of what the pairs alone would give
    bars = {"equal": (equal, 10.0), "unequal": (unequal, 0.5 * length**2 / sum(n * n for n in unequal))}
    tensors = inputs(length)
    for kind, (lengths, bar) in bars.items():
        mask = masks.documents(lengths=lengths)
        peer = _with_mask(mask.dense(length, length))
        for name, samples in compare(ours(mask), peer, tensors, sizes.rounds):
            note = f"pairs 1/{length**2 / sum(n * n for n in lengths):.1f}"
            yield faster("documents", f"16 {kind} in L={length} {name}", samples, bar, note)


# In a process of its own, which has none of the memory that earlier work gave back. The small call first loads what any
# call loads; then the kernel is told to forget the highest resident size so far.
MEMORY = """
import json, torch, regard
from pathlib import Path
from regard import masks
torch.set_num_threads({threads})
mask = masks.causal() & masks.window(left={window})
backward = {backward}
def call(tensors, grad):
    out = {call}
    return out, torch.autograd.grad(out, tensors, grad) if backward else ()
def make(length):
    tensors = [torch.randn(1, heads, length, {dim}).requires_grad_(backward) for heads in {heads}]
    return tensors, torch.ones_like(tensors[0]) if backward else None
def status(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
call(*make(512))
given = make({length})
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
out, grads = call(*given)
peak = status("VmHWM")
results = sum(t.numel() * t.element_size() for t in (out, *grads))
print(json.dumps({{"extra": (peak - before - results) / 2**20}}))
"""


def memory(sizes: Sizes) -> Iterator[Row]:
    """Peak resident memory beyond inputs, output and gradients."""
    for name in DIRECTIONS:
        label = f"window {WINDOW}, L={sizes.memory} {name}"
        found = _extra("regard.attention(*tensors, mask=mask)", (HEADS,) * 3, sizes.memory, name)
        yield Row("memory", label, max(found), "MiB", 100, note="worst of 3", samples={"MiB": found})
    # Repeating grouped keys for each query head would cost four times their size, and as much for the values.
    length = sizes.documents
    keys = 4 * length * DIM * 4 / 2**20
    for name in DIRECTIONS:
        found = _extra("regard.attention(*tensors)", (16, 4, 4), length, name)
        peer = _extra(
            "torch.nn.functional.scaled_dot_product_attention(*tensors, enable_gqa=True)", (16, 4, 4), length, name
        )
        note = f"SDPA: {max(peer):.1f}"
        samples = {"MiB": found, "peer MiB": peer}
        yield Row(
            "memory",
            f"gqa 16 over 4, L={length} {name}",
            max(found),
            "MiB",
            max(peer) + keys,
            note=note,
            samples=samples,
        )


def _extra(call: str, heads: tuple[int, ...], length: int, direction: str) -> list[float]:
    backward = direction != "forward"
    code = MEMORY.format(
        threads=THREADS, window=WINDOW, call=call, heads=heads, dim=DIM, length=length, backward=backward
    )
    return [child(code)["extra"] for _ in range(3)]


def small(sizes: Sizes) -> Iterator[Row]:
    tensors = inputs(8, heads=4)
    lengths = torch.tensor([5])
    visible = masks.padding(lengths).dense(8, 8)
    padding = masks.padding(lengths)

    def plain_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, is_causal=True)

    cases: list[tuple[str, Attention, Attention]] = [
        ("unmasked", ours(), sdpa),
        ("causal", ours(masks.causal()), plain_causal),
        ("padding", ours(padding), _with_mask(visible)),
    ]
    ways = {"no grad, forward": forward, "grad, forward": recording, "grad, forward+backward": training}
    for name, first, second in cases:
        for way, make in ways.items():
            samples = interleave(make(first, tensors), make(second, tensors), rounds=max(sizes.rounds, 15))
            bar = {"unmasked": 8, "causal": 10, "padding": 12}[name] if make is forward else 30
            yield overhead("small", f"B=1 H=4 L=8 {name}, {way}", samples, bar)


def planning(sizes: Sizes) -> Iterator[Row]:
    """Describing a call and finding its plan again, which every call pays before anything runs."""
    query, key, value = inputs(512)
    joined = masks.causal() & masks.window(left=WINDOW) & masks.padding([500])
    for name, mask in (("unmasked", None), ("causal", masks.causal()), ("causal & window & padding", joined)):

        def work(mask: Mask | None = mask) -> object:
            call = prepare(query, key, value, mask, None, None, None, None, 0.0, None)
            return choose(call.spec, "auto")

        work()
        samples = [seconds(work, 1000) for _ in range(max(sizes.rounds, 15))]
        measured = statistics.median(samples) * 1e6
        yield Row("plan", f"spec and plan of a repeated call, {name}", measured, "µs", 20, samples={"seconds": samples})


def modifiers(sizes: Sizes) -> Iterator[Row]:
    """What no fused kernel of torch does on a CPU: 4 items of 8 heads, 512 tokens of 64, one thread."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(4, HEADS, 512, DIM, generator=generator) for _ in range(3))
    bias = torch.randn(HEADS, 512, 512, generator=generator).requires_grad_()
    cases: list[tuple[str, Attention, Attention, float]] = [
        ("dropout 0.1", _ours(dropout=0.1), lambda q, k, v: sdpa(q, k, v, dropout_p=0.1), 1.0),
        ("bias with gradient", _ours(bias=bias), lambda q, k, v: sdpa(q, k, v, attn_mask=bias), 1.0),
        ("softcap, against plain", _ours(softcap=20.0), sdpa, 1.8),
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, first, second, bar in cases:
            ways = {"forward": recording if "bias" in name else forward, "forward+backward": training}
            for way, make in ways.items():
                tensors = (query, key, value)
                samples = interleave(make(first, tensors), make(second, tensors), rounds=sizes.rounds)
                yield at_most("modifiers", f"{name}, {way}", samples, bar)
    finally:
        torch.set_num_threads(threads)


def _ours(**given: Any) -> Attention:
    return lambda q, k, v: regard.attention(q, k, v, **given)


def crossover(sizes: Sizes) -> Iterator[Row]:
    """Where `eager` gives way to `blockwise`, which a rule of the plan rests on: at a quarter of `FEW_PAIRS` eager is
    to be the faster, and at sixteen times as many the slower."""
    for share, first, second in ((1 / 4, "eager", "blockwise"), (16, "blockwise", "eager")):
        length = round((FEW_PAIRS["cpu"] * share / 4) ** 0.5)
        tensors = inputs(length, heads=4)
        works = [forward(_ours(softcap=20.0, backend=backend), tensors) for backend in (first, second)]
        samples = interleave(*works, rounds=max(sizes.rounds, 15))
        yield at_most("crossover", f"{first} against {second}, 4 heads of L={length}", samples, LEVEL_BAR)
    yield from _steps_or_whole(sizes)


def _steps_or_whole(sizes: Sizes) -> Iterator[Row]:
    """Where steps give way to one masked call of all pairs, which `STEP_PAIRS` says: at a quarter of the pairs that
    each step is to save, the whole is to be the faster, and at sixteen times as many the slower."""
    from regard.backends._grouped import Steps, grouped_steps
    from regard.backends._schedule import ROWS_OF_A_READ, STEP_PAIRS
    from regard.backends._steps import Run, Step
    from regard.backends.sdpa import Sdpa

    backend = Sdpa()
    for share, quick, slow in ((1 / 4, "whole", "steps"), (16, "steps", "whole")):
        # two documents: two steps, which save half of the pairs; and one long text among short ones that are decoded
        length = round((4 * share * STEP_PAIRS) ** 0.5 / 2) * 2
        long = round(share * STEP_PAIRS * 16 / (15 * 4 * ROWS_OF_A_READ))
        documents = inputs(length, heads=1), masks.documents(lengths=[length // 2 - 1, length // 2 + 1])
        query, key, value = (torch.randn(16, 4, tokens, DIM) for tokens in (1, long, long))
        decoded = (query, key, value), masks.padding([long] + [1] * 15)
        for (tensors, mask), label in ((documents, f"one head of L={length}"), (decoded, f"decoding at S={long}")):
            call = prepare(*tensors, mask, None, None, None, None, 0.0, None)
            spec = call.spec
            whole = Steps([Step(None, 0, spec.queries, (Run(0, spec.keys, False),), "tile", None, None)])
            ways = {"whole": whole, "steps": grouped_steps(call)}
            first, second = ways[quick], ways[slow]
            works = [lambda steps=steps, call=call: backend.run_steps(call, steps) for steps in (first, second)]
            samples = interleave(*works, rounds=max(sizes.rounds, 15))
            yield at_most("crossover", f"a mask's {quick}, {label}", samples, LEVEL_BAR)


# A fresh interpreter for each sample. The second number adds the first use of the public names, which load lazily.
IMPORT = """
import json, time
import torch
start = time.perf_counter()
import regard
bare = time.perf_counter()
regard.attention, regard.masks, regard.nn
print(json.dumps({"import": bare - start, "names": time.perf_counter() - start}))
"""


def imports(sizes: Sizes) -> Iterator[Row]:
    found = [child(IMPORT) for _ in range(sizes.children)]
    for name, label in (("import", "import regard after torch"), ("names", "… and attention, masks, nn")):
        samples = [one[name] for one in found]
        yield Row("import", label, statistics.median(samples), "s", 0.15, samples={"seconds": samples})


GROUPS: dict[str, Callable[[Sizes], Iterator[Row]]] = {
    "dense": dense,
    "causal": causal,
    "gqa": gqa,
    "window": window,
    "slope": slope,
    "documents": documents,
    "memory": memory,
    "small": small,
    "modifiers": modifiers,
    "crossover": crossover,
    "plan": planning,
    "import": imports,
}


if __name__ == "__main__":
    sys.exit(main(__doc__, GROUPS, Sizes, RESULTS / "cpu.json", {"head_dim": DIM}))
