"""What a configuration costs, before anything is built: parameters, FLOPs, activation bytes, cache bytes, time.

print(cost.of("gpt3-175b"))                                     a named configuration, at its own length
bill = cost.of(config, length=131_072, batch=4, dtype="bf16")   one of your own
bill.parameters, bill.flops.forward, bill.activations.fused, bill.cache.total
"""

from __future__ import annotations

from regard.cost._cache import CacheCost
from regard.cost._cost import Cost, of
from regard.cost._crossings import Crossings
from regard.cost._sums import Activations, Flops, Part

__all__ = ["Activations", "CacheCost", "Cost", "Crossings", "Flops", "Part", "of"]
