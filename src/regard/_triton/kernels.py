# ruff: noqa: SIM102, SIM108 (a condition known at compile time is a branch of its own)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The observation pass: every statistic but the weights themselves and the choice of the largest.

A program owns BM rows of one head and walks over their key tiles: first those in which all is permitted, then those
with forbidden pairs. Tiles lie as [keys, rows]. So a thread's numbers belong to few keys and many rows: sums over rows
(key mass, map, distances) are made within threads, and what belongs to a row is kept as one number for each of the 8
groups of lanes of a warp, joined once at the end. Sums that several programs share are added to float64 numbers in a
way that does not depend on the order of the programs.

A tile is plain when all is permitted, all its pairs share a cell of the map and its distances lie in one bucket or in
two neighbours: then one or two sums over the tile are enough for both. The others, along the diagonal and between
cells, are seen again by other programs, which look at single pairs: in one loop the registers would not suffice.

On Hopper, products of matrices go on while a program computes other things (AHEAD): there the loop over plain tiles
starts the product of the next tile, makes the sums of this one, and only then waits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._triton.tiles import (
    BAND,
    BUCKETS,
    COPIES,
    LN2,
    NEVER,
    add_exactly,
    forgotten,
    load_block,
    load_lse,
    locate_pairs,
    log_weights,
    settled,
)

# where a tile lies: in one cell of the map and one bucket of distance; across one edge between two buckets; elsewhere
ELSEWHERE, INSIDE, ACROSS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _cell(position, size, count, WIDE: tl.constexpr):
    """The cell of a position on a grid of ``count`` cells over ``size``: cell c starts at ⌊c·size/count⌋.

    WIDE: size·count does not fit 32 bits, in which a division takes a fraction of the time.
    """
    if WIDE:
        found = (((position + 1).to(tl.int64) * count - 1) // size).to(tl.int32)
    else:
        found = ((position + 1) * count - 1) // size
    return found


@triton.jit
def _cell_start(cell, size, count, WIDE: tl.constexpr):
    if WIDE:
        found = (cell.to(tl.int64) * size // count).to(tl.int32)
    else:
        found = cell * size // count
    return found


@triton.jit
def _divided(n, by):
    """n // d for 0 <= n < 2^31 without a division, which takes long where one thing waits for it; see ``divisor``."""
    return ((n.to(tl.int64) * by[0]) >> by[1]).to(tl.int32)


@triton.jit
def _key_cell(position, size, count, by_size, WIDE: tl.constexpr):
    """As ``_cell``."""
    if WIDE:
        found = _cell(position, size, count, WIDE)
    else:
        found = _divided((position + 1) * count - 1, by_size)
    return found


@triton.jit
def _key_cell_start(cell, size, count, by_count, WIDE: tl.constexpr):
    """As ``_cell_start``."""
    if WIDE:
        found = _cell_start(cell, size, count, WIDE)
    else:
        found = _divided(cell * size, by_count)
    return found


@triton.jit
def _clipped(row, start, stop):
    """How far a row, or the nearest that counts, lies in start … stop-1."""
    return tl.minimum(tl.maximum(row, start), stop - 1) - start


@triton.jit
def _bucket(distance):
    """Number of binary digits of a distance >= 0."""
    exponent = (distance.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126
    # a float holds 24 digits: a longer number may have been rounded up to the next power of two
    exponent = tl.where((distance > 0) & ((1 << tl.maximum(exponent - 1, 0)) > distance), exponent - 1, exponent)
    return tl.where(distance > 0, exponent, 0)


@triton.jit
def _reach(position, i0, j0, BM: tl.constexpr, BN: tl.constexpr):
    """The buckets of the smallest and of the largest distance in a tile."""
    below = position + i0 - (j0 + BN - 1)
    above = position + i0 + BM - 1 - j0
    return _bucket(tl.maximum(tl.maximum(below, -above), 0)), _bucket(tl.maximum(above, -below))


@triton.jit
def _in_lanes(x, BM: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr):
    """[BN, BM] with the axes of keys told apart: within a thread, warps, within a thread, lanes. See the module."""
    return tl.reshape(x, [BN // (16 * WARPS), WARPS, 2, 8, BM])


@triton.jit
def _lane_sums(x, BM: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr):
    return tl.sum(tl.sum(_in_lanes(x, BM, BN, WARPS), 0), 1)


@triton.jit
def _add_products(sums, p, z, BM: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr):
    """sums + _lane_sums(p·z), one step for each product where a thread has two of them."""
    if BN == 16 * WARPS:
        p_low, p_high = tl.split(tl.permute(tl.reshape(p, [WARPS, 2, 8, BM]), (0, 2, 3, 1)))
        z_low, z_high = tl.split(tl.permute(tl.reshape(z, [WARPS, 2, 8, BM]), (0, 2, 3, 1)))
        sums += p_low * z_low
        sums += p_high * z_high
    else:
        sums += _lane_sums(p * z, BM, BN, WARPS)
    return sums


@triton.jit
def _lane_maxima(x, BM: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr, GROUPS: tl.constexpr):
    """The largest of each of GROUPS disjoint groups of keys, 8 or 16 a warp."""
    found = tl.max(_in_lanes(x, BM, BN, WARPS), 0)
    if GROUPS == 8 * WARPS:
        joined = tl.max(found, 1)
    else:
        joined = tl.reshape(found, [WARPS, 16, BM])
    return joined


@triton.jit
def _add_total(sums, at, x, magic, BN: tl.constexpr, WARPS: tl.constexpr):
    """Add all of x [BN] to one sum, without a step between warps."""
    parts = tl.sum(tl.sum(tl.reshape(x, [BN // (16 * WARPS), WARPS, 16]), 0), 1)
    place = tl.zeros([WARPS], tl.int32) + at
    add_exactly(sums, place, parts, magic, place >= 0)


@triton.jit
def _add_totals(sums, map_at, distance_at, x, magic, F: tl.constexpr):
    """Add all of x [BN] to a cell of the map and to a bucket of distances."""
    if F.MAP:
        _add_total(sums, map_at, x, magic, F.BN, F.WARPS)
    if F.DISTANCE:
        _add_total(sums, distance_at, x, magic, F.BN, F.WARPS)


@triton.jit
def _same_bucket_until(position, i0, j0, bucket, BM: tl.constexpr, BN: tl.constexpr):
    """Where, from j0 on, the first tile begins that leaves the bucket, if all distances of the tile at j0 are in it."""
    below = position + i0 - (j0 + BN - 1)
    before = below - (1 << tl.maximum(bucket - 1, 0)) + 1  # keys before the rows: distances shrink
    after = below + (1 << bucket)  # keys after them: distances grow
    return j0 + tl.where(below > 0, before, after)


@triton.jit
def _add_to_map(
    p, mass, sums, rows, keys_at, row, last, height, map_rows, j0, S, map_cols, magic,
    BN: tl.constexpr, WARPS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A tile that may lie in several cells: the map's rows ``row`` to ``last``, and any columns."""
    cell = _cell(j0, S, map_cols, WIDE)
    if (row == last) & (tl.minimum(j0 + BN, S) <= _cell_start(cell + 1, S, map_cols, WIDE)):
        _add_total(sums, row * map_cols + cell, mass, magic, BN, WARPS)
    else:
        cells = _cell(keys_at, S, map_cols, WIDE)
        while row <= last:
            # not by differences: a NaN is to stay in its cell
            start = _cell_start(row, height, map_rows, WIDE)
            stop = _cell_start(row + 1, height, map_rows, WIDE)
            part = tl.sum(tl.where((rows >= start) & (rows < stop), p, 0.0), 1)
            add_exactly(sums, row * map_cols + cells, part, magic, keys_at < S)
            row += 1


@triton.jit
def _add_to_distances(p, mass, sums, away, bucket, last, magic, BN: tl.constexpr, WARPS: tl.constexpr):
    """A tile with distances in several buckets: what is nearer than each edge is summed, the rest is the difference."""
    nearer = mass * 0.0
    while bucket < last:
        # 0 | 1 | 2, 3 | 4 … 7
        within = tl.sum(tl.where(away < (1 << bucket), p, 0.0), 1)
        _add_total(sums, bucket, within - nearer, magic, BN, WARPS)
        nearer = within
        bucket += 1
    _add_total(sums, last, mass - nearer, magic, BN, WARPS)


@triton.jit
def _next_place(
    pooled, cell, bucket, place, cell_change, bucket_change, j0, fresh, i0, S, offset, one_row, map_cols, by_keys,
    by_cols, sums, map_row, distance_at, magic, F: tl.constexpr,
):  # fmt: skip
    """Where the tile at j0 lies, the first that may lie elsewhere than those before it, whose sums are added up."""
    if place == INSIDE:
        _add_totals(sums, map_row + cell, distance_at + bucket, pooled, magic, F)
    edges = j0 * 0
    change = edges
    if F.MAP:
        if (j0 >= cell_change) | fresh:
            cell = _key_cell(j0, S, map_cols, by_keys, F.WIDE)
            cell_change = _key_cell_start(cell + 1, S, map_cols, by_cols, F.WIDE) - F.BN + 1
        change = cell_change
        edges = tl.where(one_row & (j0 < change), 0, 2)
    if F.DISTANCE:
        last = bucket
        if (j0 >= bucket_change) | fresh:
            bucket, last = _reach(offset, i0, j0, F.BM, F.BN)
            until = _same_bucket_until(offset, i0, j0, bucket, F.BM, F.BN)
            bucket_change = tl.where(last == bucket, until, j0 + 1)
        if F.MAP:
            change = tl.minimum(change, bucket_change)
        else:
            change = bucket_change
        edges += last - bucket
    place = tl.where(edges == 0, INSIDE, tl.where(edges == 1, ACROSS, ELSEWHERE))
    change = tl.where(edges == 0, change, j0 + 1)
    return tl.full([F.BN], 0.0, tl.float32), cell, bucket, place, change, cell_change, bucket_change


@triton.jit
def _add_both_sides(
    z, keys_at, sums, distance_at, map_at, i0, j0, offset, bucket, magic,
    BM: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr, MAP: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """A tile across the edge between two buckets. Pairs nearer than the edge are those whose row comes before
    key + edge, or, where keys come after the rows, does not. Weights are computed here alone: there are not enough
    registers to keep those of the other sums."""
    before = offset + i0 > j0
    edge = tl.where(before, 1 << bucket, 1 - (1 << bucket)) - offset
    p = tl.exp2(settled(z, DIRECT))
    low = tl.arange(0, BM)[None, :] < (keys_at - i0 + edge)[:, None]
    first = tl.sum(tl.where(low, p, 0.0), 1)
    rest = tl.sum(tl.where(low, 0.0, p), 1)
    _add_total(sums, distance_at + tl.where(before, bucket, bucket + 1), first, magic, BN, WARPS)
    _add_total(sums, distance_at + tl.where(before, bucket + 1, bucket), rest, magic, BN, WARPS)
    if MAP:
        _add_total(sums, map_at, first + rest, magic, BN, WARPS)


@triton.jit
def _fold(
    z, entropy, largest, firsts, pooled, rows, keys_at, j0, i0, S, first, offset, limit, place, cell, bucket,
    sums, map_row, distance_at, line, magic, MAP: tl.constexpr, DISTANCE: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """What a tile adds to all sums; ``line``: where key masses of this block of rows are kept apart."""
    cols = keys_at[:, None]
    if DISTANCE:
        if place == ACROSS:
            _add_both_sides(
                z, keys_at, sums, distance_at, map_row + cell, i0, j0, offset, bucket, magic,
                F.BM, F.BN, F.WARPS, MAP, F.DIRECT,
            )  # fmt: skip
    p = tl.exp2(z)
    if F.ROWS:
        entropy = settled(_add_products(entropy, p, z, F.BM, F.BN, F.WARPS), F.DIRECT)
    if F.ROWS or F.TOP:
        largest = settled(tl.maximum(largest, _lane_maxima(z, F.BM, F.BN, F.WARPS, F.GROUPS)), F.DIRECT)
    if F.FIRSTS:
        if j0 < first:
            firsts += _lane_sums(tl.where(cols < first, p, 0.0), F.BM, F.BN, F.WARPS)
    if F.MASS or MAP or DISTANCE:
        mass = tl.sum(p, 1)
        if MAP or DISTANCE:
            # of a tile that is not INSIDE this is not used
            pooled += mass
        if F.LIMIT:
            mass = tl.sum(tl.where((rows >= limit[0]) & (rows < limit[1]), p, 0.0), 1)
        if F.BY_BLOCK:
            tl.store(line + keys_at, mass, mask=keys_at < S)
        elif F.MASS:
            add_exactly(sums, keys_at, mass, magic, keys_at < S)
    return entropy, largest, firsts, pooled


@triton.jit
def _keys(K, b, h, j0, strides, S, EDGE: tl.constexpr, F: tl.constexpr):
    return load_block(K, b, h // F.GROUP, j0, strides, S, F.BN, F.HEAD, F.D, F.COPIED, EDGE, F.HEAD == F.D)


_SIZES = ["L", "S", "first_row", "offset", "limit_start", "limit_stop", "map_rows", "map_cols", "first"]
_SIZES += ["blocks", "sums_stride", "map_at", "distance_at", "pairs_stride_b", "pairs_stride_h"]
_DIVISORS = ["by_keys", "by_keys_shift", "by_cols", "by_cols_shift"]


@triton.jit
def _rows(
    q, K, lse, bias, pairs, tables, sums_at, results, k_strides, item, sizes, offset, limit, cells, first,
    by_keys, by_cols, scales, magic, blocks, F: tl.constexpr,
):  # fmt: skip
    """What belongs to rows, key mass, and of map and distances what plain tiles give."""
    b, h, block = item
    L, S = sizes
    map_rows, map_cols = cells
    sums, map_at, distance_at = sums_at
    LSE, ENTROPY, LARGEST, FIRST, MAXIMA, MASSES = results
    bh = b * F.H + h
    i0 = block * F.BM
    rows = (i0 + tl.arange(0, F.BM))[None, :]
    map_row = map_at
    one_row = True
    if F.MAP:
        row_cell = _cell(i0, L, map_rows, F.WIDE)
        one_row = row_cell == _cell(tl.minimum(i0 + F.BM, L) - 1, L, map_rows, F.WIDE)
        map_row = map_at + row_cell * map_cols

    # tl.zeros is written in Triton, and in Triton 3.6 such functions take no fields of a structure in a list
    entropy = tl.full([F.WARPS, 8, F.BM], 0.0, tl.float32)
    firsts = tl.full([F.WARPS, 8, F.BM], 0.0, tl.float32)
    largest = tl.full([F.WARPS, F.GROUPS // F.WARPS, F.BM], NEVER, tl.float32)
    line = MASSES + (bh.to(tl.int64) * blocks + block) * S
    for kind in tl.static_range(2):
        runs = tl.load(tables[1] + 2 * kind)
        table = tables[0] + tl.load(tables[1] + 3 + 2 * kind) + tables[2] * runs * 2
        if kind == 1:
            rows = (forgotten(i0, F.DIRECT) + tl.arange(0, F.BM))[None, :]
        for run in range(runs):
            start = tl.load(table + 2 * run)
            stop = tl.load(table + 2 * run + 1)
            # what plain tiles gave since the cell of the map or the bucket of distances last changed
            pooled = tl.full([F.BN], 0.0, tl.float32)
            cell = start * 0
            bucket = start * 0
            place = start * 0 + ELSEWHERE
            change = start * F.BN
            cell_change = start * F.BN
            bucket_change = start * F.BN
            # Programs begin at different keys: in step with each other they would all add to the same sums.
            shift = block % tl.maximum(stop - start, 1)
            z = tl.full([F.BN, F.BM], 0.0, tl.float32)
            s = z
            if F.AHEAD and kind == 0:
                k = _keys(K, b, h, (start + shift) * F.BN, k_strides, S, True, F)
                s = tl.dot(k, tl.trans(q), input_precision=F.PRECISION)
                z = log_weights(s, lse, rows, rows, (L, S), scales, bias, pairs, 0, 0, False, 0, False)
            for step in range(start + shift, stop + shift):
                tile = tl.where(step < stop, step, step - stop + start)
                j0 = tile * F.BN
                keys_at = j0 + tl.arange(0, F.BN)
                cols = keys_at[:, None]
                if F.AHEAD and kind == 0:
                    # The product of the next tile is made while the sums of this one are. Both conditions always hold:
                    # by the outer one the compiler does not mix the two, and it waits for the product in the inner one.
                    j1 = tl.where(step + 1 < stop, step + 1, step + 1 - stop + start) * F.BN
                    k = _keys(K, b, h, j1, k_strides, S, False, F)
                    s = tl.dot(k, tl.trans(q), input_precision=F.PRECISION)
                    if j0 < S:
                        if F.MAP or F.DISTANCE:
                            if (j0 >= change) | (tile == start):
                                pooled, cell, bucket, place, change, cell_change, bucket_change = _next_place(
                                    pooled, cell, bucket, place, cell_change, bucket_change, j0, tile == start, i0, S,
                                    offset, one_row, map_cols, by_keys, by_cols, sums, map_row, distance_at, magic, F,
                                )  # fmt: skip
                        entropy, largest, firsts, pooled = _fold(
                            z, entropy, largest, firsts, pooled, rows, keys_at, j0, i0, S, first, offset, limit, place,
                            cell, bucket, sums, map_row, distance_at, line, magic, F.MAP, F.DISTANCE, F,
                        )  # fmt: skip
                        if j1 < S:
                            z = log_weights(s, lse, rows, rows, (L, S), scales, bias, pairs, 0, 0, False, 0, False)
                else:
                    if (F.MAP or F.DISTANCE) and kind == 0:
                        if (j0 >= change) | (tile == start):
                            pooled, cell, bucket, place, change, cell_change, bucket_change = _next_place(
                                pooled, cell, bucket, place, cell_change, bucket_change, j0, tile == start, i0, S,
                                offset, one_row, map_cols, by_keys, by_cols, sums, map_row, distance_at, magic, F,
                            )  # fmt: skip
                    k = _keys(K, b, h, j0, k_strides, S, kind == 1, F)
                    s = tl.dot(k, tl.trans(q), input_precision=F.PRECISION)
                    z = log_weights(
                        s, lse, rows, cols, (L, S), scales, bias, pairs,
                        F.PREDICATE, F.SLOTS, F.SOFTCAP, F.BIASED, kind == 1,
                    )  # fmt: skip
                    entropy, largest, firsts, pooled = _fold(
                        z, entropy, largest, firsts, pooled, rows, keys_at, j0, i0, S, first, offset, limit, place,
                        cell, bucket, sums, map_row, distance_at, line, magic,
                        F.MAP and kind == 0, F.DISTANCE and kind == 0, F,
                    )  # fmt: skip
            if F.AHEAD and kind == 0:
                settled(s, F.DIRECT)
            if (F.MAP or F.DISTANCE) and kind == 0:
                if place == INSIDE:
                    _add_totals(sums, map_row + cell, distance_at + bucket, pooled, magic, F)

    rows = forgotten(i0, F.DIRECT) + tl.arange(0, F.BM)
    row = bh.to(tl.int64) * L + rows
    lse = load_lse(LSE + bh.to(tl.int64) * L, rows, L)
    if F.ROWS:
        empty = lse == -NEVER
        total = tl.maximum(tl.sum(tl.sum(entropy, 1), 0) * -LN2, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(ENTROPY + row, tl.where(empty, float("nan"), total), mask=rows < L)
        top = tl.exp2(tl.max(tl.max(largest, 1), 0))
        tl.store(LARGEST + row, tl.where(empty | (lse != lse), float("nan"), top), mask=rows < L)
    if F.FIRSTS:
        tl.store(FIRST + row, tl.sum(tl.sum(firsts, 1), 0), mask=rows < L)
    if F.TOP:
        group = bh.to(tl.int64) * F.GROUPS + tl.arange(0, F.GROUPS)
        at = group[:, None] * L + rows[None, :]
        tl.store(MAXIMA + at, tl.reshape(largest, [F.GROUPS, F.BM]), mask=(rows < L)[None, :])


@triton.jit
def _edges(
    q, K, lse, bias, pairs, tables, sums_at, k_strides, item, sizes, position, limit, cells, scales, magic,
    F: tl.constexpr,
):  # fmt: skip
    """Map and distances of the tiles that are not plain."""
    b, h, block = item
    L, S = sizes
    limit_start, limit_stop = limit
    map_rows, map_cols = cells
    sums, map_at, distance_at = sums_at
    i0 = block * F.BM
    rows = (i0 + tl.arange(0, F.BM))[None, :]
    height = limit_stop - limit_start
    first_cell = 0
    last_cell = 0
    if F.EDGE_MAP:
        first_cell = _cell(_clipped(i0, limit_start, limit_stop), height, map_rows, F.WIDE)
        last_cell = _cell(_clipped(i0 + F.BM - 1, limit_start, limit_stop), height, map_rows, F.WIDE)
    for kind in tl.static_range(1, 3):
        # tiles that straddle cells or buckets; tiles with forbidden pairs
        runs = tl.load(tables[1] + kind)
        table = tables[0] + tl.load(tables[1] + 3 + kind) + tables[2] * runs * 2
        for run in range(runs):
            start = tl.load(table + 2 * run)
            stop = tl.load(table + 2 * run + 1)
            for tile in range(start, stop):
                j0 = tile * F.BN
                keys_at = j0 + tl.arange(0, F.BN)
                cols = keys_at[:, None]
                k = _keys(K, b, h, j0, k_strides, S, kind == 2, F)
                s = tl.dot(k, tl.trans(q), input_precision=F.PRECISION)
                z = log_weights(
                    s, lse, rows, cols, (L, S), scales, bias, pairs,
                    F.PREDICATE, F.SLOTS, F.SOFTCAP, F.BIASED, kind == 2,
                )  # fmt: skip
                p = tl.exp2(z)
                mass = tl.sum(p, 1)
                if F.EDGE_DISTANCE:
                    near, far = _reach(position, i0, j0, F.BM, F.BN)
                    away = tl.abs(position + rows - cols)
                    _add_to_distances(p, mass, sums + distance_at, away, near, far, magic, F.BN, F.WARPS)
                if F.EDGE_MAP:
                    if F.LIMIT:
                        p = tl.where((rows >= limit_start) & (rows < limit_stop), p, 0.0)
                        mass = tl.sum(p, 1)
                    _add_to_map(
                        p, mass, sums + map_at, rows - limit_start, keys_at, first_cell, last_cell, height, map_rows,
                        j0, S, map_cols, magic, F.BN, F.WARPS, F.WIDE,
                    )  # fmt: skip


@triton.jit(do_not_specialize=_SIZES + _DIVISORS)
def observe(
    Q, K, LSE, BIAS, PAIRS, PAIRS_HI, RUNS, COUNTS, EDGE_RUNS, EDGE_COUNTS, OFFSETS,
    SUMS, ENTROPY, LARGEST, FIRST, MAXIMA, MASSES,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_s,
    bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k,
    pairs_stride_b, pairs_stride_h, pairs_stride_q, pairs_stride_k, runs_group,
    L, S, first_row, offset, limit_start, limit_stop, map_rows, map_cols, first, blocks,
    by_keys, by_keys_shift, by_cols, by_cols_shift, sums_stride, map_at, distance_at, scale, cap, magic,
    F: tl.constexpr,
):  # fmt: skip
    """RUNS: the key tiles of each block, see ``encode``; EDGE_RUNS: those that are not plain. PAIRS: lo (PAIRS_HI: hi)
    for INTERVALS, booleans for DENSE; for a BAND two of the strides are its numbers instead."""
    heads = tl.num_programs(1)
    bh = tl.program_id(1)
    if F.EDGE_MAP or F.EDGE_DISTANCE:
        # the second half of the programs sees to the edges: they are short, and fill the end, when few others run
        heads = heads // 2
        bh = tl.where(bh < heads, bh, bh - heads)
    # late rows see the most keys under causal masks: they start first
    block = tl.num_programs(0) - 1 - tl.program_id(0) + first_row // F.BM
    b = bh // F.H
    h = bh % F.H
    bias = (BIAS + b.to(tl.int64) * bias_stride_b + h.to(tl.int64) * bias_stride_h, bias_stride_q, bias_stride_k)
    if F.PREDICATE == BAND:
        pairs = (pairs_stride_b, pairs_stride_h, 0, S)
    else:
        pairs = locate_pairs(
            PAIRS, PAIRS_HI, b, h, first_row,
            pairs_stride_b, pairs_stride_h, pairs_stride_q, pairs_stride_k, F.PREDICATE,
        )  # fmt: skip
    q = load_block(Q, b, h, block * F.BM, (q_stride_b, q_stride_h, q_stride_l), L, F.BM, F.HEAD, F.D, F.COPIED, True)
    rows = (block * F.BM + tl.arange(0, F.BM))[None, :]
    lse = load_lse(LSE + bh.to(tl.int64) * L, rows, L)
    sums = SUMS + bh.to(tl.int64) * sums_stride
    distance_at += block % COPIES * BUCKETS
    owner = b * runs_group * blocks + block
    k_strides = (k_stride_b, k_stride_h, k_stride_s)
    if F.EDGE_MAP or F.EDGE_DISTANCE:
        if tl.program_id(1) >= heads:
            position = offset
            if F.EACH:
                position = tl.load(OFFSETS + b).to(tl.int32)
            _edges(
                q, K, lse, bias, pairs, (EDGE_RUNS, EDGE_COUNTS, owner), (sums, map_at, distance_at), k_strides,
                (b, h, block), (L, S), position, (limit_start, limit_stop), (map_rows, map_cols), (scale, cap), magic,
                F,
            )  # fmt: skip
    if tl.program_id(1) < heads:
        _rows(
            q, K, lse, bias, pairs, (RUNS, COUNTS, owner), (sums, map_at, distance_at),
            (LSE, ENTROPY, LARGEST, FIRST, MAXIMA, MASSES), k_strides, (b, h, block), (L, S), offset,
            (limit_start, limit_stop), (map_rows, map_cols), first, (by_keys, by_keys_shift), (by_cols, by_cols_shift),
            (scale, cap), magic, blocks, F,
        )  # fmt: skip
