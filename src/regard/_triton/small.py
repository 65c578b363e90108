# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The kernels in addition to the observation pass: sums to floats, and a rectangle of weights."""

from __future__ import annotations

import triton
import triton.language as tl

from regard._triton.tiles import BUCKETS, COPIES, load_block, load_lse, locate_pairs, log_weights


@triton.jit(do_not_specialize=["total", "rows", "cols", "queries", "keys", "mass", "cells", "sums_stride"])
def finish_sums(
    SUMS, MASS, MAP, DISTANCE, total, rows, cols, queries, keys, mass, cells, sums_stride,
    SIZE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sums lie as [key mass | map | copies of distances] for each head; a cell becomes a mean over its pairs."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    head = tl.program_id(1).to(tl.int64)
    inside = at < total
    x = tl.load(SUMS + head * sums_stride + at, mask=inside, other=0).to(tl.float32)
    tl.store(MASS + head * mass + at, x, mask=at < mass)
    first = tl.program_id(0) * SIZE
    if (first + SIZE > mass) & (first < mass + cells):
        cell = tl.maximum(at - mass, 0)
        r = cell // cols
        c = cell % cols
        if WIDE:
            r = r.to(tl.int64)
            c = c.to(tl.int64)
        height = (r + 1) * queries // rows - r * queries // rows
        pairs = height.to(tl.float32) * ((c + 1) * keys // cols - c * keys // cols).to(tl.float32)
        in_map = (at >= mass) & (at < mass + cells)
        tl.store(MAP + head * cells + cell, x / tl.maximum(pairs, 1.0), mask=in_map)
    bucket = at - mass - cells
    if (first + SIZE > mass + cells) & (first < mass + cells + BUCKETS):
        in_distance = (bucket >= 0) & (bucket < BUCKETS) & inside
        whole = tl.zeros([SIZE], tl.float64)
        for copy in tl.static_range(COPIES):
            whole += tl.load(SUMS + head * sums_stride + at + copy * BUCKETS, mask=in_distance, other=0)
        tl.store(DISTANCE + head * BUCKETS + bucket, whole.to(tl.float32), mask=in_distance)


@triton.jit(do_not_specialize=["blocks", "extents_group", "rows", "cols", "queries", "keys", "sums_stride"])
def fold_blocks(
    MASSES, EXTENTS, SUMS, MASS, MAP, DISTANCE, blocks, extents_group, rows, cols, queries, keys, sums_stride,
    H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, KEYS: tl.constexpr, CELLS: tl.constexpr, WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr, PARTLY: tl.constexpr, MASSED: tl.constexpr, DISTANCES: tl.constexpr,
):  # fmt: skip
    """Key mass and map from the key mass of each block of BM rows, MASSES [B·H, blocks, keys]; each block lies in one
    row of the map. PARTLY: only what EXTENTS says was written, in tiles of BN keys. Programs of a head: first one for
    each CELLS cells of a row of the map, then one for the distances, then one for each KEYS keys."""
    role = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    masses = MASSES + head * blocks * keys
    extents = EXTENTS + tl.program_id(1) // H * extents_group * blocks * 2
    in_row = tl.cdiv(cols, CELLS)
    if role < rows * in_row:
        row = role // in_row
        first = row * queries // rows
        last = (row + 1) * queries // rows
        cell = role % in_row * CELLS + tl.arange(0, CELLS)
        start = cell * keys // cols
        stop = tl.where(cell < cols, (cell + 1) * keys // cols, 0)
        total = tl.zeros([CELLS], tl.float64)
        for block in range(first // BM, tl.cdiv(last, BM)):
            for offset in range(0, tl.cdiv(keys, cols), WIDTH):
                at = start[:, None] + offset + tl.arange(0, WIDTH)[None, :]
                there = (at < stop[:, None]) & (cell < cols)[:, None]
                if PARTLY:
                    there &= (at >= tl.load(extents + block * 2) * BN) & (at < tl.load(extents + block * 2 + 1) * BN)
                x = tl.load(masses + block * keys + at, mask=there, other=0.0)
                total += tl.sum(x.to(tl.float64), 1)
        pairs = (last - first) * tl.maximum(stop - start, 1)
        tl.store(MAP + (head * rows + row) * cols + cell, (total / pairs).to(tl.float32), mask=cell < cols)
    elif role == rows * in_row:
        if DISTANCES:
            bucket = tl.arange(0, BUCKETS)
            copies = tl.arange(0, COPIES)[:, None] * BUCKETS + bucket[None, :]
            whole = tl.sum(tl.load(SUMS + head * sums_stride + copies), 0)
            tl.store(DISTANCE + head * BUCKETS + bucket, whole.to(tl.float32))
    elif MASSED:
        key = (role - rows * in_row - 1) * KEYS + tl.arange(0, KEYS)
        total = tl.zeros([KEYS], tl.float64)
        for block in range(0, blocks, AT_ONCE):
            line = block + tl.arange(0, AT_ONCE)[:, None]
            there = (line < blocks) & (key < keys)[None, :]
            if PARTLY:
                there &= key[None, :] >= tl.load(extents + line * 2, mask=line < blocks, other=0) * BN
                there &= key[None, :] < tl.load(extents + line * 2 + 1, mask=line < blocks, other=0) * BN
            x = tl.load(masses + line * keys + key[None, :], mask=there, other=0.0)
            total += tl.sum(x.to(tl.float64), 0)
        tl.store(MASS + head * keys + key, total.to(tl.float32), mask=key < keys)


@triton.jit(do_not_specialize=["L", "S", "first_row", "row_start", "row_stop", "key_start", "key_stop", "height"])
def rectangle(
    Q, K, LSE, BIAS, PAIRS, PAIRS_HI, WEIGHTS,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_s,
    bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k,
    pairs_stride_b, pairs_stride_h, pairs_stride_q, pairs_stride_k,
    L, S, first_row, row_start, row_stop, key_start, key_stop, height, scale, cap,
    H: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PREDICATE: tl.constexpr, SLOTS: tl.constexpr, SOFTCAP: tl.constexpr, BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Weights of rows row_start … row_stop-1 and keys key_start … key_stop-1, [B, H, rows, keys].

    Only rows from ``first_row`` on are computed: where a mask comes in pieces, so does the rectangle.
    """
    bh = tl.program_id(2)
    b = bh // H
    h = bh % H
    begin = tl.maximum(row_start, first_row)
    i0 = begin + tl.program_id(1) * BM
    j0 = key_start + tl.program_id(0) * BN
    rows = (i0 + tl.arange(0, BM))[:, None]
    cols = (j0 + tl.arange(0, BN))[None, :]
    bias = (BIAS + b.to(tl.int64) * bias_stride_b + h.to(tl.int64) * bias_stride_h, bias_stride_q, bias_stride_k)
    pairs = locate_pairs(
        PAIRS, PAIRS_HI, b, h, first_row, pairs_stride_b, pairs_stride_h, pairs_stride_q, pairs_stride_k, PREDICATE
    )
    q = load_block(Q, b, h, i0, (q_stride_b, q_stride_h, q_stride_l), L, BM, HEAD, D, False, True)
    lse = load_lse(LSE + bh.to(tl.int64) * L, rows, L)
    k = load_block(K, b, h // GROUP, j0, (k_stride_b, k_stride_h, k_stride_s), S, BN, HEAD, D, False, True)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    z = log_weights(s, lse, rows, cols, (L, S), (scale, cap), bias, pairs, PREDICATE, SLOTS, SOFTCAP, BIASED, True)
    width = key_stop - key_start
    at = (bh.to(tl.int64) * height + (rows - row_start)) * width + (cols - key_start)
    tl.store(WEIGHTS + at, tl.exp2(z), mask=(rows < row_stop) & (cols < key_stop))
