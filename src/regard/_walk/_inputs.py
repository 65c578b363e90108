"""What goes into a walk: tokens, their vectors, and the numbers of the layer."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from regard._walk._draws import Draws, of_word
from regard._walk._story import Numbers

MOST_TOKENS = 512
MOST_WIDTH = 4096


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of a walk through a text, under the names they have on the command line."""

    heads: int = 2
    d_model: int = 8
    causal: bool = False
    window: int | None = None
    scale: bool = True
    seed: int = 0
    cross: str | None = None

    def check(self) -> None:
        for name, value, most in (("--heads", self.heads, MOST_WIDTH), ("--d-model", self.d_model, MOST_WIDTH)):
            if not 1 <= value <= most:
                raise ValueError(f"{name} is {value}; expected 1 to {most}")
        if self.d_model % self.heads:
            raise ValueError(
                f"--d-model is {self.d_model}, which {self.heads} heads do not divide; expected a multiple of --heads"
            )
        if self.seed < 0:
            raise ValueError(f"--seed is {self.seed}; expected 0 or more")
        self.check_mask()

    def check_mask(self) -> None:
        if self.window is not None and self.window < 0:
            raise ValueError(f"--window is {self.window}; expected 0 (only itself) or more")
        if self.cross is not None and (self.causal or self.window is not None):
            option = "--causal" if self.causal else "--window"
            raise ValueError(f"{option} compares positions in one text, and --cross has two; give one of them")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One multi-head attention layer and what it is given. Self attention has the same tokens and vectors twice."""

    tokens: tuple[str, ...]  # who looks
    key_tokens: tuple[str, ...]  # who is looked at
    x: Numbers  # [L, d_model]
    memory: Numbers  # [S, d_model]
    weights: Mapping[str, Numbers]
    heads: int
    scale: float | None = None  # 1/√d_k when None
    mask: Numbers | None = None  # [L, S], True = may look
    before: Mapping[str, Numbers] = field(default_factory=dict)  # how x came about: ids, embeddings, positions
    key_before: Mapping[str, Numbers] = field(default_factory=dict)

    @property
    def is_cross(self) -> bool:
        return self.memory is not self.x

    @property
    def head_dim(self) -> int:
        return int(self.weights["q"].shape[-1]) // self.heads


def words(text: str, option: str = "the text") -> tuple[str, ...]:
    """Words, signs, and Chinese characters one by one."""
    found: list[str] = []
    runs_on = False
    for letter in unicodedata.normalize("NFC", text):
        kind = unicodedata.category(letter)
        if kind[0] in "MC" and not letter.isspace() and found and kind != "Cc":  # accents, joiners: part of the last
            found[-1] += letter
            continue
        joins = (kind[0] in "LN" or letter == "_") and not _stands_alone(letter)
        if joins and runs_on:
            found[-1] += letter
        elif not letter.isspace():
            found.append(letter)
        runs_on = joins
    if not found:
        raise ValueError(f"{option} is empty; expected some words, such as 'The cat sat on the mat.'")
    if len(found) > MOST_TOKENS:
        raise ValueError(f"{option} has {len(found)} tokens; expected at most {MOST_TOKENS}")
    return tuple(found)


def _stands_alone(letter: str) -> bool:
    """Characters of Chinese and kana, which are written without spaces between words."""
    return "\u3040" <= letter <= "\u30ff" or "\u3400" <= letter <= "\u9fff" or "\U00020000" <= letter <= "\U0003ffff"


def vectors(tokens: tuple[str, ...], width: int, seed: int) -> Numbers:
    """A random vector for each word, drawn from the seed and the word: the same in every sentence."""
    return np.stack([of_word(token, seed).normal(width) for token in tokens])


def numbered(tokens: tuple[str, ...], more: tuple[str, ...] = ()) -> Numbers:
    """The place of every token in the vocabulary of this walk: words in the order in which they first come."""
    vocabulary: dict[str, int] = {}
    for token in (*more, *tokens):
        vocabulary.setdefault(token.lower(), len(vocabulary))
    return np.array([vocabulary[token.lower()] for token in tokens])


def sinusoids(length: int, width: int) -> Numbers:
    """PE(p, 2i) = sin(p / 10000^(2i/width)), PE(p, 2i+1) = cos of the same."""
    column = np.arange(width)
    angles = np.arange(length)[:, None] * 10_000.0 ** (-2 * (column // 2) / width)
    return np.where(column % 2 == 1, np.cos(angles), np.sin(angles))


def drawn(width: int, seed: int) -> dict[str, Numbers]:
    """The four matrices, normal with variance 1/width, so that queries and keys spread as the vectors do."""
    draws = Draws(seed + 1)
    return {name: draws.normal(width, width) / np.sqrt(width) for name in ("q", "k", "v", "out")}


def permitted(length: int, causal: bool, window: int | None) -> Numbers | None:
    """Which positions each may look at; None where all may."""
    if not causal and window is None:
        return None
    query, key = np.arange(length)[:, None], np.arange(length)[None, :]
    allowed = np.ones((length, length), dtype=bool)
    if causal:
        allowed &= key <= query
    if window is not None:
        allowed &= np.abs(query - key) <= window
    return allowed


def from_text(text: str, settings: Settings) -> Layer:
    """An untrained layer that reads a text."""
    settings.check()
    tokens = words(text)
    key_tokens = tokens if settings.cross is None else words(settings.cross, "--cross")
    before = _embedded(tokens, numbered(tokens), settings)
    x = before["embeddings"] + before["positions"]
    key_before, memory = before, x
    if settings.cross is not None:
        key_before = _embedded(key_tokens, numbered(key_tokens, more=tokens), settings)
        memory = key_before["embeddings"] + key_before["positions"]
    return Layer(
        tokens=tokens,
        key_tokens=key_tokens,
        x=x,
        memory=memory,
        weights=drawn(settings.d_model, settings.seed),
        heads=settings.heads,
        scale=None if settings.scale else 1.0,
        mask=permitted(len(tokens), settings.causal, settings.window),
        before=before,
        key_before=key_before,
    )


def _embedded(tokens: tuple[str, ...], ids: Numbers, settings: Settings) -> dict[str, Numbers]:
    return {
        "ids": ids,
        "embeddings": vectors(tokens, settings.d_model, settings.seed),
        "positions": sinusoids(len(tokens), settings.d_model),
    }
