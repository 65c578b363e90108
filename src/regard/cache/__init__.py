"""KV caches for decoding, one for each attention layer.

    cache = KVCache(4096)                                  every token, in memory allocated at once
    cache = RollingCache(window=1023, sinks=4)             the first few and the newest tokens: bounded memory
    cache = PagedCache(BlockPool(1024, block_size=16))     blocks that sequences share, copied when written to
    cache = keep("key_mass", budget=64).caches(model)      from `regard.edits`: the keys that received most weight
    cache = LatentCache(4096)                              one small tensor per token, for `regard.nn.LatentAttention`

All have `attend`, `reorder`, `fork`, `position`, `lengths` and `bytes`. All but `KeptCache`, which cannot bring back
what it drops, take `int8=True` (for a `PagedCache`, its pool does) and have `update`, `padded`, `truncate`, `to` and
`save`, whose files `regard.cache.load` reads.
To write a cache of your own, see `regard.nn.Cache`.
"""

from __future__ import annotations

from regard.cache._base import CacheFull, TokenCache
from regard.cache._files import load
from regard.cache._kept import KeptCache
from regard.cache._paged import BlockPool, PagedCache
from regard.cache._slots import KVCache, LatentCache, RollingCache

__all__ = [
    "BlockPool",
    "CacheFull",
    "KVCache",
    "KeptCache",
    "LatentCache",
    "PagedCache",
    "RollingCache",
    "TokenCache",
    "load",
]
