# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention itself, in one pass with a running maximum, and the row statistics that come with it. Rows with huge logits
take a second pass.

A program owns BM rows of one head. For each row it keeps, relative to the largest logit m so far (t = logit - m in
powers of two): total = sum 2^t, e = sum 2^t·t, and acc = sum 2^t·v. Out, lse, entropy and the largest weight
follow from these. The row statistics change nothing in what else is computed: out has the same bits without them.

Logits are kept in a unit of their own, natural ones or plain products of query and key: the largest logits that float32
holds would not fit powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._triton.tiles import (
    BAND,
    LN2,
    LOG2E,
    NEVER,
    SLOPES,
    any_tile_at,
    dropped,
    in_units,
    key_tiles,
    load_bias,
    load_block,
    load_keys,
    locate_band,
    locate_bias,
    locate_pairs,
    permitted,
    seed_keys,
    span_of,
    steps_of,
    tanh,
    tile_at,
)

_NOTHING = tl.constexpr(float("-inf"))
# in powers of two
HUGE = tl.constexpr(1e8)


@triton.jit
def _logits(s, rows, cols, sizes, scales, bias, pairs, F: tl.constexpr, MASKED: tl.constexpr):
    """The tile's logits; -inf where a pair is forbidden."""
    z = s
    if F.SOFTCAP:
        z = tanh(s * scales[0]) * scales[1]
    if F.BIASED == SLOPES:
        z = z + load_bias(bias, rows, cols, sizes, F.BIASED, F.DIRECT)
    elif F.BIASED:
        added = load_bias(bias, rows, cols, sizes, F.BIASED, F.DIRECT)
        z = tl.where(added == _NOTHING, _NOTHING, z + added)
    if MASKED:
        z = tl.where(permitted(rows, cols, sizes, pairs, F.PREDICATE, F.SLOTS), z, _NOTHING)
    return z


@triton.jit
def _power_below(powers):
    return (powers.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _careful_factor(m, powers):
    """Instead of ``powers``, the powers of two that a unit of logits is, for rows whose largest logit m is huge.

    t = z·powers - m·powers is computed in one step, in which only m·powers is rounded. Where that error would count,
    the factor is made a power of two, with which nothing is rounded: first the next larger one, as then any two logits
    that differ are so far apart that the smaller has little weight, with the right factor or a larger one; then a small
    one, with which the largest float32 does not overflow.
    """
    below = _power_below(powers)
    size = tl.abs(m) * below
    return tl.where(size > 1e30, below * 0.25, tl.where(size > HUGE, below * 2, powers))


@triton.jit
def _store_rows(results, m, total, e, acc, factor, unit, sink, mine, kept_share, value, F: tl.constexpr):
    """What follows from a row's numbers, see the module, for the rows that are ``mine``. ``unit``: natural logits.
    ``sink``: -inf where there is none."""
    OUT, LSE, ENTROPY, LARGEST, row = results
    # a row of NaN has no largest logit either
    empty = (m == _NOTHING) & (total == 0.0)
    m = tl.where(m == _NOTHING, 0.0, m)
    # what was taken for the largest logit, m·factor, was rounded: the numbers are put right by the difference
    rest = tl.fma(m, factor, -(m * factor))
    right = tl.exp2(-rest)
    e = (e - rest * total) * right
    total = total * right
    base = m * unit
    highest = tl.where(sink > base, sink, base)
    shift = tl.where(sink > base, (base - sink) * LOG2E, 0.0)
    whole = total * tl.exp2(shift) + tl.where(sink == _NOTHING, 0.0, tl.exp2((sink - highest) * LOG2E))
    whole = tl.where(empty, 1.0, whole)
    share = tl.exp2(shift) / whole
    tl.store(LSE + row, tl.where(empty, _NOTHING, highest + tl.log2(whole) * LN2), mask=mine)
    if F.ROWS:
        entropy = -LN2 * share * (e + total * (shift - tl.log2(whole)))
        entropy = tl.maximum(entropy, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(ENTROPY + row, tl.where(empty, float("nan"), entropy), mask=mine)
        tl.store(LARGEST + row, tl.where(empty, float("nan"), share), mask=mine)
    out = tl.where(empty[:, None], 0.0, acc * (share * right * kept_share)[:, None])
    d = tl.arange(0, F.DV)[None, :]
    inside = mine[:, None] if F.WHOLE_V else mine[:, None] & (d < value)
    tl.store(OUT + row[:, None] * value + d, out.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _tile(
    state, q, K, V, j0, factor, rows, bias, pairs, strides, item, sizes, scales, draw,
    F: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """``state``, see ``_over_tiles``, with the keys from j0 on. MASKED: their pairs are tested."""
    m, total, e, acc = state
    b, kv = item
    L, S, head, value = sizes
    cols = (j0 + tl.arange(0, F.BN))[None, :]
    k = load_keys(K, b, kv, j0, strides[0], pairs, S, F.BN, head, F.D, F.COPIED, MASKED, F.PADDED, F.WHOLE)
    s = tl.dot(q, tl.trans(k), input_precision=F.PRECISION)
    if not F.RISING and not F.SOFTCAP:
        s = s * scales[0]
    z = _logits(s, rows, cols, (L, S), scales, bias, pairs, F, MASKED)
    top = tl.maximum(m, tl.max(z, 1))
    base = tl.where(top == _NOTHING, 0.0, top)
    t = z * factor[:, None] - (base * factor)[:, None]
    p = tl.exp2(t)
    before = (m - base) * factor
    kept = tl.exp2(before)
    if F.ROWS:
        if F.BIASED:
            # finite: 0·t is 0, for logits near the smallest float32 too
            t = tl.maximum(t, NEVER, propagate_nan=tl.PropagateNan.ALL)
        elif MASKED:
            t = tl.where(z == _NOTHING, 0.0, t)
        e = kept * (e + total * tl.where(m == _NOTHING, 0.0, tl.maximum(before, NEVER))) + tl.sum(p * t, 1)
    total = total * kept + tl.sum(p, 1)
    acc = acc * kept[:, None]
    if F.DROPOUT:
        p = tl.where(dropped(draw[0], draw[1], cols, draw[2]), 0.0, p)
    v = load_keys(V, b, kv, j0, strides[1], pairs, S, F.BN, value, F.DV, F.COPIED, MASKED, F.PADDED, F.WHOLE_V)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=F.PRECISION)
    return top, total, e, acc


@triton.jit
def _over_tiles(
    q, K, V, m, factor, rows, bias, pairs, tables, walk, strides, item, sizes, scales, draw,
    F: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """(m, total, e, acc) of the rows, see the module; ``m``: where it begins. ``factor``: powers of two of a unit.
    ``draw``: of dropout, (keys of the seed, number of each row's first pair, threshold). SMALL: little code, which runs
    slower and takes less time to compile."""
    state = (
        m,
        tl.full([F.BM], 0.0, tl.float32),
        tl.full([F.BM], 0.0, tl.float32),
        tl.full([F.BM, F.DV], 0.0, tl.float32),
    )
    if SMALL:
        for step in tl.range(0, steps_of(tables, walk, F.PREDICATE), num_stages=1):
            j0 = any_tile_at(tables, walk, step, F.PREDICATE) * F.BN
            state = _tile(state, q, K, V, j0, factor, rows, bias, pairs, strides, item, sizes, scales, draw, F, True)
    else:
        for kind in tl.static_range(2):
            start, stop = span_of(tables, walk, kind, F.PREDICATE)
            for step in range(start, stop):
                j0 = tile_at(tables, walk, step, kind, F.PREDICATE) * F.BN
                state = _tile(
                    state, q, K, V, j0, factor, rows, bias, pairs, strides, item, sizes, scales, draw, F, kind == 1
                )
    return state


# what Triton would compile anew for, where one of these is 1 or 16 divides it
_NUMBERS = [
    "q_stride_b", "q_stride_h", "q_stride_l", "k_stride_b", "k_stride_h", "k_stride_s", "v_stride_b", "v_stride_h",
    "v_stride_s", "bias_stride_b", "bias_stride_h", "bias_stride_q", "bias_stride_k", "pairs_b", "pairs_h", "pairs_q",
    "pairs_k", "items", "owners", "L", "S", "first_row", "blocks", "heads", "group", "head", "value", "sinks_given",
    "threshold",
]  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def attend(
    Q, K, V, BIAS, PAIRS, PAIRS_HI, SINKS, SEED, TILES, STARTS, OUT, LSE, ENTROPY, LARGEST,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
    bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k,
    pairs_b, pairs_h, pairs_q, pairs_k, items, owners, L, S, first_row, blocks, heads, group, head, value, sinks_given,
    threshold, scale, cap, share, F: tl.constexpr,
):  # fmt: skip
    """OUT: [B, H, L, value]; LSE, ENTROPY, LARGEST: [B, H, L]. ``scale``, ``cap``: see ``natural_scales``. ``pairs_b``
    … ``pairs_k``: strides of PAIRS, or for a BAND its offset, left and right, and what is given. ``group``: heads that
    share keys. ``share``: 1 / (1 - dropout)."""
    block = tl.num_programs(0) - 1 - tl.program_id(0) + first_row // F.BM
    bh = tl.program_id(1)
    b = bh // heads
    h = bh % heads
    i0 = block * F.BM
    at = i0 + tl.arange(0, F.BM)
    rows = at[:, None]
    head = F.D if F.WHOLE else head * F.UNIT
    value = F.DV if F.WHOLE_V else value * F.UNIT
    bias = locate_bias(BIAS, b, h, bias_stride_b, bias_stride_h, bias_stride_q, bias_stride_k, F.BIASED)
    if F.PREDICATE == BAND:
        pairs = locate_band(PAIRS, PAIRS_HI, b, S, pairs_b, pairs_h, pairs_q, pairs_k)
        walk = key_tiles(pairs, i0, L, F.BM, F.BN)
    else:
        pairs = locate_pairs(PAIRS, PAIRS_HI, b, h, first_row, pairs_b, pairs_h, pairs_q, pairs_k, F.PREDICATE)
        walk = (i0, i0, i0, i0)
    q_strides = in_units((q_stride_b, q_stride_h, q_stride_l), F.UNIT)
    q = load_block(Q, b, h, i0, q_strides, L, F.BM, head, F.D, F.COPIED, True, F.WHOLE)
    sink = tl.load(SINKS + h, mask=sinks_given != 0, other=_NOTHING).to(tl.float32)
    # of a unit of logits: its natural logits, and its powers of two
    unit = scale * 0.0 + 1.0
    if F.RISING:
        unit = scale
    powers = unit * LOG2E
    tables = (TILES, STARTS, owners, b * items * blocks + block)
    strides = (
        in_units((k_stride_b, k_stride_h, k_stride_s), F.UNIT), in_units((v_stride_b, v_stride_h, v_stride_s), F.UNIT)
    )  # fmt: skip
    sizes = (L, S, head, value)
    draw = (seed_keys(SEED, F.DROPOUT), (bh.to(tl.int64) * L + rows) * S, threshold)
    m = tl.full([F.BM], _NOTHING, tl.float32)
    factor = tl.full([F.BM], 0.0, tl.float32) + powers
    m, total, e, acc = _over_tiles(
        q, K, V, m, factor, rows, bias, pairs, tables, walk, strides, (b, h // group), sizes, (scale, cap), draw,
        F, False,
    )  # fmt: skip
    results = (OUT, LSE, ENTROPY, LARGEST, bh.to(tl.int64) * L + at)
    huge = ((tl.abs(m) * _power_below(powers) > HUGE) & (m != _NOTHING)) | (total - total != 0.0)
    _store_rows(results, m, total, e, acc, factor, unit, sink, (at < L) & (huge == 0), share, value, F)
    if tl.max(huge.to(tl.int32), 0) > 0:
        # these rows, and no others, once more: from the largest logit on, which is known now
        factor = _careful_factor(m, powers)
        m, total, e, acc = _over_tiles(
            q, K, V, m, factor, rows, bias, pairs, tables, walk, strides, (b, h // group), sizes, (scale, cap), draw,
            F, True,
        )  # fmt: skip
        _store_rows(results, m, total, e, acc, factor, unit, sink, (at < L) & huge, share, value, F)
