"""One cache of each kind, with the mask it is used with, and modules to use them in."""

from __future__ import annotations

import torch
from tests.nn.helpers import build, random

from regard import masks
from regard.cache import BlockPool, KVCache, PagedCache, RollingCache
from regard.positions import Rotary

# more keys than a cache reads at once where it cannot give them as a view: `explain` says in how many pieces
LONG = 1053
CAUSAL = masks.causal()
ROLLING = masks.causal() & (masks.window(left=7) | masks.columns(3))

# name -> (a new cache, its mask); all of them exact
EXACT = {
    "kv": (lambda: KVCache(1131), CAUSAL),
    "kv, a window": (lambda: KVCache(1131), masks.causal() & masks.window(left=5)),
    "kv, not relative": (lambda: KVCache(1131), masks.causal() & (masks.prefix(9) | masks.window(left=5))),
    "rolling": (lambda: RollingCache(7, sinks=3), ROLLING),
    "rolling, no sinks": (lambda: RollingCache(7), masks.causal() & masks.window(left=7)),
    "rolling, narrower": (lambda: RollingCache(9, sinks=5), ROLLING),
    "paged": (lambda: PagedCache(BlockPool(501, 7)), CAUSAL),
    "paged, a window": (lambda: PagedCache(BlockPool(701, 5)), masks.causal() & masks.window(left=5)),
    "paged, not relative": (
        lambda: PagedCache(BlockPool(701, 5)),
        masks.causal() & (masks.strided(3) | masks.columns(2)),
    ),
}
INT8 = {
    "kv": (lambda: KVCache(1131, int8=True), CAUSAL),
    "rolling": (lambda: RollingCache(7, sinks=3, int8=True), ROLLING),
    "paged": (lambda: PagedCache(BlockPool(501, 7, int8=True)), CAUSAL),
}


def module(**keywords):
    """Grouped heads, rotary positions, values of another width."""
    positions = Rotary(12) if keywords.pop("rotary", True) else None
    return build(48, 4, num_kv_heads=2, value_head_dim=10, positions=positions, **keywords).eval()


def decode(mha, x, split, mask, cache):
    """The module's rows for the tokens of x, in chunks through the cache."""
    with torch.no_grad():
        return torch.cat([mha(part, mask=mask, cache=cache) for part in x.split(split, 1)], 1)


__all__ = ["CAUSAL", "EXACT", "INT8", "LONG", "ROLLING", "decode", "module", "random"]
