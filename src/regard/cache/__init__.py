"""Caches of keys and values for decoding, one for each attention layer.

    cache = KVCache(4096)                                  every token, in memory set aside at once
    cache = RollingCache(window=1023, sinks=4)             the first few and the newest: bounded for ever
    cache = PagedCache(BlockPool(1024, block_size=16))     blocks that sequences share, copied when written to
    cache = keep("key_mass", budget=64).caches(model)      of `regard.edits`: those keys that received most
    cache = LatentCache(4096)                              one small tensor per token, for `regard.nn.LatentAttention`

All of them have `attend`, `reorder`, `fork`, `position`, `lengths` and `bytes`. All but `KeptCache`, which drops what
it cannot bring back, take `int8=True` (of a `PagedCache`, its pool) and have `update`, `padded`, `truncate`, `to` and
`save`, which `regard.cache.load` reads.
`regard.nn.Cache` says what the modules ask of a cache of your own.
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
