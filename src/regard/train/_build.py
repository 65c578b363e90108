"""From settings and text to a `Trainer`."""

from __future__ import annotations

import hashlib
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
    model = Transformer(TransformerConfig(**same, norm=settings.norm, ff_dropout=settings.ff_dropout), device=device)
    if settings.norm == "post":
        # branches as large as what they are added to leave the encoder's attention unlearnt for thousands of steps
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith(("out_proj.weight", "down.weight")):
                    weight.mul_(settings.branch_init)
    return model


def encode_pairs(words: Words, pairs: Pairs, settings: Settings, *, dropping: int | None = None) -> Corpus:
    """Pairs with a side longer than `max_tokens` are left out. `dropping` is the seed of BPE-dropout; None splits as
    translation does.

    Raises:
        ValueError: all pairs are that long.
    """
    source, target = (
        words.encode(lines)
        if dropping is None
        else words.encode_dropping(lines, settings.bpe_dropout, 2 * dropping + side)
        for side, lines in enumerate(pairs)
    )
    # the start and the stop token stand with them; half a sentence would teach to stop early
    kept = [pair for pair in zip(source, target, strict=True) if max(map(len, pair)) < settings.max_tokens]
    if not kept:
        raise ValueError(f"all {len(source)} sentences have max_tokens={settings.max_tokens} tokens or more; raise it")
    return parallel(*zip(*kept, strict=True))


def within(words: Words, pairs: Pairs, settings: Settings) -> Pairs:
    """The pairs that `encode_pairs` keeps."""
    sides = zip(words.encode(pairs.source), words.encode(pairs.target), strict=True)
    kept = [at for at, pair in enumerate(sides) if max(map(len, pair)) < settings.max_tokens]
    return Pairs([pairs.source[at] for at in kept], [pairs.target[at] for at in kept])


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
    known = _agreed(words, [*data.train.source, *data.train.target], settings, device)
    torch.manual_seed(settings.seed)
    model = model_of(settings, len(known), device)
    plain = encode_pairs(known, data.train, settings)

    def encode(epoch: int) -> Corpus:
        if not settings.bpe_dropout:
            return plain
        return encode_pairs(known, data.train, settings, dropping=settings.seed * 1_000_003 + epoch)

    def score(model: nn.Module) -> float:
        assert isinstance(model, Transformer)
        found = Translator([model], known)(judged.source, beams=1)
        return bleu([each[0].text for each in found], judged.target, lowercase=known.lowercase)

    # a search through one endless line would hold up every validation
    judged = within(known, data.valid, settings)
    valid = encode_pairs(known, data.valid, settings)
    trainer = Trainer(
        model, settings, known, encode, valid, Path(out), device, score=score if with_bleu else None, how=how
    )
    trainer.left_out = len(data.train.source) - len(plain.target.lengths)
    trainer.left_out += len(data.valid.source) - len(judged.source)
    trainer.text = _digest(*data.train, *data.valid)
    return trainer


def language_trainer(
    settings: Settings,
    lines: Sequence[str],
    out: str | Path,
    *,
    words: Words | None = None,
    device: torch.device | str = "cpu",
    how: str = "copies",
) -> Trainer:
    """A `Trainer` of a `Decoder` on a running text; its last tenth is held out."""
    device = torch.device(device)
    if not any(line.strip() for line in lines):
        raise ValueError("the text is empty")
    learnt, held_out = _tenth_apart(lines)
    known = _agreed(words, learnt, settings, device)
    torch.manual_seed(settings.seed)
    model = model_of(settings, len(known), device)

    def corpus(part: Sequence[str]) -> Corpus:
        return running([token for ids in known.encode(part) for token in ids], settings.max_tokens)

    train, valid = corpus(learnt), corpus(held_out)
    if not len(train.target.lengths) or not len(valid.target.lengths):
        parts = f"its {len(lines)} lines, the first {len(learnt)} and the other {len(held_out)}"
        if len(lines) == 1:
            parts = "its only line, the first nine tenths and the rest"
        raise ValueError(
            f"the text has too few tokens: of {parts}, which are held out for validation, need two tokens each"
        )
    trainer = Trainer(model, settings, known, lambda epoch: train, valid, Path(out), device, how=how)
    trainer.text = _digest(lines)
    return trainer


def _agreed(words: Words | None, lines: Sequence[str], settings: Settings, device: torch.device) -> Words:
    """One vocabulary in all processes, whoever learnt it; from these lines when it is not given."""
    if words is None:
        words = Words.learn(lines, vocab_size=settings.vocab_size, lowercase=settings.lowercase)
    return Words.read(Processes(device).agree(words.as_json()))


def _tenth_apart(lines: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The first nine tenths and the last one: of the lines, or of one long line, between two words."""
    if len(lines) > 1:
        cut = len(lines) * 9 // 10
        return lines[: max(1, cut)], lines[max(1, cut) :]
    text = "".join(lines)
    cut = text.rfind(" ", 0, len(text) * 9 // 10) + 1 or len(text) * 9 // 10
    return [text[:cut]], [text[cut:]]


def _digest(*texts: Sequence[str]) -> str:
    found = hashlib.sha256()
    for lines in texts:
        found.update(hashlib.sha256("\n".join(lines).encode()).digest())
    return found.hexdigest()[:16]
