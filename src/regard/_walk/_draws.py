"""Random numbers that Python and the page draw alike: what `regard walk` prints is what the page shows.

mulberry32 (a counter and a few multiplications of 32 bits), then Box and Muller: frontend/src/walk/compute.ts has
the same.
"""

from __future__ import annotations

import numpy as np

from regard._walk._story import Numbers

_WORD = 0xFFFFFFFF


class Draws:
    """Normal numbers that depend on the seed alone, one after the other."""

    def __init__(self, seed: int) -> None:
        self.seed, self.taken = seed & _WORD, 0

    def normal(self, *shape: int) -> Numbers:
        count = int(np.prod(shape))
        uniform = self._uniform(self.taken, 2 * count).reshape(count, 2)
        self.taken += 2 * count
        found: Numbers = np.sqrt(-2 * np.log(1 - uniform[:, 0])) * np.cos(2 * np.pi * uniform[:, 1])
        return found.reshape(shape)

    def _uniform(self, first: int, count: int) -> Numbers:
        turn = np.arange(first + 1, first + count + 1, dtype=np.uint64)
        state = ((self.seed + turn * 0x6D2B79F5) & _WORD).astype(np.uint32)
        mixed = (state ^ (state >> 15)) * (state | 1)  # products of 32 bits: what runs over is lost
        mixed = (mixed + (mixed ^ (mixed >> 7)) * (mixed | 61)) ^ mixed
        found: Numbers = (mixed ^ (mixed >> 14)) / 2.0**32
        return found


def of_word(word: str, seed: int) -> Draws:
    """The draws of a word: the same wherever it stands (FNV-1a of its letters)."""
    found = (2166136261 ^ seed) & _WORD
    for letter in word.lower():
        found = (found ^ ord(letter)) * 16777619 & _WORD
    return Draws(found)
