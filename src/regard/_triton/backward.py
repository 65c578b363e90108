# ruff: noqa: SIM102 (a condition known at compile time is a branch of its own)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Gradients of attention, recomputed tile by tile from the log-sum-exp: two passes over the tiles that the mask keeps.

For a pair with weight p: dP = dO·v (scaled or dropped like the weight), dS = p·(dP − delta) with delta = dO·O of the
row, and from these dV += p·dO, dK += dS·q, dQ += dS·k. ``keys_backward`` owns BN keys and walks over the row tiles
that may see them; ``queries_backward`` owns BM rows and walks over their key tiles. It comes first, and leaves the
deltas for the others. No atomics: always the same bits.

Sinks need nothing here: they are in the log-sum-exp and in delta.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._triton.tiles import (
    BAND,
    NEVER,
    OFFSETS_GIVEN,
    dropped,
    key_tiles,
    load_block,
    load_keys,
    load_lse,
    locate_band,
    locate_bias,
    locate_pairs,
    log_weights,
    row_tiles,
    seed_keys,
    span_of,
    tanh,
    tile_at,
)

_NUMBERS = ["L", "S", "blocks", "items", "owners", "pairs_b", "pairs_h", "pairs_q", "pairs_k", "threshold"]


@triton.jit
def _products_of_rows(
    OUT, do, b, h, i0, strides, L, BM: tl.constexpr, VALUE: tl.constexpr, DV: tl.constexpr
):  # fmt: skip
    """Delta of BM rows: the product of each row's output and the output's gradient ``do``."""
    out = load_block(OUT, b, h, i0, strides, L, BM, VALUE, DV, False, True)
    return tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)


@triton.jit
def row_products(
    OUT, DO, DELTA, out_stride_b, out_stride_h, out_stride_l, do_stride_b, do_stride_h, do_stride_l, L,
    H: tl.constexpr, VALUE: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """DELTA [B, H, L], where no gradient of the queries is asked for: ``queries_backward`` makes it on its way."""
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    i0 = tl.program_id(0) * BM
    at = i0 + tl.arange(0, BM)
    do = load_block(DO, b, h, i0, (do_stride_b, do_stride_h, do_stride_l), L, BM, VALUE, DV, False, True)
    delta = _products_of_rows(OUT, do, b, h, i0, (out_stride_b, out_stride_h, out_stride_l), L, BM, VALUE, DV)
    tl.store(DELTA + bh.to(tl.int64) * L + at, delta, mask=at < L)


@triton.jit
def _load_rows(LSE, DELTA, first, rows, L, CHECK: tl.constexpr):
    """The log-sum-exp of some rows, or a number that makes every weight 0 of an empty one, and their delta; CHECK: they
    may lie beyond the end, where weights are 0."""
    if CHECK:
        lse = load_lse(LSE + first, rows, L)
        delta = tl.load(DELTA + first + rows, mask=rows < L, other=0.0)
    else:
        lse = tl.load(LSE + first + rows)
        lse = tl.where(lse == float("-inf"), -NEVER, lse)
        delta = tl.load(DELTA + first + rows)
    return lse, delta


@triton.jit
def _weights_and_slopes(
    s, lse, dp, delta, rows, cols, sizes, scales, bias, pairs, keys, row_at, threshold, share,
    PREDICATE: tl.constexpr, SLOTS: tl.constexpr, SOFTCAP: tl.constexpr, BIASED: tl.constexpr, DROPOUT: tl.constexpr,
    MASKED: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """(weights after dropout, gradient of the logits before the softcap, gradient of the logits after it)."""
    z = log_weights(s, lse, rows, cols, sizes, scales, bias, pairs, PREDICATE, SLOTS, SOFTCAP, BIASED, MASKED, DIRECT)
    p = tl.exp2(z)
    kept = p
    if DROPOUT:
        gone = dropped(keys, row_at, cols, threshold)
        kept = tl.where(gone, 0.0, p * share)
        dp = tl.where(gone, 0.0, dp * share)
    ds = p * (dp - delta)
    if MASKED or BIASED:
        # what is hidden has no weight; its value may be anything
        ds = tl.where(p == 0.0, 0.0, ds)
    inner = ds
    if SOFTCAP:
        t = tanh(s * scales[0])
        inner = ds * (1.0 - t * t)
    return kept, inner, ds


@triton.jit(do_not_specialize=_NUMBERS)
def keys_backward(
    Q, K, V, DO, LSE, DELTA, BIAS, PAIRS, PAIRS_HI, SEED, TILES, STARTS, DK, DV_,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
    do_stride_b, do_stride_h, do_stride_l, bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k,
    pairs_b, pairs_h, pairs_q, pairs_k, items, owners, L, S, blocks, threshold, scale, cap, factor, share,
    H: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, VALUE: tl.constexpr, DV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PREDICATE: tl.constexpr, SLOTS: tl.constexpr, SOFTCAP: tl.constexpr,
    BIASED: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, DIRECT: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """DK [B, Hkv, S, HEAD], DV_ [B, Hkv, S, VALUE]. ``scale``, ``cap``: powers of two included; ``factor``: the
    derivative of a logit by its product, without the softcap. Tiles lie as [keys, rows]."""
    block = tl.program_id(0)
    item = tl.program_id(1)
    b = item // (H // GROUP)
    kv = item % (H // GROUP)
    j0 = block * BN
    at = j0 + tl.arange(0, BN)
    cols = at[:, None]
    dk = tl.zeros([BN, D], tl.float32)
    dv = tl.zeros([BN, DV], tl.float32)
    keys = seed_keys(SEED, DROPOUT)
    tables = (TILES, STARTS, owners, b * items * blocks + block)
    if PREDICATE == BAND:
        pairs = locate_band(PAIRS, PAIRS_HI, b, S, pairs_b, pairs_h, pairs_q, pairs_k)
        walk = row_tiles(pairs, j0, L, S, BM, BN)
    else:
        pairs = locate_pairs(PAIRS, PAIRS_HI, b, kv, j0 * 0, pairs_b, pairs_h, pairs_q, pairs_k, PREDICATE)
        walk = (j0, j0, j0, j0)
    k = load_keys(K, b, kv, j0, (k_stride_b, k_stride_h, k_stride_s), pairs, S, BN, HEAD, D, False, True, PADDED)
    v = load_keys(V, b, kv, j0, (v_stride_b, v_stride_h, v_stride_s), pairs, S, BN, VALUE, DV, False, True, PADDED)
    for kind in tl.static_range(2):
        start, stop = span_of(tables, walk, kind, PREDICATE)
        # all heads that share these keys, one after the other
        for turn in range((stop - start) * GROUP):
            h = kv
            step = turn
            if GROUP > 1:
                h = kv * GROUP + turn // (stop - start)
                step = turn % (stop - start)
            i0 = tile_at(tables, walk, start + step, kind, PREDICATE) * BM
            rows = (i0 + tl.arange(0, BM))[None, :]
            first = (b * H + h).to(tl.int64) * L
            bias = locate_bias(BIAS, b, h, bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k, BIASED)
            if PREDICATE != BAND:
                pairs = locate_pairs(PAIRS, PAIRS_HI, b, h, i0 * 0, pairs_b, pairs_h, pairs_q, pairs_k, PREDICATE)
            q = load_block(Q, b, h, i0, (q_stride_b, q_stride_h, q_stride_l), L, BM, HEAD, D, False, kind == 1)
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            lse, delta = _load_rows(LSE, DELTA, first, rows, L, kind == 1)
            do = load_block(DO, b, h, i0, (do_stride_b, do_stride_h, do_stride_l), L, BM, VALUE, DV, False, kind == 1)
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            p, ds, _ = _weights_and_slopes(
                s, lse, dp, delta, rows, cols, (L, S), (scale, cap), bias, pairs, keys, (first + rows) * S, threshold,
                share, PREDICATE, SLOTS, SOFTCAP, BIASED, DROPOUT, kind == 1, DIRECT,
            )  # fmt: skip
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    where = (item.to(tl.int64) * S + at)[:, None]
    d = tl.arange(0, D)[None, :]
    e = tl.arange(0, DV)[None, :]
    tl.store(DK + where * HEAD + d, (dk * factor).to(DK.dtype.element_ty), mask=(cols < S) & (d < HEAD))
    tl.store(DV_ + where * VALUE + e, dv.to(DV_.dtype.element_ty), mask=(cols < S) & (e < VALUE))


@triton.jit(do_not_specialize=_NUMBERS)
def queries_backward(
    Q, K, V, DO, LSE, DELTA, BIAS, PAIRS, PAIRS_HI, SEED, TILES, STARTS, OUT, DQ,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
    do_stride_b, do_stride_h, do_stride_l, bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k,
    pairs_b, pairs_h, pairs_q, pairs_k, items, owners, L, S, blocks, threshold, scale, cap, factor, share,
    out_stride_b, out_stride_h, out_stride_l,
    H: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, VALUE: tl.constexpr, DV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PREDICATE: tl.constexpr, SLOTS: tl.constexpr, SOFTCAP: tl.constexpr,
    BIASED: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, DIRECT: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """DQ [B, H, L, HEAD], and DELTA [B, H, L], which ``keys_backward`` reads; the rest as there. Tiles lie as [rows,
    keys]."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # with a causal mask the longest come first
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    i0 = block * BM
    at = i0 + tl.arange(0, BM)
    rows = at[:, None]
    first = bh.to(tl.int64) * L
    q = load_block(Q, b, h, i0, (q_stride_b, q_stride_h, q_stride_l), L, BM, HEAD, D, False, True)
    do = load_block(DO, b, h, i0, (do_stride_b, do_stride_h, do_stride_l), L, BM, VALUE, DV, False, True)
    delta = _products_of_rows(OUT, do, b, h, i0, (out_stride_b, out_stride_h, out_stride_l), L, BM, VALUE, DV)
    tl.store(DELTA + first + at, delta, mask=at < L)
    delta = delta[:, None]
    lse = load_lse(LSE + first, rows, L)
    bias = locate_bias(BIAS, b, h, bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k, BIASED)
    if PREDICATE == BAND:
        pairs = locate_band(PAIRS, PAIRS_HI, b, S, pairs_b, pairs_h, pairs_q, pairs_k)
        walk = key_tiles(pairs, i0, L, BM, BN)
    else:
        pairs = locate_pairs(PAIRS, PAIRS_HI, b, h, i0 * 0, pairs_b, pairs_h, pairs_q, pairs_k, PREDICATE)
        walk = (i0, i0, i0, i0)
    tables = (TILES, STARTS, owners, b * items * blocks + block)
    keys = seed_keys(SEED, DROPOUT)
    row_at = (first + rows) * S
    dq = tl.zeros([BM, D], tl.float32)
    for kind in tl.static_range(2):
        start, stop = span_of(tables, walk, kind, PREDICATE)
        for step in range(start, stop):
            j0 = tile_at(tables, walk, step, kind, PREDICATE) * BN
            cols = (j0 + tl.arange(0, BN))[None, :]
            k = load_keys(
                K, b, h // GROUP, j0, (k_stride_b, k_stride_h, k_stride_s), pairs, S,
                BN, HEAD, D, False, kind == 1, PADDED,
            )  # fmt: skip
            v = load_keys(
                V, b, h // GROUP, j0, (v_stride_b, v_stride_h, v_stride_s), pairs, S,
                BN, VALUE, DV, False, kind == 1, PADDED,
            )  # fmt: skip
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            _, ds, _ = _weights_and_slopes(
                s, lse, dp, delta, rows, cols, (L, S), (scale, cap), bias, pairs, keys, row_at, threshold, share,
                PREDICATE, SLOTS, SOFTCAP, BIASED, DROPOUT, kind == 1, DIRECT,
            )  # fmt: skip
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    d = tl.arange(0, D)[None, :]
    tl.store(DQ + (first + rows) * HEAD + d, (dq * factor).to(DQ.dtype.element_ty), mask=(rows < L) & (d < HEAD))


@triton.jit(do_not_specialize=[*_NUMBERS, "tiles", "items", "heads", "diagonals"])
def bias_backward(
    Q, K, V, DO, LSE, DELTA, BIAS, PAIRS, PAIRS_HI, SEED, DBIAS,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
    do_stride_b, do_stride_h, do_stride_l, bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k,
    pairs_b, pairs_h, pairs_q, pairs_k, grad_stride_b, grad_stride_h, grad_stride_q, grad_stride_k, L, S, tiles, items,
    heads, diagonals, threshold, scale, cap, share,
    H: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, VALUE: tl.constexpr, DV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PREDICATE: tl.constexpr, SLOTS: tl.constexpr, SOFTCAP: tl.constexpr,
    BIASED: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, ALONG: tl.constexpr,
    ONE_ROW: tl.constexpr, ONE_KEY: tl.constexpr, DIRECT: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits, summed over what shares a number of the bias; each program owns a tile of sums.

    Without ALONG the bias is a matrix: program (row tile · key tile, item and head of the bias) walks over the
    ``items`` and ``heads`` that share it. ONE_ROW, ONE_KEY: all rows or all keys share a number; DBIAS then has a row,
    or a column, for each tile. With ALONG (BM = BN) the bias goes by distance: program (tile diagonal, item and head)
    walks along that diagonal in each of ``items``, and leaves a tile to be summed along its diagonals.
    """
    which = tl.program_id(0)
    owner = tl.program_id(1)
    keys = seed_keys(SEED, DROPOUT)
    total = tl.zeros([BM, BN], tl.float32)
    own_heads = H // heads
    if ALONG:
        # diagonal n has key tile - row tile = n - (row tiles - 1)
        down = tl.cdiv(L, BM)
        apart = which - (down - 1)
        start = tl.maximum(0, -apart)
        steps = tl.maximum(0, tl.minimum(down, tiles - apart) - start)
        between = apart * BM
    else:
        start = which // tiles
        apart = which % tiles - start
        steps = which * 0 + 1
        between = which % tiles * BN - start * BM  # from the tile's first row to its first key
    if PREDICATE == BAND:
        # a tile that lies outside of the band
        if (pairs_k & OFFSETS_GIVEN) == 0:
            outside = (between + BN - 1 < pairs_b - pairs_h) | (between - BM + 1 > pairs_b + pairs_q)
            steps = tl.where(outside, 0, steps)
    for step in range(steps * items * heads):
        shared = step // steps
        b = owner // own_heads + shared // heads
        h = owner % own_heads + shared % heads
        row_tile = start + step % steps
        i0 = row_tile * BM
        j0 = (row_tile + apart) * BN
        rows = (i0 + tl.arange(0, BM))[:, None]
        cols = (j0 + tl.arange(0, BN))[None, :]
        first = (b * H + h).to(tl.int64) * L
        bias = locate_bias(BIAS, b, h, bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k, BIASED)
        if PREDICATE == BAND:
            pairs = locate_band(PAIRS, PAIRS_HI, b, S, pairs_b, pairs_h, pairs_q, pairs_k)
        else:
            pairs = locate_pairs(PAIRS, PAIRS_HI, b, h, i0 * 0, pairs_b, pairs_h, pairs_q, pairs_k, PREDICATE)
        q = load_block(Q, b, h, i0, (q_stride_b, q_stride_h, q_stride_l), L, BM, HEAD, D, False, True)
        k = load_keys(
            K, b, h // GROUP, j0, (k_stride_b, k_stride_h, k_stride_s), pairs, S, BN, HEAD, D, False, True, PADDED
        )
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        do = load_block(DO, b, h, i0, (do_stride_b, do_stride_h, do_stride_l), L, BM, VALUE, DV, False, True)
        v = load_keys(
            V, b, h // GROUP, j0, (v_stride_b, v_stride_h, v_stride_s), pairs, S, BN, VALUE, DV, False, True, PADDED
        )
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        lse, delta = _load_rows(LSE, DELTA, first, rows, L, True)
        _, _, ds = _weights_and_slopes(
            s, lse, dp, delta, rows, cols, (L, S), (scale, cap), bias, pairs, keys, (first + rows) * S, threshold,
            share, PREDICATE, SLOTS, SOFTCAP, BIASED, DROPOUT, True, DIRECT,
        )  # fmt: skip
        total += ds
    r = tl.arange(0, BM)[:, None]
    c = tl.arange(0, BN)[None, :]
    if ALONG:
        at = (owner.to(tl.int64) * diagonals + which) * (BM * BN)
        tl.store(DBIAS + at + r * BN + c, total)
    else:
        at = (owner // own_heads).to(tl.int64) * grad_stride_b + (owner % own_heads).to(tl.int64) * grad_stride_h
        rows = which // tiles * BM + r
        cols = which % tiles * BN + c
        inside = (rows < L) & (cols < S)
        if ONE_ROW:
            total = tl.sum(total, 0)[None, :]
            rows = tl.full([1, 1], 0, tl.int32) + which // tiles
            inside = cols < S
        if ONE_KEY:
            total = tl.sum(total, 1)[:, None]
            cols = tl.full([1, 1], 0, tl.int32) + which % tiles
            inside = rows < (L if not ONE_ROW else 1 << 30)
        place = at + rows.to(tl.int64) * grad_stride_q + cols.to(tl.int64) * grad_stride_k
        tl.store(DBIAS + place, total, mask=inside)
