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
from regard.masks._documents import Documents
from regard.masks._flags import Fused
from regard.masks._intervals import RowIntervals
from regard.masks._padding import Padding
from regard.masks._rebuild import rebuild

__all__ = [
    "BlockTable",
    "Documents",
    "Fused",
    "Mask",
    "Padding",
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
    "strided",
    "window",
]
