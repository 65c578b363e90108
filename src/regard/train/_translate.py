"""Sentences through trained models: sorted by length, in batches, back in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard import interop
from regard.models import Hypothesis, Transformer
from regard.models._sampling import Sampling
from regard.models._search import Asked, search
from regard.train._loop import LAST
from regard.train._tokens import PAD, START, STOP, Words


class Translation(NamedTuple):
    """One translation of a sentence."""

    text: str
    score: float  # log P / length penalty
    log_probability: float
    tokens: list[int]


class Translator:
    """One trained model, or several that write together (the mean of their probabilities decides).

    translator = Translator.load("runs/x")
    [[best]] = translator(["A man rides a bike."])
    best.text
    """

    def __init__(self, models: Sequence[Transformer], words: Words) -> None:
        if not models:
            raise ValueError("models must be at least one Transformer")
        self.models, self.words = list(models), words
        self.device = next(models[0].parameters()).device

    @classmethod
    def load(cls, *folders: str | Path, device: str | torch.device | None = None) -> Translator:
        """The models of folders that `regard train` wrote; they must share their vocabulary.

        Raises:
            ValueError: a folder is missing or damaged, or of another task or vocabulary.
        """
        models, words = [], None
        for folder in map(Path, folders):
            if not folder.is_dir():
                raise ValueError(f"{folder} is not a folder; expected one that regard train wrote")
            _check_finished(folder)
            model: Any = interop.load(folder, device=device)
            if not isinstance(model, Transformer):
                raise ValueError(f"{folder} holds a {type(model).__name__}; a Transformer translates")
            own = Words.load(folder / "tokenizer.json")
            if words is not None and own.as_json() != words.as_json():
                raise ValueError(f"{folder} has another vocabulary than {folders[0]}: they cannot translate together")
            if model.config.vocab_size != len(own):
                raise ValueError(f"{folder}: the model has {model.config.vocab_size} tokens, its tokenizer {len(own)}")
            models.append(model)
            words = own
        if words is None:
            raise ValueError("folders must be at least one")
        return cls(models, words)

    def __call__(
        self,
        lines: Sequence[str],
        *,
        beams: int = 5,
        length_penalty: float = 1.0,
        best: int = 1,
        batch_tokens: int = 6_000,
        max_new_tokens: int | None = None,
        use_cache: bool = True,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[list[Translation]]:
        """The `best` translations of each sentence, best first. A line without a word has one, which is empty.

        Args:
            beams: 1 takes the likeliest token each time.
            length_penalty: α of log P / ((5 + length) / 6)^α.
            batch_tokens: source tokens of a batch, times beams, at most.
            max_new_tokens: of each translation; 1.5 times the source's, and 20, when not given.
            temperature, top_k, top_p, seed: draw tokens in place of a search, with `beams=1`.
            progress: is told how many sentences are done.
        """
        encoded = [[*ids, STOP] for ids in self.words.encode(lines)]
        spoken = [at for at, ids in enumerate(encoded) if len(ids) > 1 and lines[at].strip()]
        order = sorted(spoken, key=lambda at: -len(encoded[at]))
        sampling = Sampling(temperature, top_k, top_p, seed)
        # each sentence draws from a stream of its own, whatever stands next to it in a batch
        seeds = torch.randint(2**62, (len(encoded),), generator=_generator(seed)).tolist() if sampling.draws else []
        found: list[list[Translation]] = [[Translation("", 0.0, 0.0, [])] for _ in encoded]
        at = 0
        while at < len(order):
            width = len(encoded[order[at]])
            chosen = order[at : at + max(1, batch_tokens // (width * beams))]
            lengths_of = [len(encoded[each]) for each in chosen]
            limits = [max_new_tokens if max_new_tokens is not None else n * 3 // 2 + 20 for n in lengths_of]
            source, lengths = padded([encoded[each] for each in chosen], self.device)
            drawn = replace(sampling, seed=[seeds[each] for each in chosen] if seeds else None)
            asked = Asked(START, STOP, max(limits), beams, length_penalty, best, use_cache, drawn)
            items = search(self.models, (source, lengths, "right"), asked, limits)
            for each, item in zip(chosen, items, strict=True):
                found[each] = [self._translation(one) for one in item]
            at += len(chosen)
            progress(at)
        progress(len(encoded))
        return found

    def _translation(self, one: Hypothesis) -> Translation:
        return Translation(self.words.decode(one.tokens), one.score, one.log_probability, one.tokens)


def _check_finished(folder: Path) -> None:
    """A run keeps weights from its first validation on; before that there is nothing to translate with."""
    if (folder / "config.json").exists() or not (folder / "settings.json").exists():
        return
    again = "" if (folder / LAST).exists() else ", or start it again: it has no checkpoint yet"
    raise ValueError(
        f"{folder} holds a run that has not come to its first validation, so there are no weights to translate with; "
        f"go on with regard train --resume --out {folder}{again}"
    )


def _generator(seed: int | None) -> torch.Generator:
    drawn = int(torch.randint(2**31, ())) if seed is None else seed
    if not -(2**63) <= drawn < 2**64:
        raise ValueError(f"seed must be from −2^63 to 2^64 − 1, got {drawn}")
    return torch.Generator().manual_seed(drawn)


def padded(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """`[row, token]`, with PAD after each sequence, and the lengths."""
    width = max(len(each) for each in sequences)
    rows = [[*each, *[PAD] * (width - len(each))] for each in sequences]
    return torch.tensor(rows, device=device), torch.tensor([len(each) for each in sequences], device=device)
