"""A byte-pair vocabulary learnt from the training text: from sentences to token numbers and back."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, UNKNOWN, START, STOP = 0, 1, 2, 3
SPECIALS = ("<pad>", "<unk>", "<s>", "</s>")


class Words:
    """Token numbers of sentences. `<pad>`, `<unk>`, `<s>` and `</s>` are 0, 1, 2 and 3; text never gives the last two.

    words = Words.learn(lines, vocab_size=10_000)
    ids = words.encode(["A man rides a bike."])
    words.decode(ids[0])
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._plain: tuple[dict[str, int], dict[tuple[str, str], int]] | None = None

    @classmethod
    def learn(cls, lines: Sequence[str], *, vocab_size: int, lowercase: bool = False) -> Words:
        """Learn merges from these sentences, most frequent pairs first."""
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

        if not lines:
            raise ValueError("there are no sentences to learn a vocabulary from")
        tokenizer = Tokenizer(models.BPE(unk_token=SPECIALS[UNKNOWN]))
        steps: list[Any] = [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
        tokenizer.normalizer = normalizers.Sequence(steps + ([normalizers.Lowercase()] if lowercase else []))
        # punctuation stands alone, so that "bike" and "bike." share their pieces; ▁ marks where a word begins
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Metaspace(prepend_scheme="always"), pre_tokenizers.Punctuation("isolated")]
        )
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
        # each merge makes a word at least one piece shorter, so a text has fewer merges than characters; the library
        # takes memory for as many pieces as it is asked for
        most = len(SPECIALS) + 4 * sum(len(line) + 1 for line in lines)
        trainer = trainers.BpeTrainer(
            vocab_size=min(vocab_size, most), special_tokens=list(SPECIALS), show_progress=False
        )
        tokenizer.train_from_iterator(lines, trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, path: str | Path) -> Words:
        """The vocabulary of a `tokenizer.json`.

        Raises:
            ValueError: it cannot be read, or lacks the four special tokens at 0 … 3.
        """
        from tokenizers import Tokenizer

        path = Path(path)
        if not path.is_file():
            raise ValueError(f"{path} is missing: expected the tokenizer.json of a training run")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # that library raises this class and no other
            raise ValueError(f"{path} cannot be read: {str(error)[:200]}") from None
        found = [tokenizer.token_to_id(token) for token in SPECIALS]
        if found != [PAD, UNKNOWN, START, STOP]:
            raise ValueError(f"{path} has {SPECIALS} at {found}; expected 0, 1, 2, 3 (regard train writes it so)")
        return cls(tokenizer)

    @classmethod
    def read(cls, text: str) -> Words:
        """What `as_json` gave."""
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_str(text))

    def as_json(self) -> str:
        return self.tokenizer.to_str() + "\n"

    @property
    def lowercase(self) -> bool:
        """Whether everything is lower-cased before it is split."""
        normalizer = self.tokenizer.normalizer
        return normalizer is not None and normalizer.normalize_str("A") == "a"

    def __len__(self) -> int:
        return self.tokenizer.get_vocab_size()

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Without special tokens: text that looks like one is text."""
        return [each.ids for each in self._encode([_without_specials(line) for line in lines])]

    def pieces(self, line: str) -> list[str]:
        """The pieces of one sentence, as they are written in the vocabulary."""
        return list(self._encode([_without_specials(line)])[0].tokens)

    def _encode(self, lines: list[str]) -> list[Any]:
        return self.tokenizer.encode_batch(lines, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(
            [each for each in ids if each > STOP or each == UNKNOWN], skip_special_tokens=False
        )

    def names(self, ids: Sequence[int]) -> list[str]:
        return [str(self.tokenizer.id_to_token(each)).replace("▁", "") or "▁" for each in ids]

    def encode_dropping(self, lines: Sequence[str], probability: float, seed: int) -> list[list[int]]:
        """Split each word anew, skipping each possible merge with this probability (BPE-dropout, Provilkov 2020).

        Drawn from `seed` alone: the same seed gives the same pieces, which an exact resume needs.
        """
        vocabulary, ranks = self._merges()
        draw = random.Random(seed)
        normalize, split = self.tokenizer.normalizer, self.tokenizer.pre_tokenizer
        assert normalize is not None and split is not None
        found = []
        for line in lines:
            parts = _parts_of(normalize, split, _without_specials(line))
            ids: list[int] = []
            for part in parts:
                ids += [vocabulary.get(piece, UNKNOWN) for piece in _merge(part, ranks, probability, draw)]
            found.append(ids)
        return found

    def _merges(self) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
        if self._plain is None:
            model = json.loads(self.tokenizer.to_str())["model"]
            pairs = [each.split(" ") if isinstance(each, str) else each for each in model["merges"]]
            self._plain = model["vocab"], {(first, second): rank for rank, (first, second) in enumerate(pairs)}
        return self._plain


def _without_specials(line: str) -> str:
    """`<s>` in a text must not become the start token."""
    for token in SPECIALS:
        if token in line:
            line = line.replace(token, f"{token[0]} {token[1:]}")
    return line


def _parts_of(normalize: Any, split: Any, line: str) -> list[str]:
    return [part for part, _ in split.pre_tokenize_str(normalize.normalize_str(line))]


def _merge(word: str, ranks: dict[tuple[str, str], int], probability: float, draw: random.Random) -> list[str]:
    """Pieces of a word: the best-ranked pair is merged first, unless it is dropped this time."""
    pieces = list(word)
    while len(pieces) > 1:
        best, at = None, -1
        for place, pair in enumerate(itertools.pairwise(pieces)):
            rank = ranks.get(pair)
            if rank is not None and draw.random() >= probability and (best is None or rank < best):
                best, at = rank, place
        if best is None:
            return pieces
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return pieces
