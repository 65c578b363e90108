"""Random stories of a cache against a list of tokens for each item and the oracle."""

from __future__ import annotations

import random as stories

import numpy as np
import pytest
import torch
from tests import forced
from tests.cache.kinds import CAUSAL, ROLLING, random

from regard import reference
from regard.cache import BlockPool, CacheFull, KVCache, PagedCache, RollingCache

KINDS = {
    "kv": (lambda: KVCache(60), CAUSAL),
    "rolling": (lambda: RollingCache(7, sinks=3), ROLLING),
    "paged": (lambda: PagedCache(BlockPool(40, 4)), CAUSAL),
}


class Story:
    """A cache beside what it should hold: for each item the keys and values of all its tokens."""

    def __init__(self, kind: str, seed: int) -> None:
        make, self.mask = KINDS[kind]
        self.cache = make()
        self.draw = stories.Random(seed)
        self.items = [[] for _ in range(self.draw.choice([1, 3]))]

    def tell(self, steps: int) -> int:
        done = 0
        for _ in range(steps):
            act = self.draw.choice([self.attend] * 5 + [self.truncate, self.reorder, self.fork, self.poison])
            done += act()
            assert self.cache.lengths in ([len(item) for item in self.items], [])
        return done

    def attend(self) -> int:
        batch, tokens = len(self.items), self.draw.choice([1, 1, 1, 2, 5, 23])
        side = self.draw.choice([None, "left", "right"])
        counts = [tokens if side is None else self.draw.randint(0, tokens) for _ in self.items]
        q, k, v = random(batch, 4, tokens, 6), random(batch, 2, tokens, 6), random(batch, 2, tokens, 5)
        given = self.cache if side is None else self.cache.padded(counts, side=side, tokens=tokens)
        try:
            out = given.attend(q, k, v, mask=self.mask)
        except CacheFull:
            assert not isinstance(self.cache, RollingCache)
            return 0
        for item, count in enumerate(counts):
            real = slice(tokens - count, tokens) if side == "left" else slice(0, count)
            self.items[item] += list(zip(k[item, :, real].unbind(1), v[item, :, real].unbind(1), strict=True))
            self.compare(item, q[item, :, real], out[item, :, real])
        return 1

    def compare(self, item: int, query: torch.Tensor, out: torch.Tensor) -> None:
        held = self.items[item]
        if query.shape[1] == 0 or not held:
            return
        key, value = (torch.stack(parts, 1)[None].numpy() for parts in zip(*held, strict=True))
        pairs = self.mask.dense(query.shape[1], len(held)).numpy()
        exact = reference.attention(query[None].numpy(), key, value, mask=pairs)
        assert np.abs(out.numpy() - exact[0]).max() < 1e-11

    def truncate(self) -> int:
        wanted = [self.draw.randint(0, len(item)) for item in self.items]
        if self.cache.lengths:
            try:
                self.cache.truncate(wanted)
            except ValueError:
                assert isinstance(self.cache, RollingCache)
                return 0
        self.items = [item[:count] for item, count in zip(self.items, wanted, strict=True)]
        return 0

    def reorder(self) -> int:
        if self.cache.lengths:
            order = [self.draw.randrange(len(self.items)) for _ in range(self.draw.choice([1, 2, 3, 4]))]
            self.cache.reorder(order)
            self.items = [list(self.items[i]) for i in order]
        return 0

    def fork(self) -> int:
        old, self.cache = self.cache, self.cache.fork()
        if isinstance(old, PagedCache):
            old.free()
        elif old.lengths:
            old.fill_unused(3.0)
        return 0

    def poison(self) -> int:
        if self.cache.lengths:
            self.cache.fill_unused(torch.nan)
        return 0


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_holds_what_it_was_told(kind, seed, monkeypatch):
    forced.sizes(monkeypatch, piece_of_a_cache=[1024, 8, 11][seed % 3])
    story = Story(kind, seed)
    with torch.no_grad():
        assert story.tell(45) > 5
    if isinstance(story.cache, PagedCache):
        pool = story.cache.pool
        assert pool.free_blocks + len({b for blocks in story.cache.blocks for b in blocks}) == pool.blocks
        story.cache.free()
        assert pool.free_blocks == pool.blocks
