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
    in_units,
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

# what Triton would compile anew for, where one of these is 1 or 16 divides it
_NUMBERS = [
    "q_stride_b", "q_stride_h", "q_stride_l", "k_stride_b", "k_stride_h", "k_stride_s", "v_stride_b", "v_stride_h",
    "v_stride_s", "do_stride_b", "do_stride_h", "do_stride_l", "bias_stride_b", "bias_stride_h", "bias_stride_q",
    "bias_stride_k", "pairs_b", "pairs_h", "pairs_q", "pairs_k", "items", "owners", "L", "S", "blocks", "heads",
    "group", "head", "value", "threshold",
]  # fmt: skip


@triton.jit
def _products_of_rows(OUT, do, b, h, i0, strides, L, value, F: tl.constexpr):
    """Delta of BM rows: the product of each row's output and the output's gradient ``do``."""
    out = load_block(OUT, b, h, i0, strides, L, F.BM, value, F.DV, False, True, F.WHOLE_V)
    return tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)


@triton.jit(
    do_not_specialize=["out_stride_b", "out_stride_h", "out_stride_l", "do_stride_b", "do_stride_h", "do_stride_l", "L",
                       "heads", "value"]
)  # fmt: skip
def row_products(
    OUT, DO, DELTA, out_stride_b, out_stride_h, out_stride_l, do_stride_b, do_stride_h, do_stride_l, L, heads, value,
    F: tl.constexpr,
):  # fmt: skip
    """DELTA [B, H, L], where no gradient of the queries is asked for: ``queries_backward`` makes it on its way."""
    bh = tl.program_id(1)
    b = bh // heads
    h = bh % heads
    i0 = tl.program_id(0) * F.BM
    at = i0 + tl.arange(0, F.BM)
    value = F.DV if F.WHOLE_V else value * F.UNIT
    do_strides = in_units((do_stride_b, do_stride_h, do_stride_l), F.UNIT)
    out_strides = in_units((out_stride_b, out_stride_h, out_stride_l), F.UNIT)
    do = load_block(DO, b, h, i0, do_strides, L, F.BM, value, F.DV, False, True, F.WHOLE_V)
    delta = _products_of_rows(OUT, do, b, h, i0, out_strides, L, value, F)
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
    F: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(weights after dropout, gradient of the logits before the softcap, gradient of the logits after it)."""
    z = log_weights(
        s, lse, rows, cols, sizes, scales, bias, pairs, F.PREDICATE, F.SLOTS, F.SOFTCAP, F.BIASED, MASKED, F.DIRECT
    )
    p = tl.exp2(z)
    kept = p
    if F.DROPOUT:
        gone = dropped(keys, row_at, cols, threshold)
        kept = tl.where(gone, 0.0, p * share)
        dp = tl.where(gone, 0.0, dp * share)
    ds = p * (dp - delta)
    if MASKED or F.BIASED:
        # what is hidden has no weight; its value may be anything
        ds = tl.where(p == 0.0, 0.0, ds)
    inner = ds
    if F.SOFTCAP:
        t = tanh(s * scales[0])
        inner = ds * (1.0 - t * t)
    return kept, inner, ds


@triton.jit(do_not_specialize=_NUMBERS)
def keys_backward(
    Q, K, V, DO, LSE, DELTA, BIAS, PAIRS, PAIRS_HI, SEED, TILES, STARTS, DK, DV_,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
    do_stride_b, do_stride_h, do_stride_l, bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k,
    pairs_b, pairs_h, pairs_q, pairs_k, items, owners, L, S, blocks, heads, group, head, value, threshold,
    scale, cap, factor, share, F: tl.constexpr,
):  # fmt: skip
    """DK [B, Hkv, S, head], DV_ [B, Hkv, S, value]. ``scale``, ``cap``: powers of two included; ``factor``: the
    derivative of a logit by its product, without the softcap. ``group``: heads that share keys. Tiles lie as [keys,
    rows]."""
    block = tl.program_id(0)
    item = tl.program_id(1)
    b = item // (heads // group)
    kv = item % (heads // group)
    j0 = block * F.BN
    at = j0 + tl.arange(0, F.BN)
    cols = at[:, None]
    head = F.D if F.WHOLE else head * F.UNIT
    value = F.DV if F.WHOLE_V else value * F.UNIT
    q_strides = in_units((q_stride_b, q_stride_h, q_stride_l), F.UNIT)
    k_strides = in_units((k_stride_b, k_stride_h, k_stride_s), F.UNIT)
    v_strides = in_units((v_stride_b, v_stride_h, v_stride_s), F.UNIT)
    do_strides = in_units((do_stride_b, do_stride_h, do_stride_l), F.UNIT)
    dk = tl.full([F.BN, F.D], 0.0, tl.float32)
    dv = tl.full([F.BN, F.DV], 0.0, tl.float32)
    keys = seed_keys(SEED, F.DROPOUT)
    tables = (TILES, STARTS, owners, b * items * blocks + block)
    if F.PREDICATE == BAND:
        pairs = locate_band(PAIRS, PAIRS_HI, b, S, pairs_b, pairs_h, pairs_q, pairs_k)
        walk = row_tiles(pairs, j0, L, S, F.BM, F.BN)
    else:
        pairs = locate_pairs(PAIRS, PAIRS_HI, b, kv, j0 * 0, pairs_b, pairs_h, pairs_q, pairs_k, F.PREDICATE)
        walk = (j0, j0, j0, j0)
    k = load_keys(K, b, kv, j0, k_strides, pairs, S, F.BN, head, F.D, False, True, F.PADDED, F.WHOLE)
    v = load_keys(V, b, kv, j0, v_strides, pairs, S, F.BN, value, F.DV, False, True, F.PADDED, F.WHOLE_V)
    for kind in tl.static_range(2):
        start, stop = span_of(tables, walk, kind, F.PREDICATE)
        # all heads that share these keys, one after the other
        for turn in range((stop - start) * group if F.GROUPED else stop - start):
            h = kv
            step = turn
            if F.GROUPED:
                h = kv * group + turn // (stop - start)
                step = turn % (stop - start)
            i0 = tile_at(tables, walk, start + step, kind, F.PREDICATE) * F.BM
            rows = (i0 + tl.arange(0, F.BM))[None, :]
            first = (b * heads + h).to(tl.int64) * L
            bias = locate_bias(BIAS, b, h, bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k, F.BIASED)
            if F.PREDICATE != BAND:
                pairs = locate_pairs(PAIRS, PAIRS_HI, b, h, i0 * 0, pairs_b, pairs_h, pairs_q, pairs_k, F.PREDICATE)
            q = load_block(Q, b, h, i0, q_strides, L, F.BM, head, F.D, False, kind == 1, F.WHOLE)
            s = tl.dot(k, tl.trans(q), input_precision=F.PRECISION)
            lse, delta = _load_rows(LSE, DELTA, first, rows, L, kind == 1)
            do = load_block(DO, b, h, i0, do_strides, L, F.BM, value, F.DV, False, kind == 1, F.WHOLE_V)
            dp = tl.dot(v, tl.trans(do), input_precision=F.PRECISION)
            p, ds, _ = _weights_and_slopes(
                s, lse, dp, delta, rows, cols, (L, S), (scale, cap), bias, pairs, keys, (first + rows) * S, threshold,
                share, F, kind == 1,
            )  # fmt: skip
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=F.PRECISION)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=F.PRECISION)
    where = (item.to(tl.int64) * S + at)[:, None]
    d = tl.arange(0, F.D)[None, :]
    e = tl.arange(0, F.DV)[None, :]
    inside = cols < S
    inside_k = inside if F.WHOLE else inside & (d < head)
    inside_v = inside if F.WHOLE_V else inside & (e < value)
    tl.store(DK + where * head + d, (dk * factor).to(DK.dtype.element_ty), mask=inside_k)
    tl.store(DV_ + where * value + e, dv.to(DV_.dtype.element_ty), mask=inside_v)


@triton.jit(do_not_specialize=[*_NUMBERS, "out_stride_b", "out_stride_h", "out_stride_l"])
def queries_backward(
    Q, K, V, DO, LSE, DELTA, BIAS, PAIRS, PAIRS_HI, SEED, TILES, STARTS, OUT, DQ,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
    do_stride_b, do_stride_h, do_stride_l, bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k,
    pairs_b, pairs_h, pairs_q, pairs_k, items, owners, L, S, blocks, heads, group, head, value, threshold,
    scale, cap, factor, share, out_stride_b, out_stride_h, out_stride_l, F: tl.constexpr,
):  # fmt: skip
    """DQ [B, H, L, head], and DELTA [B, H, L], which ``keys_backward`` reads; the rest as there. Tiles lie as [rows,
    keys]."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # with a causal mask the longest come first
    bh = tl.program_id(1)
    b = bh // heads
    h = bh % heads
    kv = h // group
    i0 = block * F.BM
    at = i0 + tl.arange(0, F.BM)
    rows = at[:, None]
    head = F.D if F.WHOLE else head * F.UNIT
    value = F.DV if F.WHOLE_V else value * F.UNIT
    q_strides = in_units((q_stride_b, q_stride_h, q_stride_l), F.UNIT)
    k_strides = in_units((k_stride_b, k_stride_h, k_stride_s), F.UNIT)
    v_strides = in_units((v_stride_b, v_stride_h, v_stride_s), F.UNIT)
    do_strides = in_units((do_stride_b, do_stride_h, do_stride_l), F.UNIT)
    out_strides = in_units((out_stride_b, out_stride_h, out_stride_l), F.UNIT)
    first = bh.to(tl.int64) * L
    q = load_block(Q, b, h, i0, q_strides, L, F.BM, head, F.D, False, True, F.WHOLE)
    do = load_block(DO, b, h, i0, do_strides, L, F.BM, value, F.DV, False, True, F.WHOLE_V)
    delta = _products_of_rows(OUT, do, b, h, i0, out_strides, L, value, F)
    tl.store(DELTA + first + at, delta, mask=at < L)
    delta = delta[:, None]
    lse = load_lse(LSE + first, rows, L)
    bias = locate_bias(BIAS, b, h, bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k, F.BIASED)
    if F.PREDICATE == BAND:
        pairs = locate_band(PAIRS, PAIRS_HI, b, S, pairs_b, pairs_h, pairs_q, pairs_k)
        walk = key_tiles(pairs, i0, L, F.BM, F.BN)
    else:
        pairs = locate_pairs(PAIRS, PAIRS_HI, b, h, i0 * 0, pairs_b, pairs_h, pairs_q, pairs_k, F.PREDICATE)
        walk = (i0, i0, i0, i0)
    tables = (TILES, STARTS, owners, b * items * blocks + block)
    keys = seed_keys(SEED, F.DROPOUT)
    row_at = (first + rows) * S
    dq = tl.full([F.BM, F.D], 0.0, tl.float32)
    for kind in tl.static_range(2):
        start, stop = span_of(tables, walk, kind, F.PREDICATE)
        for step in range(start, stop):
            j0 = tile_at(tables, walk, step, kind, F.PREDICATE) * F.BN
            cols = (j0 + tl.arange(0, F.BN))[None, :]
            k = load_keys(K, b, kv, j0, k_strides, pairs, S, F.BN, head, F.D, False, kind == 1, F.PADDED, F.WHOLE)
            v = load_keys(V, b, kv, j0, v_strides, pairs, S, F.BN, value, F.DV, False, kind == 1, F.PADDED, F.WHOLE_V)
            s = tl.dot(q, tl.trans(k), input_precision=F.PRECISION)
            dp = tl.dot(do, tl.trans(v), input_precision=F.PRECISION)
            _, ds, _ = _weights_and_slopes(
                s, lse, dp, delta, rows, cols, (L, S), (scale, cap), bias, pairs, keys, row_at, threshold, share,
                F, kind == 1,
            )  # fmt: skip
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=F.PRECISION)
    d = tl.arange(0, F.D)[None, :]
    inside = rows < L
    inside = inside if F.WHOLE else inside & (d < head)
    tl.store(DQ + (first + rows) * head + d, (dq * factor).to(DQ.dtype.element_ty), mask=inside)


_GRADIENT = ["grad_stride_b", "grad_stride_h", "grad_stride_q", "grad_stride_k", "tiles", "shared_heads", "diagonals"]


@triton.jit(do_not_specialize=[*_NUMBERS, *_GRADIENT])
def bias_backward(
    Q, K, V, DO, LSE, DELTA, BIAS, PAIRS, PAIRS_HI, SEED, DBIAS,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
    do_stride_b, do_stride_h, do_stride_l, bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k,
    pairs_b, pairs_h, pairs_q, pairs_k, grad_stride_b, grad_stride_h, grad_stride_q, grad_stride_k, L, S, heads, group,
    head, value, tiles, items, shared_heads, diagonals, threshold, scale, cap, share, F: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits, summed over what shares a number of the bias; each program owns a tile of sums.

    Without ALONG the bias is a matrix: program (row tile · key tile, item and head of the bias) walks over the
    ``items`` and ``shared_heads`` that share it. ONE_ROW, ONE_KEY: all rows or all keys share a number; DBIAS then has
    a row, or a column, for each tile. With ALONG (BM = BN) the bias goes by distance: program (tile diagonal, item and
    head) walks along that diagonal in each of ``items``, and leaves a tile to be summed along its diagonals.
    """
    which = tl.program_id(0)
    owner = tl.program_id(1)
    keys = seed_keys(SEED, F.DROPOUT)
    total = tl.full([F.BM, F.BN], 0.0, tl.float32)
    own_heads = heads // shared_heads
    head = F.D if F.WHOLE else head * F.UNIT
    value = F.DV if F.WHOLE_V else value * F.UNIT
    q_strides = in_units((q_stride_b, q_stride_h, q_stride_l), F.UNIT)
    k_strides = in_units((k_stride_b, k_stride_h, k_stride_s), F.UNIT)
    v_strides = in_units((v_stride_b, v_stride_h, v_stride_s), F.UNIT)
    do_strides = in_units((do_stride_b, do_stride_h, do_stride_l), F.UNIT)
    if F.ALONG:
        # diagonal n has key tile - row tile = n - (row tiles - 1)
        down = tl.cdiv(L, F.BM)
        apart = which - (down - 1)
        start = tl.maximum(0, -apart)
        steps = tl.maximum(0, tl.minimum(down, tiles - apart) - start)
        between = apart * F.BM
    else:
        start = which // tiles
        apart = which % tiles - start
        steps = which * 0 + 1
        between = which % tiles * F.BN - start * F.BM  # from the tile's first row to its first key
    if F.PREDICATE == BAND:
        # a tile that lies outside of the band
        if (pairs_k & OFFSETS_GIVEN) == 0:
            outside = (between + F.BN - 1 < pairs_b - pairs_h) | (between - F.BM + 1 > pairs_b + pairs_q)
            steps = tl.where(outside, 0, steps)
    for step in range(steps * items * shared_heads):
        shared = step // steps
        b = owner // own_heads + shared // shared_heads
        h = owner % own_heads + shared % shared_heads
        row_tile = start + step % steps
        i0 = row_tile * F.BM
        j0 = (row_tile + apart) * F.BN
        rows = (i0 + tl.arange(0, F.BM))[:, None]
        cols = (j0 + tl.arange(0, F.BN))[None, :]
        first = (b * heads + h).to(tl.int64) * L
        bias = locate_bias(BIAS, b, h, bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k, F.BIASED)
        if F.PREDICATE == BAND:
            pairs = locate_band(PAIRS, PAIRS_HI, b, S, pairs_b, pairs_h, pairs_q, pairs_k)
        else:
            pairs = locate_pairs(PAIRS, PAIRS_HI, b, h, i0 * 0, pairs_b, pairs_h, pairs_q, pairs_k, F.PREDICATE)
        kv = h // group
        q = load_block(Q, b, h, i0, q_strides, L, F.BM, head, F.D, False, True, F.WHOLE)
        k = load_keys(K, b, kv, j0, k_strides, pairs, S, F.BN, head, F.D, False, True, F.PADDED, F.WHOLE)
        s = tl.dot(q, tl.trans(k), input_precision=F.PRECISION)
        do = load_block(DO, b, h, i0, do_strides, L, F.BM, value, F.DV, False, True, F.WHOLE_V)
        v = load_keys(V, b, kv, j0, v_strides, pairs, S, F.BN, value, F.DV, False, True, F.PADDED, F.WHOLE_V)
        dp = tl.dot(do, tl.trans(v), input_precision=F.PRECISION)
        lse, delta = _load_rows(LSE, DELTA, first, rows, L, True)
        _, _, ds = _weights_and_slopes(
            s, lse, dp, delta, rows, cols, (L, S), (scale, cap), bias, pairs, keys, (first + rows) * S, threshold,
            share, F, True,
        )  # fmt: skip
        total += ds
    r = tl.arange(0, F.BM)[:, None]
    c = tl.arange(0, F.BN)[None, :]
    if F.ALONG:
        at = (owner.to(tl.int64) * diagonals + which) * (F.BM * F.BN)
        tl.store(DBIAS + at + r * F.BN + c, total)
    else:
        at = (owner // own_heads).to(tl.int64) * grad_stride_b + (owner % own_heads).to(tl.int64) * grad_stride_h
        rows = which // tiles * F.BM + r
        cols = which % tiles * F.BN + c
        inside = (rows < L) & (cols < S)
        if F.ONE_ROW:
            total = tl.sum(total, 0)[None, :]
            rows = tl.full([1, 1], 0, tl.int32) + which // tiles
            inside = cols < S
        if F.ONE_KEY:
            total = tl.sum(total, 1)[:, None]
            cols = tl.full([1, 1], 0, tl.int32) + which % tiles
            inside = rows < (L if not F.ONE_ROW else 1 << 30)
        place = at + rows.to(tl.int64) * grad_stride_q + cols.to(tl.int64) * grad_stride_k
        tl.store(DBIAS + place, total, mask=inside)
