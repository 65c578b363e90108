# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Decoding over a cache as it is stored: in blocks of a pool (PAGED), in one byte per number (INT8), or both.

One query of each head over the first tokens of its item. Keys are split among programs as in ``decode``, whose
``join_splits`` makes the result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._triton.decode import fold
from regard._triton.tiles import tanh

_NOTHING = tl.constexpr(float("-inf"))
# numbers that share a scale
_GROUP = tl.constexpr(32)


@triton.jit
def _load(
    CODES, SCALES, place, scale_place, real,
    WIDTH: tl.constexpr, D: tl.constexpr, INT8: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """[BN, D]: numbers at their places, zeros where there is none; ``real``: [BN]."""
    d = tl.arange(0, D)
    found = tl.load(CODES + place[:, None] + d[None, :], mask=real[:, None] & (d < WIDTH)[None, :], other=0)
    if INT8:
        g = tl.arange(0, D // _GROUP)
        many: tl.constexpr = (WIDTH + _GROUP - 1) // _GROUP
        inside = real[:, None] & (g < many)[None, :]
        scales = tl.load(SCALES + scale_place[:, None] + g[None, :], mask=inside, other=0.0)
        found = tl.reshape(found.to(tl.float32), [found.shape[0], D // _GROUP, _GROUP]) * scales[:, :, None]
        found = tl.reshape(found, [found.shape[0], D])
    return found.to(OPERAND)


@triton.jit(do_not_specialize=["splits", "table_stride"])
def decode_stored(
    Q, K, K_SCALES, V, V_SCALES, LENGTHS, TABLE, M, TOTAL, ACC,
    q_stride_b, q_stride_h, k_stride_b, k_stride_h, k_stride_s, ks_stride_b, ks_stride_h, ks_stride_s, v_stride_b,
    v_stride_h, v_stride_s, vs_stride_b, vs_stride_h, vs_stride_s, table_stride, splits, scale, cap,
    HKV: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, VALUE: tl.constexpr,
    DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SIZE: tl.constexpr, PAGED: tl.constexpr,
    INT8: tl.constexpr, SOFTCAP: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows are the heads that share a key. K, V: [batch or block, …]; strides of scales apart. LENGTHS: [B]; TABLE
    (PAGED): the block, of SIZE tokens, of each SIZE tokens of an item. M, TOTAL, ACC as in ``decode``."""
    split = tl.program_id(0)
    item = tl.program_id(1)
    b = (item // HKV).to(tl.int64)
    kv = (item % HKV).to(tl.int64)
    rows = tl.arange(0, BM)
    d = tl.arange(0, D)
    heads = (kv * GROUP + rows) * q_stride_h
    q = tl.load(
        Q + b * q_stride_b + heads[:, None] + d[None, :], mask=(rows < GROUP)[:, None] & (d < HEAD)[None, :], other=0.0
    ).to(OPERAND)
    length = tl.load(LENGTHS + b).to(tl.int32)
    tiles = tl.cdiv(length, BN)
    share = tl.cdiv(tiles, splits)
    m = tl.full([BM], _NOTHING, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DV], tl.float32)
    for tile in range(split * share, tl.minimum((split + 1) * share, tiles)):
        at = tile * BN + tl.arange(0, BN)
        real = at < length
        lead = b
        token = at.to(tl.int64)
        if PAGED:
            lead = tl.load(TABLE + b * table_stride + at // SIZE, mask=real, other=0).to(tl.int64)
            token = token % SIZE
        place = lead * k_stride_b + kv * k_stride_h + token * k_stride_s
        scale_place = lead * ks_stride_b + kv * ks_stride_h + token * ks_stride_s
        k = _load(K, K_SCALES, place, scale_place, real, HEAD, D, INT8, OPERAND)
        z = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFTCAP:
            z = tanh(z) * cap
        z = tl.where(real[None, :], z, _NOTHING)
        place = lead * v_stride_b + kv * v_stride_h + token * v_stride_s
        scale_place = lead * vs_stride_b + kv * vs_stride_h + token * vs_stride_s
        v = _load(V, V_SCALES, place, scale_place, real, VALUE, DV, INT8, OPERAND)
        m, total, acc = fold(z, v, m, total, acc, PRECISION)
    row = (item.to(tl.int64) * splits + split) * BM + rows
    tl.store(M + row, m)
    tl.store(TOTAL + row, total)
    tl.store(ACC + row[:, None] * DV + tl.arange(0, DV)[None, :], acc)
