"""Masks as a few rectangles and triangles of pairs."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from mask_oracle import Rectangle

from regard import masks
from regard.masks._areas import LEAST_ROWS, MOST_AREAS, Area, areas_of


def drawn(areas: tuple[Area, ...], L: int, S: int) -> np.ndarray:
    """How often each pair is in an area; rows that merge must have been written before, and others not."""
    count, written = np.zeros((L, S), dtype=int), np.zeros(L, dtype=bool)
    for area in areas:
        rows, keys = ([n for start, stop in ranges for n in range(start, stop)] for ranges in (area.rows, area.keys))
        assert rows and keys
        assert written[rows].all() if area.merges else not written[rows].any()
        written[rows] = True
        if area.causal:
            assert len(rows) == len(keys) > 1
        for n, row in enumerate(rows):
            count[row, keys[: n + 1] if area.causal else keys] += 1
    return count


def runs(rng: random.Random, size: int) -> tuple[tuple[int, int], ...]:
    edges = sorted(rng.sample(range(size + 7), 2 * rng.randint(1, 3)))
    return tuple(zip(edges[::2], edges[1::2], strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_areas_are_the_pairs_of_the_mask_each_once(seed: int) -> None:
    rng, found = random.Random(seed), 0
    for _ in range(150):
        L, S = rng.randint(0, 23), rng.randint(0, 29)
        S = rng.choice([L, S])
        offset = rng.choice([S - L, 0, 2, -3])
        some = Rectangle(rng.choice([None, runs(rng, L)]), runs(rng, S))
        for base in (masks.causal(), masks.everything(), masks.causal() | masks.prefix(5), masks.window(4)):
            for mask in (base & ~some, base & some):
                areas = areas_of(mask.rows(L, S, offset))
                if areas is not None:
                    meant = mask.dense(L, S, query_offset=offset).numpy()
                    assert (drawn(areas, L, S) == meant).all(), (mask, L, S, offset)
                    found += 1
    assert found > 600


def test_what_is_left_of_a_causal_call_is_one_triangle() -> None:
    assert (masks.causal() & ~masks.columns(4)).areas(300, 300, 0) == (Area(((4, 300),), ((4, 300),), causal=True),)
    left = ((1, 5), (6, 70), (73, 300))
    assert (masks.causal() & ~Rectangle(None, ((0, 1), (5, 6), (70, 73)))).areas(300, 300, 0) == (
        Area(((5, 6),), ((1, 5),)),
        Area(((70, 73),), ((1, 5), (6, 70))),
        Area(left, left, causal=True),
    )


def test_rows_that_are_cut_in_another_way_see_a_rectangle_and_a_triangle() -> None:
    rows, keys = ((150, 300),), ((0, 3), (4, 150))
    assert (masks.causal() & ~Rectangle(((150, None),), ((3, 4),))).areas(300, 300, 0) == (
        Area(rows, keys),
        Area(((0, 150),), ((0, 150),), causal=True),
        Area(rows, rows, causal=True, merges=True),
    )


def test_keys_that_are_cut_for_all_rows_leave_one_rectangle() -> None:
    assert (~Rectangle(None, ((3, 9),))).areas(200, 50, 7) == (Area(((0, 200),), ((0, 3), (9, 50))),)
    assert (masks.everything() & ~masks.everything()).areas(200, 50, 0) == ()


def test_a_triangle_may_lie_beside_the_diagonal() -> None:
    far = masks.causal() & ~masks.window(left=9)
    assert far.areas(300, 300, 0) == (Area(((10, 300),), ((0, 290),), causal=True),)


def test_what_is_not_a_few_areas_has_none() -> None:
    size = 300
    assert size > LEAST_ROWS
    for mask in (
        masks.window(left=9),
        masks.causal() & (masks.window(left=9) | masks.columns(2)),
        masks.strided(3),
        masks.padding([200]),
        masks.keep(torch.ones(size, size, dtype=torch.bool)),
    ):
        assert mask.areas(size, size, 0) is None
    many = tuple((start, start + 2) for start in range(0, 9 * MOST_AREAS, 9))
    assert Rectangle(many, ((3, 4),)).areas(size, size, 0) is not None  # equal rows together, however many
    assert (masks.causal() & Rectangle(many, ((3, 4),))).areas(size, size, 0) is not None
    assert (masks.causal() & ~Rectangle(many, ((3, 4),))).areas(size, size, 0) is None
    assert (masks.causal() & ~masks.columns(4)).areas(LEAST_ROWS - 1, size, 0) is None
