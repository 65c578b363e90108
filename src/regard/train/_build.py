"""From settings and text to a `Trainer`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.models import Decoder, DecoderConfig, Transformer, TransformerConfig
from regard.train._batches import Corpus, parallel, running
from regard.train._evaluate import bleu
from regard.train._loop import Trainer
from regard.train._processes import Processes
from regard.train._settings import Settings
from regard.train._text import Data, Pairs
from regard.train._tokens import Words
from regard.train._translate import Translator


def model_of(settings: Settings, vocabulary: int, device: torch.device | str | None = None) -> nn.Module:
    """The model that these settings train, with weights as before training."""
    same: dict[str, Any] = {
        "vocab_size": vocabulary,
        "embed_dim": settings.embed_dim,
        "num_layers": settings.num_layers,
        "num_heads": settings.num_heads,
        "ff_dim": settings.ff_dim,
        "activation": settings.activation,
        "dropout": settings.dropout,
        "attention_dropout": settings.attention_dropout,
    }
    if settings.task == "lm":
        return Decoder(DecoderConfig(**same, max_tokens=settings.max_tokens), device=device)
    return Transformer(TransformerConfig(**same, norm=settings.norm), device=device)


def encode_pairs(words: Words, pairs: Pairs, settings: Settings, *, dropping: int | None = None) -> Corpus:
    """`dropping` is the seed of BPE-dropout; None splits as translation does."""
    source, target = (
        words.encode(lines)
        if dropping is None
        else words.encode_dropping(lines, settings.bpe_dropout, 2 * dropping + side)
        for side, lines in enumerate(pairs)
    )
    longest = settings.max_tokens - 1
    return parallel([each[:longest] for each in source], [each[:longest] for each in target])


def translation_trainer(
    settings: Settings,
    data: Data,
    out: str | Path,
    *,
    words: Words | None = None,
    device: torch.device | str = "cpu",
    with_bleu: bool = True,
    how: str = "copies",
) -> Trainer:
    """A `Trainer` of a `Transformer` on parallel text, from which its vocabulary is learnt when not given."""
    device = torch.device(device)
    if words is None:
        lines = [*data.train.source, *data.train.target]
        words = Words.learn(lines, vocab_size=settings.vocab_size, lowercase=settings.lowercase)
    words = Words.read(Processes(device).agree(words.as_json()))  # one vocabulary, whoever learnt it
    torch.manual_seed(settings.seed)
    model = model_of(settings, len(words), device)
    known = words
    plain = encode_pairs(words, data.train, settings)

    def encode(epoch: int) -> Corpus:
        if not settings.bpe_dropout:
            return plain
        return encode_pairs(known, data.train, settings, dropping=settings.seed * 1_000_003 + epoch)

    def score(model: nn.Module) -> float:
        assert isinstance(model, Transformer)
        found = Translator([model], known)(data.valid.source, beams=1)
        return bleu([each[0].text for each in found], data.valid.target, lowercase=settings.lowercase)

    valid = encode_pairs(words, data.valid, settings)
    return Trainer(
        model, settings, words, encode, valid, Path(out), device, score=score if with_bleu else None, how=how
    )


def language_trainer(
    settings: Settings,
    lines: Sequence[str],
    out: str | Path,
    *,
    device: torch.device | str = "cpu",
    how: str = "copies",
) -> Trainer:
    """A `Trainer` of a `Decoder` on a running text; its last tenth is held out."""
    device = torch.device(device)
    cut = max(1, len(lines) * 9 // 10)
    if cut >= len(lines):
        raise ValueError(f"the text has {len(lines)} line; expected at least two, to hold one out for validation")
    words = Words.learn(lines[:cut], vocab_size=settings.vocab_size, lowercase=settings.lowercase)
    words = Words.read(Processes(device).agree(words.as_json()))
    torch.manual_seed(settings.seed)
    model = model_of(settings, len(words), device)

    def corpus(part: Sequence[str]) -> Corpus:
        return running([token for ids in words.encode(part) for token in ids], settings.max_tokens)

    train = corpus(lines[:cut])
    return Trainer(model, settings, words, lambda epoch: train, corpus(lines[cut:]), Path(out), device, how=how)
