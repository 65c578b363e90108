"""Sparse patterns on a CPU: does time follow the kept pairs, and what does a pair cost against one of dense attention?

python benchmarks/sparse.py [--only blocks --only patterns --only keys] [--quick] [--save]

float32, 2 threads, 8 heads of 64; forward, and forward with backward. A full run takes about 16 minutes.
All cases take turns, round after round; a time is the median of its rounds, a ratio the median of the rounds' ratios.
Block patterns are measured in several processes: on shared machines short pieces run at one of two speeds, which change
now and then (in the raw figures of blocks of 64, forward, from 1.9 to 1.4 times a dense pair), while dense ones do not.
A group's fit is time = a + b · pairs; R² is its share of explained variance. For patterns made of blocks, the time per
kept pair is held against dense attention's: case by case (all of the time over all of the pairs), and by the fit (b).
Patterns of single keys are held against a causal call of all pairs.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
from torch import Tensor

import regard
from _harness import RESULTS, Row, Work, main, seconds
from regard import masks, sparse
from regard.masks import Mask

HEADS, DIM = 8, 64


class Sizes:
    """What a full run measures, and what --quick makes of it."""

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.rounds = 2 if quick else 9
        self.processes = 1 if quick else 5
        self.length = 1024 if quick else 8192
        self.shares = (0.125, 0.5) if quick else (0.02, 0.05, 0.1, 0.2, 0.4)
        self.sizes = (64,) if quick else (64, 128, 256)


def inputs(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(1, HEADS, length, DIM, generator=generator) for _ in range(3)]


def forward(mask: Mask | None, length: int) -> Work:
    tensors = inputs(length)

    def work() -> Tensor:
        with torch.no_grad():
            return regard.attention(*tensors, mask=mask)

    return work


def training(mask: Mask | None, length: int) -> Work:
    leaves = [tensor.requires_grad_() for tensor in inputs(length)]
    grad = torch.ones_like(leaves[0])
    return lambda: torch.autograd.grad(regard.attention(*leaves, mask=mask), leaves, grad)


DIRECTIONS = {"forward": forward, "forward+backward": training}


def random_table(length: int, size: int, share: float, heads: int = 1) -> Mask:
    """A random table whose rows keep equally many blocks, the diagonal among them."""
    count = length // size
    keep = max(1, round(share * count))
    drawn = torch.rand(1, heads, count, count, generator=torch.Generator().manual_seed(size))
    drawn.diagonal(dim1=2, dim2=3).fill_(2.0)
    table = torch.zeros_like(drawn, dtype=torch.bool).scatter(3, drawn.topk(keep, 3).indices, True)
    return masks.blocks(table if heads > 1 else table[0, 0], size)


def block_cases(sizes: Sizes, size: int) -> dict[str, Mask | None]:
    cases: dict[str, Mask | None] = {"dense": None}
    for share in sizes.shares:
        cases[f"table of {size}, {share:.0%}"] = random_table(sizes.length, size, share)
    for share in sizes.shares[:3]:
        cases[f"table of {size} a head, {share:.0%}"] = random_table(sizes.length, size, share, HEADS)
    cases[f"bigbird of {size}"] = sparse.bigbird(sizes.length, size=size, window=3, tokens=2, random=3)
    return cases


def families(sizes: Sizes) -> dict[str, dict[str, Mask | None]]:
    """The named patterns, each with more and more pairs."""
    length, tensors = sizes.length, inputs(sizes.length)
    windows = [length // n for n in (64, 32, 16, 8)]
    return {
        "streaming": {f"left {w}": sparse.streaming(left=w, sinks=4) for w in windows},
        "longformer": {f"window {w // 2}": sparse.longformer(length, window=w // 2, tokens=64) for w in windows},
        "bigbird": {f"{n} random": sparse.bigbird(length, size=128, random=n) for n in (0, 3, 6, 12)},
        "causal bigbird": {
            f"{n} random": sparse.bigbird(length, size=128, random=n, causal=True) for n in (0, 3, 6, 12)
        },
        "strided": {f"stride {n}": sparse.strided(n) for n in (128, 64, 32, 16)},
        "fixed": {f"{n} summaries": sparse.fixed(length, stride=128, summary=n) for n in (1, 4, 16, 32)},
        "selected": {f"keep {n}": sparse.select_blocks(*tensors[:2], size=128, keep=n) for n in (2, 4, 8, 16)},
    }


def measure(cases: dict[str, Mask | None], direction: str, sizes: Sizes, rounds: int) -> dict[str, list[float]]:
    works = {name: DIRECTIONS[direction](mask, sizes.length) for name, mask in cases.items()}
    for work in works.values():
        work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(seconds(work, 1))
    return times


def measure_blocks(size: int, direction: str, sizes: Sizes) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {}
    for _ in range(sizes.processes):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            found = process.submit(_in_process, size, direction, sizes.quick, torch.get_num_threads()).result()
        for name, more in found.items():
            times.setdefault(name, []).extend(more)
    return times


def _in_process(size: int, direction: str, quick: bool, threads: int) -> dict[str, list[float]]:
    torch.set_num_threads(threads)
    sizes = Sizes(quick)
    return measure(block_cases(sizes, size), direction, sizes, 2)


def pairs_of(mask: Mask | None, length: int) -> int:
    if mask is None:
        return HEADS * length**2
    count, exact = mask.kept_pairs(length, length, 0, 1, HEADS)
    if exact:
        return count
    strips = [range(start, min(start + 256, length)) for start in range(0, length, 256)]
    seen = [mask.tile(rows, range(length), length, length, offset=0) for rows in strips]
    return sum(int(tile.sum()) * HEADS // tile.shape[1] for tile in seen)


def line(pairs: dict[str, int], times: dict[str, list[float]]) -> tuple[float, float, float]:
    """Slope, intercept and R² of time against pairs."""
    xs, ys = [float(pairs[case]) for case in times], [statistics.median(found) for found in times.values()]
    slope, intercept = statistics.linear_regression(xs, ys)
    return slope, intercept, statistics.correlation(xs, ys) ** 2


def fit(group: str, name: str, pairs: dict[str, int], times: dict[str, list[float]]) -> Row:
    slope, beside, found = line(pairs, times)
    note = f"{slope * 1e9:.2f} ns a pair, {beside * 1e3:.1f} ms beside"
    return Row(group, f"R² of time against kept pairs, {name}", found, "", 0.95, at_least=True, note=note)


def one_more(group: str, name: str, pairs: dict[str, int], times: dict[str, list[float]], dense: float) -> Row:
    return Row(group, f"{name}: one more pair (the fit) against a dense pair", line(pairs, times)[0] / dense, "×", 1.5)


def blocks(sizes: Sizes) -> Iterator[Row]:
    for direction in DIRECTIONS:
        for size in sizes.sizes:
            cases = block_cases(sizes, size)
            pairs = {name: pairs_of(mask, sizes.length) for name, mask in cases.items()}
            times = measure_blocks(size, direction, sizes)
            dense = statistics.median(times["dense"])
            for name in list(cases)[1:]:
                rounds = zip(times[name], times["dense"], strict=True)
                ratio = statistics.median(ours / whole for ours, whole in rounds) * pairs["dense"] / pairs[name]
                samples = {"ours": times[name], "dense": times["dense"]}
                note = f"{pairs[name] / pairs['dense']:.1%} of the pairs"
                row = Row("blocks", f"{name}, {direction}: a pair against a dense pair", ratio, "×", 1.5, note=note)
                row.ours, row.peer, row.samples = statistics.median(times[name]), dense, samples
                yield row
            tables = {name: found for name, found in times.items() if name != "dense"}
            yield fit("blocks", f"blocks of {size} {direction}", pairs, tables)
            yield one_more("blocks", f"blocks of {size} {direction}", pairs, tables, dense / pairs["dense"])


def patterns(sizes: Sizes) -> Iterator[Row]:
    """The named patterns, whose edges may cut through blocks: no bar but that time follows the pairs."""
    for family, cases in families(sizes).items():
        pairs = {name: pairs_of(mask, sizes.length) for name, mask in cases.items()}
        for direction in DIRECTIONS:
            times = measure(cases, direction, sizes, sizes.rounds)
            row = fit("patterns", f"{family} {direction}", pairs, times)
            row.samples = times | {"pairs": [float(count) for count in pairs.values()]}
            yield row


def keys(sizes: Sizes) -> Iterator[Row]:
    """Single keys, near and far: against a causal call, whose blocks they all touch."""
    length = 2 * sizes.length
    cases: dict[str, Mask | None] = {
        "causal": masks.causal(),
        "strided(64)": sparse.strided(64),
        "dilated(left=16, step=64)": sparse.dilated(left=16, step=64),
        "fixed(stride=128)": sparse.fixed(length, stride=128),
        "fixed(stride=128, summary=8)": sparse.fixed(length, stride=128, summary=8),
    }
    pairs = {name: pairs_of(mask, length) for name, mask in cases.items()}
    wide = Sizes(sizes.quick)
    wide.length = length
    for direction in DIRECTIONS:
        times = measure(cases, direction, wide, min(sizes.rounds, 3))
        for name in list(cases)[1:]:
            rounds = zip(times[name], times["causal"], strict=True)
            ratio = statistics.median(ours / whole for ours, whole in rounds)
            note = f"{pairs[name] / pairs['causal']:.1%} of the pairs"
            row = Row("keys", f"{name}, {length} tokens, {direction}: against causal", ratio, "×", 0.2, note=note)
            row.samples = {"ours": times[name], "causal": times["causal"]}
            yield row


GROUPS: dict[str, Callable[[Sizes], Iterator[Row]]] = {"blocks": blocks, "patterns": patterns, "keys": keys}


if __name__ == "__main__":
    sys.exit(main(__doc__, GROUPS, Sizes, RESULTS / "sparse.json", {"heads": HEADS, "head_dim": DIM}))
