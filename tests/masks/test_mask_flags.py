"""What a fused kernel can take as flags, and the keys that no query sees."""

from __future__ import annotations

import random

import pytest
import torch
from mask_oracle import join, sizes

from regard import masks
from regard.masks import Fused

PADDING = masks.padding([4, 2])
PACKED = masks.documents(lengths=[7, 4])


@pytest.mark.parametrize(
    ("mask", "flags"),
    [
        (masks.everything(), Fused()),
        (masks.causal(), Fused(causal=True, right=0)),
        (masks.window(3), Fused(causal=True, left=3, right=0)),
        (masks.window(3, right=2), Fused(left=3, right=2)),
        (masks.causal() & masks.window(3, right=2), Fused(causal=True, left=3, right=0)),
        (masks.window(3, right=2) & masks.window(5, right=1), Fused(left=3, right=1)),
        (PADDING & masks.causal(), Fused(causal=True, right=0, padding=PADDING)),
        (PACKED & (masks.window(2) & PADDING), Fused(True, 2, 0, PADDING, PACKED)),
        (PADDING & masks.causal() & PADDING, Fused(causal=True, right=0, padding=PADDING)),
        (~~masks.causal(), Fused(causal=True, right=0)),
        (masks.everything() & PACKED, Fused(documents=PACKED)),
    ],
)
def test_bands_padding_and_documents_are_flags(mask, flags):
    assert mask.fused(11, 11, 0) == flags


@pytest.mark.parametrize(
    "mask",
    [
        ~masks.causal(),
        masks.causal() | masks.columns(2),
        masks.prefix(3),
        masks.columns(3),
        masks.strided(2),
        masks.causal() & masks.keep(torch.ones(11, dtype=torch.bool)),
        masks.random_blocks(1, 2, 0),
        masks.blocks(torch.ones(2, 2, dtype=torch.bool), 3),
        PADDING & masks.padding([3, 3], side="left"),
        PACKED & masks.documents([4, 7]),
    ],
)
def test_other_masks_have_no_flags(mask):
    assert mask.fused(11, 11, 0) is None


def test_limits_that_no_pair_reaches_are_left_out():
    assert masks.causal().fused(1, 11, 10) == Fused()
    assert masks.causal().fused(2, 11, 9) == Fused(causal=True, right=0)
    assert masks.window(10).fused(11, 11, 0) == Fused(causal=True, right=0)
    assert masks.window(9).fused(11, 11, 0) == Fused(causal=True, left=9, right=0)
    assert masks.window(3, right=20).fused(11, 11, 0) == Fused(left=3)
    assert masks.window(3).fused(1, 11, torch.tensor([4])) == Fused(True, 3, 0)


def test_flags_mean_the_same_as_the_mask():
    for L in range(6):
        for S in range(6):
            for offset in (S - L, 0, -2, 3):
                for left in range(7):
                    for right in range(7):
                        mask = masks.window(left, right)
                        flags = mask.fused(L, S, offset)
                        again = masks.window(
                            2**62 if flags.left is None else flags.left, 2**62 if flags.right is None else flags.right
                        )
                        assert torch.equal(
                            again.dense(L, S, query_offset=offset), mask.dense(L, S, query_offset=offset)
                        )


def test_hidden_keys_are_seen_by_no_query():
    rng = random.Random(13)
    known = 0
    for _ in range(300):
        z = sizes(rng, 11)
        mask, bits = join(rng, z, 3)
        hidden = mask.hidden_keys(z.S, "cpu")
        if hidden is not None:
            known += 1
            assert hidden.shape[0] in (1, z.B)
            assert hidden.shape[1] == z.S
            assert not (bits & hidden.numpy()[:, None, None, :]).any(), (mask, z)
    assert known > 100


@pytest.mark.parametrize(
    ("mask", "hidden"),
    [
        (masks.padding([3, 1]), [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]]),
        (masks.padding([3, 1], side="left"), [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]),
        (masks.causal() & masks.padding([3]), [[0, 0, 0, 1, 1]]),
        (masks.columns(2), [[0, 0, 1, 1, 1]]),
        (~masks.columns(2), [[1, 1, 0, 0, 0]]),
        (masks.documents(ids=[0, -1, 1, 1, -1]), [[0, 1, 0, 0, 1]]),
        (masks.keep(torch.tensor([True, True, False, True, False])), [[0, 0, 1, 0, 1]]),
        (masks.drop(torch.tensor([True, True, False, True, False])), [[1, 1, 0, 1, 0]]),
        (masks.keep(torch.tensor([[[[1, 0, 0, 0, 1]], [[0, 0, 1, 0, 1]]]]).bool()), [[0, 1, 0, 1, 0]]),
        (masks.keep(torch.tensor([[[[False]]], [[[True]]]])), [[1] * 5, [0] * 5]),
        (masks.padding([4]) & masks.keep(torch.tensor([False, True, True, True, True])), [[1, 0, 0, 0, 1]]),
        (masks.columns(1) | masks.padding([3]), [[0, 0, 0, 1, 1]]),
        (masks.prefix(4), [[0, 0, 0, 0, 1]]),
    ],
)
def test_hidden_keys_are_found(mask, hidden):
    assert mask.hidden_keys(5, "cpu").int().tolist() == hidden


def test_nothing_is_known_of_the_keys_of_positional_masks():
    for mask in (masks.causal(), masks.window(2), masks.everything(), masks.causal() | masks.columns(2)):
        assert mask.hidden_keys(5, "cpu") is None
