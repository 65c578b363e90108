"""E6: "The cat sat on the mat.", token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from regard import masks
from regard._walk._inputs import Settings, from_text
from regard.lab import _draw
from regard.lab._result import Matrix, Result, Row, Table, Words, rows
from regard.nn import MultiHeadAttention
from regard.statistics import Want

if TYPE_CHECKING:
    from regard.masks import Mask
    from regard.observation import Observation

TEXT = "The cat sat on the mat."


@dataclass(frozen=True)
class Sentence(Result):
    tokens: tuple[str, ...]
    weights: tuple[Matrix, ...]  # by head
    entropy: tuple[Row, ...]  # by head, nats
    causal_weights: tuple[Matrix, ...]

    def _tables(self, say: Words) -> list[Table]:
        heads = [say("head", number=at) for at in range(len(self.weights))]
        columns = ("", *(name for head in heads for name in (head, say("entropy"))))
        lines = []
        for at, token in enumerate(self.tokens):
            cells = [
                (_most(self, weights[at]), f"{entropy[at]:.2f}")
                for weights, entropy in zip(self.weights, self.entropy, strict=True)
            ]
            lines.append((token, *(cell for pair in cells for cell in pair)))
        step = (
            (token, *(_most(self, weights[at]) for weights in self.causal_weights))
            for at, token in enumerate(self.tokens)
        )
        return [say.table("heaviest", columns, lines), say.table("causal", ("", *heads), step)]

    def _figure(self) -> _draw.Figure:
        title = "The same sentence in two heads, without and with a causal mask: every row sums to 1"
        figure, grid = _draw.subplots(9.6, 7.4, title, 2, nrows=2, sharex=True, sharey=True)
        shown = (("all tokens", self.weights, ""), ("causal", self.causal_weights, "key"))
        for row, (how, weights, x) in zip(grid, shown, strict=True):
            for head, (axes, values) in enumerate(zip(row, weights, strict=True)):
                y = "query" if head == 0 else ""
                _draw.heatmap(axes, values, f"head {head}, {how}", tokens=self.tokens, x=x, y=y)
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
