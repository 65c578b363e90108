"""Counter-based random numbers: the same value for the same seed and index, on every device.

Everything is plain int64 arithmetic on words of 32 bits. A 32-bit word times a constant below 2**31 stays below 2**63,
so no step relies on what a device does when a signed number overflows.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["mix", "mix_number", "uniform"]

_WORD = 0xFFFFFFFF
# Multipliers of a two-round xorshift-multiply finaliser with low avalanche bias; both are below 2**31.
FIRST = 0x21F0AAAD
SECOND = 0x735A2D97
# Separates the words of a seed, so that swapping two of them, or a word of zero, still changes the result.
_STEP = 0x3C6EF372


def mix(x: Tensor) -> Tensor:
    """Scramble the low 32 bits of each int64 element; the result is in 0 … 2**32 − 1 and one-to-one on those bits.

    >>> mix(torch.tensor([0, 1, 2**32 + 1]))
    tensor([         0, 2261973619, 2261973619])
    """
    x = x & _WORD  # a tensor of our own, so the rest may happen in place
    x ^= x >> 16
    x *= FIRST
    x &= _WORD
    x ^= x >> 15
    x *= SECOND
    x &= _WORD
    x ^= x >> 15
    return x


def mix_number(x: int) -> int:
    """:func:`mix` of one Python integer."""
    x &= _WORD
    x ^= x >> 16
    x = (x * FIRST) & _WORD
    x ^= x >> 15
    x = (x * SECOND) & _WORD
    return x ^ (x >> 15)


def keys(seed: Tensor | int) -> tuple[Tensor | int, Tensor | int]:
    """Two 32-bit keys from a 64-bit seed."""
    if isinstance(seed, Tensor):
        low = mix(seed.to(torch.int64) + _STEP)
        return low, mix((seed.to(torch.int64) >> 32) + low + _STEP)
    low_number = mix_number(seed + _STEP)
    return low_number, mix_number((seed >> 32) + low_number + _STEP)


def uniform(seed: Tensor | int, index: Tensor) -> Tensor:
    """One float32 in [0, 1), with 24 random bits, for each element of an int64 ``index`` (which may exceed 2**32).

    >>> bool((uniform(7, torch.arange(1000)) < 1).all())
    True
    """
    low, high = keys(seed)
    word = mix((index & _WORD) ^ low)
    word = mix(word + (index >> 32) + high)
    return (word >> 8).to(torch.float32) * 2.0**-24
