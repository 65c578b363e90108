"""What each mask permits: the materialised form of every rule, of every join, at every small size (rules 1, 10–14)."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from mask_oracle import RULES, Sizes, full_size, join, sizes

import regard
from regard import masks


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_mask_equals_its_materialised_form_at_every_size_up_to_9(rule):
    rng = random.Random(1)
    for L in range(10):
        for S in range(10):
            for offsets in [(S - L,), (0,), (-3,), (5,), (S - L, -2, 3)]:
                z = Sizes(3, 2, L, S, offsets)
                mask, bits = rule(rng, z)
                mask.check(*z[:4])
                assert (full_size(mask, z) == bits).all(), (mask, z)


def test_joins_equal_the_same_operations_on_materialised_arrays():
    rng = random.Random(2)
    for _ in range(400):
        z = sizes(rng, 11)
        mask, bits = join(rng, z, 3)
        mask.check(*z[:4])
        assert (full_size(mask, z) == bits).all(), (mask, z)


def test_a_tile_is_that_part_of_the_whole():
    rng = random.Random(3)
    for _ in range(200):
        z = sizes(rng, 15)
        mask, bits = join(rng, z, 2)
        rows = range(*sorted((rng.randint(0, z.L), rng.randint(0, z.L))))
        cols = slice(*sorted((rng.randint(0, z.S), rng.randint(0, z.S))))
        tile = mask.tile(rows, cols, z.L, z.S, offset=z.offset)
        assert tile.shape[2:] == (len(rows), cols.stop - cols.start)
        assert (tile.numpy() == bits[:, :, rows.start : rows.stop, cols]).all()


def test_random_blocks_keep_the_given_count_of_distinct_key_blocks():
    for count in (0, 1, 3, 7, 20):
        seen = masks.random_blocks(count, 5, seed=11).dense(63, 33)
        blocks = seen[:, ::5]
        assert torch.equal(blocks.sum(1), torch.full((63,), min(count, 7)))
        assert torch.equal(seen, blocks.repeat_interleave(5, 1)[:, :33])


def test_random_blocks_are_the_smallest_hashes_of_seed_row_and_column():
    from regard._hash import mix_number

    size, count, seed, L, S = 3, 2, 2**40 + 5, 11, 31
    seen = masks.random_blocks(count, size, seed).dense(L, S, query_offset=-4)
    for r in range(L):
        row = (r - 4) // size
        key = mix_number(row + mix_number(seed + mix_number(seed >> 32)))
        best = sorted(range(11), key=lambda col: (mix_number(key + col), col))[:count]
        assert [j for j in range(S) if seen[r, j]] == [j for j in range(S) if j // size in best]


def test_random_blocks_differ_between_seeds_and_between_rows():
    one, two = masks.random_blocks(2, 1, seed=0).dense(63, 63), masks.random_blocks(2, 1, seed=1).dense(63, 63)
    assert not torch.equal(one, two)
    assert len({tuple(row.tolist()) for row in one}) > 50


def test_random_blocks_follow_the_offset_of_each_item():
    mask = masks.random_blocks(2, 3, seed=5)
    both = mask.dense(7, 20, query_offset=torch.tensor([-4, 9]))
    assert both.shape == (2, 1, 7, 20)
    for item, offset in zip(both[:, 0], (-4, 9), strict=True):
        assert torch.equal(item, mask.dense(7, 20, query_offset=offset))


def test_causal_is_aligned_at_the_end_unless_an_offset_is_given():
    assert masks.causal().dense(2, 4).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert masks.causal().dense(2, 4, query_offset=0).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]
    assert not masks.causal().dense(3, 2)[0].any()


def test_a_window_keeps_left_plus_right_plus_one_keys():
    assert masks.window(left=3, right=2).dense(21, 21)[10].sum() == 6


def test_masks_together_mean_intersection_in_any_order():
    parts = [masks.causal(), masks.window(2), masks.padding([5, 3]), masks.keep(torch.rand(7, 7) > 0.3)]
    one = (parts[0] & parts[1] & parts[2] & parts[3]).dense(7, 7)
    other = (parts[3] & (parts[2] & parts[0]) & parts[1]).dense(7, 7)
    by_hand = parts[0].dense(7, 7) & parts[1].dense(7, 7) & parts[2].dense(7, 7) & parts[3].dense(7, 7)
    assert torch.equal(one, other)
    assert torch.equal(one, by_hand)


def test_dense_has_batch_and_head_only_where_they_matter():
    assert masks.causal().dense(3, 5).shape == (3, 5)
    assert masks.padding([4, 2, 1]).dense(3, 5).shape == (3, 1, 3, 5)
    assert masks.keep(torch.ones(1, 7, 1, 5, dtype=torch.bool)).dense(3, 5).shape == (1, 7, 3, 5)
    assert masks.causal().dense(3, 5, query_offset=torch.tensor([0, 2])).shape == (2, 1, 3, 5)
    assert masks.columns(2).dense(0, 5).shape == (0, 5)


def test_keep_and_drop_are_opposite_and_index_rows_not_positions():
    bits = torch.rand(3, 7) > 0.5
    assert torch.equal(masks.keep(bits).dense(3, 7, query_offset=-9), bits)
    assert torch.equal(masks.drop(bits).dense(3, 7, query_offset=4), ~bits)


def test_limits_at_the_edge_of_the_integers_do_not_wrap_around():
    far = masks.window(2**63 - 1, 2**63 - 1)
    assert far.dense(3, 5).all()
    assert far.rows(3, 5, 2, 1).hi.tolist() == [[[5, 5, 5]]]
    assert masks.columns(2**63 - 1).dense(3, 5).all()
    assert torch.equal(masks.strided(2**63 - 1).dense(5, 5), torch.eye(5, dtype=torch.bool))


def test_a_query_outside_the_keys_belongs_to_no_document():
    seen = masks.documents(lengths=[2, 3]).dense(7, 5, query_offset=-1)
    assert not seen[0].any()
    assert not seen[6].any()
    assert seen[1:6].any(1).all()


def test_the_callers_tensors_are_not_modified():
    ids, bits = torch.tensor([0, 0, 1, -1, 1]), torch.rand(3, 5) > 0.5
    before = ids.clone(), bits.clone()
    mask = ~(masks.documents(ids=ids) | masks.keep(bits))
    mask.dense(3, 5), mask.blocks(3, 5, 2, 1, 2, 2), mask.rows(3, 5, 2, 1), mask.kept_pairs(3, 5, 2, 1, 1)
    assert torch.equal(ids, before[0])
    assert torch.equal(bits, before[1])
    assert ids._version == bits._version == 0


def test_a_drawing_has_a_row_for_each_query_and_stays_small_for_long_masks():
    text = masks.causal().show(3, 12)
    assert text.splitlines()[-1].count("■") == 12
    assert "first query at 9" in text
    long = masks.causal().show(1000, 3000)
    assert max(len(line) for line in long.splitlines()) < 160
    assert len(long.splitlines()) == 2 + len(range(0, 1000, 16))
    assert set("■▒·") <= set(long)
    assert masks.causal().show(0, 0).startswith("causal()")
    assert masks.padding([2, 3]).show(1, 3, query_offset=torch.tensor([0, 2])).count("item") == 2


def test_the_drawing_agrees_with_the_dense_form():
    mask = masks.keep(torch.rand(1, 3, 5, 7) > 0.5) & masks.window(4, 1)
    pictures = mask.show(5, 7).split("\n\n")
    cells = [[[cell == "■" for cell in line[4:].split()] for line in p.splitlines()[2:]] for p in pictures]
    assert np.array_equal(np.array(cells), mask.dense(5, 7)[0].numpy())


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_length_beyond_the_keys_means_that_all_are_real(side):
    mask = masks.padding([9, 3], side=side)
    assert torch.equal(mask.dense(5, 7), masks.padding([7, 3], side=side).dense(5, 7))
    assert mask.kept_pairs(5, 7, 2, 2, 1) == (5 * 7 + 5 * 3, True)
    query, key = torch.randn(2, 3, 5, 8, dtype=torch.float64), torch.randn(2, 3, 7, 8, dtype=torch.float64)
    expected = regard.attention(query, key, key, mask=masks.padding([7, 3], side=side), backend="reference")
    for name in ("auto", *regard.backends.available("cpu")):
        out = regard.attention(query, key, key, mask=mask, backend=name)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_a_large_drawing_of_intervals_equals_the_one_pair_by_pair_and_others_are_refused():
    mask = masks.window(300, 20) & masks.documents(lengths=[3000, 1090, 7])
    large = mask.show(4096, 4097).splitlines()
    assert 4096 * 4096 <= 2**24 < 4096 * 4097
    drawn = []
    for row in range(0, 4096, 64):
        seen = mask.tile(range(row, row + 64), range(4097), 4096, 4097, offset=1)[0, 0]
        cells = [seen[:, col : col + 65] for col in range(0, 4097, 65)]
        drawn.append(" ".join("■" if cell.all() else "▒" if cell.any() else "·" for cell in cells))
    assert [line[6:] for line in large[2:]] == drawn
    assert "10000000 queries" in masks.causal().show(10**7, 10**7)
    with pytest.raises(ValueError, match=r"show looks at up to 16,777,216 pairs .* draw a part of it"):
        masks.strided(3).show(10**7, 10**7)
    assert len(masks.strided(3).show(4096, 4096).splitlines()) == 66
