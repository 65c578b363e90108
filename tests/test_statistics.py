"""The definitions of the statistics: one place, which CPU code, kernels and caches take theirs from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import regard
from regard import masks, statistics


@pytest.mark.parametrize(("size", "count"), [(1, 1), (7, 3), (63, 11), (64, 64), (111, 64)])
def test_cell_c_starts_at_c_size_over_count(size: int, count: int) -> None:
    starts = [c * size // count for c in range(count)] + [size]
    expected = [c for c in range(count) for _ in range(starts[c], starts[c + 1])]
    assert statistics.cells(size, count, torch.device("cpu")).tolist() == expected
    assert statistics.cell_of(np.arange(size), size, count).tolist() == expected
    assert [statistics.cell_of(x, size, count) for x in range(size)] == expected


def test_the_bucket_of_a_distance_is_its_number_of_binary_digits() -> None:
    distances = [0, 1, 2, 3, 4, 7, 8, 2**20 - 1, 2**20, 2**31 - 1, 2**31, 2**40]
    expected = [min(d.bit_length(), statistics.BUCKETS - 1) for d in distances]
    assert statistics.bucket_of(torch.tensor(distances)).tolist() == expected
    assert statistics.bucket_of(np.array(distances)).tolist() == expected


def test_kernels_take_their_constants_from_the_definition() -> None:
    tiles = pytest.importorskip("regard._triton.tiles")
    assert (tiles.NEVER.value, tiles.BUCKETS.value) == (statistics.NEVER, statistics.BUCKETS)


def test_a_permitted_pair_of_no_weight_is_permitted_however_low_its_logit() -> None:
    q = torch.zeros(1, 1, 2, 3)
    bias = torch.tensor([[0.0, -3e5, -1e20, -math.inf], [-1e25, -2e25, -math.inf, -math.inf]])
    k = torch.zeros(1, 1, 4, 3)
    seen = regard.observe(q, k, k, bias=bias, want=regard.Want(top_k=4))
    assert seen.top_keys[0, 0].tolist() == [[0, 1, 2, -1], [0, 1, -1, -1]]
    assert seen.top_weights[0, 0].tolist() == [[1, 0, 0, 0], [1, 0, 0, 0]]
    assert seen.entropy[0, 0].tolist() == [0, 0]


def test_two_parts_of_the_same_rows_merge_to_the_whole() -> None:
    made = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 3, n, 5, generator=made, dtype=torch.float64) for n in (7, 11, 11))
    mask = masks.window(4)
    whole = regard.observe(q, k, v, mask=mask, query_offset=4)
    parts = [
        regard.observe(q, k[:, :, part], v[:, :, part], mask=mask, query_offset=4 - part.start)
        for part in (slice(0, 6), slice(6, 11))
    ]
    (out, lse), (more, more_lse) = ((part.out.clone(), part.lse.clone()) for part in parts)
    assert (lse == -torch.inf).any() and (more_lse == -torch.inf).any()
    statistics.merge(out, lse, more, more_lse)
    torch.testing.assert_close(out, whole.out, rtol=0, atol=1e-14)
    torch.testing.assert_close(lse, whole.lse, rtol=0, atol=1e-14)
