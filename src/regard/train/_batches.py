"""Batches of about equally long sentences, in an order that seed and epoch alone decide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from regard.train._tokens import PAD, START, STOP


class Soft(NamedTuple):
    """What teachers would have written at each target token: their likeliest tokens, and how likely each was."""

    tokens: Tensor  # [target token, k]
    weights: Tensor  # [target token, k]


class Ragged(NamedTuple):
    """Sequences one after another in one tensor: no padding is stored."""

    flat: Tensor
    starts: Tensor
    lengths: Tensor

    def places(self, rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Where each token of these rows stands in `flat` [row, width], and whether there is one."""
        at = torch.arange(width, device=self.flat.device)
        real = at < self.lengths[rows].unsqueeze(1)
        return (self.starts[rows].unsqueeze(1) + at).clamp_max(self.flat.shape[0] - 1), real


class Batch(NamedTuple):
    """One step's tokens. `outputs` are the inputs moved by one; PAD there counts for nothing."""

    source: Tensor | None  # [row, S]
    source_lengths: Tensor | None  # [row]
    inputs: Tensor  # [row, T]
    outputs: Tensor  # [row, T]
    soft: Soft | None = None

    @property
    def places(self) -> int:
        """Of both sides, padding included."""
        return self.outputs.numel() + (0 if self.source is None else self.source.numel())

    def tokens(self) -> Tensor:
        """Of both sides, without padding."""
        target = (self.outputs != PAD).sum()
        return target if self.source_lengths is None else target + self.source_lengths.sum()

    @property
    def shape(self) -> tuple[int, ...]:
        return (*(() if self.source is None else self.source.shape), *self.inputs.shape)


class Corpus(NamedTuple):
    """Encoded sentences on one device. A language model's corpus has no source."""

    source: Ragged | None
    target: Ragged
    soft: Soft | None = None

    def to(self, device: torch.device | str) -> Corpus:
        moved: Corpus = tree_map_only(Tensor, lambda x: x.to(device), self)
        return moved

    def take(self, rows: Tensor, widths: tuple[int, int]) -> Batch:
        """The batch of these rows, padded to these widths."""
        at, real = self.target.places(rows, widths[1] + 1)
        tokens = self.target.flat[at].masked_fill(~real, PAD)
        soft = None if self.soft is None else Soft(self.soft.tokens[at[:, 1:]], self.soft.weights[at[:, 1:]])
        if self.source is None:
            return Batch(None, None, tokens[:, :-1], tokens[:, 1:], soft)
        source_at, source_real = self.source.places(rows, widths[0])
        source = self.source.flat[source_at].masked_fill(~source_real, PAD)
        return Batch(source, self.source.lengths[rows], tokens[:, :-1], tokens[:, 1:], soft)


class Planned(NamedTuple):
    """Which sentences a batch holds, and how wide it is."""

    rows: list[int]
    widths: tuple[int, int]
    tokens: int  # of the target, without padding

    def part(self, rank: int, processes: int) -> list[int]:
        """The sentences of one of several processes."""
        return self.rows[rank::processes]


def ragged(sequences: Sequence[Sequence[int]]) -> Ragged:
    lengths = torch.tensor([len(each) for each in sequences], dtype=torch.int64)
    flat = torch.tensor([token for each in sequences for token in each], dtype=torch.int64)
    return Ragged(flat, lengths.cumsum(0) - lengths, lengths)


def parallel(source: Sequence[Sequence[int]], target: Sequence[Sequence[int]]) -> Corpus:
    """Sources end with the stop token; targets begin with the start token and end with the stop token."""
    return Corpus(ragged([[*each, STOP] for each in source]), ragged([[START, *each, STOP] for each in target]))


def running(tokens: Sequence[int], width: int) -> Corpus:
    """One long text in pieces of `width` + 1 tokens, each of which begins with the last token of the one before."""
    pieces = [tokens[at : at + width + 1] for at in range(0, len(tokens) - 1, width)]
    return Corpus(None, ragged([piece for piece in pieces if len(piece) > 1]))


def lengths_of(corpus: Corpus) -> tuple[Tensor, Tensor]:
    """Tokens that the encoder and the decoder read, of each sentence."""
    target = corpus.target.lengths - 1
    return (torch.ones_like(target) if corpus.source is None else corpus.source.lengths), target


def plan_epoch(corpus: Corpus, tokens: int, *, seed: int, epoch: int, multiple: int = 1) -> list[Planned]:
    """The batches of one pass over the corpus, shuffled.

    A batch has at most `tokens` tokens on either side, padding included, and at least one sentence. Widths are rounded
    up to a `multiple`; then few shapes occur, and the same ones in each epoch (a CUDA graph is made for each).
    """
    source, target = (each.cpu() for each in lengths_of(corpus))
    draw = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    order = torch.randperm(len(target), generator=draw)
    lengths = target
    source, target = (-(-each // multiple) * multiple for each in (source, target))
    # By target length, then by source length, rising and falling in turn so that neighbours stay alike where the target
    # grows; equal ones stay in the drawn order.
    turn = torch.where(target // multiple % 2 == 0, source, -source)
    order = order[torch.argsort(turn[order], stable=True)]
    order = order[torch.argsort(target[order], stable=True)]
    rows, wide = order.tolist(), list(zip(source[order].tolist(), target[order].tolist(), strict=True))
    real = lengths[order].tolist()
    batches: list[Planned] = []
    at = 0
    while at < len(rows):
        width, end = wide[at], at + 1
        while end < len(rows):
            wider = max(width[0], wide[end][0]), max(width[1], wide[end][1])
            if (end + 1 - at) * max(wider) > tokens:
                break
            width, end = wider, end + 1
        batches.append(Planned(rows[at:end], width, sum(real[at:end])))
        at = end
    shuffled = torch.randperm(len(batches), generator=draw).tolist()
    return [batches[each] for each in shuffled]


def join(corpora: Sequence[Corpus]) -> Corpus:
    """Several corpora as one; all have soft targets or none has."""
    sources = [each.source for each in corpora if each.source is not None]
    soft = [each.soft for each in corpora if each.soft is not None]
    if len(sources) not in (0, len(corpora)) or len(soft) not in (0, len(corpora)):
        raise ValueError("corpora must all have a source, or none, and all have soft targets, or none")
    target = _join([each.target for each in corpora])
    together = Soft(*(torch.cat(parts) for parts in zip(*soft, strict=True))) if soft else None
    return Corpus(_join(sources) if sources else None, target, together)


def _join(parts: Sequence[Ragged]) -> Ragged:
    lengths = torch.cat([part.lengths for part in parts])
    return Ragged(torch.cat([part.flat for part in parts]), lengths.cumsum(0) - lengths, lengths)
