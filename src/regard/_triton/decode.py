# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention of a few queries over many keys, as in decoding: the keys of an item are split among programs.

The heads that share keys stand below each other as rows of one program, so that each key is read once (of very many
heads, some in each program). A program takes its share of the tiles that its item's queries may see, whatever the
lengths of the others, and leaves the numbers of ``forward`` (m, total, acc); ``join_splits`` makes the result of them.

Keys may be wider than a power of two, by REST numbers: those of latent attention are a latent, which is the value too
(SAME: it is read once), and a rotary part.

Of wide heads two groups of warps share the work on Hopper. Where one product of matrices leads to another, Triton has
both of them compute the whole first one, and what leads from one to the other it follows through anything but a branch.
So, if APART, their logits and the second product are computed in branches that are always taken, and are none in the
machine's code. (In a branch, the second product also ends before the next tile begins; else the compiler runs all
products one after the other, and says so: ptxas C7515.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._triton.tiles import LN2, LOG2E, load_keys, locate_band, tanh

_NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def fold(z, v, m, total, acc, PRECISION: tl.constexpr, always=True, APART: tl.constexpr = False):
    """A tile of logits and values joined to what was there: the largest logit, the sum of weights, that of values."""
    top = tl.maximum(m, tl.max(z, 1))
    base = tl.where(top == _NOTHING, 0.0, top)
    p = tl.exp2((z - base[:, None]) * LOG2E)
    kept = tl.exp2((m - base) * LOG2E)
    total = total * kept + tl.sum(p, 1)
    acc = acc * kept[:, None]
    if APART:
        if always:
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    else:
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return top, total, acc


@triton.jit
def _load_visible(X, j0, band, STEP: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """Keys j0 … j0+BN-1 of an item as [BN, D]; one that is seen stands in the place of those that are not."""
    at = tl.minimum(tl.maximum(j0 + tl.arange(0, BN), band[2]), band[3] - 1).to(tl.int64)
    d = tl.arange(0, D)[None, :]
    where = X + at[:, None] * STEP + d
    return tl.load(where) if WIDTH == D else tl.load(where, mask=d < WIDTH, other=0.0)


@triton.jit
def _masked(z, rows, cols, band, cap, SOFTCAP: tl.constexpr):
    """Logits of scaled products; -inf where a row does not see a key."""
    if SOFTCAP:
        z = tanh(z) * cap
    seen = (cols >= tl.maximum(rows + band[0], band[2])) & (cols < tl.minimum(rows + band[1], band[3]))
    return tl.where(seen, z, _NOTHING)


@triton.jit
def locate_parts(PARTS, items, splits, ROWS: tl.constexpr, DV: tl.constexpr):
    """What programs leave, one after the other: ACC [items, splits, ROWS, DV], M and TOTAL [items, splits, ROWS]."""
    rows = items.to(tl.int64) * splits * ROWS
    return PARTS, PARTS + rows * DV, PARTS + rows * (DV + 1)


@triton.jit(do_not_specialize=["L", "S", "splits", "offset", "left", "right", "given"])
def decode(
    Q, K, V, LENGTHS, OFFSETS, PARTS,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, v_stride_b, v_stride_h, offset, left, right, given,
    L, S, splits, scale, cap,
    HKV: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, REST: tl.constexpr, D2: tl.constexpr,
    VALUE: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, K_STEP: tl.constexpr,
    V_STEP: tl.constexpr, SOFTCAP: tl.constexpr, PADDED: tl.constexpr, SAME: tl.constexpr, APART: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """PARTS: see ``locate_parts``; an item is a head of keys, and its ROWS come in blocks of BM. Row g·L + i is query i
    of the group's head g. K_STEP, V_STEP: from key to key. Blocks that read the same keys run at the same time."""
    split = tl.program_id(1)
    item = tl.program_id(2)
    always = split >= 0
    b = item // HKV
    kv = item % HKV
    at = tl.program_id(0) * BM + tl.arange(0, BM)
    rows = (at % L)[:, None]
    d = tl.arange(0, D)[None, :]
    place = b.to(tl.int64) * q_stride_b + (kv * GROUP + at // L).to(tl.int64)[:, None] * q_stride_h + rows * q_stride_l
    q = tl.load(Q + place + d, mask=(at < GROUP * L)[:, None] & (d < HEAD), other=0.0)
    if REST > 0:
        r = tl.arange(0, D2)[None, :]
        rest = tl.load(Q + place + HEAD + r, mask=(at < GROUP * L)[:, None] & (r < REST), other=0.0)
    band = locate_band(LENGTHS, OFFSETS, b, S, offset, left, right, given)
    lowest = tl.maximum(band[0], band[2])
    highest = tl.maximum(tl.minimum(L - 1 + band[1], band[3]), lowest)
    first = lowest // BN
    tiles = tl.cdiv(highest, BN) - first
    share = tl.cdiv(tiles, splits)
    own = K + b.to(tl.int64) * k_stride_b + kv.to(tl.int64) * k_stride_h
    m = tl.full([BM], _NOTHING, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DV], tl.float32)
    for tile in range(first + split * share, first + tl.minimum((split + 1) * share, tiles)):
        j0 = tile * BN
        cols = (j0 + tl.arange(0, BN))[None, :]
        of_keys = (k_stride_b, k_stride_h, K_STEP)
        if SAME:
            k = _load_visible(own, j0, band, K_STEP, BN, HEAD, D)
        else:
            k = load_keys(K, b, kv, j0, of_keys, band, S, BN, HEAD, D, False, True, PADDED)
        z = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        y = 0.0
        if REST > 0:
            if SAME:
                more = _load_visible(own + HEAD, j0, band, K_STEP, BN, REST, D2)
            else:
                more = load_keys(K + HEAD, b, kv, j0, of_keys, band, S, BN, REST, D2, False, True, PADDED)
            if APART:  # scaled, as the compiler would make one product of two that are added
                y = tl.dot(rest, tl.trans(more), input_precision=PRECISION) * scale
            else:
                z = tl.dot(rest, tl.trans(more), z, input_precision=PRECISION)
        z *= scale
        if APART:
            if always:
                z = _masked(z + y, rows, cols, band, cap, SOFTCAP)
        else:
            z = _masked(z, rows, cols, band, cap, SOFTCAP)
        if SAME:
            v = k
        else:
            of_values = (v_stride_b, v_stride_h, V_STEP)
            v = load_keys(V, b, kv, j0, of_values, band, S, BN, VALUE, DV, False, True, PADDED)
        m, total, acc = fold(z, v, m, total, acc, PRECISION, always, APART)
    ACC, M, TOTAL = locate_parts(PARTS, tl.num_programs(2), splits, ROWS, DV)
    row = (item.to(tl.int64) * splits + split) * ROWS + at
    tl.store(M + row, m)
    tl.store(TOTAL + row, total)
    tl.store(ACC + row[:, None] * DV + tl.arange(0, DV)[None, :], acc)


@triton.jit(do_not_specialize=["L", "splits"])
def join_splits(
    PARTS, SINKS, OUT, LSE, L, splits,
    HKV: tl.constexpr, GROUP: tl.constexpr, VALUE: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, SINK: tl.constexpr, WITH_LSE: tl.constexpr,
):  # fmt: skip
    """OUT: [B, H, L, VALUE]; LSE: [B, H, L], where it is wanted. One row of ROWS for each program; SPLITS: splits, made
    a power of two."""
    row = tl.program_id(0)
    item = tl.program_id(1)
    ACC, M, TOTAL = locate_parts(PARTS, tl.num_programs(1), splits, ROWS, DV)
    each = tl.arange(0, SPLITS)
    at = (item.to(tl.int64) * splits + each) * ROWS + row
    there = each < splits
    m = tl.load(M + at, mask=there, other=_NOTHING)
    total = tl.load(TOTAL + at, mask=there, other=0.0)
    top = tl.max(m, 0)
    # NaN where a split saw one: its maximum may not show it
    sums = tl.sum(total, 0)
    base = tl.where(top == _NOTHING, 0.0, top)
    weight = tl.exp2((m - base) * LOG2E)
    whole = tl.sum(tl.where(m == _NOTHING, 0.0, total * weight), 0) + (sums - sums)
    empty = (top == _NOTHING) & (sums == 0.0)
    h = item % HKV * GROUP + row // L
    highest = base
    shift = 1.0
    if SINK:
        sink = tl.load(SINKS + h).to(tl.float32)
        highest = tl.maximum(base, sink)
        shift = tl.exp2((base - highest) * LOG2E)
        whole = whole * shift + tl.exp2((sink - highest) * LOG2E)
    whole = tl.where(empty, 1.0, whole)
    d = tl.arange(0, DV)
    acc = tl.load(ACC + at[:, None] * DV + d[None, :], mask=there[:, None], other=0.0)
    out = tl.sum(tl.where((m == _NOTHING)[:, None], 0.0, acc * weight[:, None]), 0) * (shift / whole)
    place = ((item // HKV * HKV * GROUP + h).to(tl.int64)) * L + row % L
    tl.store(OUT + place * VALUE + d, tl.where(empty, 0.0, out).to(OUT.dtype.element_ty), mask=d < VALUE)
    if WITH_LSE:
        tl.store(LSE + place, tl.where(empty, _NOTHING, highest + tl.log2(whole) * LN2))
