"""Edits of attention, as values: what ``regard.edit`` changes in a model while it runs.

cut      edges that do not exist
ablate   a head's output replaced: by zeros, its mean, or what it wrote elsewhere
patch    a head's output or pattern taken from another run
steer    a number added to the logits of some edges
keep     a cache that keeps a budget of keys
"""

from __future__ import annotations

from regard.edits._cut import Cut, cut
from regard.edits._edit import CannotEdit, Edit
from regard.edits._keep import Keep, keep
from regard.edits._outputs import Ablate, Patch, ablate, patch
from regard.edits._steer import Steer, steer

__all__ = ["Ablate", "CannotEdit", "Cut", "Edit", "Keep", "Patch", "Steer", "ablate", "cut", "keep", "patch", "steer"]
