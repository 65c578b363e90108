# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The k largest weights of each row, exactly, in three steps.

  find    from a threshold that at least k keys reach, note the tiles in which a row has such keys, one bit for each
  choose  compute the weights of the noted keys again and keep the k largest
  search  rows with more tiles than their list holds: a running choice over all keys. Rare on real data; programs
          whose rows all fit end at once, so nothing needs to be known on the host

Ranks are (weight, lower key first), packed into one integer: the bits of a weight >= 0 are ordered like the weight.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._triton.tiles import LOG2E, NEVER, load_lse, load_rows, locate_pairs, log_weights, permitted, tanh

_SIZES = ["L", "S", "first_row", "blocks"]
LAST_KEY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _rank(p, keys):
    # a NaN weight is above every other, as torch sorts it
    bits = tl.abs(p).to(tl.int32, bitcast=True).to(tl.int64)
    return (bits << 32) | (-keys + LAST_KEY).to(tl.int64)


@triton.jit(do_not_specialize=_SIZES)
def find(
    Q, K, LSE, BIAS, PAIRS, PAIRS_HI, RUNS, COUNTS, THRESHOLD, COUNT, TILES, WORDS,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_s,
    bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k,
    pairs_stride_b, pairs_stride_h, pairs_stride_q, pairs_stride_k, runs_group,
    L, S, first_row, blocks, scale, cap,
    H: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PREDICATE: tl.constexpr, SLOTS: tl.constexpr, SOFTCAP: tl.constexpr, BIASED: tl.constexpr, ROOM: tl.constexpr,
    RAW: tl.constexpr, WARPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """TILES, WORDS: [row, ROOM], a tile's index and a bit for each of its 64 keys. COUNT may exceed ROOM."""
    block = tl.num_programs(0) - 1 - tl.program_id(0) + first_row // BM
    bh = tl.program_id(1)
    b = (bh // H).to(tl.int64)
    h = bh % H
    rows = block * BM + tl.arange(0, BM)
    bias = (BIAS + b * bias_stride_b + h * bias_stride_h, bias_stride_q, bias_stride_k)
    pairs = locate_pairs(
        PAIRS, PAIRS_HI, b, h, first_row, pairs_stride_b, pairs_stride_h, pairs_stride_q, pairs_stride_k, PREDICATE
    )
    q = load_rows(Q + b * q_stride_b + h * q_stride_h, q_stride_l, rows, L, HEAD, D, True)
    lse = load_lse(LSE + bh.to(tl.int64) * L, rows, L)
    k_at = K + b * k_stride_b + (h // GROUP) * k_stride_h
    threshold = tl.load(THRESHOLD + bh.to(tl.int64) * L + rows, mask=rows < L, other=float("inf"))
    if RAW:
        # z rises with s = q·k: the products themselves are compared
        threshold = tl.maximum((threshold + lse) / scale, NEVER / 2, propagate_nan=tl.PropagateNan.ALL)
    # the lists are kept by warp, so that noting a tile needs no step between warps
    own = _by_warp(rows, BM, WARPS)
    row = bh.to(tl.int64) * L + own
    count = tl.zeros([BM // WARPS, WARPS], tl.int32)
    bit = (1 << (tl.arange(0, BN) % 32))[None, :]
    half = (32 * tl.arange(0, BN // 32)).to(tl.int64)[None, :]
    for kind in tl.static_range(2):
        runs = tl.load(COUNTS + 2 * kind)
        table = RUNS + tl.load(COUNTS + 3 + 2 * kind) + ((b * runs_group) * blocks + block) * runs * 2
        for run in range(runs):
            start = tl.load(table + 2 * run)
            stop = tl.load(table + 2 * run + 1)
            for tile in range(start, stop):
                cols = tile * BN + tl.arange(0, BN)
                k = load_rows(k_at, k_stride_s, cols, S, HEAD, D, kind == 1)
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
                reach = tl.where(z < threshold[:, None], 0, bit)
                words = tl.sum(tl.reshape(reach, [BM, BN // 32, 32]), 2).to(tl.int64) & 0xFFFFFFFF
                word = _by_warp(tl.sum(words << half, 1), BM, WARPS)
                at = row * ROOM + count
                noted = (word != 0) & (count < ROOM)
                tl.store(WORDS + at, word, mask=noted)
                tl.store(TILES + at, count * 0 + tile, mask=noted)
                count += (word != 0).to(tl.int32)
    tl.store(COUNT + row, count, mask=own < L)


@triton.jit
def _by_warp(x, BM: tl.constexpr, WARPS: tl.constexpr):
    """[BM] as [rows of a warp, WARPS]: a product of matrices gives every warp 16 rows in turn."""
    return tl.reshape(tl.permute(tl.reshape(x, [BM // (16 * WARPS), WARPS, 16]), [0, 2, 1]), [BM // WARPS, WARPS])


@triton.jit(do_not_specialize=["L", "S"])
def choose(
    Q, K, LSE, BIAS, COUNT, TILES, WORDS, TOP_WEIGHTS, TOP_KEYS,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_s,
    bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k, L, S, scale, cap,
    H: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SOFTCAP: tl.constexpr, BIASED: tl.constexpr, ROOM: tl.constexpr, TOP: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """All noted keys are permitted: the mask is not needed again."""
    bh = tl.program_id(1)
    b = (bh // H).to(tl.int64)
    h = bh % H
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    row = bh.to(tl.int64) * L + rows
    d = tl.arange(0, D)
    q = load_rows(Q + b * q_stride_b + h * q_stride_h, q_stride_l, rows, L, HEAD, D, True).to(tl.float32)
    lse = load_lse(LSE + bh.to(tl.int64) * L, rows, L)
    k_at = K + b * k_stride_b + (h // GROUP) * k_stride_h
    bias_at = BIAS + b * bias_stride_b + h * bias_stride_h + rows.to(tl.int64) * bias_stride_q
    count = tl.load(COUNT + row, mask=rows < L, other=0)
    count = tl.where(count > ROOM, 0, count)  # left to the search
    kept = tl.full([BM, KEPT], -1, tl.int64) - tl.arange(0, KEPT)[None, :]  # all different, all below any rank
    entry = tl.zeros([BM], tl.int32)
    word = tl.zeros([BM], tl.int64)
    tile = tl.zeros([BM], tl.int32)
    left = tl.max(count, 0)
    while left > 0:
        fresh = (word == 0) & (entry < count)
        word = tl.where(fresh, tl.load(WORDS + row * ROOM + entry, mask=fresh, other=0), word)
        tile = tl.where(fresh, tl.load(TILES + row * ROOM + entry, mask=fresh, other=0), tile)
        entry += fresh.to(tl.int32)
        low = word & -word
        # the place of a single bit is the exponent of its number
        place = ((low.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 255) - 127
        key = tile * BN + place
        have = word != 0
        word = word ^ low
        inside = have[:, None] & (d < HEAD)[None, :]
        k = tl.load(k_at + key.to(tl.int64)[:, None] * k_stride_s + d[None, :], mask=inside, other=0.0)
        z = tl.sum(q * k.to(tl.float32), 1) * scale
        if SOFTCAP:
            z = tanh(z) * cap
        if BIASED:
            z += tl.load(bias_at + key.to(tl.int64) * bias_stride_k, mask=have, other=0.0).to(tl.float32) * LOG2E
        rank = tl.where(have, _rank(tl.exp2(z - lse), key), -1 - KEPT)
        worst = tl.min(kept, 1)
        kept = tl.where((kept == worst[:, None]) & (rank > worst)[:, None], rank[:, None], kept)
        left = tl.max((word != 0).to(tl.int32) + (entry < count).to(tl.int32), 0)
    _store(
        kept, row, (rows < L) & (tl.load(COUNT + row, mask=rows < L, other=0) <= ROOM), TOP_WEIGHTS, TOP_KEYS, TOP, KEPT
    )


@triton.jit
def _store(kept, row, mine, TOP_WEIGHTS, TOP_KEYS, TOP: tl.constexpr, KEPT: tl.constexpr):
    kept = tl.sort(kept, descending=True)
    place = tl.arange(0, KEPT)
    real = kept >= 0
    weight = (kept >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    key = -(kept & 0xFFFFFFFF) + LAST_KEY
    at = row[:, None] * TOP + place[None, :]
    inside = mine[:, None] & (place < TOP)[None, :]
    tl.store(TOP_WEIGHTS + at, tl.where(real, weight, 0.0), mask=inside)
    tl.store(TOP_KEYS + at, tl.where(real, key, -1), mask=inside)


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
):  # fmt: skip
    """Every tile's keys are offered to the rows' lists, the best first, until none is better than what is kept."""
    block = tl.program_id(0) + first_row // BM
    bh = tl.program_id(1)
    b = (bh // H).to(tl.int64)
    h = bh % H
    rows = block * BM + tl.arange(0, BM)
    row = bh.to(tl.int64) * L + rows
    mine = tl.load(COUNT + row, mask=rows < L, other=0) > ROOM
    if tl.max(mine.to(tl.int32), 0) > 0:
        bias = (BIAS + b * bias_stride_b + h * bias_stride_h, bias_stride_q, bias_stride_k)
        pairs = locate_pairs(
            PAIRS, PAIRS_HI, b, h, first_row, pairs_stride_b, pairs_stride_h, pairs_stride_q, pairs_stride_k, PREDICATE
        )
        q = load_rows(Q + b * q_stride_b + h * q_stride_h, q_stride_l, rows, L, HEAD, D, True)
        lse = load_lse(LSE + bh.to(tl.int64) * L, rows, L)
        k_at = K + b * k_stride_b + (h // GROUP) * k_stride_h
        kept = tl.full([BM, KEPT], -1, tl.int64) - tl.arange(0, KEPT)[None, :]
        for kind in tl.static_range(2):
            runs = tl.load(COUNTS + 2 * kind)
            # the runs are those of the larger blocks of the other kernels
            owner = (b * runs_group) * blocks + block * BM // RUN_ROWS
            table = RUNS + tl.load(COUNTS + 3 + 2 * kind) + owner * runs * 2
            for run in range(runs):
                start = tl.load(table + 2 * run)
                stop = tl.load(table + 2 * run + 1)
                for tile in range(start, stop):
                    cols = tile * BN + tl.arange(0, BN)
                    k = load_rows(k_at, k_stride_s, cols, S, HEAD, D, kind == 1)
                    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                    z = log_weights(
                        s,
                        lse,
                        rows,
                        cols,
                        (L, S),
                        (scale, cap),
                        bias,
                        pairs,
                        PREDICATE,
                        SLOTS,
                        SOFTCAP,
                        BIASED,
                        kind == 1,
                    )
                    seen = mine[:, None] & (z != NEVER)
                    rank = tl.where(seen, _rank(tl.exp2(z), cols[None, :]), -1 - KEPT)
                    best = tl.max(rank, 1)
                    worst = tl.min(kept, 1)
                    while tl.max((best > worst).to(tl.int32), 0) > 0:
                        taken = (kept == worst[:, None]) & (best > worst)[:, None]
                        kept = tl.where(taken, best[:, None], kept)
                        rank = tl.where(rank == best[:, None], -1 - KEPT, rank)
                        best = tl.max(rank, 1)
                        worst = tl.min(kept, 1)
        _store(kept, row, mine & (rows < L), TOP_WEIGHTS, TOP_KEYS, TOP, KEPT)
