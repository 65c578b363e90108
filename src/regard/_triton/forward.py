# ruff: noqa: SIM108 (a condition known at compile time is clearer as a branch)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention itself, in one pass with a running maximum, and the row statistics that come with it.

A program owns BM rows of one head. For each row it keeps, relative to the largest logit m so far (in powers of two,
t = logit - m): total = sum 2^t, e = sum 2^t·t, and acc = sum 2^t·v. Out, lse, entropy and the largest weight
follow from these. The row statistics change nothing in what else is computed: out has the same bits without them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._triton.tiles import LN2, LOG2E, load_block, load_pairs, locate_pairs, permitted, tanh

_NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def _logits(
    s, rows, cols, sizes, scales, bias, pairs,
    PREDICATE: tl.constexpr, SLOTS: tl.constexpr, SOFTCAP: tl.constexpr, BIASED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The tile's logits in powers of two; only forbidden pairs are set to -inf where the products are used as such."""
    z = s
    if SOFTCAP:
        z = tanh(s * scales[0]) * scales[1]
    if BIASED:
        added = load_pairs(bias, rows, cols, sizes).to(tl.float32)
        z = tl.where(added == _NOTHING, _NOTHING, z + added * LOG2E)
    if MASKED:
        z = tl.where(permitted(rows, cols, sizes, pairs, PREDICATE, SLOTS), z, _NOTHING)
    return z


@triton.jit(do_not_specialize=["L", "S", "first_row", "blocks"])
def attend(
    Q, K, V, BIAS, PAIRS, PAIRS_HI, SINKS, RUNS, COUNTS, OUT, LSE, ENTROPY, LARGEST,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
    bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k,
    pairs_stride_b, pairs_stride_h, pairs_stride_q, pairs_stride_k, runs_group, L, S, first_row, blocks, scale, cap,
    H: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr,
    VALUE: tl.constexpr, DV: tl.constexpr, COPIED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PREDICATE: tl.constexpr, SLOTS: tl.constexpr, SOFTCAP: tl.constexpr, BIASED: tl.constexpr, SINK: tl.constexpr,
    RISING: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """OUT: [B, H, L, VALUE]; LSE, ENTROPY, LARGEST: [B, H, L]. RISING: a logit is the product times a positive scale,
    so that the products themselves are compared."""
    block = tl.num_programs(0) - 1 - tl.program_id(0) + first_row // BM
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    i0 = block * BM
    at = i0 + tl.arange(0, BM)
    rows = at[:, None]
    bias = (BIAS + b.to(tl.int64) * bias_stride_b + h * bias_stride_h, bias_stride_q, bias_stride_k)
    pairs = locate_pairs(
        PAIRS, PAIRS_HI, b, h, first_row, pairs_stride_b, pairs_stride_h, pairs_stride_q, pairs_stride_k, PREDICATE
    )
    q = load_block(Q, b, h, i0, (q_stride_b, q_stride_h, q_stride_l), L, BM, HEAD, D, COPIED, True)
    m = tl.full([BM], _NOTHING, tl.float32)
    total = tl.zeros([BM], tl.float32)
    e = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DV], tl.float32)
    for kind in tl.static_range(2):
        runs = tl.load(COUNTS + 2 * kind)
        table = RUNS + tl.load(COUNTS + 3 + 2 * kind) + (b * runs_group * blocks + block) * runs * 2
        for run in range(runs):
            start = tl.load(table + 2 * run)
            stop = tl.load(table + 2 * run + 1)
            for tile in range(start, stop):
                j0 = tile * BN
                cols = (j0 + tl.arange(0, BN))[None, :]
                k = load_block(
                    K, b, h // GROUP, j0, (k_stride_b, k_stride_h, k_stride_s), S, BN, HEAD, D, COPIED, kind == 1
                )
                s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                if not RISING and not SOFTCAP:
                    s = s * scale
                z = _logits(
                    s, rows, cols, (L, S), (scale, cap), bias, pairs, PREDICATE, SLOTS, SOFTCAP, BIASED, kind == 1
                )
                top = tl.max(z, 1)
                if RISING:
                    top = top * scale
                top = tl.maximum(m, top)
                base = tl.where(top == _NOTHING, 0.0, top)
                if RISING:
                    t = z * scale - base[:, None]
                else:
                    t = z - base[:, None]
                p = tl.exp2(t)
                kept = tl.exp2(m - base)
                if ROWS:
                    if BIASED or kind == 1:
                        t = tl.where(z == _NOTHING, 0.0, t)
                    e = kept * (e + total * tl.where(m == _NOTHING, 0.0, m - base)) + tl.sum(p * t, 1)
                total = total * kept + tl.sum(p, 1)
                acc = acc * kept[:, None]
                v = load_block(
                    V, b, h // GROUP, j0, (v_stride_b, v_stride_h, v_stride_s), S, BN, VALUE, DV, COPIED, kind == 1
                )
                acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
                m = top

    empty = m == _NOTHING
    base = tl.where(empty, 0.0, m)
    whole = total
    shift = tl.zeros([BM], tl.float32)
    if SINK:
        sink = tl.load(SINKS + h).to(tl.float32) * LOG2E
        shift = base - tl.maximum(base, sink)
        whole = total * tl.exp2(shift) + tl.exp2(sink - tl.maximum(base, sink))
    whole = tl.where(empty, 1.0, whole)
    share = tl.exp2(shift) / whole
    row = bh.to(tl.int64) * L + at
    inside = at < L
    tl.store(LSE + row, tl.where(empty, _NOTHING, (base - shift + tl.log2(whole)) * LN2), mask=inside)
    if ROWS:
        entropy = -LN2 * share * (e + total * (shift - tl.log2(whole)))
        entropy = tl.maximum(entropy, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(ENTROPY + row, tl.where(empty, float("nan"), entropy), mask=inside)
        tl.store(LARGEST + row, tl.where(empty, float("nan"), share), mask=inside)
    out = tl.where(empty[:, None], 0.0, acc * share[:, None])
    d = tl.arange(0, DV)[None, :]
    tl.store(OUT + row[:, None] * VALUE + d, out.to(OUT.dtype.element_ty), mask=inside[:, None] & (d < VALUE))
