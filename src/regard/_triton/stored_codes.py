# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Decoding over codes of one byte, in half precision: codes are multiplied as they are, and their scales afterwards.

Widening every number and multiplying it by its scale takes more instructions than there is time for while the bytes
arrive. Here a row of the products belongs to one head and one group of numbers that share scales, and is zero in the
other groups (the rows of the matrix units would be empty otherwise). So a scale multiplies one product per key, or one
weight, in place of 32 numbers.

Codes are read two at a time, as 16 bits, and become halves by a few operations on both: of keys, each code is laid into
the digits of 1024, which adds 1152 to it, and what that adds to the products is taken from them; of values, whose sums
are too long for that, the exact code. Keys are float16 and values bfloat16, whatever the queries: queries are brought
near 2^15 by a power of two, and weights times scales need the range.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._triton.decode import locate_parts
from regard._triton.stored import GROUP_SIZE, slots_of
from regard._triton.tiles import LN2, tanh

_NOTHING = tl.constexpr(float("-inf"))
# of the float16 whose last digits hold a code
_RAISED = tl.constexpr(1024 + 128)
_TINY = tl.constexpr(2.0**-100)
_LARGE = tl.constexpr(2.0**14)
_INFINITE = tl.constexpr(float("inf"))


@triton.jit
def _raised(pairs, DIRECT: tl.constexpr):
    """(even, odd) codes of int16 pairs, plus 1152, in float16. DIRECT: not on the interpreter."""
    if DIRECT:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 odd;
            shr.u32 odd, $2, 8;
            lop3.b32 $0, $2, 0x00FF00FF, 0x64806480, 0x6A;
            lop3.b32 $1, odd, 0x00FF00FF, 0x64806480, 0x6A; }""",
            "=&r,=&r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        even, odd = (pairs & 0xFF) ^ 0x6480, ((pairs >> 8) & 0xFF) ^ 0x6480
        return even.to(tl.float16, bitcast=True), odd.to(tl.float16, bitcast=True)


@triton.jit
def _exact(pairs, DIRECT: tl.constexpr):
    """(even, odd) codes of int16 pairs in bfloat16: 128 and the lower seven bits, less 128, or 256 of negative ones."""
    if DIRECT:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 odd, low, sign, minus;
            mov.b32 minus, 0xBF80BF80;
            shr.u32 odd, $2, 8;
            lop3.b32 low, $2, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 sign, $2, 0x00800080, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, sign, minus, low;
            lop3.b32 low, odd, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 sign, odd, 0x00800080, 0x43004300, 0xEA;
            fma.rn.bf16x2 $1, sign, minus, low; }""",
            "=&r,=&r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return ((pairs << 8) >> 8).to(tl.float32).to(tl.bfloat16), (pairs >> 8).to(tl.float32).to(tl.bfloat16)


@triton.jit
def _load(X, slots, STEP: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """[BN, D] of the slots; zeros beyond the WIDTH that they have. All slots hold tokens: there is nothing to hide."""
    d = tl.arange(0, D)
    where = X + slots[:, None] * STEP + d[None, :]
    return tl.load(where) if WIDTH == D else tl.load(where, mask=(d < WIDTH)[None, :], other=0)


@triton.jit
def _finite(x):
    size = tl.abs(x.to(tl.float32))
    return tl.where(size < _INFINITE, size, 0.0)


@triton.jit(do_not_specialize=["splits", "table_stride"])
def decode_codes(
    Q, K, K_SCALES, V, V_SCALES, LENGTHS, TABLE, PARTS,
    q_stride_b, q_stride_h, k_stride_b, k_stride_h, ks_stride_b, ks_stride_h, v_stride_b, v_stride_h, vs_stride_b,
    vs_stride_h, table_stride, splits, scale, cap,
    HKV: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, VALUE: tl.constexpr,
    DV: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, K_STEP: tl.constexpr, KS_STEP: tl.constexpr,
    V_STEP: tl.constexpr, VS_STEP: tl.constexpr, SIZE: tl.constexpr, PAGED: tl.constexpr, SOFTCAP: tl.constexpr,
    FINE: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """As ``decode_stored``; strides and steps of codes count pairs. ``scale`` and ``cap``: of powers of two. ROWS:
    heads, made a power of two. Row g·ROWS + h of a product belongs to head h and the numbers of group g. FINE: weights
    count with 16 digits, as float16's have more than bfloat16's."""
    split = tl.program_id(0)
    item = tl.program_id(1)
    b = (item // HKV).to(tl.int64)
    kv = (item % HKV).to(tl.int64)
    GK: tl.constexpr = D // GROUP_SIZE
    GV: tl.constexpr = DV // GROUP_SIZE
    head = tl.arange(0, GK * ROWS) % ROWS
    pair = tl.arange(0, D // 2)[None, :]
    own = (pair // (GROUP_SIZE // 2) == (tl.arange(0, GK * ROWS) // ROWS)[:, None]) & (head < GROUP)[:, None]
    where = Q + b * q_stride_b + (kv * GROUP + head)[:, None] * q_stride_h + 2 * pair
    even = tl.load(where, mask=own & (2 * pair < HEAD), other=0.0)
    odd = tl.load(where + 1, mask=own & (2 * pair + 1 < HEAD), other=0.0)
    # the power of two below the largest, so that no other number of a head is lost
    largest = tl.max(tl.maximum(_finite(even), _finite(odd)))
    unit = (tl.maximum(largest, _TINY).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    even = (even.to(tl.float32) * (_LARGE / unit)).to(tl.float16)
    odd = (odd.to(tl.float32) * (_LARGE / unit)).to(tl.float16)
    scale *= unit / _LARGE
    raised = tl.sum(even.to(tl.float32) + odd.to(tl.float32), 1) * -_RAISED
    raised = tl.broadcast_to(raised[:, None], [GK * ROWS, BN])
    lead = b
    if PAGED:
        lead = b * 0
    pairs_k = K.to(tl.pointer_type(tl.int16)) + lead * k_stride_b + kv * k_stride_h
    pairs_v = V.to(tl.pointer_type(tl.int16)) + lead * v_stride_b + kv * v_stride_h
    K_SCALES += lead * ks_stride_b + kv * ks_stride_h
    V_SCALES += lead * vs_stride_b + kv * vs_stride_h
    length = tl.load(LENGTHS + b).to(tl.int32)
    tiles = tl.cdiv(length, BN)
    share = tl.cdiv(tiles, splits)
    m = tl.full([ROWS], _NOTHING, tl.float32)
    total = tl.zeros([ROWS, BN], tl.float32)
    acc_even = tl.zeros([GV * ROWS, DV // 2], tl.float32)
    acc_odd = tl.zeros([GV * ROWS, DV // 2], tl.float32)
    for tile in range(split * share, tl.minimum((split + 1) * share, tiles)):
        at = tile * BN + tl.arange(0, BN)
        slots = slots_of(TABLE + b * table_stride, tl.minimum(at, length - 1), SIZE, PAGED)
        k_even, k_odd = _raised(_load(pairs_k, slots, K_STEP, HEAD // 2, D // 2), DIRECT)
        k_scales = _load(K_SCALES, slots, KS_STEP, (HEAD + GROUP_SIZE - 1) // GROUP_SIZE, GK)
        z = tl.dot(even, tl.trans(k_even), raised)
        z = tl.dot(odd, tl.trans(k_odd), z)
        z = tl.sum(tl.reshape(z, [GK, ROWS, BN]) * tl.trans(k_scales)[:, None, :], 0) * scale
        if SOFTCAP:
            z = tanh(z) * cap
        z = tl.where((at < length)[None, :], z, _NOTHING)
        v_even, v_odd = _exact(_load(pairs_v, slots, V_STEP, VALUE // 2, DV // 2), DIRECT)
        v_scales = _load(V_SCALES, slots, VS_STEP, (VALUE + GROUP_SIZE - 1) // GROUP_SIZE, GV)
        top = tl.maximum(m, tl.max(z, 1))
        base = tl.where(top == _NOTHING, 0.0, top)
        p = tl.exp2(z - base[:, None])
        kept = tl.exp2(m - base)
        # over the keys of a tile it is summed at the end
        total = total * kept[:, None] + p
        p = tl.reshape(p[None] * tl.trans(v_scales)[:, None, :], [GV * ROWS, BN])
        rounded = p.to(tl.bfloat16)
        kept = tl.reshape(tl.broadcast_to(kept[None, :], [GV, ROWS]), [GV * ROWS])[:, None]
        acc_even = tl.dot(rounded, v_even, acc_even * kept)
        acc_odd = tl.dot(rounded, v_odd, acc_odd * kept)
        if FINE:
            rounded = (p - rounded.to(tl.float32)).to(tl.bfloat16)
            acc_even = tl.dot(rounded, v_even, acc_even)
            acc_odd = tl.dot(rounded, v_odd, acc_odd)
        m = top
    ACC, M, TOTAL = locate_parts(PARTS, tl.num_programs(1), splits, ROWS, DV)
    first = (item.to(tl.int64) * splits + split) * ROWS
    tl.store(M + first + tl.arange(0, ROWS), m * LN2)
    tl.store(TOTAL + first + tl.arange(0, ROWS), tl.sum(total, 1))
    row = tl.arange(0, GV * ROWS)[:, None]
    d = tl.arange(0, DV)[None, :]
    acc = tl.reshape(tl.join(acc_even, acc_odd), [GV * ROWS, DV])
    tl.store(ACC + (first + row % ROWS) * DV + d, acc, mask=d // GROUP_SIZE == row // ROWS)
