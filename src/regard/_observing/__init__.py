"""Statistics of the attention weights in torch: one pass of row tiles after the forward pass."""

from __future__ import annotations

from regard._observing._effects import edge_effects, edge_effects_of_weights, weighted_key_mass
from regard._observing._gradients import with_gradients
from regard._observing._lengths import value_lengths
from regard._observing._pairs import weights_of_pairs
from regard._observing._rows import observe_rows, observing_bytes, tiles

__all__ = [
    "edge_effects",
    "edge_effects_of_weights",
    "observe_rows",
    "observing_bytes",
    "tiles",
    "value_lengths",
    "weighted_key_mass",
    "weights_of_pairs",
    "with_gradients",
]
