"""Statistics of the attention weights in torch: one pass of row tiles after the forward pass."""

from __future__ import annotations

from regard._observing._rows import observe_rows

__all__ = ["observe_rows"]
