"""E6: "The cat sat on the mat.", token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from regard import masks
from regard._walk._inputs import Settings, from_text
from regard.lab._result import Matrix, Result, Row, Table, rows
from regard.nn import MultiHeadAttention
from regard.statistics import Want

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regard.masks import Mask
    from regard.observation import Observation

TEXT = "The cat sat on the mat."


@dataclass(frozen=True)
class Sentence(Result):
    name = "E6"
    topic = "sentence"

    tokens: tuple[str, ...]
    weights: tuple[Matrix, ...]  # by head
    entropy: tuple[Row, ...]  # by head, nats
    causal_weights: tuple[Matrix, ...]

    def tables(self, lang: str = "en") -> list[Table]:
        heads = [self.say("head", lang, number=at) for at in range(len(self.weights))]
        columns = ("", *(name for head in heads for name in (head, self.say("entropy", lang))))
        lines = []
        for at, token in enumerate(self.tokens):
            cells = [
                (_most(self, weights[at]), f"{entropy[at]:.2f}")
                for weights, entropy in zip(self.weights, self.entropy, strict=True)
            ]
            lines.append((token, *(cell for pair in cells for cell in pair)))
        step = tuple(
            (token, *(_most(self, weights[at]) for weights in self.causal_weights))
            for at, token in enumerate(self.tokens)
        )
        return [
            Table(self.say("heaviest", lang), columns, tuple(lines)),
            Table(self.say("causal", lang), ("", *heads), step),
        ]

    def _figure(self) -> Figure:
        from regard.lab import _draw

        figure = _draw.figure(9.6, 7.4, "The same sentence in two heads, whole and causal: every row sums to 1")
        grid = figure.subplots(2, 2, sharex=True, sharey=True)
        for axes_row, weights, how in zip(
            grid, (self.weights, self.causal_weights), ("all tokens", "causal"), strict=True
        ):
            for head, (axes, values) in enumerate(zip(axes_row, weights, strict=True)):
                _draw.heatmap(axes, values, f"head {head}, {how}", columns=self.tokens, names=self.tokens)
        for axes in grid[:, 0]:
            axes.set_ylabel("query")
        for axes in grid[1]:
            axes.set_xlabel("key")
        return figure


def sentence(seed: int = 0) -> Sentence:
    """One layer with two heads reads the sentence, with the numbers of `regard walk E6`: drawn, not trained."""
    given = from_text(TEXT, Settings(seed=seed))
    width, matrices = given.x.shape[1], given.weights.items()
    layer = MultiHeadAttention(width, given.heads, qkv_bias=False, out_bias=False, device="meta")
    # the walk multiplies x @ W, a Linear x @ Wᵀ
    layer.load_state_dict({f"{name}_proj.weight": torch.from_numpy(w.T) for name, w in matrices}, assign=True)
    x = torch.from_numpy(given.x)[None]
    seen, step = _seen(layer, x, None), _seen(layer, x, masks.causal())
    return Sentence(
        given.tokens,
        tuple(rows(head) for head in seen.weights[0]),
        tuple(tuple(row) for row in seen.entropy[0].tolist()),
        tuple(rows(head) for head in step.weights[0]),
    )


@torch.no_grad()
def _seen(layer: MultiHeadAttention, x: torch.Tensor, mask: Mask | None) -> Observation:
    seen: Observation = layer.observe(x, mask=mask, want=Want(weights=(slice(None), slice(None))))
    return seen


def _most(found: Sentence, row: Row) -> str:
    at = max(range(len(row)), key=row.__getitem__)
    return f"{found.tokens[at]} {row[at]:.2f}"
