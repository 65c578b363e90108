"""An LSTM, a dilated CNN and attention of about equal size on one task: recall what was said d tokens ago.

python benchmarks/rnn_cnn_attention.py [--only recall --only time] [--quick] [--save] [--plot docs/pictures/recall.png]

A sequence holds random symbols, one of them after a marker; d tokens later a question mark asks for it. The answer can
only come from that one place, so accuracy against d shows how far back a model reaches. All models have the same
embedding, width and output, about the same number of parameters, and the same training: batches, steps, optimiser.
Beside it: the time of a forward and backward pass against the length, and how many steps must wait for each other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _harness import RESULTS, Row, save, seconds
from regard import masks
from regard.nn import AttentionSublayer
from regard.positions import sinusoidal

THREADS, WIDTH = 2, 64
SYMBOLS = 8
MARK, ASK, VOCABULARY = SYMBOLS, SYMBOLS + 1, SYMBOLS + 2
CHANCE = 1 / SYMBOLS


class Sizes:
    """What a full run measures, and what --quick makes of it."""

    def __init__(self, quick: bool) -> None:
        self.distances = (4, 16) if quick else (4, 8, 16, 32, 64, 128, 256)
        self.steps = 20 if quick else 500
        self.seeds = (0,) if quick else (0, 1)
        self.lengths = (64, 128) if quick else (64, 128, 256, 512, 1024, 2048, 4096)
        self.rounds = 2 if quick else 7


class Recurrent(nn.Module):
    """Two LSTM layers: a step for every token, each of which waits for the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        for name, bias in self.lstm.named_parameters():
            if name.startswith("bias_hh"):  # the usual start: remember, until something speaks for forgetting
                nn.init.ones_(bias.data[WIDTH : 2 * WIDTH])

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.lstm(x)[0]
        return found

    @staticmethod
    def sequential(length: int) -> int:
        return length  # the layers overlap, as a wave


class Convolutional(nn.Module):
    """Six causal convolutions of width 3, each reaching twice as far as the one below: 127 tokens in all."""

    LAYERS = 6

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv1d(WIDTH, WIDTH, kernel_size=3, dilation=2**n) for n in range(self.LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for n, layer in enumerate(self.layers):
            x = x + F.relu(layer(F.pad(x, (2 * 2**n, 0))))
        return x.transpose(1, 2)

    @classmethod
    def reach(cls) -> int:
        return sum(2 * 2**n for n in range(cls.LAYERS))

    @classmethod
    def sequential(cls, length: int) -> int:
        return cls.LAYERS


class Attentive(nn.Module):
    """Two layers of causal attention with a feed-forward part each; positions are added to the input."""

    LAYERS = 2

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList([AttentionSublayer(WIDTH, 4, norm="pre") for _ in range(self.LAYERS)])
        self.feed = nn.ModuleList(
            [
                nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
                for _ in range(self.LAYERS)
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + sinusoidal(x.shape[1], WIDTH).to(x.dtype)
        for attention, feed in zip(self.attention, self.feed, strict=True):
            x = attention(x, mask=masks.causal())
            x = x + feed(x)
        return x

    @classmethod
    def sequential(cls, length: int) -> int:
        return 2 * cls.LAYERS


MODELS: dict[str, Callable[[], nn.Module]] = {"LSTM": Recurrent, "CNN": Convolutional, "attention": Attentive}


class Recall(nn.Module):
    """A body between one embedding and one reader; the answer is read at the question mark, the last token."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = body
        self.read = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, tokens: Tensor) -> Tensor:
        answer: Tensor = self.read(self.body(self.embed(tokens))[:, -1])
        return answer


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def batch(distance: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """1 to 8 random symbols, marker, symbol to recall, distance - 1 other symbols, question mark."""
    before = int(torch.randint(1, 9, (), generator=generator))
    tokens = torch.randint(0, SYMBOLS, (count, before + 2 + distance), generator=generator)
    tokens[:, before] = MARK
    tokens[:, -1] = ASK
    return tokens, tokens[:, before + 1].clone()


def accuracy(name: str, distance: int, seed: int, steps: int) -> float:
    """Share of right answers on fresh sequences, after training on sequences of this distance."""
    torch.manual_seed(seed)
    model = Recall(MODELS[name]())
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        tokens, answer = batch(distance, 32, generator)
        loss = F.cross_entropy(model(tokens), answer)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if loss.item() < 0.01:
            break
    with torch.no_grad():
        tokens, answer = batch(distance, 1000, torch.Generator().manual_seed(10**6 + seed))
        return (model(tokens).argmax(-1) == answer).float().mean().item()


def recall(sizes: Sizes) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {}
    for name in MODELS:
        found[name] = {}
        for distance in sizes.distances:
            scores = [accuracy(name, distance, seed, sizes.steps) for seed in sizes.seeds]
            found[name][str(distance)] = scores
            print(f"{name}, distance {distance}: {', '.join(f'{s:.2f}' for s in scores)}", file=sys.stderr, flush=True)
    return found


def time(sizes: Sizes) -> dict[str, dict[str, list[float]]]:
    """Seconds of a forward and backward pass of one sequence, by length."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in MODELS}
    for length in sizes.lengths:
        works = {name: _pass(Recall(make()), length) for name, make in MODELS.items()}
        for name, work in works.items():
            work()
            found[name][str(length)] = []
        for _ in range(sizes.rounds):
            for name, work in works.items():
                found[name][str(length)].append(seconds(work, max(1, 1024 // length)))
    return found


def _pass(model: nn.Module, length: int) -> Callable[[], object]:
    tokens = torch.randint(0, SYMBOLS, (1, length), generator=torch.Generator().manual_seed(0))
    return lambda: model(tokens).sum().backward()


def rows_of(group: str, found: dict[str, dict[str, list[float]]]) -> list[Row]:
    """One row a model: raw numbers, and the median at the largest distance or length; nothing to pass or fail."""
    unit = "" if group == "recall" else "s"
    return [
        Row(group, name, statistics.median(list(by.values())[-1]), unit, 0.0, at_least=True, samples=by)
        for name, by in found.items()
    ]


def picture(stored: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for number, name in enumerate(MODELS):
        colour, shape = f"C{number}", "osD"[number]
        _line(left, _samples(stored, "recall", name), name, colour, shape)
        _line(middle, _samples(stored, "time", name), name, colour, shape, scale=1e3)
        lengths = [int(n) for n in _samples(stored, "time", name)]
        right.plot(lengths, [MODELS[name].sequential(n) for n in lengths], color=colour, marker=shape, label=name)  # type: ignore[attr-defined]
    left.axhline(CHANCE, color="grey", linestyle=":", label="chance")
    left.axvline(Convolutional.reach(), color="C1", linestyle=":", label="reach of the CNN")
    left.set(xscale="log", xlabel="distance in tokens", ylabel="right answers", title="Recall", ylim=(0, 1.03))
    middle.set(xscale="log", yscale="log", xlabel="length in tokens", ylabel="ms", title="Forward and backward")
    right.set(
        xscale="log", yscale="log", xlabel="length in tokens", ylabel="steps", title="Steps that wait for each other"
    )
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        axes.set_xscale("log", base=2)
    file.parent.mkdir(exist_ok=True)
    figure.savefig(file, dpi=110)


def _samples(stored: dict[str, Any], group: str, name: str) -> dict[str, list[float]]:
    rows = stored[group]["rows"] if group in stored else []
    return next((row["samples"] for row in rows if row["name"] == name), {})


def _line(axes: Any, found: dict[str, list[float]], name: str, colour: str, shape: str, scale: float = 1.0) -> None:
    xs = [int(x) for x in found]
    ys = [[scale * y for y in samples] for samples in found.values()]
    axes.plot(xs, [statistics.median(y) for y in ys], color=colour, marker=shape, label=name)
    axes.fill_between(xs, [min(y) for y in ys], [max(y) for y in ys], color=colour, alpha=0.15, linewidth=0)


GROUPS = {"recall": recall, "time": time}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=GROUPS, help="measure this group; may be repeated")
    parser.add_argument("--quick", action="store_true", help="few steps and small sizes: shows that the tool works")
    parser.add_argument("--save", action="store_true", help="store the raw figures under benchmarks/results/")
    parser.add_argument("--plot", type=Path, help="draw the stored figures (what has been saved so far) into this file")
    parser.add_argument("--threads", type=int, default=THREADS)
    arguments = parser.parse_args()
    if arguments.save and arguments.quick:
        parser.error("--quick figures are not for keeping: leave out --quick or --save")
    torch.set_num_threads(arguments.threads)
    sizes = Sizes(arguments.quick)
    for name, make in MODELS.items():
        print(f"{name}: {parameters(Recall(make())):,} parameters")
    file = RESULTS / "rnn_cnn_attention.json"
    wanted = arguments.only or ([] if arguments.plot and file.exists() and not arguments.save else list(GROUPS))
    for group in wanted:
        rows = rows_of(group, GROUPS[group](sizes))
        for row in rows:
            medians = ", ".join(f"{at}: {statistics.median(found):.3g}" for at, found in row.samples.items())
            print(f"{group} {row.name}: {medians}")
        if arguments.save:
            counts = {name: parameters(Recall(make())) for name, make in MODELS.items()}
            settings = {"threads": arguments.threads, "parameters": counts, "steps": sizes.steps, "width": WIDTH}
            save(file, rows, settings)
    if arguments.plot:
        picture(json.loads(file.read_text()), arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
