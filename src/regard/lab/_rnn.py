"""S15: recurrent and convolutional layers next to attention: how far a gradient reaches, steps, paths, parameters."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from regard import masks
from regard.lab._result import Result, Row, Table, check_counts
from regard.nn import MultiHeadAttention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("rnn", "lstm", "cnn", "attention")
KERNEL = 3  # tokens that a convolution sees at once, itself included
LAYERS = 4  # convolutions, one on another


@dataclass(frozen=True)
class Rnn(Result):
    name = "S15"
    topic = "rnn"

    tokens: int
    width: int
    distances: tuple[int, ...]
    gradients: dict[str, Row]  # of the last output by the token so far back, mean length; 1 at distance 0
    steps: dict[str, int]  # that must follow each other for one layer over all tokens
    path: dict[str, int | None]  # layers or steps between the first and the last token; None: no path
    parameters: dict[str, int]
    seconds: dict[str, float]  # forward, median; measured when it was run

    def tables(self, lang: str = "en") -> list[Table]:
        kinds = tuple(self.say(kind, lang) for kind in KINDS)
        reach = tuple(
            (str(distance), *(_small(self.gradients[kind][at]) for kind in KINDS))
            for at, distance in enumerate(self.distances)
        )
        rows = (
            (self.say("steps", lang), *(str(self.steps[kind]) for kind in KINDS)),
            (
                self.say("path", lang),
                *(self.say("none", lang) if (n := self.path[kind]) is None else str(n) for kind in KINDS),
            ),
            (self.say("cost", lang), "n·d²", "n·d²", f"{KERNEL}·n·d²", "n²·d"),
            (self.say("parameters", lang), *(f"{self.parameters[kind]:,}" for kind in KINDS)),
            (self.say("shared", lang), *[self.say("every_token", lang)] * len(KINDS)),
            (self.say("seconds", lang), *(f"{1e3 * self.seconds[kind]:.2f} ms" for kind in KINDS)),
            (self.say("uses", lang), *(self.say(f"uses_{kind}", lang) for kind in KINDS)),
        )
        return [
            Table(self.say("reach", lang), (self.say("distance", lang), *kinds), reach),
            Table(self.say("compared", lang, tokens=self.tokens, width=self.width), ("", *kinds), rows),
        ]

    def _figure(self) -> Figure:
        from regard.lab import _draw

        figure = _draw.figure(
            8.4, 3.6, "A gradient fades with distance in an RNN, ends in a CNN, and stays level in attention"
        )
        axes = figure.add_subplot()
        looks = zip(KINDS, (_draw.ORANGE, _draw.PINK, _draw.GREEN, _draw.BLUE), "s^Do", strict=True)
        for kind, colour, mark in looks:
            seen = [(d, g) for d, g in zip(self.distances, self.gradients[kind], strict=True) if g > 0 and d > 0]
            axes.plot(*zip(*seen, strict=True), color=colour, marker=mark, label=self.say(kind))
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(self.distances[1:], [str(distance) for distance in self.distances[1:]])
        axes.minorticks_off()
        axes.legend(fontsize=9, loc="lower left")
        _draw.tidy(axes, x="distance in tokens", y="gradient, relative to distance 0")
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
            lengths = torch.stack([_gradient(MAKERS[kind](width).double(), tokens, width) for _ in range(draws)]).mean(
                0
            )
            layer = MAKERS[kind](width)
            seconds[kind] = _seconds(layer, torch.randn(1, tokens, width))
        gradients[kind] = tuple((lengths[list(distances)] / lengths[0]).tolist())
        parameters[kind] = sum(parameter.numel() for parameter in layer.parameters())
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
