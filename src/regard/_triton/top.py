# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The k largest weights of each row, exactly, in four steps.

  bound   from the maxima of disjoint groups of keys, a threshold that at least k keys reach
  find    note the stretches of 128 keys in which a row has keys that reach it,
          one bit for each
  choose  compute the weights of the noted keys again, and keep the k largest
  search  rows with more stretches than their lists hold: a running choice over all keys. Rare on real data; programs
          whose rows all fit end at once, so nothing needs to be known on the host

A row has four lists, one for each thread that holds some of its products: key 64·n + 8·g + 2·t + e of a stretch is
bit 16·n + 2·g + e of thread t. So nothing is exchanged between threads.

Ranks are (weight, lower key first), packed into one integer: the bits of a weight >= 0 are ordered like the weight.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._triton.tiles import (
    LOG2E,
    NEVER,
    load_block,
    load_lse,
    locate_pairs,
    log_weights,
    permitted,
    settled,
    store_in_place,
    tanh,
)

_SIZES = ["L", "S", "first_row", "blocks"]
LAST_KEY = tl.constexpr(0x7FFFFFFF)
LISTS = tl.constexpr(4)


@triton.jit
def _rank(p, keys):
    # a NaN weight is above every other, as torch sorts it
    bits = tl.abs(p).to(tl.int32, bitcast=True).to(tl.int64)
    return (bits << 32) | (-keys + LAST_KEY).to(tl.int64)


@triton.jit(do_not_specialize=["L", "first_row"])
def bound(
    MAXIMA, LSE, THRESHOLD, L, first_row, BM: tl.constexpr, TOP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """MAXIMA: [B·H, GROUPS, L], of z. A kernel of its own, as here a thread holds all the maxima of a row."""
    bh = tl.program_id(1).to(tl.int64)
    rows = first_row + tl.program_id(0) * BM + tl.arange(0, BM)
    at = (bh * GROUPS + tl.arange(0, GROUPS)[:, None]) * L + rows[None, :]
    maxima = tl.load(MAXIMA + at, mask=(rows < L)[None, :], other=NEVER)
    found = tl.max(maxima, 0)
    for _ in range(TOP - 1):
        maxima = tl.where(maxima == found[None, :], NEVER, maxima)
        found = tl.max(maxima, 0)
    # lowered by more than two computations of one z differ
    lse = load_lse(LSE + bh * L, rows, L)
    found -= 1e-6 * (tl.abs(found) + tl.abs(lse) * LOG2E) + 1e-5
    # weights that underflow are all equal, and then the lower keys win
    tl.store(THRESHOLD + bh * L + rows, tl.where(found > -120.0, found, NEVER / 2), mask=rows < L)


@triton.jit
def _note(
    low, count, words, tile, ends, bit, lists, NOTED, rows, L,
    BM: tl.constexpr, BN: tl.constexpr, ROOM: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """The bits of a tile's keys that are not ``low``, stored where a stretch or the run of tiles ends."""
    IN_STRETCH: tl.constexpr = 128 // BN
    reach = tl.where(low, 0, bit)
    word = tl.sum(tl.sum(tl.reshape(reach, [BM, BN // 8, LISTS, 2]), 1), 2)
    words |= word << (tile % IN_STRETCH * (BN // 4))
    if (tile % IN_STRETCH == IN_STRETCH - 1) | ends:
        stretch = tl.zeros([BM, LISTS], tl.int64) + tile // IN_STRETCH
        entry = (stretch << 32) | words.to(tl.uint32, bitcast=True).to(tl.int64)
        store_in_place(NOTED + lists * ROOM + count, entry, (words != 0) & (count < ROOM) & (rows < L), DIRECT)
        count += (words != 0).to(tl.int32)
        words = tl.zeros([BM, LISTS], tl.int32)
    return count, words


@triton.jit(do_not_specialize=_SIZES)
def find(
    Q, K, LSE, BIAS, PAIRS, PAIRS_HI, RUNS, COUNTS, THRESHOLD, COUNT, NOTED,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_s,
    bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k,
    pairs_stride_b, pairs_stride_h, pairs_stride_q, pairs_stride_k, runs_group,
    L, S, first_row, blocks, scale, cap,
    H: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, COPIED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
    PREDICATE: tl.constexpr, SLOTS: tl.constexpr, SOFTCAP: tl.constexpr, BIASED: tl.constexpr, ROOM: tl.constexpr,
    RAW: tl.constexpr, AHEAD: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """NOTED: [row, list, ROOM], a stretch and 32 bits in one number. COUNT, [row, list], may exceed ROOM."""
    block = tl.num_programs(0) - 1 - tl.program_id(0) + first_row // BM
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    i0 = block * BM
    at = i0 + tl.arange(0, BM)
    rows = at[:, None]
    bias = (BIAS + b.to(tl.int64) * bias_stride_b + h.to(tl.int64) * bias_stride_h, bias_stride_q, bias_stride_k)
    pairs = locate_pairs(
        PAIRS, PAIRS_HI, b, h, first_row, pairs_stride_b, pairs_stride_h, pairs_stride_q, pairs_stride_k, PREDICATE
    )
    q = load_block(Q, b, h, i0, (q_stride_b, q_stride_h, q_stride_l), L, BM, HEAD, D, COPIED, True)
    lse = load_lse(LSE + bh.to(tl.int64) * L, rows, L)
    threshold = tl.load(THRESHOLD + bh.to(tl.int64) * L + rows, mask=rows < L, other=float("inf"))
    if RAW:
        # z rises with s = q·k: the products themselves are compared
        threshold = tl.maximum((threshold + lse * LOG2E) / scale, NEVER / 2, propagate_nan=tl.PropagateNan.ALL)
    lists = (bh.to(tl.int64) * L + rows) * LISTS + tl.arange(0, LISTS)[None, :]
    count = tl.zeros([BM, LISTS], tl.int32)
    words = tl.zeros([BM, LISTS], tl.int32)
    k_strides = (k_stride_b, k_stride_h, k_stride_s)
    key = tl.arange(0, BN)
    bit = (1 << (2 * (key // 8) + key % 2))[None, :]
    for kind in tl.static_range(2):
        runs = tl.load(COUNTS + 2 * kind)
        table = RUNS + tl.load(COUNTS + 3 + 2 * kind) + (b * runs_group * blocks + block) * runs * 2
        for run in range(runs):
            start = tl.load(table + 2 * run)
            stop = tl.load(table + 2 * run + 1)
            z = tl.zeros([BM, BN], tl.float32)
            s = z
            if AHEAD and kind == 0:
                k = load_block(K, b, h // GROUP, start * BN, k_strides, S, BN, HEAD, D, COPIED, True, HEAD == D)
                s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                z = s - threshold
            for tile in range(start, stop):
                if AHEAD and kind == 0:
                    # The product of the next tile is made while this one is looked at; of both conditions, which always
                    # hold, see ``observe``.
                    j1 = tl.where(tile + 1 < stop, tile + 1, start) * BN
                    k = load_block(K, b, h // GROUP, j1, k_strides, S, BN, HEAD, D, COPIED, False, HEAD == D)
                    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                    if tile * BN < S:
                        count, words = _note(
                            z < 0, count, words, tile, tile + 1 == stop, bit, lists, NOTED, rows, L,
                            BM, BN, ROOM, DIRECT,
                        )  # fmt: skip
                        if j1 < S:
                            z = s - threshold
                else:
                    cols = (tile * BN + tl.arange(0, BN))[None, :]
                    k = load_block(K, b, h // GROUP, tile * BN, k_strides, S, BN, HEAD, D, COPIED, kind == 1, HEAD == D)
                    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                    if RAW:
                        z = s
                        if kind == 1:
                            z = tl.where(permitted(rows, cols, (L, S), pairs, PREDICATE, SLOTS), s, NEVER)
                    else:
                        z = log_weights(
                            s, lse, rows, cols, (L, S), (scale, cap), bias, pairs, PREDICATE, SLOTS, SOFTCAP, BIASED,
                            kind == 1,
                        )  # fmt: skip
                    # not z >= threshold: a NaN is to be found
                    low = z < threshold
                    if kind == 1:
                        # below a threshold that is NaN there is nothing, not even keys beyond the end
                        low |= z == NEVER
                    count, words = _note(
                        low, count, words, tile, tile + 1 == stop, bit, lists, NOTED, rows, L, BM, BN, ROOM, DIRECT
                    )
            if AHEAD and kind == 0:
                settled(s, DIRECT)
    tl.store(COUNT + lists, count, mask=rows < L)


@triton.jit(do_not_specialize=["L"])
def choose(
    Q, K, LSE, BIAS, COUNT, NOTED, TOP_WEIGHTS, TOP_KEYS,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_s,
    bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k, L, scale, cap,
    H: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
    SOFTCAP: tl.constexpr, BIASED: tl.constexpr, ROOM: tl.constexpr, TOP: tl.constexpr, KEPT: tl.constexpr,
    DIRECT: tl.constexpr,
):  # fmt: skip
    """All noted keys are permitted: the mask is not needed again. KEPT entries of a row are looked at together, from
    each of them one key at a time: nearly always there are no more."""
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    at = tl.program_id(0) * BM + tl.arange(0, BM)
    row = bh.to(tl.int64) * L + at
    # the entries of the four lists in one line: where each list begins there, and where the last ends
    list0 = tl.load(COUNT + row * LISTS, mask=at < L, other=0)
    list1 = tl.load(COUNT + row * LISTS + 1, mask=at < L, other=0)
    list2 = tl.load(COUNT + row * LISTS + 2, mask=at < L, other=0)
    list3 = tl.load(COUNT + row * LISTS + 3, mask=at < L, other=0)
    most = tl.maximum(tl.maximum(list0, list1), tl.maximum(list2, list3))
    mine = (most <= ROOM) & (at < L)  # the others are left to the search
    begin1 = list0[:, None]
    begin2 = begin1 + list1[:, None]
    begin3 = begin2 + list2[:, None]
    end = tl.where(mine[:, None], begin3 + list3[:, None], 0)
    lse = load_lse(LSE + bh.to(tl.int64) * L, at, L)[:, None]
    d = tl.arange(0, D)
    q = load_block(Q, b, h, tl.program_id(0) * BM, (q_stride_b, q_stride_h, q_stride_l), L, BM, HEAD, D, False, True)
    # the same column 16 times: the smallest product there is
    q = tl.broadcast_to(q[:, :, None], [BM, D, 16])
    k_at = K + b.to(tl.int64) * k_stride_b + (h // GROUP).to(tl.int64) * k_stride_h
    bias_at = (
        BIAS
        + b.to(tl.int64) * bias_stride_b
        + h.to(tl.int64) * bias_stride_h
        + at.to(tl.int64)[:, None] * bias_stride_q
    )
    slot = tl.arange(0, KEPT)[None, :]
    # the best so far and how many are better than each
    kept = tl.zeros([BM, KEPT], tl.int64) - 1 - slot
    order = tl.broadcast_to(slot, [BM, KEPT])
    fresh = True
    for first in range(0, tl.max(tl.max(end, 1), 0), KEPT):
        place = slot + first
        which = (place >= begin1).to(tl.int32) + (place >= begin2).to(tl.int32) + (place >= begin3).to(tl.int32)
        begin = tl.where(which == 0, 0, tl.where(which == 1, begin1, tl.where(which == 2, begin2, begin3)))
        entry = (row[:, None] * LISTS + which) * ROOM + place - begin
        noted = tl.load(NOTED + entry, mask=place < end, other=0)
        word = noted.to(tl.int32)
        stretch = (noted >> 32).to(tl.int32)
        while tl.max(tl.max((word != 0).to(tl.int32), 1), 0) > 0:
            low = word & -word
            some = word != 0
            key = stretch * 128 + 2 * which + _key_of_bit(low)
            word = word ^ low
            inside = some[:, :, None] & (d < HEAD)[None, None, :]
            k = tl.load(k_at + key.to(tl.int64)[:, :, None] * k_stride_s + d[None, None, :], mask=inside, other=0.0)
            z = tl.max(tl.dot(k, q, input_precision="ieee"), 2) * scale
            if SOFTCAP:
                z = tanh(z) * cap
            rest = -lse
            if BIASED:
                rest += tl.load(bias_at + key.to(tl.int64) * bias_stride_k, mask=some, other=0.0).to(tl.float32)
            # those that are none have ranks of their own, below those of the kept ones that are none
            new = tl.where(some, _rank(tl.exp2(z + rest * LOG2E), key), -1 - KEPT - slot)
            better = _count(new[:, None, :] > new[:, :, None], 2)
            if fresh:
                kept = new
                order = better
            else:
                ahead = new[:, None, :] > kept[:, :, None]
                better += _count(ahead == 0, 1)
                kept = _put(kept, order + _count(ahead, 2), KEPT) + _put(new, better, KEPT)
                order = tl.broadcast_to(slot, [BM, KEPT])
            fresh = False
    _store(kept, order, row, mine, TOP_WEIGHTS, TOP_KEYS, TOP, DIRECT)


@triton.jit
def _count(x, axis: tl.constexpr):
    return tl.sum(x.to(tl.int32), axis)


@triton.jit
def _put(x, place, KEPT: tl.constexpr):
    """The numbers x [BM, KEPT] at their places; zeros where no number has its place."""
    here = place[:, None, :] == tl.arange(0, KEPT)[None, :, None]
    return tl.sum(tl.where(here, x[:, None, :], 0), 2)


@triton.jit
def _key_of_bit(low):
    """The key, from the list's first of its stretch on, that a single bit stands for."""
    # the place of a single bit is the exponent of its number
    bit = ((low.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 255) - 127
    return bit // 16 * 64 + bit % 16 // 2 * 8 + bit % 2


@triton.jit
def _store(kept, place, row, mine, TOP_WEIGHTS, TOP_KEYS, TOP: tl.constexpr, DIRECT: tl.constexpr):
    real = kept >= 0
    bits = (kept >> 32).to(tl.int32)
    key = -(kept & 0xFFFFFFFF) + LAST_KEY
    at = row[:, None] * TOP + place
    inside = mine[:, None] & (place < TOP)
    store_in_place(TOP_WEIGHTS + at, tl.where(real, bits, 0), inside, DIRECT)
    store_in_place(TOP_KEYS + at, tl.where(real, key, -1), inside, DIRECT)


@triton.jit
def _search_block(
    Q, K, LSE, BIAS, PAIRS, PAIRS_HI, RUNS, COUNTS, COUNT, TOP_WEIGHTS, TOP_KEYS,
    q_strides, k_strides, bias_strides, pairs_strides, runs_group, sizes, first_row, block, blocks, scales,
    H: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RUN_ROWS: tl.constexpr, PREDICATE: tl.constexpr, SLOTS: tl.constexpr, SOFTCAP: tl.constexpr,
    BIASED: tl.constexpr, ROOM: tl.constexpr, TOP: tl.constexpr, KEPT: tl.constexpr, PRECISION: tl.constexpr,
    DIRECT: tl.constexpr,
):  # fmt: skip
    """Every tile's keys are offered to the rows' lists, the best first, until none is better than what is kept."""
    L, S = sizes
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    at = block * BM + tl.arange(0, BM)
    rows = at[:, None]
    row = bh.to(tl.int64) * L + at
    lists = row[:, None] * LISTS + tl.arange(0, LISTS)[None, :]
    mine = tl.max(tl.load(COUNT + lists, mask=rows < L, other=0), 1) > ROOM
    if tl.max(mine.to(tl.int32), 0) > 0:
        bias = (
            BIAS + b.to(tl.int64) * bias_strides[0] + h.to(tl.int64) * bias_strides[1],
            bias_strides[2],
            bias_strides[3],
        )
        pairs = locate_pairs(
            PAIRS,
            PAIRS_HI,
            b,
            h,
            first_row,
            pairs_strides[0],
            pairs_strides[1],
            pairs_strides[2],
            pairs_strides[3],
            PREDICATE,
        )
        q = load_block(Q, b, h, block * BM, q_strides, L, BM, HEAD, D, False, True)
        lse = load_lse(LSE + bh.to(tl.int64) * L, rows, L)
        kept = tl.full([BM, KEPT], -1, tl.int64) - tl.arange(0, KEPT)[None, :]
        for kind in tl.static_range(2):
            runs = tl.load(COUNTS + 2 * kind)
            # the runs are those of the larger blocks of the other kernels
            owner = b * runs_group * blocks + block * BM // RUN_ROWS
            table = RUNS + tl.load(COUNTS + 3 + 2 * kind) + owner * runs * 2
            for run in range(runs):
                start = tl.load(table + 2 * run)
                stop = tl.load(table + 2 * run + 1)
                for tile in range(start, stop):
                    cols = (tile * BN + tl.arange(0, BN))[None, :]
                    k = load_block(
                        K, b, h // GROUP, tile * BN, k_strides, S, BN, HEAD, D, False,
                        kind == 1, HEAD == D,
                    )  # fmt: skip
                    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                    z = log_weights(
                        s, lse, rows, cols, (L, S), scales, bias, pairs, PREDICATE, SLOTS, SOFTCAP, BIASED,
                        kind == 1,
                    )  # fmt: skip
                    seen = mine[:, None] & (z != NEVER)
                    rank = tl.where(seen, _rank(tl.exp2(z), cols), -1 - KEPT)
                    best = tl.max(rank, 1)
                    worst = tl.min(kept, 1)
                    while tl.max((best > worst).to(tl.int32), 0) > 0:
                        taken = (kept == worst[:, None]) & (best > worst)[:, None]
                        kept = tl.where(taken, best[:, None], kept)
                        rank = tl.where(rank == best[:, None], -1 - KEPT, rank)
                        best = tl.max(rank, 1)
                        worst = tl.min(kept, 1)
        place = tl.broadcast_to(tl.arange(0, KEPT)[None, :], [BM, KEPT])
        _store(tl.sort(kept, descending=True), place, row, mine & (at < L), TOP_WEIGHTS, TOP_KEYS, TOP, DIRECT)


@triton.jit(do_not_specialize=_SIZES)
def search(
    Q, K, LSE, BIAS, PAIRS, PAIRS_HI, RUNS, COUNTS, COUNT, TOP_WEIGHTS, TOP_KEYS,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_s,
    bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k,
    pairs_stride_b, pairs_stride_h, pairs_stride_q, pairs_stride_k, runs_group,
    L, S, first_row, blocks, scale, cap,
    H: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    RUN_ROWS: tl.constexpr, PREDICATE: tl.constexpr, SLOTS: tl.constexpr, SOFTCAP: tl.constexpr,
    BIASED: tl.constexpr, ROOM: tl.constexpr, TOP: tl.constexpr, KEPT: tl.constexpr, PRECISION: tl.constexpr,
    PARTS: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """The rows that ``choose`` leaves, see the module. A program has several blocks of rows, nearly always none of them
    with such rows."""
    at = (tl.program_id(0) * PARTS + first_row // BM) * BM + tl.arange(0, PARTS * BM)
    lists = (tl.program_id(1).to(tl.int64) * L + at[:, None]) * LISTS + tl.arange(0, LISTS)[None, :]
    most = tl.max(tl.max(tl.load(COUNT + lists, mask=at[:, None] < L, other=0), 1), 0)
    for part in range(tl.where(most > ROOM, PARTS, 0)):
        _search_block(
            Q, K, LSE, BIAS, PAIRS, PAIRS_HI, RUNS, COUNTS, COUNT, TOP_WEIGHTS, TOP_KEYS,
            (q_stride_b, q_stride_h, q_stride_l), (k_stride_b, k_stride_h, k_stride_s),
            (bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k),
            (pairs_stride_b, pairs_stride_h, pairs_stride_q, pairs_stride_k), runs_group,
            (L, S), first_row, tl.program_id(0) * PARTS + part + first_row // BM, blocks, (scale, cap),
            H, GROUP, HEAD, D, BM, BN, RUN_ROWS, PREDICATE, SLOTS, SOFTCAP, BIASED, ROOM, TOP, KEPT, PRECISION,
            DIRECT,
        )  # fmt: skip
