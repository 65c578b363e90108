"""What a configuration costs, before anything is built: parameters, FLOPs, activation bytes, cache bytes, time.

print(cost.of("gpt3-175b"))                                     a named configuration, at its own length
bill = cost.of(config, length=131_072, batch=4, dtype="bf16")   one of your own
bill.parameters, bill.flops.forward, bill.activations.fused, bill.cache.total

call = cost.AttentionCall(length=4096, heads=8, head_dim=64, causal=True, dtype="bf16")
cost.roofline(call, cost.device("h200")).seconds                the least time it can take there
"""

from __future__ import annotations

from regard.cost._cache import CacheCost
from regard.cost._cost import Cost, of
from regard.cost._crossings import Crossings
from regard.cost._devices import Device, device, devices, measured
from regard.cost._kinds import LayerKind, layer_kinds
from regard.cost._measure import measure, measure_call
from regard.cost._roofline import AttentionCall, Roofline, roofline
from regard.cost._spread import Spread, spread
from regard.cost._sums import Activations, Flops, Part

__all__ = [
    "Activations",
    "AttentionCall",
    "CacheCost",
    "Cost",
    "Crossings",
    "Device",
    "Flops",
    "LayerKind",
    "Part",
    "Roofline",
    "Spread",
    "device",
    "devices",
    "layer_kinds",
    "measure",
    "measure_call",
    "measured",
    "of",
    "roofline",
    "spread",
]
