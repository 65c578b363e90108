"""Blocks: shared, copied when written to, given back, used again."""

from __future__ import annotations

import pytest
import torch
from tests.cache.kinds import CAUSAL, decode, module, random
from tests.nn.helpers import close

from regard.cache import BlockPool, CacheFull, PagedCache


def feed(cache, items, tokens):
    cache.update(random(items, 2, tokens, 12), random(items, 2, tokens, 10))


def test_blocks_are_taken_as_tokens_come_and_given_back_by_free():
    pool = BlockPool(11, 5)
    cache = PagedCache(pool)
    feed(cache, 2, 7)
    assert [len(blocks) for blocks in cache.blocks] == [2, 2]
    assert pool.free_blocks == 7 and not pool.full
    feed(cache, 2, 3)
    assert pool.free_blocks == 7
    feed(cache, 2, 1)
    assert pool.free_blocks == 5
    cache.free()
    assert pool.free_blocks == 11 and cache.lengths == []
    feed(cache, 11, 5)
    assert pool.full and cache.lengths == [5] * 11
    assert sorted(block for blocks in cache.blocks for block in blocks) == list(range(11))


def test_a_shared_prefix_takes_its_blocks_once_and_is_copied_where_it_is_written_to():
    pool = BlockPool(20, 5)
    cache = PagedCache(pool)
    feed(cache, 1, 12)  # two full blocks and one of two tokens
    cache.reorder([0, 0, 0])
    assert pool.free_blocks == 17 and cache.lengths == [12] * 3
    assert cache.bytes == 3 * pool.bytes // 20
    feed(cache, 3, 1)
    # two of the three copy the third block; the last one of them is alone with it by then
    assert pool.free_blocks == 15
    first, second, third = cache.blocks
    assert first[:2] == second[:2] == third[:2]
    assert len({first[2], second[2], third[2]}) == 3
    feed(cache, 3, 3)
    assert pool.free_blocks == 12


def test_a_shared_full_block_is_never_copied():
    pool = BlockPool(9, 5)
    cache = PagedCache(pool)
    feed(cache, 1, 10)
    other = cache.fork()
    feed(other, 1, 1)
    assert other.blocks[0][:2] == cache.blocks[0]
    assert pool.free_blocks == 6


def test_what_one_sequence_writes_does_not_reach_the_one_it_was_forked_from():
    mha, x, pool = module(), random(1, 12, 48), BlockPool(20, 5)
    cache = PagedCache(pool)
    decode(mha, x, [12], CAUSAL, cache)
    other = cache.fork()
    decode(mha, random(1, 6, 48), [6], CAUSAL, other)
    other.fill_unused(torch.nan)
    y = random(1, 4, 48)
    out = decode(mha, y, [4], CAUSAL, cache)
    assert close(out, mha(torch.cat([x, y], 1), mask=CAUSAL)[:, 12:], 1e-11)
    other.free()
    cache.free()
    assert pool.free_blocks == 20


def test_a_pool_that_is_full_says_so_and_nothing_changes():
    pool = BlockPool(4, 5)
    cache = PagedCache(pool)
    feed(cache, 2, 8)
    blocks = cache.blocks
    with pytest.raises(CacheFull, match="2 blocks of 5 tokens are needed, and 0 of 4 are free"):
        feed(cache, 2, 3)
    assert cache.blocks == blocks and cache.lengths == [8, 8]
    cache.truncate([8, 5])
    assert pool.free_blocks == 1
    cache.padded([3, 0]).update(random(2, 2, 3, 12), random(2, 2, 3, 10))
    assert cache.lengths == [11, 5] and pool.full


def test_copies_on_write_are_counted_before_anything_is_written():
    pool = BlockPool(2, 5)
    cache = PagedCache(pool)
    feed(cache, 1, 3)
    cache.reorder([0, 0, 0])
    with pytest.raises(CacheFull, match="2 blocks of 5 tokens are needed, and 1 of 2 are free"):
        feed(cache, 3, 1)
    assert cache.lengths == [3] * 3 and pool.free_blocks == 1
    cache.reorder([0, 0])
    feed(cache, 2, 1)
    assert pool.full


def test_truncate_keeps_what_others_share():
    pool = BlockPool(9, 5)
    cache = PagedCache(pool)
    feed(cache, 1, 12)
    other = cache.fork()
    cache.truncate(6)
    assert pool.free_blocks == 6
    other.free()
    assert pool.free_blocks == 7


def test_sequences_join_and_split_batches():
    mha, pool = module(), BlockPool(31, 5)
    prompts = [random(1, n, 48) for n in (7, 11, 3)]
    caches = [PagedCache(pool) for _ in prompts]
    for prompt, cache in zip(prompts, caches, strict=True):
        decode(mha, prompt, [prompt.shape[1]], CAUSAL, cache)
    free = pool.free_blocks
    batch = PagedCache.join(caches)
    assert pool.free_blocks == free and batch.lengths == [7, 11, 3] and caches[0].lengths == []
    y = random(3, 3, 48)
    out = decode(mha, y, [1, 2], CAUSAL, batch)
    alone = batch.split()
    assert [one.lengths for one in alone] == [[10], [14], [6]] and batch.lengths == []
    alone[1].free()
    rest = PagedCache.join([alone[2], alone[0]])
    z = random(2, 2, 48)
    more = decode(mha, z, [1, 1], CAUSAL, rest)
    for item, prompt in enumerate(prompts):
        whole = mha(torch.cat([prompt, y[item : item + 1]], 1), mask=CAUSAL)
        assert close(out[item], whole[0, -3:], 1e-11)
    for item, source in enumerate((2, 0)):
        whole = mha(torch.cat([prompts[source], y[source : source + 1], z[item : item + 1]], 1), mask=CAUSAL)
        assert close(more[item], whole[0, -2:], 1e-11)
    rest.free()
    assert pool.free_blocks == 31


def test_joins_that_have_no_meaning_are_refused():
    pool, other = BlockPool(5), BlockPool(5)
    one, two, three = PagedCache(pool), PagedCache(pool), PagedCache(other)
    feed(one, 1, 1)
    feed(three, 1, 1)
    for caches, words in (
        ([], "one or more"),
        ([one, three], "of the same pool"),
        ([one, one], "the same cache twice"),
        ([one, two], "one without any sequence"),
    ):
        with pytest.raises(ValueError, match=words):
            PagedCache.join(caches)
    with pytest.raises(ValueError, match="each layer needs a pool of its own"):
        two.update(random(1, 3, 1, 12), random(1, 3, 1, 10))
    assert pool.free_blocks == 4
