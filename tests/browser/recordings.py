"""Recordings for the page's tests, whose every weight is known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

import regard
from regard import masks
from regard.recording import Recorded, Recording, Site

PARTS = ("entropy", "max_weight", "key_mass", "map", "top_keys", "top_weights", "distance")
WORDS = [
    "The",
    "cat",
    "sat",
    "on",
    "the",
    "mat",
    "because",
    "it",
    "was",
    "tired",
    ",",
    "and",
    "the",
    "dog",
    "slept",
    "beside",
    "it",
]


def call_of(
    logits: Tensor,
    layer: int,
    *,
    kind: str = "self",
    causal: bool = False,
    number: int = 0,
    path: str = "",
    size: int = 64,
) -> Recorded:
    """A recorded call whose weights are softmax(logits) [batch, head, query, key], observed as any other."""
    batch, heads, queries, keys = logits.shape
    eye = torch.eye(keys, dtype=logits.dtype).expand(batch, heads, keys, keys)
    mask = masks.causal() if causal else masks.everything()
    want = regard.Want(map=(size, size))
    seen = regard.observe(logits, eye, eye, mask=mask, scale=1.0, want=want)
    offset = keys - queries if kind == "self" else 0
    counts = (
        torch.arange(queries, dtype=torch.int32) + offset + 1
        if causal
        else torch.full((queries,), keys, dtype=torch.int32)
    )
    parts = {"lse": seen.lse, **{name: getattr(seen, name) for name in PARTS}}
    parts["top_keys"] = parts["top_keys"].to(torch.int32)
    return Recorded(
        site=Site(path or f"layers.{layer}.attention", 0),
        layer=layer,
        number=number,
        kind=kind,
        phase="decode" if number else "prefill",
        keys=keys,
        heads=tuple(range(heads)),
        positions=torch.tensor([offset]),
        permitted=counts.view(1, 1, -1),
        parts={name: part.float() if part.is_floating_point() else part for name, part in parts.items()},
    )


def recording_of(
    calls: Sequence[Recorded], tokens: Sequence[str] | Sequence[Sequence[str]], title: str = "a model"
) -> Recording:
    found = Recording(title)
    for call in calls:
        if call.layer == len(found.sites):
            found.sites.append(call.site)
        found.calls.append(call)
    found.tokens = tokens  # type: ignore[assignment]
    return found


def sentence(
    tokens: Sequence[str] = WORDS,
    layers: int = 3,
    heads: int = 4,
    seed: int = 0,
    batch: int = 1,
    causal: bool = False,
    title: str = "a model",
    size: int = 64,
) -> Recording:
    """One text, attended to at random."""
    draw = torch.Generator().manual_seed(seed)
    shape = (batch, heads, len(tokens), len(tokens))
    calls = [
        call_of(3 * torch.randn(shape, generator=draw, dtype=torch.float64), layer, causal=causal, size=size)
        for layer in range(layers)
    ]
    return recording_of(calls, list(tokens), title)


def generated(
    prompt: int, tokens: Sequence[str], layers: int = 2, heads: int = 3, seed: int = 0
) -> tuple[Recording, np.ndarray]:
    """A prompt and tokens that follow one by one; the weights [layer, head, query, key] of all of it."""
    draw = torch.Generator().manual_seed(seed)
    length = len(tokens)
    logits = 3 * torch.randn(layers, heads, length, length, generator=draw, dtype=torch.float64)
    calls = []
    for number, (start, stop) in enumerate([(0, prompt), *((at, at + 1) for at in range(prompt, length))]):
        calls += [
            call_of(logits[layer : layer + 1, :, start:stop, :stop], layer, causal=True, number=number)
            for layer in range(layers)
        ]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    return recording_of(calls, list(tokens)), logits.masked_fill(hidden, -torch.inf).softmax(-1).numpy()


def translation(source: Sequence[str], target: Sequence[str], seed: int = 0) -> Recording:
    """An encoder layer, a decoder layer and its cross attention."""
    draw = torch.Generator().manual_seed(seed)

    def drawn(queries: int, keys: int) -> Tensor:
        return 3 * torch.randn(1, 3, queries, keys, generator=draw, dtype=torch.float64)

    calls = [
        call_of(drawn(len(source), len(source)), 0, path="encoder.layers.0.self_attn"),
        call_of(drawn(len(target), len(target)), 1, causal=True, path="decoder.layers.0.self_attn"),
        call_of(drawn(len(target), len(source)), 2, kind="cross", path="decoder.layers.0.cross_attn"),
    ]
    found = recording_of(calls, list(target), "a translator")
    found.source_tokens = list(source)
    return found
