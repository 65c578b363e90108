"""What is known of strided masks without building them."""

from __future__ import annotations

import numpy as np

from regard.masks._intervals import EMPTY, FULL, PARTIAL, States, Strip, Whole


def strided_block_states(s: int, strip: Strip, block_q: int, block_k: int) -> States:
    """Within a block, i − j takes every value from ``low`` to ``high``: does a multiple of s lie among them?"""
    first = strip.offsets[0, 0] + np.arange(strip.start, strip.stop, block_q)
    last = np.minimum(first + block_q, strip.offsets[0, 0] + strip.stop) - 1
    left = np.arange(0, strip.S, block_k)
    right = np.minimum(left + block_k, strip.S) - 1
    low = first[:, None] - right
    high = last[:, None] - left
    touched = high // s > (low - 1) // s
    full = touched & ((low == high) | (s == 1))
    return np.where(full, FULL, np.where(touched, PARTIAL, EMPTY)).astype(np.int8)


def strided_count_below(s: int, strip: Strip, key: Whole) -> Whole:
    """Among keys 0 … key − 1 those with j ≡ i (mod s)."""
    residue = strip.i % s
    return np.asarray((key - residue + s - 1) // s, dtype=np.int64)
