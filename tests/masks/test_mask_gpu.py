"""Masks on a GPU: the same booleans as on CPU, and no synchronisation."""

from __future__ import annotations

import random

import pytest
import torch
from mask_oracle import join, sizes

from core_calls import no_synchronisation
from regard import masks

pytestmark = pytest.mark.gpu


def on_gpu(mask):
    return masks.rebuild(mask.code, [tensor.cuda() for tensor in mask.tensors])


def test_tiles_are_those_of_the_cpu_and_nothing_synchronises():
    rng = random.Random(21)
    for _ in range(150):
        z = sizes(rng, 31)
        mask, bits = join(rng, z, 3)
        mask = mask | masks.random_blocks(1, 3, seed=5)
        wanted = mask.tile(range(z.L), range(z.S), z.L, z.S, offset=z.offset)
        there = on_gpu(mask)
        offset = z.offset.cuda() if isinstance(z.offset, torch.Tensor) else z.offset
        with no_synchronisation():
            there.check(*z[:4])
            tile = there.tile(range(z.L), range(z.S), z.L, z.S, offset=offset, device="cuda")
            hidden = there.hidden_keys(z.S, "cuda")
            table = there.blocks(z.L, z.S, z.offset, z.B, 4, 4)
            assert there.rows(z.L, z.S, z.offset, z.B) is None or not there.tensors
        assert torch.equal(tile.cpu(), wanted)
        assert hidden is None or torch.equal(hidden.cpu(), mask.hidden_keys(z.S, "cpu"))
        assert table.query_blocks == -(-z.L // 4)


def test_a_list_is_copied_once():
    mask = masks.documents([3, 4]) & masks.padding([2, 5])
    tile = mask.tile(range(7), range(7), 7, 7, offset=0, device="cuda")
    assert torch.equal(tile.cpu(), mask.dense(7, 7, query_offset=0))
    with no_synchronisation():
        mask.tile(range(7), range(7), 7, 7, offset=0, device="cuda")


def test_equal_masks_on_two_devices_are_equal():
    bits = torch.rand(3, 5) > 0.5
    assert masks.keep(bits) == masks.keep(bits.cuda())
    assert masks.keep(bits.cuda()) != masks.keep(~bits)
