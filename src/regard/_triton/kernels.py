# ruff: noqa: SIM102 (a condition known at compile time is not to be merged with one that is not)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The observation pass: every statistic but the weights themselves and the choice of the largest.

A program owns BM rows of one head and walks over their key tiles: first the runs of plain tiles (all is permitted, all
pairs of a run share a bucket of distance, those of a tile a cell of the map), then the tiles that straddle these, then
those with forbidden pairs. What belongs to rows stays in registers. What is summed over rows (key mass, map,
distances) is added to float64 sums in a way that does not depend on the order of the programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._triton.tiles import (
    LN2,
    NEVER,
    add_exactly,
    load_lse,
    load_rows,
    locate_pairs,
    log_weights,
    warp_sums,
)


@triton.jit
def _cell(position, size, count):
    """The cell of a position on a grid of ``count`` cells over ``size``: cell c starts at ⌊c·size/count⌋."""
    return (((position + 1).to(tl.int64) * count - 1) // size).to(tl.int32)


@triton.jit
def _cell_start(cell, size, count):
    return (cell.to(tl.int64) * size // count).to(tl.int32)


@triton.jit
def _bucket(distance):
    """Number of binary digits of a distance >= 0."""
    exponent = (distance.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126
    # a float holds 24 digits: a longer number may have been rounded up to the next power of two
    exponent = tl.where((distance > 0) & ((1 << tl.maximum(exponent - 1, 0)) > distance), exponent - 1, exponent)
    return tl.where(distance > 0, exponent, 0)


@triton.jit
def _reach(position, i0, j0, keys, BM: tl.constexpr):
    """The smallest and the largest distance in a tile of BM rows and the keys j0 … keys-1."""
    below = position + i0 - (keys - 1)
    above = position + i0 + BM - 1 - j0
    return tl.maximum(tl.maximum(below, -above), 0), tl.maximum(above, -below)


@triton.jit
def _add_to_map(p, sums, row_cells, inside, cols, j0, keys, S, map_cols, magic):
    """One tile, column by column of the map. ``row_cells``: where the map's row of each query begins."""
    start = j0
    while start < keys:
        c = _cell(start, S, map_cols)
        stop = _cell_start(c + 1, S, map_cols)
        here = (cols >= start) & (cols < stop)
        part = tl.sum(tl.where(here[None, :], p, 0.0), 1)
        add_exactly(sums, row_cells + c, part, magic, inside)
        start = stop


@triton.jit
def _add_to_distances(
    p, total, sums, at, rows, cols, position, i0, j0, keys, magic, BM: tl.constexpr, BN: tl.constexpr, W: tl.constexpr
):
    """One tile, bucket by bucket; what is nearer than each edge is summed, the rest is the difference."""
    near, far = _reach(position, i0, j0, keys, BM)
    away = tl.abs(position + rows[:, None] - cols[None, :])
    bucket = _bucket(near)
    last = _bucket(far)
    nearer = total * 0.0
    while bucket < last:
        # 0 | 1 | 2, 3 | 4 … 7
        within = tl.sum(warp_sums(tl.where(away < (1 << bucket), p, 0.0), BM, BN, W), 1)
        place = tl.zeros([W], tl.int32) + at + bucket
        add_exactly(sums, place, within - nearer, magic, place >= 0)
        nearer = within
        bucket += 1
    place = tl.zeros([W], tl.int32) + at + last
    add_exactly(sums, place, total - nearer, magic, place >= 0)


_SIZES = ["L", "S", "first_row", "offset", "limit_start", "limit_stop", "map_rows", "map_cols", "first"]
_SIZES += ["blocks", "sums_stride", "map_at", "distance_at"]


@triton.jit(do_not_specialize=_SIZES)
def observe_rows(
    Q, K, LSE, BIAS, PAIRS, PAIRS_HI, RUNS, COUNTS, OFFSETS, CELLS, SUMS, ENTROPY, LARGEST, FIRST, THRESHOLD,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_s,
    bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k,
    pairs_stride_b, pairs_stride_h, pairs_stride_q, pairs_stride_k, runs_group,
    L, S, first_row, offset, limit_start, limit_stop, map_rows, map_cols, first, blocks,
    sums_stride, map_at, distance_at, scale, cap, magic,
    H: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr,
    PREDICATE: tl.constexpr, SLOTS: tl.constexpr, SOFTCAP: tl.constexpr, BIASED: tl.constexpr, EACH: tl.constexpr,
    ROWS: tl.constexpr, MASS: tl.constexpr, MAP: tl.constexpr, DISTANCE: tl.constexpr, FIRSTS: tl.constexpr,
    LIMIT: tl.constexpr, TOP: tl.constexpr, GROUPS: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """RUNS: the key tiles of each block, see ``encode``; CELLS: the map's column of each tile, -1 where it has several.

    PAIRS: lo (PAIRS_HI: hi) for INTERVALS, booleans for DENSE.
    """
    # late rows see the most keys under causal masks: they start first
    block = tl.num_programs(0) - 1 - tl.program_id(0) + first_row // BM
    bh = tl.program_id(1)
    b = (bh // H).to(tl.int64)
    h = bh % H
    i0 = block * BM
    rows = i0 + tl.arange(0, BM)
    position = offset
    if EACH:
        position = tl.load(OFFSETS + b).to(tl.int32)
    bias = (BIAS + b * bias_stride_b + h * bias_stride_h, bias_stride_q, bias_stride_k)
    pairs = locate_pairs(
        PAIRS, PAIRS_HI, b, h, first_row, pairs_stride_b, pairs_stride_h, pairs_stride_q, pairs_stride_k, PREDICATE
    )
    q = load_rows(Q + b * q_stride_b + h * q_stride_h, q_stride_l, rows, L, HEAD, D, True)
    lse = load_lse(LSE + bh.to(tl.int64) * L, rows, L)
    k_at = K + b * k_stride_b + (h // GROUP) * k_stride_h
    sums = SUMS + bh.to(tl.int64) * sums_stride
    inside = (rows >= limit_start) & (rows < limit_stop)
    if MAP:
        reach = tl.minimum(tl.maximum(rows, limit_start), limit_stop - 1) - limit_start
        row_cells = map_at + _cell(reach, limit_stop - limit_start, map_rows) * map_cols
        map_row = tl.min(row_cells, 0)
        one_row = map_row == tl.max(row_cells, 0)

    entropy = tl.zeros([BM], tl.float32)
    firsts = tl.zeros([BM], tl.float32)
    largest = tl.full([BM, GROUPS], NEVER, tl.float32)
    warp = tl.zeros([WARPS], tl.int32)
    for kind in tl.static_range(3):
        # plain tiles; tiles that straddle cells or buckets; tiles with forbidden pairs
        runs = tl.load(COUNTS + kind)
        if kind == 1 and not SPLIT:
            runs = 0
        table = RUNS + tl.load(COUNTS + 3 + kind) + ((b * runs_group) * blocks + block) * runs * 2
        for run in range(runs):
            start = tl.load(table + 2 * run)
            stop = tl.load(table + 2 * run + 1)
            # sums since the run, and since the cell of the map, began
            passed = tl.zeros([WARPS], tl.float32)
            pooled = tl.zeros([WARPS], tl.float32)
            current = tl.load(CELLS + start)
            for tile in range(start, stop):
                j0 = tile * BN
                cols = j0 + tl.arange(0, BN)
                k = load_rows(k_at, k_stride_s, cols, S, HEAD, D, kind == 2)
                s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                z = log_weights(
                    s, lse, rows, cols, (L, S), (scale, cap), bias, pairs, PREDICATE, SLOTS, SOFTCAP, BIASED, kind == 2
                )
                p = tl.exp2(z)
                if ROWS:
                    entropy += tl.sum(p * z, 1)
                if ROWS or TOP:
                    groups = tl.max(tl.reshape(z, [BM, BN // GROUPS, GROUPS]), 1)
                    largest = tl.maximum(largest, groups)
                if FIRSTS:
                    if j0 < first:
                        firsts += tl.sum(tl.where((cols < first)[None, :], p, 0.0), 1)
                if MASS or MAP or DISTANCE:
                    parts = warp_sums(p, BM, BN, WARPS)
                    total = tl.sum(parts, 1)
                    if DISTANCE:
                        if kind == 0:
                            passed += total
                        else:
                            keys = tl.minimum(j0 + BN, S)
                            _add_to_distances(
                                p, total, sums, distance_at, rows, cols, position, i0, j0, keys, magic, BM, BN, WARPS
                            )
                    if LIMIT and (MASS or MAP):
                        p = tl.where(inside[:, None], p, 0.0)
                        parts = warp_sums(p, BM, BN, WARPS)
                        total = tl.sum(parts, 1)
                    if MASS:
                        at = cols[None, :] + warp[:, None]
                        add_exactly(sums, at, parts, magic, at < S)
                    if MAP:
                        cell = tl.load(CELLS + tile)
                        if kind == 0:
                            if cell != current:
                                add_exactly(sums, warp + map_row + current, pooled, magic, warp == 0)
                                pooled = tl.zeros([WARPS], tl.float32)
                                current = cell
                            pooled += total
                        elif one_row & (cell >= 0):
                            add_exactly(sums, warp + map_row + cell, total, magic, warp == 0)
                        else:
                            keys = tl.minimum(j0 + BN, S)
                            _add_to_map(p, sums, row_cells, inside, cols, j0, keys, S, map_cols, magic)
            if MAP and kind == 0:
                if start < stop:
                    add_exactly(sums, warp + map_row + current, pooled, magic, warp == 0)
            if DISTANCE and kind == 0:
                if start < stop:
                    near, far = _reach(position, i0, start * BN, start * BN + BN, BM)
                    add_exactly(sums, warp + distance_at + _bucket(near), passed, magic, warp == 0)

    row = bh.to(tl.int64) * L + rows
    empty = lse == -NEVER
    if ROWS:
        entropy = tl.maximum(entropy * -LN2, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(ENTROPY + row, tl.where(empty, float("nan"), entropy), mask=rows < L)
        top = tl.exp2(tl.max(largest, 1))
        tl.store(LARGEST + row, tl.where(empty | (lse != lse), float("nan"), top), mask=rows < L)
    if FIRSTS:
        tl.store(FIRST + row, firsts, mask=rows < L)
    if TOP:
        tl.store(THRESHOLD + row, _threshold(largest, lse, TOP, GROUPS), mask=rows < L)


@triton.jit
def _threshold(largest, lse, TOP: tl.constexpr, GROUPS: tl.constexpr):
    """A z that at least TOP keys of the row reach: the TOP-th largest of the maxima of disjoint groups of keys."""
    ordered = tl.sort(largest, descending=True)
    found = tl.sum(tl.where(tl.arange(0, GROUPS)[None, :] == TOP - 1, ordered, 0.0), 1)
    # lowered by more than two computations of one z differ
    found -= 1e-6 * (tl.abs(found) + tl.abs(lse)) + 1e-5
    # weights that underflow are all equal, and then the lower keys win
    return tl.where(found > -120.0, found, NEVER / 2)
