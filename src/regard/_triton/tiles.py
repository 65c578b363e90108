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


@triton.jit
def load_block(
    X, b, h, start, strides, count,
    SIZE: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr, COPIED: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Rows start … start+SIZE-1 of head h of a [B, H, count, HEAD] tensor as [SIZE, D], zeros beyond its ends.

    COPIED: X is a descriptor for the copy engine. Else it is an address, and CHECK says that rows may lie beyond.
    """
    if COPIED:
        found = tl.reshape(X.load([b, h, start, 0]), [SIZE, D])
    else:
        at = start + tl.arange(0, SIZE)
        d = tl.arange(0, D)
        base = X + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
        where = base + at.to(tl.int64)[:, None] * strides[2] + d[None, :]
        if CHECK:
            found = tl.load(where, mask=(at < count)[:, None] & (d < HEAD)[None, :], other=0.0)
        elif HEAD == D:
            found = tl.load(where)
        else:
            found = tl.load(where, mask=(d < HEAD)[None, :], other=0.0)
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
):  # fmt: skip
    """z of a tile from its products s = q·k. ``scales``: (scale, softcap), log2 e included."""
    z = s * scales[0]
    if SOFTCAP:
        z = tanh(z) * scales[1]
    if BIAS:
        added = load_pairs(bias, rows, cols, sizes, float("-inf")).to(tl.float32)
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
def load_pairs(matrix, rows, cols, sizes, OTHER: tl.constexpr):
    """A tile of a matrix (address, row stride, column stride); OTHER beyond the ends."""
    at = matrix[0] + rows.to(tl.int64) * matrix[1] + cols.to(tl.int64) * matrix[2]
    return tl.load(at, mask=(rows < sizes[0]) & (cols < sizes[1]), other=OTHER)


@triton.jit
def permitted(rows, cols, sizes, pairs, PREDICATE: tl.constexpr, SLOTS: tl.constexpr):
    """``pairs``: for INTERVALS (lo, hi, distance of slots), for DENSE a matrix of booleans."""
    if PREDICATE == INTERVALS:
        seen = (cols < 0) & (rows < 0)
        for slot in tl.static_range(SLOTS):
            lo = tl.load(pairs[0] + slot * pairs[2] + rows, mask=rows < sizes[0], other=0)
            hi = tl.load(pairs[1] + slot * pairs[2] + rows, mask=rows < sizes[0], other=0)
            seen |= (cols >= lo) & (cols < hi)
    elif PREDICATE == DENSE:
        seen = load_pairs(pairs, rows, cols, sizes, 0) != 0
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
