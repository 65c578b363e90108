"""What the kernels of attention are compiled for: one argument, in which each of them reads what it needs."""

from __future__ import annotations

from typing import NamedTuple


class Form(NamedTuple):
    """Kernels are compiled anew for every form, and for nothing else: numbers of heads, head dims, strides and lengths
    are given when a kernel is launched. What a kernel does not read keeps its default here."""

    D: int  # head dim, and value dim, in powers of two
    DV: int
    WHOLE: bool  # whether these are the dims themselves
    WHOLE_V: bool
    UNIT: int  # in which dims and strides of query, key, value and gradients are given: known to divide them
    BM: int  # rows and keys of a tile
    BN: int
    PREDICATE: int  # how pairs are tested; see tiles
    SLOTS: int
    PADDED: bool
    SOFTCAP: bool
    BIASED: int
    DROPOUT: bool
    PRECISION: str
    DIRECT: bool  # not on the interpreter
    COPIED: bool = False  # by the copy engine
    RISING: bool = False  # a logit is the product times a positive scale: the products themselves are compared
    ROWS: bool = False  # entropy and largest weight are asked for
    GROUPED: bool = False  # several heads share their keys
    ALONG: bool = False  # of the gradient of a bias: see bias_backward
    ONE_ROW: bool = False
    ONE_KEY: bool = False
