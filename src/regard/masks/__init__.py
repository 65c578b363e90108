"""Masks: rules that say which query may attend to which key. True = may attend.

Query row r of a call stands at position ``i = r + query_offset`` among the keys (by default ``S − L``); key column j
stands at position j. Masks are values, joined by ``&``, ``|`` and ``~``:

>>> from regard import masks
>>> masks.causal() & masks.window(left=256) | masks.columns(64)
(causal() & window(left=256)) | columns(64)
"""

from regard.masks._base import Mask
from regard.masks._blocks import BlockTable
from regard.masks._constructors import (
    blocks,
    causal,
    columns,
    documents,
    drop,
    everything,
    from_additive,
    keep,
    padding,
    prefix,
    random_blocks,
    strided,
    window,
)
from regard.masks._flags import Fused
from regard.masks._function import rule
from regard.masks._intervals import RowIntervals
from regard.masks._rebuild import rebuild

# Masks that a person can write in words: numbers and lists, no tensors.
IN_WORDS = (
    "everything",
    "causal",
    "window",
    "padding",
    "documents",
    "prefix",
    "columns",
    "strided",
    "random_blocks",
)

__all__ = [
    "BlockTable",
    "Fused",
    "Mask",
    "RowIntervals",
    "blocks",
    "causal",
    "columns",
    "documents",
    "drop",
    "everything",
    "from_additive",
    "keep",
    "padding",
    "prefix",
    "random_blocks",
    "rebuild",
    "rule",
    "strided",
    "window",
]
