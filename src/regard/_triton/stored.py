# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Decoding over a cache as it is stored: in blocks of a pool (PAGED), in one byte per number (INT8), or both.

One query of each head over the first tokens of its item. Keys are split among programs as in ``decode``, whose
``join_splits`` makes the result. Codes of half-precision queries have a kernel of their own, in ``stored_codes``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._triton.decode import fold, locate_parts
from regard._triton.tiles import tanh

_NOTHING = tl.constexpr(float("-inf"))
# numbers that share a scale
GROUP_SIZE = tl.constexpr(32)


@triton.jit
def slots_of(TABLE, at, SIZE: tl.constexpr, PAGED: tl.constexpr):
    """Where the tokens of an item lie, as 64-bit numbers of slots. TABLE: the blocks of the item, of SIZE slots."""
    if PAGED:
        at = tl.load(TABLE + at // SIZE).to(tl.int32) * SIZE + at % SIZE
    return at.to(tl.int64)


@triton.jit
def _load(
    CODES, SCALES, slots, real, STEP: tl.constexpr, SCALES_STEP: tl.constexpr,
    WIDTH: tl.constexpr, D: tl.constexpr, INT8: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """[BN, D]: numbers of the slots, zeros where there is none; ``real``: [BN]. STEP: from slot to slot."""
    d = tl.arange(0, D)
    where = CODES + slots[:, None] * STEP + d[None, :]
    found = tl.load(where, mask=real[:, None] & (d < WIDTH)[None, :], other=0)
    if INT8:
        g = tl.arange(0, D // GROUP_SIZE)
        many: tl.constexpr = (WIDTH + GROUP_SIZE - 1) // GROUP_SIZE
        inside = real[:, None] & (g < many)[None, :]
        scales = tl.load(SCALES + slots[:, None] * SCALES_STEP + g[None, :], mask=inside, other=0.0)
        found = tl.reshape(found.to(tl.float32), [found.shape[0], D // GROUP_SIZE, GROUP_SIZE]) * scales[:, :, None]
        found = tl.reshape(found, [found.shape[0], D])
    return found.to(OPERAND)


@triton.jit(do_not_specialize=["splits", "table_stride"])
def decode_stored(
    Q, K, K_SCALES, V, V_SCALES, LENGTHS, TABLE, PARTS,
    q_stride_b, q_stride_h, k_stride_b, k_stride_h, ks_stride_b, ks_stride_h, v_stride_b, v_stride_h, vs_stride_b,
    vs_stride_h, table_stride, splits, scale, cap,
    HKV: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, VALUE: tl.constexpr,
    DV: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, K_STEP: tl.constexpr, KS_STEP: tl.constexpr,
    V_STEP: tl.constexpr, VS_STEP: tl.constexpr, SIZE: tl.constexpr, PAGED: tl.constexpr, INT8: tl.constexpr,
    SOFTCAP: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows are the heads that share a key. K, V: [batch or all blocks, head, slot, dim], with K_STEP and V_STEP from
    slot to slot; strides of scales apart. LENGTHS: [B]; TABLE (PAGED): the block, of SIZE tokens, of each SIZE tokens
    of an item. PARTS as in ``decode``."""
    split = tl.program_id(0)
    item = tl.program_id(1)
    b = (item // HKV).to(tl.int64)
    kv = (item % HKV).to(tl.int64)
    rows = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    heads = (kv * GROUP + rows) * q_stride_h
    q = tl.load(
        Q + b * q_stride_b + heads[:, None] + d[None, :], mask=(rows < GROUP)[:, None] & (d < HEAD)[None, :], other=0.0
    ).to(OPERAND)
    lead = b
    if PAGED:
        lead = b * 0
    K += lead * k_stride_b + kv * k_stride_h
    V += lead * v_stride_b + kv * v_stride_h
    K_SCALES += lead * ks_stride_b + kv * ks_stride_h
    V_SCALES += lead * vs_stride_b + kv * vs_stride_h
    length = tl.load(LENGTHS + b).to(tl.int32)
    tiles = tl.cdiv(length, BN)
    share = tl.cdiv(tiles, splits)
    m = tl.full([ROWS], _NOTHING, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DV], tl.float32)
    for tile in range(split * share, tl.minimum((split + 1) * share, tiles)):
        at = tile * BN + tl.arange(0, BN)
        real = at < length
        slots = slots_of(TABLE + b * table_stride, tl.minimum(at, length - 1), SIZE, PAGED)
        k = _load(K, K_SCALES, slots, real, K_STEP, KS_STEP, HEAD, D, INT8, OPERAND)
        z = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFTCAP:
            z = tanh(z) * cap
        z = tl.where(real[None, :], z, _NOTHING)
        v = _load(V, V_SCALES, slots, real, V_STEP, VS_STEP, VALUE, DV, INT8, OPERAND)
        m, total, acc = fold(z, v, m, total, acc, PRECISION)
    ACC, M, TOTAL = locate_parts(PARTS, tl.num_programs(1), splits, ROWS, DV)
    row = (item.to(tl.int64) * splits + split) * ROWS + rows
    tl.store(M + row, m)
    tl.store(TOTAL + row, total)
    tl.store(ACC + row[:, None] * DV + tl.arange(0, DV)[None, :], acc)
