"""The named patterns keep exactly the pairs their papers say, and attention under them is exact with its gradients."""

from __future__ import annotations

import doctest
import itertools

import pytest
import torch

import regard
from core_calls import check_against_oracle
from regard import masks, sparse


def pairs(mask, L, S=None):
    return mask.dense(L, L if S is None else S)


def every_pair(length, rule):
    table = torch.zeros(length, length, dtype=torch.bool)
    for i, j in itertools.product(range(length), repeat=2):
        table[i, j] = rule(i, j)
    return table


def test_longformer_is_a_window_and_global_tokens_in_both_directions():
    found = pairs(sparse.longformer(23, window=3, tokens=2), 23)
    assert torch.equal(found, every_pair(23, lambda i, j: abs(i - j) <= 3 or i < 2 or j < 2))
    causal = pairs(sparse.longformer(23, window=3, tokens=2, causal=True), 23)
    assert torch.equal(causal, found.tril())
    assert torch.equal(pairs(sparse.longformer(23, window=3, tokens=0), 23), pairs(masks.window(3, 3), 23))


def test_bigbird_is_window_and_global_and_random_blocks():
    drawn = pairs(masks.random_blocks(2, 5, seed=9), 33)
    found = pairs(sparse.bigbird(33, size=5, window=3, tokens=1, random=2, seed=9), 33)
    rule = every_pair(33, lambda i, j: abs(i // 5 - j // 5) <= 1 or i // 5 < 1 or j // 5 < 1)
    assert torch.equal(found, rule | drawn)
    assert torch.equal(pairs(sparse.bigbird(33, size=5, random=0, causal=True), 33), rule.tril())


def test_strided_is_the_last_stride_tokens_and_every_stride_th():
    found = pairs(sparse.strided(5), 23)
    assert torch.equal(found, every_pair(23, lambda i, j: j <= i and (i - j < 5 or (i - j) % 5 == 0)))


def test_fixed_is_the_own_block_and_the_last_columns_of_every_block():
    found = pairs(sparse.fixed(23, stride=5, summary=2), 23)
    assert torch.equal(found, every_pair(23, lambda i, j: j <= i and (i // 5 == j // 5 or j % 5 >= 3)))


def test_streaming_is_a_window_and_sinks():
    found = pairs(sparse.streaming(left=4, sinks=2), 23)
    assert torch.equal(found, every_pair(23, lambda i, j: j <= i and (i - j <= 4 or j < 2)))


def test_dilated_windows_have_gaps():
    found = pairs(sparse.dilated(left=3, step=4, right=1), 23)
    assert torch.equal(found, every_pair(23, lambda i, j: (i - j) % 4 == 0 and -4 <= i - j <= 12))


def test_chosen_blocks_are_those_listed():
    found = pairs(sparse.chosen_blocks([[0, 3], [], [1, 2]], size=2), 6, 8)
    table = torch.zeros(6, 8, dtype=torch.bool)
    table[:2, :2] = table[:2, 6:] = table[4:, 2:6] = True
    assert torch.equal(found, table.roll(-2, 0) & torch.tensor([True, True, True, True, False, False])[:, None])


def test_the_drawings_in_the_docstrings_are_true():
    found = doctest.testmod(sparse)
    assert found.attempted >= 7 and found.failed == 0


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: sparse.longformer(9, window=-1, tokens=1), ValueError, "window must be at least 0"),
        (lambda: sparse.longformer(9.0, window=1, tokens=1), TypeError, "length must be an int"),
        (lambda: sparse.bigbird(9, window=2), ValueError, "odd number of blocks"),
        (lambda: sparse.bigbird(9, size=0), ValueError, "size must be at least 1"),
        (lambda: sparse.bigbird(10**7), ValueError, "156250 × 156250 blocks, 22.7 GiB.* pass size=306 or more"),
        (lambda: sparse.strided(0), ValueError, "stride must be at least 1"),
        (lambda: sparse.fixed(9, stride=2, summary=3), ValueError, "summary must be at most stride=2"),
        (lambda: sparse.streaming(left=True, sinks=1), TypeError, "left must be an int"),
        (lambda: sparse.dilated(left=1, step=0), ValueError, "step must be at least 1"),
        (lambda: sparse.chosen_blocks([[-1]], size=2), ValueError, r"rows\[0\] must be at least 0"),
    ],
)
def test_wrong_numbers_are_refused_by_name(call, error, words):
    with pytest.raises(error, match=words):
        call()


LENGTH = 203
PATTERNS = {
    "longformer": sparse.longformer(LENGTH, window=17, tokens=3),
    "bigbird": sparse.bigbird(LENGTH, size=32, window=3, tokens=1, random=1),
    "bigbird, causal": sparse.bigbird(LENGTH, size=32, window=3, tokens=1, random=1, causal=True),
    "strided": sparse.strided(13),
    "fixed": sparse.fixed(LENGTH, stride=16, summary=3),
    "streaming": sparse.streaming(left=31, sinks=5),
    "dilated": sparse.dilated(left=7, step=3, right=2),
    "chosen": sparse.chosen_blocks([[0, 4], [1], [], [5, 6, 0], [2, 3], [0, 1, 2, 3, 4, 5, 6], [6]], size=32),
}


@pytest.mark.parametrize("backend", ["auto", "sdpa", "blockwise"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_attention_under_a_pattern_equals_the_oracle_in_values_and_gradients(pattern, backend):
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 4, LENGTH, 7), (2, 2, LENGTH, 7), (2, 2, LENGTH, 7))
    tensors = [torch.randn(*s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]
    check_against_oracle(backend, tuple(tensors), mask=PATTERNS[pattern])


def test_the_plan_counts_the_kept_pairs():
    tensors = [torch.randn(1, 2, LENGTH, 8) for _ in range(3)]
    plan = regard.explain(*tensors, mask=PATTERNS["bigbird"])
    assert plan.cost.kept_pairs == 2 * int(PATTERNS["bigbird"].dense(LENGTH, LENGTH).sum())
