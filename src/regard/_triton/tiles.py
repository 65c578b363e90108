# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What the kernels share: one tile of logits, which of its pairs are permitted, and sums that have no order.

Legend: b batch item, h head, i query row, j key; BM × BN the tile, D the head dim padded to a power of two. Logits are
in powers of two: z = log2 of the weight = logit·log2 e - lse·log2 e, NEVER where a pair is forbidden. BM rows belong
to one program, which walks over the key tiles of its runs. A tile lies as [rows, keys] or as [keys, rows]: the indices
``rows`` and ``cols`` of its pairs come with two axes, one of them of length 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard import statistics

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEVER = tl.constexpr(statistics.NEVER)
BUCKETS = tl.constexpr(statistics.BUCKETS)
# Distances are summed in several places, joined at the end: one place would be waited for by all programs of a head.
COPIES = tl.constexpr(16)

ANY = tl.constexpr(0)  # every pair is permitted
INTERVALS = tl.constexpr(1)  # each row permits a few intervals of keys
DENSE = tl.constexpr(2)  # a boolean for each pair
# how a bias is given: as a matrix; as a line by distance; as a slope of each head, times the distance; as a matrix of
# contiguous rows, whose strides are given in units of 16 bytes
MATRIX, LINE, SLOPES, ALIGNED = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
BAND = tl.constexpr(3)  # a band around the diagonal and a range of keys for each item; see ``locate_band``
# of the last number of a band: lengths count from the first key, or from the last; each item has its own offset
RIGHT_PADDING, LEFT_PADDING, OFFSETS_GIVEN = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
_FAR = tl.constexpr(1 << 29)


@triton.jit
def in_units(numbers, UNIT: tl.constexpr):
    """Three strides that were given in units, which the compiler then knows to divide them."""
    return numbers[0] * UNIT, numbers[1] * UNIT, numbers[2] * UNIT


@triton.jit
def load_block(
    X, b, h, start, strides, count, SIZE: tl.constexpr, HEAD, D: tl.constexpr, COPIED: tl.constexpr,
    CHECK: tl.constexpr, WHOLE: tl.constexpr = False,
):  # fmt: skip
    """Rows start … start+SIZE-1 of head h of a [B, H, count, HEAD] tensor as [SIZE, D], zeros beyond its ends.

    COPIED: X is a descriptor for the copy engine. Else it is an address, and CHECK says that rows may lie beyond.
    WHOLE: HEAD is D.
    """
    if COPIED:
        found = tl.reshape(X.load([b, h, start, 0]), [SIZE, D])
    else:
        at = start + tl.arange(0, SIZE)
        d = tl.arange(0, D)
        base = X + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
        where = base + at.to(tl.int64)[:, None] * strides[2] + d[None, :]
        if CHECK:
            inside = (at < count)[:, None]
            found = tl.load(where, mask=inside if WHOLE else inside & (d < HEAD)[None, :], other=0.0)
        elif WHOLE:
            found = tl.load(where)
        else:
            found = tl.load(where, mask=(d < HEAD)[None, :], other=0.0)
    return found


@triton.jit
def load_keys(
    X, b, h, start, strides, pairs, count, SIZE: tl.constexpr, HEAD, D: tl.constexpr, COPIED: tl.constexpr,
    CHECK: tl.constexpr, PADDED: tl.constexpr, WHOLE: tl.constexpr = False,
):  # fmt: skip
    """As ``load_block``, of keys or values. PADDED, where a tile may hold padding: zeros in its place, as what lies
    there may be anything, and 0·NaN is NaN. ``pairs``: of a BAND."""
    if PADDED and CHECK:
        at = start + tl.arange(0, SIZE)
        d = tl.arange(0, D)
        real = ((at >= pairs[2]) & (at < pairs[3]))[:, None]
        if COPIED:
            found = tl.where(real, tl.reshape(X.load([b, h, start, 0]), [SIZE, D]), 0.0)
        else:
            base = X + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
            where = base + at.to(tl.int64)[:, None] * strides[2] + d[None, :]
            found = tl.load(where, mask=real if WHOLE else real & (d < HEAD)[None, :], other=0.0)
    else:
        found = load_block(X, b, h, start, strides, count, SIZE, HEAD, D, COPIED, CHECK, WHOLE)
    return found


@triton.jit
def load_lse(LSE, rows, L):
    """Rows that are empty or beyond the end get a value that makes every weight 0."""
    lse = tl.load(LSE + rows, mask=rows < L, other=float("-inf"))
    return tl.where(lse == float("-inf"), -NEVER, lse)


@triton.jit
def tanh(x):
    """To float32 accuracy: the series near 0, where the quotient would cancel."""
    a = tl.minimum(tl.abs(x), 20.0)
    far = 1.0 - 2.0 / (tl.exp2(a * (2 * LOG2E)) + 1.0)
    far = tl.where(x < 0, -far, far)
    y = x * x
    near = x * (1.0 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835 - y * 1382 / 155925)))))
    return tl.where(a < 0.25, near, far)


@triton.jit
def log_weights(
    s, lse, rows, cols, sizes, scales, bias, pairs,
    PREDICATE: tl.constexpr, SLOTS: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, MASKED: tl.constexpr,
    DIRECT: tl.constexpr = False,
):  # fmt: skip
    """z of a tile from its products s = q·k. ``scales``: (scale, softcap), log2 e included."""
    z = s * scales[0]
    if SOFTCAP:
        z = tanh(z) * scales[1]
    if BIAS == SLOPES:
        z = z + (load_bias(bias, rows, cols, sizes, BIAS, DIRECT) - lse) * LOG2E
    elif BIAS:
        added = load_bias(bias, rows, cols, sizes, BIAS, DIRECT)
        # either may be near the smallest float32, which powers of two cannot express; finite, as 0·z is to be 0
        z = tl.maximum(z + (added - lse) * LOG2E, NEVER / 2, propagate_nan=tl.PropagateNan.ALL)
        z = tl.where(added == float("-inf"), NEVER, z)
    else:
        z = z - lse * LOG2E
    if MASKED:
        z = tl.where(permitted(rows, cols, sizes, pairs, PREDICATE, SLOTS), z, NEVER)
    return z


@triton.jit
def locate_pairs(LO, HI, b, h, first_row, stride_b, stride_h, stride_q, stride_k, PREDICATE: tl.constexpr):
    """What ``permitted`` reads of this head. A matrix of booleans may begin at a later row than 0."""
    at = b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
    if PREDICATE == INTERVALS:
        return LO + at, HI + at, stride_k
    else:
        return LO + at - first_row.to(tl.int64) * stride_q, stride_q, stride_k


@triton.jit
def locate_band(LENGTHS, OFFSETS, b, S, offset, left, right, given):
    """(lo, hi, first, stop): row r may see the keys j with r + lo <= j < r + hi and first <= j < stop."""
    if given & OFFSETS_GIVEN:
        offset = tl.minimum(tl.maximum(tl.load(OFFSETS + b).to(tl.int64), -_FAR), _FAR).to(tl.int32)
    first = S * 0
    stop = S
    if given & (RIGHT_PADDING | LEFT_PADDING):
        length = tl.minimum(tl.maximum(tl.load(LENGTHS + b).to(tl.int64), 0), S).to(tl.int32)
        if given & RIGHT_PADDING:
            stop = length
        else:
            first = S - length
    return offset - left, offset + right + 1, first, stop


@triton.jit
def _in_order(first, inner, outer, last):
    """(first, inner, outer, last) tiles of a walk: all is permitted in inner … outer-1, and tested before and after."""
    last = tl.maximum(first, last)
    inner = tl.minimum(tl.maximum(inner, first), last)
    outer = tl.minimum(outer, last)
    none = outer <= inner
    return first, tl.where(none, last, inner), tl.where(none, last, outer), last


@triton.jit
def key_tiles(band, i0, L, BM: tl.constexpr, BN: tl.constexpr):
    """The key tiles that rows i0 … i0+BM-1 walk over."""
    end = tl.minimum(i0 + BM, L) - 1
    lo_first = tl.maximum(i0 + band[0], band[2])
    lo_last = tl.maximum(end + band[0], band[2])
    hi_first = tl.maximum(tl.minimum(i0 + band[1], band[3]), 0)
    hi_last = tl.maximum(tl.minimum(end + band[1], band[3]), 0)
    return _in_order(lo_first // BN, tl.cdiv(lo_last, BN), hi_first // BN, tl.cdiv(hi_last, BN))


@triton.jit
def row_tiles(band, j0, L, S, BM: tl.constexpr, BN: tl.constexpr):
    """The row tiles that keys j0 … j0+BN-1 are seen from."""
    end = tl.minimum(j0 + BN, S)
    seen = (band[2] < end) & (band[3] > j0)
    lo = tl.minimum(tl.maximum(j0 - band[1] + 1, 0), L)
    hi = tl.where(seen, tl.minimum(tl.maximum(end - band[0], lo), L), lo)
    whole = (band[2] <= j0) & (band[3] >= end)
    full_lo = tl.minimum(tl.maximum(end - band[1], 0), L)
    full_hi = tl.where(whole, tl.minimum(tl.maximum(j0 - band[0] + 1, 0), L), 0)
    return _in_order(lo // BM, tl.cdiv(full_lo, BM), full_hi // BM, tl.where(seen, tl.cdiv(hi, BM), lo // BM))


@triton.jit
def span_of(tables, walk, kind: tl.constexpr, PREDICATE: tl.constexpr):
    """(start, stop) of the steps over tiles of a kind: 0, all is permitted in them; 1, their pairs are tested.

    ``tables``: (tiles one after the other, where those of each kind and owner begin, owners, owner), or of a band,
    which needs none, ``walk``: see ``key_tiles``. One loop, whatever the mask: of loops within loops the compiler
    would run products of matrices one after the other.
    """
    if PREDICATE == BAND:
        first, inner, outer, last = walk
        if kind == 0:
            start, stop = inner, outer
        else:
            start, stop = first, last - (outer - inner)
    else:
        at = tables[1] + kind * (tables[2] + 1) + tables[3]
        start, stop = tl.load(at), tl.load(at + 1)
    return start, stop


@triton.jit
def tile_at(tables, walk, step, kind: tl.constexpr, PREDICATE: tl.constexpr):
    """The tile of a step of ``span_of``."""
    if PREDICATE == BAND:
        tile = step
        if kind == 1:
            tile = step + tl.where(step < walk[1], 0, walk[2] - walk[1])
    else:
        tile = tl.load(tables[0] + step)
    return tile


@triton.jit
def steps_of(tables, walk, PREDICATE: tl.constexpr):
    """How many tiles there are, of both kinds."""
    if PREDICATE == BAND:
        number = walk[3] - walk[0]
    else:
        plain, tested = span_of(tables, walk, 0, PREDICATE), span_of(tables, walk, 1, PREDICATE)
        number = plain[1] - plain[0] + tested[1] - tested[0]
    return number


@triton.jit
def any_tile_at(tables, walk, step, PREDICATE: tl.constexpr):
    """The tile of a step of ``steps_of``."""
    if PREDICATE == BAND:
        tile = walk[0] + step
    else:
        plain, tested = span_of(tables, walk, 0, PREDICATE), span_of(tables, walk, 1, PREDICATE)
        many = plain[1] - plain[0]
        tile = tl.load(tables[0] + tl.where(step < many, plain[0] + step, tested[0] + step - many))
    return tile


@triton.jit
def load_pairs(matrix, rows, cols, sizes, OTHER: tl.constexpr):
    """A tile of a matrix (address, row stride, column stride); OTHER beyond the ends."""
    at = matrix[0] + rows.to(tl.int64) * matrix[1] + cols.to(tl.int64) * matrix[2]
    return tl.load(at, mask=(rows < sizes[0]) & (cols < sizes[1]), other=OTHER)


@triton.jit
def locate_bias(BIAS, b, h, stride_b, stride_h, stride_q, stride_k, BIASED: tl.constexpr):
    """What ``load_bias`` reads of this head. Of SLOPES, ``stride_q`` is the position of row 0."""
    if BIASED == ALIGNED:
        unit: tl.constexpr = 128 // BIAS.dtype.element_ty.primitive_bitwidth
        strides = in_units((stride_b, stride_h, stride_q), unit)
        return BIAS + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1], strides[2], 1
    else:
        at = BIAS + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
        if BIASED == SLOPES:
            return tl.load(at).to(tl.float32), stride_q, stride_k
        else:
            return at, stride_q, stride_k


@triton.jit
def load_bias(bias, rows, cols, sizes, BIASED: tl.constexpr, DIRECT: tl.constexpr):
    """A tile of the bias. DIRECT: not on the interpreter."""
    if BIASED == SLOPES:
        found = -bias[0] * tl.abs(cols.to(tl.float32) - (rows + bias[1]).to(tl.float32))
    elif BIASED == LINE:
        # the line goes on beyond both ends of the call. Not ``tl.load``: what it loads ahead goes through shared memory
        at = bias[0] + (cols - rows)
        if DIRECT:
            found = tl.inline_asm_elementwise(
                "ld.global.nc.f32 $0, [$1];", "=f,l", [at.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
            )
        else:
            found = tl.load(at)
    else:
        found = load_pairs(bias, rows, cols, sizes, float("-inf")).to(tl.float32)
    return found


@triton.jit
def permitted(rows, cols, sizes, pairs, PREDICATE: tl.constexpr, SLOTS: tl.constexpr):
    """``pairs``: for INTERVALS (lo, hi, distance of slots), for DENSE a matrix of booleans, for BAND see there."""
    if PREDICATE == INTERVALS:
        seen = (cols < 0) & (rows < 0)
        for slot in tl.static_range(SLOTS):
            lo = tl.load(pairs[0] + slot * pairs[2] + rows, mask=rows < sizes[0], other=0)
            hi = tl.load(pairs[1] + slot * pairs[2] + rows, mask=rows < sizes[0], other=0)
            seen |= (cols >= lo) & (cols < hi)
    elif PREDICATE == DENSE:
        seen = load_pairs(pairs, rows, cols, sizes, 0) != 0
    elif PREDICATE == BAND:
        seen = (cols >= tl.maximum(rows + pairs[0], pairs[2])) & (cols < tl.minimum(rows + pairs[1], pairs[3]))
    else:
        seen = (cols < sizes[1]) & (rows >= 0)
    return seen


@triton.jit
def add_exactly(sums, at, x, magic, mask):
    """Add x to float64 sums, rounded to a unit in which all of them are whole numbers: the order does not matter.

    ``magic`` is so large that the last digit of a float64 of its size is that unit.
    """
    tl.atomic_add(sums + at, (x.to(tl.float64) + magic) - magic, mask=mask, sem="relaxed")


@triton.jit
def store_in_place(at, x, mask, DIRECT: tl.constexpr):
    """Store whole numbers from the threads that hold them; ``tl.store`` would first exchange them, for neighbouring
    addresses, which takes longer where only few are stored. DIRECT: not on the interpreter."""
    if DIRECT:
        if x.dtype == tl.int64:
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b64 [$1], $2; mov.u32 $0, 0; }",
                "=r,l,l,r", [at.to(tl.int64), x, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        else:
            tl.static_assert(x.dtype == tl.int32)
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b32 [$1], $2; mov.u32 $0, 0; }",
                "=r,l,r,r", [at.to(tl.int64), x, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
    else:
        tl.store(at, x.to(at.dtype.element_ty, bitcast=True), mask=mask)


@triton.jit
def settled(x, DIRECT: tl.constexpr):
    """x, computed here and not later. The compiler would move sums past a branch that does not need them, and keep what
    they are made of until then, for which there are not enough registers. DIRECT: not on the interpreter."""
    if DIRECT:
        x = tl.inline_asm_elementwise("", "=f,0", [x], dtype=tl.float32, is_pure=False, pack=1)
    return x


@triton.jit
def forgotten(n, DIRECT: tl.constexpr):
    """n, of which the compiler does not know that it is n: what is made of it is made anew, where otherwise registers
    would hold it from one loop to another. DIRECT: not on the interpreter."""
    if DIRECT:
        n = tl.inline_asm_elementwise("", "=r,0", [n], dtype=tl.int32, is_pure=False, pack=1)
    return n


# as in regard._hash, whose numbers these are
_FIRST = tl.constexpr(0x21F0AAAD)
_SECOND = tl.constexpr(0x735A2D97)
_STEP = tl.constexpr(0x3C6EF372)


@triton.jit
def _mix(x):
    """``regard._hash.mix`` of 32-bit words."""
    x = x ^ (x >> 16)
    x = (x * _FIRST).to(tl.uint32)
    x = x ^ (x >> 15)
    x = (x * _SECOND).to(tl.uint32)
    return x ^ (x >> 15)


@triton.jit
def seed_keys(SEED, DROPOUT: tl.constexpr):
    """The two words that ``regard._hash.uniform`` makes of a seed."""
    if DROPOUT:
        seed = tl.load(SEED)
        low = _mix((seed + _STEP).to(tl.uint32))
        high = _mix(((seed >> 32) + low.to(tl.int64) + _STEP).to(tl.uint32))
        return low, high
    else:
        return 0, 0


@triton.jit
def dropped(keys, row_at, cols, threshold):
    """Which pairs dropout takes away: the draw of ``regard._hash.uniform`` is below the probability.

    ``row_at``: 64-bit number of the row's first pair among all pairs of the call. ``threshold``: of 24 bits.
    """
    index = row_at + cols
    word = _mix(index.to(tl.uint32) ^ keys[0])
    word = _mix(word + (index >> 32).to(tl.uint32) + keys[1])
    return (word >> 8).to(tl.int32) < threshold
