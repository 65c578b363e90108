"""S15: recurrent and convolutional layers next to attention: how far a gradient reaches, steps, paths, parameters."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard import masks
from regard.lab import _draw
from regard.lab._result import Result, Row, Table, Words, check_counts, parameter_count
from regard.nn import MultiHeadAttention

KINDS = ("rnn", "lstm", "cnn", "attention")
KERNEL = 3  # tokens that a convolution sees at once, itself included
LAYERS = 4  # convolutions, one on another


@dataclass(frozen=True)
class Rnn(Result):
    tokens: int
    width: int
    distances: tuple[int, ...]
    gradients: dict[str, Row]  # of the last output by the token so far back, mean length; 1 at distance 0
    steps: dict[str, int]  # that must follow each other for one layer over all tokens
    path: dict[str, int | None]  # layers or steps between the first and the last token; None: no path
    parameters: dict[str, int]
    seconds: dict[str, float]  # forward, median; measured when it was run

    def _tables(self, say: Words) -> list[Table]:
        kinds = say.each(*KINDS)
        reach = (
            (str(distance), *(_small(self.gradients[kind][at]) for kind in KINDS))
            for at, distance in enumerate(self.distances)
        )
        compared = {
            "steps": [str(self.steps[kind]) for kind in KINDS],
            "path": [say("none") if (n := self.path[kind]) is None else str(n) for kind in KINDS],
            "cost": ["n·d²", "n·d²", f"{KERNEL}·n·d²", "n²·d"],
            "parameters": [f"{self.parameters[kind]:,}" for kind in KINDS],
            "shared": [say("every_token")] * len(KINDS),
            "seconds": [f"{1e3 * self.seconds[kind]:.2f} ms" for kind in KINDS],
            "uses": [say(f"uses_{kind}") for kind in KINDS],
        }
        rows = ((say(key), *cells) for key, cells in compared.items())
        return [
            say.table("reach", (say("distance"), *kinds), reach),
            say.table("compared", ("", *kinds), rows, tokens=self.tokens, width=self.width),
        ]

    def _figure(self) -> _draw.Figure:
        title = "A gradient fades with distance in an RNN, ends in a CNN, and stays level in attention"
        figure, axes = _draw.subplots(8.4, 3.6, title)
        looks = zip(KINDS, (_draw.ORANGE, _draw.PINK, _draw.GREEN, _draw.BLUE), "s^Do", strict=True)
        for kind, colour, mark in looks:
            seen = [(d, g) for d, g in zip(self.distances, self.gradients[kind], strict=True) if g > 0 and d > 0]
            axes.plot(*zip(*seen, strict=True), color=colour, marker=mark, label=self.say(kind))
        axes.set_yscale("log")
        _draw.log_ticks(axes, self.distances[1:])
        _draw.tidy(axes, x="distance in tokens", y="gradient, relative to distance 0", legend="lower left")
        return figure


class _Convolutions(nn.Module):
    """Causal convolutions one on another, each followed by tanh."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(width, width, KERNEL) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for layer in self.layers:
            x = torch.tanh(layer(nn.functional.pad(x, (KERNEL - 1, 0))))
        return x.transpose(1, 2)


class _Attending(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attend = MultiHeadAttention(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attend(x, mask=masks.causal())
        return out


class _First(nn.Module):
    """A recurrent layer's outputs, without its state."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)[0]
        return out


MAKERS: dict[str, Callable[[int], nn.Module]] = {
    "rnn": lambda width: _First(nn.RNN(width, width, batch_first=True)),
    "lstm": lambda width: _First(nn.LSTM(width, width, batch_first=True)),
    "cnn": _Convolutions,
    "attention": _Attending,
}


def rnn(tokens: int = 129, width: int = 32, draws: int = 8, seed: int = 0) -> Rnn:
    """The gradient of the last output by each token before it, of layers as they are drawn; and what they need."""
    check_counts(tokens=tokens, width=width, draws=draws)
    distances = (0, *(2**n for n in range((tokens - 1).bit_length()) if 2**n < tokens))
    gradients: dict[str, Row] = {}
    parameters, seconds = {}, {}
    for kind in KINDS:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            drawn = [_gradient(MAKERS[kind](width).double(), tokens, width) for _ in range(draws)]
            lengths = torch.stack(drawn).mean(0)
            layer = MAKERS[kind](width)
            seconds[kind] = _seconds(layer, torch.randn(1, tokens, width))
        gradients[kind] = tuple((lengths[list(distances)] / lengths[0]).tolist())
        parameters[kind] = parameter_count(layer)
    reaches = tokens <= 1 + LAYERS * (KERNEL - 1)
    return Rnn(
        tokens,
        width,
        distances,
        gradients,
        {"rnn": tokens, "lstm": tokens, "cnn": LAYERS, "attention": 1},
        {"rnn": tokens - 1, "lstm": tokens - 1, "cnn": LAYERS if reaches else None, "attention": 1},
        parameters,
        seconds,
    )


def _gradient(layer: nn.Module, tokens: int, width: int) -> Tensor:
    """Length of the last output's gradient by each token, nearest first."""
    x = torch.randn(1, tokens, width, dtype=torch.float64, requires_grad=True)  # float32 would end at 1e-45
    (found,) = torch.autograd.grad((layer(x)[0, -1] * torch.randn(width)).sum(), x)
    lengths: Tensor = found[0].norm(dim=-1)
    return lengths.flip(0)


def _seconds(layer: nn.Module, x: Tensor) -> float:
    taken = []
    with torch.no_grad():
        layer(x)
        for _ in range(5):
            start = time.perf_counter()
            layer(x)
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _small(value: float) -> str:
    return "0" if value == 0 else f"{value:.3f}" if value >= 0.001 else f"{value:.0e}"
