"""How ``regard.edit`` changes the attention of any model while it runs; the edits themselves are in ``regard.edits``.

_block      the ``with`` block, and what it says when it ends
_editor     one edit: which calls it meets (followed as a watch follows them) and what becomes of them
_positions  which tokens its queries and keys are
_functions  where calls are changed: torch's functions, above its derivatives
_plain      functions that are no part of attention, run unseen
_fused      a call given by query, key and value
_written    a call that the model writes out; _chain: the functions that came after its softmax; _again: it, done again
_kept       what a watch keeps of a run, for edits that take it from there
_report     what was changed
"""

from __future__ import annotations

from regard.editing._block import edit
from regard.editing._report import Changed, Report

__all__ = ["Changed", "Report", "edit"]
