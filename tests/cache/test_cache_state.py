"""Overflow, going back, beams and copies (rule 53)."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tests.cache.kinds import CAUSAL, EXACT, INT8, decode, module, random
from tests.nn.helpers import close

from regard.cache import BlockPool, CacheFull, KVCache, LatentCache, PagedCache, RollingCache

SMALL = {
    "kv": lambda: KVCache(13),
    "int8": lambda: KVCache(13, int8=True),
    "paged": lambda: PagedCache(BlockPool(8, 5)),
}


def read(cache):
    """All that a cache holds."""
    keys, values = cache._read(0, max(cache.lengths))
    return keys.clone(), values.clone()


@pytest.mark.parametrize("kind", SMALL)
def test_overflow_is_refused_and_leaves_the_cache_unchanged(kind):
    mha, x, cache = module(), random(2, 20, 48), SMALL[kind]()
    with torch.no_grad():
        mha(x[:, :12], mask=CAUSAL, cache=cache)
        before, (keys, values) = cache.lengths, read(cache)
        with pytest.raises(CacheFull, match="13 tokens|8 are free|of 8"):
            mha(x, mask=CAUSAL, cache=cache)
        assert cache.lengths == before
        after = read(cache)
        assert torch.equal(after[0], keys) and torch.equal(after[1], values)
        assert mha(x[:, 12:13], mask=CAUSAL, cache=cache).shape == (2, 1, 48)


def test_one_item_that_overflows_stops_the_whole_batch():
    cache = KVCache(7)
    cache.padded([6, 2]).update(random(2, 2, 6, 12), random(2, 2, 6, 10))
    with pytest.raises(ValueError, match="holds 6, and was given 2 more"):
        cache.padded([2, 1]).update(random(2, 2, 2, 12), random(2, 2, 2, 10))
    assert cache.lengths == [6, 2]
    cache.padded([1, 5], tokens=5).update(random(2, 2, 5, 12), random(2, 2, 5, 10))
    assert cache.lengths == [7, 7]


@pytest.mark.parametrize("length", [0, 3, 40, [40, 11, 0]])
@pytest.mark.parametrize("kind", EXACT)
def test_truncate_equals_never_having_seen_the_rest(kind, length):
    make, mask = EXACT[kind]
    mha, x, y = module(), random(3, 50, 48), random(3, 20, 48)
    cache = make()
    decode(mha, x, [50], mask, cache)
    counts = [length] * 3 if isinstance(length, int) else length
    cache.truncate(length)
    assert cache.lengths == counts
    cache.fill_unused(torch.nan)
    out = decode(mha, y, [7, *[1] * 13], mask, cache)
    for item, count in enumerate(counts):
        whole = mha(torch.cat([x[item, :count], y[item]])[None], mask=mask)[0]
        assert close(out[item], whole[count:], 1e-11)


@pytest.mark.parametrize("length", [90, 71, 60])
def test_a_rolling_cache_goes_back_as_far_as_it_remembers(length):
    make, mask = EXACT["rolling"]
    mha, x, y, cache = module(), random(3, 90, 48), random(3, 9, 48), make()
    decode(mha, x, [60, 30], mask, cache)
    for too_far in (59, 3, [90, 90, 0]):
        with pytest.raises(ValueError, match="some are forgotten; the item can go back to 60 tokens at least"):
            cache.truncate(too_far)
    assert cache.lengths == [90] * 3
    cache.truncate(length)
    out = decode(mha, y, [5, 4], mask, cache)
    assert close(out, mha(torch.cat([x[:, :length], y], 1), mask=mask)[:, length:], 1e-11)


@pytest.mark.parametrize("kind", [*EXACT, *(f"{name}, int8" for name in INT8)])
def test_reorder_gives_each_beam_the_past_it_chose(kind):
    make, mask = INT8[kind.removesuffix(", int8")] if kind.endswith("int8") else EXACT[kind]
    mha, x, cache = module(), random(3, 90, 48), make()
    order = [2, 0, 2]
    decode(mha, x, [90], mask, cache)
    cache.reorder(order)
    y = random(3, 9, 48)
    out = decode(mha, y, [1] * 9, mask, cache)
    other = make()
    decode(mha, x[order], [90], mask, other)
    assert close(out, decode(mha, y, [1] * 9, mask, other), 1e-11)
    assert cache.lengths == [99] * 3


@pytest.mark.parametrize("kind", EXACT)
def test_reorder_may_change_the_number_of_items(kind):
    make, mask = EXACT[kind]
    mha, x, cache = module(), random(2, 11, 48), make()
    with torch.no_grad():
        mha(x, mask=mask, cache=cache.padded([11, 4]))
    cache.reorder([1, 0, 0, 1, 1])
    assert cache.lengths == [4, 11, 11, 4, 4]
    y = random(5, 3, 48)
    out = decode(mha, y, [1, 2], mask, cache)
    for item, (source, count) in enumerate([(1, 4), (0, 11), (0, 11), (1, 4), (1, 4)]):
        whole = mha(torch.cat([x[source, :count], y[item]])[None], mask=mask)[0]
        assert close(out[item], whole[count:], 1e-11)
    cache.reorder(torch.tensor([4, 1]))
    assert cache.lengths == [7, 14]
    with pytest.raises(ValueError, match="index holds 2, but the cache holds 2 items"):
        cache.reorder([0, 2])


@pytest.mark.parametrize("kind", EXACT)
def test_forks_go_their_own_ways(kind):
    make, mask = EXACT[kind]
    mha, x, cache = module(), random(3, 17, 48), make()
    decode(mha, x, [17], mask, cache)
    other = cache.fork()
    ways = [random(3, 30, 48), random(3, 30, 48)]
    # step by step in turn, so that a shared slot would show
    outs = [[], []]
    for t in range(30):
        for way, one in enumerate((cache, other)):
            outs[way].append(decode(mha, ways[way][:, t : t + 1], [1], mask, one))
    for way in (0, 1):
        whole = mha(torch.cat([x, ways[way]], 1), mask=mask)
        assert close(torch.cat(outs[way], 1), whole[:, 17:], 1e-11)


@pytest.mark.parametrize("kind", EXACT)
def test_a_rolling_memory_is_bounded_and_others_are_set_aside_at_once(kind):
    make, mask = EXACT[kind]
    mha, cache, sizes = module(), make(), set()
    for _ in range(3):
        decode(mha, random(3, 37, 48), [36, 1], mask, cache)
        sizes.add(cache.pool.bytes if isinstance(cache, PagedCache) else cache.bytes)
    assert len(sizes) == 1
    if isinstance(cache, RollingCache):
        assert sizes == {3 * 2 * (cache.sinks + cache.window + 64) * (12 + 10) * 8}


@pytest.mark.parametrize("kind", EXACT)
def test_caches_can_be_copied_and_pickled(kind):
    make, mask = EXACT[kind]
    mha, x, cache = module(), random(3, 17, 48), make()
    decode(mha, x, [17], mask, cache)
    y = random(3, 1, 48)
    others = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    out = decode(mha, y, [1], mask, cache)
    assert all(torch.equal(decode(mha, y, [1], mask, other), out) for other in others)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: KVCache(0), "capacity must be at least 1, got 0"),
        (lambda: KVCache(True), "capacity must be an int, got True"),
        (lambda: KVCache(7, int8=1), "int8 must be True or False, got 1"),
        (lambda: RollingCache(-1), "window must be at least 0, got -1"),
        (lambda: RollingCache(7, sinks=2.0), "sinks must be an int, got 2.0"),
        (lambda: BlockPool(0), "blocks must be at least 1, got 0"),
        (lambda: BlockPool(3, 0), "block_size must be at least 1, got 0"),
        (lambda: BlockPool(3, int8=None), "int8 must be True or False, got None"),
        (lambda: PagedCache(3), "pool must be a regard.cache.BlockPool, got int"),
        (lambda: KVCache(7).padded(3), "lengths must be one int for each item, got int"),
        (lambda: KVCache(7).padded([1, -1]), "each of lengths must be at least 0, got -1"),
        (lambda: KVCache(7).padded([1, 2], side="up"), "side must be 'left' or 'right', got 'up'"),
        (lambda: KVCache(7).padded([1, 5], tokens=3), "tokens must be at least 5, got 3"),
        (lambda: KVCache(7).padded(torch.ones(2)), "lengths must be one int for each item, got a torch.float32 tensor"),
    ],
)
def test_wrong_arguments_are_named(make, words):
    with pytest.raises((TypeError, ValueError)) as error:
        make()
    assert words in str(error.value)


def test_tokens_that_do_not_fit_the_cache_are_refused():
    cache = KVCache(7)
    key, value = random(3, 2, 1, 12), random(3, 2, 1, 10)
    cache.update(key, value)
    wrong = {
        "key has 2 items, but this cache holds 3": (key[:2], value[:2]),
        "2 heads of dim 12": (key[..., :8], value),
        "value is None, but this cache holds keys and values": (key, None),
        "is torch.float32 on cpu, but this cache holds torch.float64": (key.float(), value.float()),
        "must agree in batch, heads and tokens": (key, value.expand(3, 2, 2, 10)),
        "key must be \\[batch, num_kv_heads, token, dim\\]": (key[0], value[0]),
    }
    for words, (k, v) in wrong.items():
        with pytest.raises((TypeError, ValueError), match=words):
            cache.update(k, v)
    assert cache.lengths == [1, 1, 1]
    with pytest.raises(ValueError, match="is for 2 items of 1 tokens, got key"):
        cache.padded([1, 0]).update(key, value)
    with pytest.raises(ValueError, match="length 3 is beyond the 1 tokens"):
        cache.truncate(3)
    with pytest.raises(ValueError, match="must be at most"):
        cache.truncate([1, 2, 0])
    with pytest.raises(ValueError, match="value was given to a LatentCache"):
        LatentCache(7).update(key, value)
