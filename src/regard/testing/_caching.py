"""Rules 51 to 54 and 59: caches, and keys and values that are made from latents."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard import reference
from regard.testing import _rules_of_masks as meaning
from regard.testing._calls import Call, array, expect, largest
from regard.testing._suite import DOUBLE, Trial, rule, within

CAUSAL: meaning.Tree = ("causal",)
STREAM: meaning.Tree = ("and", ("causal",), ("or", ("window", 5, 0), ("columns", 2)))
KINDS = ("KVCache", "RollingCache", "PagedCache")
SPLITS = ((79,), (7, 1, 1, 1, 69), (70, *[1] * 9), (31, 5, 43))
CACHED = "every split into prefill chunks and decode steps equals one full causal forward"


def _cache(t: Trial, kind: str, capacity: int = 90) -> tuple[Any, meaning.Tree]:
    """A new cache, and the mask to use it with; a rolling one has to forget before the 79th token."""
    found = t.need("cache")
    if kind == "RollingCache":
        return found.RollingCache(5, sinks=2), STREAM
    if kind == "PagedCache":
        return found.PagedCache(found.BlockPool(-(-2 * capacity // 5), 5)), CAUSAL
    return found.KVCache(capacity), CAUSAL


def _step(t: Trial, cache: Any, given: Any, call: Call, tokens: slice, tree: meaning.Tree) -> Tensor:
    """Attention of some of the call's tokens, through the cache (`given`: as it is, or padded)."""
    key, value, offset = given.update(call.key[:, :, tokens], call.value[:, :, tokens])
    mask = meaning.build(t.masks, tree, call.query.device)
    filled = cache.filled
    return t.fn(
        call.query[:, :, tokens], key, value, mask=mask if filled is None else mask & filled, query_offset=offset
    )


def _chunks(t: Trial, cache: Any, call: Call, split: tuple[int, ...], tree: meaning.Tree) -> Tensor:
    parts, start = [], 0
    for tokens in split:
        parts.append(_step(t, cache, cache, call, slice(start, start + tokens), tree))
        start += tokens
    return torch.cat(parts, 2)


@rule(51, CACHED, KINDS)
def in_chunks(t: Trial, kind: str) -> str:
    _, tree = _cache(t, kind)
    call = t.call(2, 4, 79, 79, 7, Hkv=2, tree=tree)
    budget, details = call.value_budget(), []
    for split in SPLITS:
        cache, _ = _cache(t, kind)
        details.append(within(f"{len(split)} chunks", _chunks(t, cache, call, split, tree), call.oracle.out, budget))
    return "; ".join(details)


@rule(52, "unused cache slots may hold NaN", KINDS)
def poisoned_slots(t: Trial, kind: str) -> str:
    cache, tree = _cache(t, kind)
    call = t.call(2, 4, 13, 13, 7, Hkv=2)
    lengths = (9, 4)
    _step(t, cache, cache.padded(lengths, tokens=9), call, slice(0, 9), tree)
    parts = []
    # one new token sees all that is held: with a mask that permits everything, only the cache hides its empty slots
    seen = tree if kind == "RollingCache" else ("everything",)
    for at in range(9, 13):
        cache.fill_unused(float("nan"))
        parts.append(_step(t, cache, cache, call, slice(at, at + 1), seen))
    return _each_alone(call, lengths, (9, 13), torch.cat(parts, 2), tree)


def _each_alone(call: Call, lengths: tuple[int, ...], later: tuple[int, int], found: Tensor, tree: meaning.Tree) -> str:
    """Rows `later` of the batch against each item by itself, without the padding behind its first tokens."""
    details = []
    for item, count in enumerate(lengths):
        places = [*range(count), *range(*later)]
        parts = {name: getattr(call, name)[item : item + 1, :, places] for name in ("query", "key", "value")}
        alone = call.but(**parts, tree=tree)
        exact = alone.oracle.out[:, :, count:]
        details.append(within(f"item {item}", found[item : item + 1], exact, alone.value_budget()))
    return "; ".join(details)


@rule(53, "overflow raises and leaves the cache unchanged; truncate(n) equals never having seen the rest", KINDS)
def overflow_and_truncate(t: Trial, kind: str) -> str:
    cache, tree = _cache(t, kind, capacity=15)
    call = t.call(2, 4, 14, 14, 7, Hkv=2, tree=tree)
    _chunks(t, cache, call, (9,), tree)
    if kind != "RollingCache":
        more = t.normal(2, 2, 40, 7, seed=9)
        t.raises(ValueError, ["token"], lambda: cache.update(more, more))
    expect(list(cache.lengths) == [9, 9], f"lengths became {list(cache.lengths)}")
    # other tokens take the place of the last four
    junk = t.normal(2, 2, 3, 7, seed=10)
    cache.update(junk, junk)
    cache.truncate(9)
    parts = [_step(t, cache, cache, call, slice(at, at + 1), tree) for at in range(9, 14)]
    return within("rows after it", torch.cat(parts, 2), call.oracle.out[:, :, 9:], call.value_budget())


@rule(
    54,
    "a left- or right-padded batch equals each sequence alone",
    [f"{kind}, {side}" for kind in KINDS for side in ("left", "right")],
)
def padded_batch(t: Trial, case: str) -> str:
    kind, side = case.split(", ")
    cache, tree = _cache(t, kind)
    call = t.call(2, 4, 13, 13, 7, Hkv=2)
    lengths = (9, 4)
    given = call
    if side == "left":
        moved = {name: getattr(call, name).clone() for name in ("query", "key", "value")}
        for name in moved:
            moved[name][1, :, :9] = moved[name][1, :, :9].roll(5, 1)
        given = call.but(**moved)
    _step(t, cache, cache.padded(lengths, side=side), given, slice(0, 9), tree)
    parts = [_step(t, cache, cache, given, slice(at, at + 2), tree) for at in (9, 11)]
    return _each_alone(call, lengths, (9, 13), torch.cat(parts, 2), tree)


@rule(54, "a left- or right-padded batch equals each sequence alone; the module's pad rows are 0", ("left", "right"))
def rows_of_padding(t: Trial, side: str) -> str:
    module = t.need("nn").MultiHeadAttention(12, 3, device=t.device, dtype=t.dtype).eval()
    torch.nn.init.ones_(module.out_proj.bias)
    x = t.normal(2, 7, 12)
    pads = slice(0, 4) if side == "left" else slice(3, 7)
    x[1, pads] = float("nan")
    cache = t.need("cache").KVCache(9)
    with torch.no_grad():
        by_mask = module(x, mask=t.masks.causal() & t.masks.padding([7, 3], side=side))
        by_cache = module(x, mask=t.masks.causal(), cache=cache.padded([7, 3], side=side))
    for name, out in (("mask", by_mask), ("cache", by_cache)):
        expect(not bool(out[1, pads].any()), f"rows of padding by {name} are not 0")
        expect(bool(torch.isfinite(out).all()), f"padding by {name}: not finite")
    return "exactly 0"


@rule(59, "latent attention equals attention on the decompressed keys within 1e-10", ("expand", "absorb"), DOUBLE)
def latents(t: Trial, form: str) -> str:
    attend = t.need("latent_attention")
    shapes = ((2, 3, 5, 6), (2, 3, 5, 4), (2, 9, 7), (2, 9, 4), (3, 6, 7), (3, 5, 7))
    given = [t.normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    out = attend(*given, mask=t.masks.causal(), form=form)
    q_nope, q_rope, latent, k_rope, w_uk, w_uv = (array(x) for x in given)
    plain = np.einsum("bsr,hnr->bhsn", latent, w_uk)
    key = np.concatenate([plain, np.broadcast_to(k_rope[:, None], (2, 3, 9, 4))], -1)
    value = np.einsum("bsr,hvr->bhsv", latent, w_uv)
    pairs = np.tril(np.ones((5, 9), dtype=bool), 4)
    exact = reference.attention(np.concatenate([q_nope, q_rope], -1), key, value, mask=pairs)
    error = largest(array(out) - exact)
    expect(error <= 1e-10, f"error {error:.2e} > 1e-10")
    return f"error {error:.1e}"
