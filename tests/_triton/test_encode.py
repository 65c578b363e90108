"""Masks as the kernels read them: the runs visit every tile that matters, once, and tell the plain ones apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests._triton.inside import encode as encoding
from tests.core_calls import every_mask, permitted, prepare

from regard import masks
from regard.spec import Call

L, S, Q, K = 111, 143, 16, 8


def call_of(mask: masks.Mask | None, offset: int | torch.Tensor | None = None) -> Call:
    query, key = torch.zeros(2, 2, L, 3), torch.zeros(2, 1, S, 3)
    return prepare(query, key, key, mask, None, None, None, None, 0.0, offset)


def kinds_of(encoded: encoding.Encoded) -> np.ndarray:
    """The kind of each tile, [groups, blocks, tiles]; -1 where it is not visited. No tile is visited twice."""
    runs = encoded.runs
    counts = runs.counts.tolist()
    found = np.full((runs.groups, runs.blocks, -(-S // K)), -1)
    for kind in range(3):
        size = runs.groups * runs.blocks * counts[kind] * 2
        table = runs.table[counts[3 + kind] : counts[3 + kind] + size].view(runs.groups, runs.blocks, counts[kind], 2)
        for g, b, r in np.ndindex(*table.shape[:3]):
            start, stop = table[g, b, r].tolist()
            assert (found[g, b, start:stop] == -1).all()
            found[g, b, start:stop] = kind
    return found


def tiles_of(seen: np.ndarray) -> np.ndarray:
    """[B, blocks, tiles, rows, columns] over all heads, padded with the nearest pair."""
    pad = [(0, 0), (0, 0), (0, -L % Q), (0, -S % K)]
    padded = np.pad(seen, pad, mode="edge")
    B, H = seen.shape[:2]
    return padded.reshape(B, H, -1, Q, padded.shape[3] // K, K).transpose(0, 2, 4, 1, 3, 5)


@pytest.mark.parametrize("kind", every_mask(2, 2, L, S))
def test_runs_visit_what_is_permitted_and_plain_tiles_are_full(kind: str) -> None:
    mask = every_mask(2, 2, L, S)[kind]
    dense = permitted(mask, 2, 2, L, S)
    assert dense is not None
    encoded = encoding.encode(call_of(mask), encoding.Tiling(Q, K))
    kinds = np.broadcast_to(kinds_of(encoded), tiles_of(dense).shape[:3])
    some, every = tiles_of(dense).any((3, 4, 5)), tiles_of(dense).all((3, 4, 5))
    assert (kinds[some] >= 0).all()
    assert every[kinds == 0].all()
    assert (kinds[..., -1] != 0).all()  # the last tile reaches beyond the keys
    if encoded.test == encoding.INTERVALS:
        assert encoded.lo is not None and encoded.hi is not None
        j = torch.arange(S)
        lo, hi = encoded.lo.unsqueeze(-1), encoded.hi.unsqueeze(-1)
        assert torch.equal(((j >= lo) & (j < hi)).any(1).expand(2, L, S), torch.from_numpy(dense[:, 0]))
    else:
        assert encoded.test == encoding.DENSE


@pytest.mark.parametrize(
    "mask", [masks.causal(), masks.window(left=30, right=4), masks.padding([20, 99]) & masks.causal()]
)
@pytest.mark.parametrize("offset", [torch.tensor([5, 32]), torch.tensor([-40, 143])])
def test_bands_whose_numbers_may_not_be_read_are_encoded_by_device_operations(
    mask: masks.Mask, offset: torch.Tensor
) -> None:
    call = call_of(mask, offset)
    dense = permitted(mask, 2, 2, L, S, offset)
    band = encoding._band_on_device(call, mask)
    assert dense is not None and band is not None
    kinds = kinds_of(encoding.Encoded(encoding.INTERVALS, encoding._band_runs(*band, S, encoding.Tiling(Q, K)), *band))
    tiles = tiles_of(dense)
    assert (kinds[tiles.any((3, 4, 5))] >= 0).all()
    assert tiles.all((3, 4, 5))[kinds == 0].all()
    j = torch.arange(S)
    seen = (j >= band[0].unsqueeze(-1)) & (j < band[1].unsqueeze(-1))
    assert torch.equal(seen[:, 0], torch.from_numpy(dense[:, 0]))


def test_plain_tiles_straddle_at_most_one_edge_of_buckets_and_no_cells() -> None:
    tiling = encoding.Tiling(Q, K, grid=(7, 11), limit=(3, 100), distance=True)
    kinds = kinds_of(encoding.encode(call_of(None, 9), tiling))[0]
    for block, tile in zip(*np.nonzero(kinds == 0), strict=True):
        rows, cols = np.arange(block * Q, block * Q + Q), np.arange(tile * K, tile * K + K)
        away = np.abs(rows[:, None] + 9 - cols)
        buckets = np.frexp(away.astype(float))[1]
        assert buckets.max() <= buckets.min() + 1
        inside = rows.clip(3, 99) - 3
        assert len(np.unique(((inside + 1) * 7 - 1) // 97)) == 1
        assert len(np.unique(((cols + 1) * 11 - 1) // S)) == 1
    assert (kinds >= 0).all()
