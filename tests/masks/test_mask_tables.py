"""Intervals, block tables and counts against the dense form: exact where promised, else on the safe side."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest
import torch
from mask_oracle import (
    RULES,
    Sizes,
    causal,
    columns,
    documents_by_id,
    documents_by_length,
    join,
    padding,
    prefix,
    sizes,
)
from mask_oracle import blocks as block_rule
from mask_oracle import everything as everything_rule
from mask_oracle import keep as keep_rule
from mask_oracle import window as window_rule
from tests import forced

import regard
from regard import masks, sparse

INTERVAL_RULES = [everything_rule, causal, window_rule, padding, documents_by_length, prefix, columns]


def intervals_as_bits(found, z):
    bits = np.zeros((z.B, z.L, z.S), bool)
    for b in range(z.B):
        g = b if len(found.lo) > 1 else 0
        for k in range(found.lo.shape[1]):
            for r in range(z.L):
                bits[b, r, found.lo[g, k, r] : found.hi[g, k, r]] = True
    return bits


def assert_well_formed(found, z):
    lo, hi = found.lo, found.hi
    assert lo.dtype == hi.dtype == np.int64
    assert lo.shape == hi.shape
    assert lo.shape[0] in (1, z.B)
    assert 1 <= lo.shape[1] <= 4
    assert lo.shape[2] == z.L
    used = lo < hi
    assert ((lo[~used] == 0) & (hi[~used] == 0)).all()
    assert (hi <= z.S).all()
    assert (lo >= 0).all()
    assert (used[:, :-1] | ~used[:, 1:]).all(), "unused slots are last"
    assert (~used[:, 1:] | (lo[:, 1:] > hi[:, :-1])).all(), "ascending and apart"


def check_rows(mask, bits, z):
    found = mask.rows(z.L, z.S, z.offset, z.B)
    if found is not None:
        assert_well_formed(found, z)
        assert (bits == bits[:, :1]).all(), "intervals are for all heads"
        assert (intervals_as_bits(found, z) == bits[:, 0]).all(), (mask, z)
    return found


def check_blocks(mask, bits, z, block_q, block_k, exact):
    table = mask.blocks(z.L, z.S, z.offset, z.B, block_q, block_k)
    assert table.row_ptr.shape == (table.groups, -(-z.L // block_q) + 1)
    assert table.groups in (1, z.B)
    assert len(table.cols) == len(table.full)
    for b in range(z.B):
        g = b if table.groups > 1 else 0
        for q in range(table.query_blocks):
            at = slice(table.row_ptr[g, q], table.row_ptr[g, q + 1])
            listed = dict(zip(table.cols[at].tolist(), table.full[at].tolist(), strict=True))
            assert list(listed) == sorted(listed)
            assert len(listed) == at.stop - at.start
            for k in range(-(-z.S // block_k)):
                part = bits[b, :, q * block_q : (q + 1) * block_q, k * block_k : (k + 1) * block_k]
                assert k in listed or not part.any(), (mask, z, q, k)
                assert not listed.get(k) or part.all(), (mask, z, q, k)
                # Heads and items share a group's table, so exactness is asked of what they have in common.
                whole = bits if table.groups == 1 else bits[b : b + 1]
                every = whole[:, :, q * block_q : (q + 1) * block_q, k * block_k : (k + 1) * block_k]
                assert not exact or ((k in listed) == every.any() and bool(listed.get(k)) == every.all()), (mask, z)


def test_intervals_equal_the_dense_form():
    rng = random.Random(4)
    found = 0
    for _ in range(300):
        z = sizes(rng)
        mask, bits = join(rng, z, 3, [*INTERVAL_RULES, documents_by_id, keep_rule])
        found += check_rows(mask, bits, z) is not None
    assert found > 100


def test_positional_masks_and_their_joins_are_intervals():
    rng = random.Random(5)
    for _ in range(150):
        z = sizes(rng)
        mask, bits = join(rng, z, 1, INTERVAL_RULES)
        assert check_rows(mask, bits, z) is not None, mask


def test_documents_that_come_back_have_no_interval_form():
    assert masks.documents(ids=[0, 1, 0]).rows(3, 3, 0, 1) is None
    assert masks.documents(ids=[-1, 1, -1, 2]).rows(4, 4, 0, 1) is not None


def test_more_than_four_intervals_are_not_offered_but_still_classified_exactly():
    bits = np.zeros(21, bool)
    bits[::4] = True
    mask = masks.drop(torch.from_numpy(~bits))
    assert mask.rows(5, 21, 0, 1) is None
    wide = masks.columns(1) | masks.window(0) | masks.padding([20], side="left") & ~masks.columns(19)
    assert wide.rows(21, 21, 0, 1) is not None
    z = Sizes(1, 1, 5, 21, (0,))
    check_blocks(mask, np.broadcast_to(bits, (1, 1, 5, 21)), z, 2, 3, exact=True)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_blocks_of_a_single_rule_are_exact(rule):
    rng = random.Random(6)
    for _ in range(60):
        z = sizes(rng)
        mask, bits = rule(rng, z)
        exact = rule is not documents_by_id or mask.rows(z.L, z.S, z.offset, z.B) is not None
        check_blocks(mask, bits, z, rng.choice([1, 2, 3, 5, 7, 64]), rng.choice([1, 2, 3, 5, 7, 64]), exact)


def test_the_blocks_of_joins_are_safe_and_exact_where_intervals_exist():
    rng = random.Random(7)
    for _ in range(300):
        z = sizes(rng)
        mask, bits = join(rng, z, 3)
        exact = mask.rows(z.L, z.S, z.offset, z.B) is not None
        check_blocks(mask, bits, z, rng.choice([2, 3, 5, 7]), rng.choice([2, 3, 5, 7]), exact)


@pytest.mark.parametrize("offset", [0, -4, 9])
def test_the_blocks_of_random_blocks_are_exact(offset):
    mask = masks.random_blocks(3, 4, seed=9)
    for L, S, block_q, block_k in [(31, 45, 3, 5), (31, 45, 8, 8), (5, 7, 64, 64), (11, 63, 4, 4)]:
        bits = mask.dense(L, S, query_offset=offset).numpy()[None, None]
        check_blocks(mask, bits, Sizes(1, 1, L, S, (offset,)), block_q, block_k, exact=True)
        assert mask.kept_pairs(L, S, offset, 3, 5) == (15 * bits.sum(), True)


def test_blocks_are_the_same_however_the_rows_are_cut_into_strips(monkeypatch):
    rng = random.Random(8)
    cases = [(z := sizes(rng, 63), *join(rng, z, 3)) for _ in range(40)]
    forced.sizes(monkeypatch, rows_of_a_strip=10, cells_of_a_strip=12, pairs_of_a_counted_tile=100)
    for z, mask, bits in cases:
        check_blocks(mask, bits, z, 3, 5, exact=mask.rows(z.L, z.S, z.offset, z.B) is not None)
        assert mask.kept_pairs(z.L, z.S, z.offset, z.B, z.H) == (bits.sum(), True)


def test_kept_pairs_are_exact_for_the_promised_masks_and_their_intersections():
    rng = random.Random(9)
    for _ in range(200):
        z = sizes(rng)
        mask, bits = rng.choice([*INTERVAL_RULES, block_rule])(rng, z)
        for _ in range(rng.randint(0, 3)):
            other, more = rng.choice([*INTERVAL_RULES, block_rule])(rng, z)
            mask, bits = mask & other, bits & more
        assert mask.kept_pairs(z.L, z.S, z.offset, z.B, z.H) == (bits.sum(), True), (mask, z)


def test_kept_pairs_of_any_join_are_exact_or_an_upper_bound(monkeypatch):
    forced.sizes(monkeypatch, pairs_counted_one_by_one=0)
    rng = random.Random(10)
    exact = 0
    for _ in range(200):
        z = sizes(rng)
        mask, bits = join(rng, z, 3)
        count, known = mask.kept_pairs(z.L, z.S, z.offset, z.B, z.H)
        assert count == bits.sum() if known else bits.sum() <= count <= bits.size, (mask, z)
        exact += known
    assert 80 < exact < 200


def test_long_strided_and_block_masks_are_counted_by_formula():
    L = 5001
    i = np.arange(L)
    strided = masks.strided(7) & masks.causal() & masks.window(999)
    assert strided.kept_pairs(L, L, 0, 1, 1) == (int((np.minimum(i, 999) // 7 + 1).sum()), True)
    table = torch.eye(51, dtype=torch.bool)
    assert (masks.blocks(table, 100) & masks.causal()).kept_pairs(L, L, 0, 2, 3) == (6 * (50 * 5050 + 1), True)
    assert (masks.blocks(table, 100) | masks.columns(0)).kept_pairs(L, L, 0, 1, 1) == (50 * 10000 + 1, True)
    assert (~masks.strided(1)).kept_pairs(L, L, 0, 1, 1) == (0, True)


def test_unreadable_masks_are_bounded_by_what_is_known():
    hidden = masks.keep(torch.ones(1, 1, 300, 300, dtype=torch.bool, device="meta"))
    mask = masks.causal() & masks.window(10) & hidden
    assert not mask.readable()
    assert mask.rows(300, 300, 0, 1) is None
    table = mask.blocks(300, 300, 0, 1, 64, 64)
    assert not table.full.any()
    assert len(table.cols) == 9
    count, exact = mask.kept_pairs(300, 300, 0, 2, 3)
    assert not exact
    assert count >= 6 * (masks.causal() & masks.window(10)).kept_pairs(300, 300, 0, 1, 1)[0]


def test_an_unreadable_offset_makes_every_block_partial():
    offset = torch.zeros(3, dtype=torch.int64, device="meta")
    assert masks.causal().rows(7, 7, offset, 3) is None
    table = masks.causal().blocks(7, 7, offset, 3, 3, 3)
    assert table.cols.tolist() == [0, 1, 2] * 3
    assert not table.full.any()
    assert masks.causal().kept_pairs(7, 7, offset, 3, 1) == (3 * 49, False)


def test_an_empty_batch_has_no_groups():
    mask = masks.padding([])
    assert mask.rows(3, 5, 2, 0).lo.shape[0] == 0
    assert mask.blocks(3, 5, 2, 0, 2, 2).row_ptr.shape == (0, 3)
    assert mask.kept_pairs(3, 5, 2, 0, 7) == (0, True)
    assert mask.dense(3, 5).shape == (0, 1, 3, 5)


def test_four_million_tokens_are_classified_in_little_memory():
    L, documents = 4_000_000, 2_000
    lengths = np.full(documents, L // documents) + np.tile([-777, 777], documents // 2)
    mask = (masks.causal() & masks.window(left=256) & masks.documents(lengths=lengths.tolist())) | masks.columns(64)
    tracemalloc.start()
    table = mask.blocks(L, L, 0, 1, 128, 128)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 256 * 2**20
    counts = np.diff(table.row_ptr[0])
    assert counts.max() == 4
    for q in (0, 1, 9, 5000, 31249):
        near = max(0, q - 4)  # a window of 256 reaches no further back; what lies before it is only the first columns
        expected = {}
        for k in sorted({0, *range(near, min(q + 3, 31250))}):
            part = mask.tile(range(q * 128, q * 128 + 128), range(k * 128, k * 128 + 128), L, L, offset=0)
            if part.any():
                expected[k] = bool(part.all())
        at = slice(table.row_ptr[0, q], table.row_ptr[0, q + 1])
        assert dict(zip(table.cols[at].tolist(), table.full[at].tolist(), strict=True)) == expected


MILLIONS = 10_000_000
LONG = {
    "strided": (masks.strided(64), MILLIONS**2 // 64),
    "strided, causal": (masks.causal() & masks.strided(64), 64 * sum(range(1, MILLIONS // 64 + 1))),
    "dilated": (sparse.dilated(left=64, step=8), 65 * MILLIONS - 8 * sum(range(1, 65))),
}


@pytest.mark.parametrize("name", LONG)
def test_the_pairs_of_strided_patterns_are_counted_exactly_at_ten_million_tokens(name):
    mask, pairs = LONG[name]
    tracemalloc.start()
    assert mask.kept_pairs(MILLIONS, MILLIONS, 0, 1, 1) == (pairs, True)
    blocks = mask.unlisted_bytes(MILLIONS, MILLIONS, 0, 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**25
    if blocks is None:
        assert name == "dilated"
        return
    far = torch.empty(1, 1, 1, 64).expand(1, 1, MILLIONS, 64)
    cost = regard.explain(far, far, far, mask=mask).cost  # lists none of the 6 · 10⁹ blocks
    assert (cost.kept_pairs, cost.kept_exact) == (pairs, True)
    assert cost.peak_bytes > blocks


def test_a_fixed_pattern_takes_a_byte_for_each_token_and_is_counted_exactly():
    stride, length = 100, 1_000_000
    mask = sparse.fixed(length, stride=stride)
    assert sum(tensor.nbytes for tensor in mask.tensors) < 2 * length
    blocks = length // stride
    own, before = blocks * sum(range(1, stride + 1)), stride * sum(range(blocks))
    assert mask.kept_pairs(length, length, 0, 1, 1) == (own + before, True)
    for L, S in ((37, 37), (20, 45)):
        small = sparse.fixed(S, stride=7, summary=2)
        assert small.kept_pairs(L, S, S - L, 1, 1) == (int(small.dense(L, S).sum()), True)


def test_random_blocks_of_ten_million_tokens_have_a_bound_at_once():
    for mask in (masks.random_blocks(3, 64), masks.causal() & masks.random_blocks(3, 64)):
        assert mask.kept_pairs(MILLIONS, MILLIONS, 0, 1, 2) == (2 * MILLIONS * 192, False)
    joined = masks.window(63) & (masks.random_blocks(3, 64) | masks.columns(2))
    kept, exact = joined.kept_pairs(MILLIONS, MILLIONS, 0, 1, 1)
    assert not exact and kept == MILLIONS * 64 - sum(range(64))


def test_blocks_within_intervals_are_those_of_the_whole_mask():
    rng = random.Random(31)
    for _ in range(60):
        z = sizes(rng, 40)
        near, bits = window_rule(rng, z)
        other, more = join(rng, z, 2)
        for mask in (near & other, other & near & masks.strided(3)):
            table = mask.blocks(z.L, z.S, z.offset, z.B, 4, 5)
            dense = mask.tile(range(z.L), range(z.S), z.L, z.S, offset=z.offset).expand(z.B, -1, -1, -1).numpy()
            for b in range(z.B):
                starts = table.row_ptr[b if table.groups > 1 else 0]
                for q in range(table.query_blocks):
                    listed = set(table.cols[starts[q] : starts[q + 1]].tolist())
                    for k in range(table.key_blocks):
                        part = dense[b, :, 4 * q : 4 * q + 4, 5 * k : 5 * k + 5]
                        assert k in listed or not part.any()
                    full = table.full[starts[q] : starts[q + 1]]
                    for k, whole in zip(sorted(listed), full, strict=True):
                        assert not whole or dense[b, :, 4 * q : 4 * q + 4, 5 * k : 5 * k + 5].all()


@pytest.mark.parametrize("mask", [masks.random_blocks(3, 64), sparse.fixed(MILLIONS, stride=100)], ids=repr)
def test_a_plan_of_ten_million_tokens_makes_no_table(mask):
    far = torch.empty(1, 1, 1, 64).expand(1, 1, MILLIONS, 64)
    assert regard.explain(far, far, far, mask=mask).cost.peak_bytes > 2**30
