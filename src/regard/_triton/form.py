"""What kernels of many choices are compiled for: one argument, in which each of them reads what it needs."""

from __future__ import annotations

from typing import NamedTuple


class Form(NamedTuple):
    """Kernels of attention are compiled anew for every form, and for nothing else: numbers of heads, head dims, strides
    and lengths are given when a kernel is launched. What a kernel does not read keeps its default here."""

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


class ObservedForm(NamedTuple):
    """The same of the observation pass, which is compiled anew for other numbers of heads too."""

    H: int
    GROUP: int  # heads that share their keys
    HEAD: int  # head dim, and in powers of two
    D: int
    COPIED: bool  # by the copy engine
    BM: int  # rows and keys of a tile
    BN: int
    WARPS: int
    PREDICATE: int  # how pairs are tested; see tiles
    SLOTS: int
    SOFTCAP: bool
    BIASED: bool
    PRECISION: str
    ROWS: bool  # entropy and largest weight are asked for
    MASS: bool  # key mass, or what the map is made from
    MAP: bool  # of plain tiles, as the next
    DISTANCE: bool
    EDGE_MAP: bool  # of the other tiles
    EDGE_DISTANCE: bool
    FIRSTS: bool
    LIMIT: bool  # only some queries count for key mass and map
    TOP: bool  # maxima of groups of keys are kept
    GROUPS: int
    WIDE: bool  # cells of the map need 64-bit numbers
    EACH: bool  # offsets differ by item
    BY_BLOCK: bool  # key mass is kept apart for each block of rows, and the map made from it
    AHEAD: bool  # products of matrices go on while other things are computed
    DIRECT: bool  # not on the interpreter
