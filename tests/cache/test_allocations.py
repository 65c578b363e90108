"""A step of decoding makes nothing that grows with the cache."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from regard import masks
from regard.cache import BlockPool, KVCache, LatentCache, PagedCache, RollingCache
from regard.nn import MultiHeadAttention

CAUSAL = masks.causal()
# both longer than a piece, and with a whole one in which the shorter item ends: a step's own constant room is in both
SHORT, LONG = 2100, 5300
KINDS = {
    "kv": lambda: KVCache(LONG + 9),
    "kv int8": lambda: KVCache(LONG + 9, int8=True),
    "rolling": lambda: RollingCache(700, sinks=4),
    "rolling int8": lambda: RollingCache(700, sinks=4, int8=True),
    "paged": lambda: PagedCache(BlockPool(2 * (LONG + 29) // 16, 16)),
    "paged int8": lambda: PagedCache(BlockPool(2 * (LONG + 29) // 16, 16, int8=True)),
}


class NewStorages(TorchDispatchMode):
    """The bytes of every storage that operations make."""

    def __init__(self):
        super().__init__()
        self.known, self.sizes, self.kept = set(), [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        self.known |= {x.untyped_storage().data_ptr() for x in given}
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.known.add(x.untyped_storage().data_ptr())
                self.sizes.append(x.untyped_storage().nbytes())
                self.kept.append(x)  # an address that is freed could be given out again
        return out


def made_by_a_step(step):
    """Bytes of the largest new storage, over two steps; the first may fill what is kept for later ones."""
    with torch.no_grad():
        step()
        with NewStorages() as made:
            step()
    return max(made.sizes)


def prefilled(make, tokens, ragged, dtype=torch.float32):
    cache = make()
    given = cache.padded([tokens, tokens - 200]) if ragged else cache
    given.update(torch.randn(2, 2, tokens, 8, dtype=dtype), torch.randn(2, 2, tokens, 8, dtype=dtype))
    return cache


@pytest.mark.parametrize("ragged", [False, True], ids=["equal lengths", "different lengths"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_makes_nothing_that_grows(kind, ragged):
    mha, x = MultiHeadAttention(32, 4, num_kv_heads=2).eval(), torch.randn(2, 1, 32)
    made = {}
    for tokens in (SHORT, LONG):
        cache = prefilled(KINDS[kind], tokens, ragged)
        mask = cache.mask if isinstance(cache, RollingCache) else CAUSAL
        made[tokens] = made_by_a_step(lambda cache=cache, mask=mask: mha(x, mask=mask, cache=cache))
    assert made[LONG] <= made[SHORT]


def test_half_precision_is_not_widened_as_a_whole():
    mha, x = MultiHeadAttention(32, 4, num_kv_heads=2, dtype=torch.bfloat16).eval(), torch.randn(2, 1, 32).bfloat16()
    made = {}
    for tokens in (SHORT, LONG):
        cache = prefilled(KINDS["kv"], tokens, False, torch.bfloat16)
        made[tokens] = made_by_a_step(lambda cache=cache: mha(x, mask=CAUSAL, cache=cache))
    assert made[LONG] <= made[SHORT]


def test_a_step_over_latents_makes_nothing_that_grows():
    made = {}
    for tokens in (SHORT, LONG):
        cache = LatentCache(LONG + 9)
        cache.update(torch.randn(2, 1, tokens, 20))
        query, new = torch.randn(2, 6, 1, 20), torch.randn(2, 1, 1, 20)
        made[tokens] = made_by_a_step(lambda c=cache, q=query, k=new: c.attend(q, k, mask=CAUSAL, value_dim=16))
    assert made[LONG] <= made[SHORT]


def test_the_measure_finds_a_cache_that_copies():
    class Copying(KVCache):
        def _read(self, start, stop):
            return tuple(x.clone() for x in super()._read(start, stop))

    mha, x = MultiHeadAttention(32, 4, num_kv_heads=2).eval(), torch.randn(2, 1, 32)
    made = []
    for tokens in (SHORT, LONG):
        cache = prefilled(lambda: Copying(LONG + 9), tokens, False)
        made.append(made_by_a_step(lambda cache=cache: mha(x, mask=CAUSAL, cache=cache)))
    assert made[1] > 2 * made[0]


def test_update_gives_views_of_memory_set_aside_at_once():
    cache = KVCache(11)
    places = set()
    for tokens in (5, 1, 1, 3):
        with torch.no_grad():
            keys, values, _ = cache.update(torch.randn(2, 2, tokens, 8), torch.randn(2, 2, tokens, 8))
        places.add((keys.data_ptr(), values.data_ptr()))
    assert len(places) == 1 and cache.bytes == 2 * 2 * 2 * 11 * 8 * 4


class Operations(TorchDispatchMode):
    """The names of all operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_preview_of_a_step_makes_nothing_but_what_it_gives():
    cache, new = KVCache(23), torch.randn(2, 2, 1, 8)
    cache.update(torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8))
    with Operations() as ran:
        keys, values, *_ = cache.preview(new, new)
    assert keys.shape == values.shape == (2, 2, 8, 8) and ran.names == {"new_empty", "expand"}
