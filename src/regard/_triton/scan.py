# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Causal linear attention in chunks, forward and backward: one kernel for the result and for all of its gradients.

Each of them is a sum over the tokens that come before a row (REVERSE: after it), itself included:

    y_i = r_i Σ_j (x_i·k_j + extra) f_j remains(i, j) v_j            remains: what the gates between leave of a weight

    result            x = φ(q)   k = φ(k)   v = v       by the sum of its weights (NORMED: it is kept; DIVIDED)
    gradient of φ(q)  x = dO     k = v      v = φ(k)    extra = −δ_i, r = 1 / weights of i           (ROW_SIDE)
    gradient of φ(k)  x = v      k = dO     v = φ(q)    extra = −δ_j, f = 1 / weights of j, REVERSE  (KEY_SIDE)
    gradient of v     x = φ(k)   k = φ(q)   v = dO      f = 1 / weights of j, REVERSE                (KEY_SIDE)

with δ = dO·out. The tokens are cut into segments, one for each program, so that short sequences fill a device too:
``sum_segments`` leaves the state Σ k_jᵀ v_j of each segment, ``carry`` turns these into the states where segments
begin, and ``scan`` goes through the chunks of its segment with the state in registers: products of matrices inside a
chunk, the state between chunks. A state is kept in float32; what gates leave is an exponential of a number that is
never above 0.

Legend: T tokens, C of them in a chunk; W width of x and k, padded to a power of two; E a block of v's columns. A state
takes W·(v's width, in whole blocks) numbers, and behind them those of the sum of weights: W for NORMED, else as many
as v is wide. MARKS of tokens: twice the number of the document, and 1 more where the key is hidden from all rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard._triton.tiles import LOG2E

# feature maps that the kernels compute themselves
ELU, RELU = tl.constexpr(1), tl.constexpr(2)
# where the numbers of rows, 1 / weights and −δ, belong: to no one, to the rows of y, or to the tokens summed over
NO_SIDE, ROW_SIDE, KEY_SIDE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _mapped(x, MAP: tl.constexpr):
    """Features of float32 numbers; NaN stays NaN."""
    if MAP == ELU:
        x = tl.where(x > 0, x + 1.0, tl.exp2(x * LOG2E))
    elif MAP == RELU:
        x = tl.where(x < 0, 0.0, x)
    return x


@triton.jit
def _load(P, at, stride, columns, there, WIDTH: tl.constexpr, MAP: tl.constexpr, OPERAND: tl.constexpr):
    """Rows ``at`` of a tensor, their features, zeros where a row is not ``there`` or beyond its WIDTH."""
    inside = there[:, None] & (columns < WIDTH)[None, :]
    x = tl.load(P + at.to(tl.int64)[:, None] * stride + columns[None, :], mask=inside, other=0.0)
    if MAP == ELU:
        x = tl.where(inside, _mapped(x.to(tl.float32), MAP), 0.0)
    elif MAP == RELU:
        x = _mapped(x.to(tl.float32), MAP)
    return x.to(OPERAND)


@triton.jit
def _marks_at(MARKS, at, T):
    """Document and whether the key is hidden, of tokens; those beyond the end stand in the last one's document."""
    marks = tl.load(MARKS + tl.minimum(tl.maximum(at, 0), T - 1))
    return marks >> 1, (marks & 1) != 0


@triton.jit
def _log_gates(GATES, at, stride, T):
    """Sums of the logs of gates within the chunk, in powers of two."""
    return tl.cumsum(tl.load(GATES + at.to(tl.int64) * stride, mask=at < T, other=0.0).to(tl.float32), 0) * LOG2E


@triton.jit
def _last(x, C: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, C) == C - 1, x, 0.0), 0)


@triton.jit
def _chunk(
    GATES, MARKS, FACTOR, EXTRA, start, gate_stride, T,
    C: tl.constexpr, GATED: tl.constexpr, MARKED: tl.constexpr, SIDE: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """What is known of the tokens of a chunk: their places, logs of gates, documents, which are hidden; how much of the
    state each of them reads, how much it adds to the state behind the chunk, and how much of the state before remains;
    1 / weights and −δ."""
    at = start + tl.arange(0, C)
    logs = tl.zeros([C], tl.float32)
    reads = tl.full([C], 1.0, tl.float32)
    adds = tl.full([C], 1.0, tl.float32)
    remains = 1.0
    if GATED:
        logs = _log_gates(GATES, at, gate_stride, T)
        end = _last(logs, C)
        remains = tl.exp2(end)
        if REVERSE:
            reads, adds = tl.exp2(end - logs), tl.exp2(logs)
        else:
            reads, adds = tl.exp2(logs), tl.exp2(end - logs)
    document = tl.zeros([C], tl.int32)
    hidden = tl.zeros([C], tl.int1)
    if MARKED:
        document, hidden = _marks_at(MARKS, at, T)
        # the document of the state that comes to this chunk, and of the one that goes on from it
        opened, _ = _marks_at(MARKS, start + C if REVERSE else start - 1, T)
        left, _ = _marks_at(MARKS, start if REVERSE else start + C - 1, T)
        reads = tl.where(document == opened, reads, 0.0)
        adds = tl.where(document == left, adds, 0.0)
        remains = tl.where(opened == left, remains, 0.0)
    factor = tl.full([C], 1.0, tl.float32)
    extra = tl.zeros([C], tl.float32)
    if SIDE != NO_SIDE:
        factor = tl.load(FACTOR + at, mask=at < T, other=0.0)
        extra = tl.load(EXTRA + at, mask=at < T, other=0.0)
    return at, logs, document, hidden, reads, adds, remains, factor, extra


@triton.jit
def _add_to_state(
    state, line, k, v, adds, remains, factor, extra,
    SIDE: tl.constexpr, NORMED: tl.constexpr, LINED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state, and the sums of weights next to it, behind a chunk."""
    if SIDE == KEY_SIDE:
        adds = adds * factor
    wide = v.to(tl.float32)
    grown = tl.dot(tl.trans(k), (wide * adds[:, None]).to(OPERAND), state * remains, input_precision=PRECISION)
    if NORMED:
        line = line * remains + tl.sum(k.to(tl.float32) * adds[:, None], 0)
    elif LINED:
        if SIDE == KEY_SIDE:
            adds = adds * extra
        line = line * remains + tl.sum(wide * adds[:, None], 0)
    return grown, line


@triton.jit(do_not_specialize=["T", "segment_chunks"])
def sum_segments(
    K, V, GATES, MARKS, FACTOR, EXTRA, STATES, REMAINS,
    k_stride_b, k_stride_h, k_stride_t, v_stride_b, v_stride_h, v_stride_t, gate_stride_b, gate_stride_h, gate_stride_t,
    mark_stride_b, T, segment_chunks,
    H: tl.constexpr, GK: tl.constexpr, GV: tl.constexpr, GG: tl.constexpr, K_WIDTH: tl.constexpr, W: tl.constexpr,
    V_WIDTH: tl.constexpr, E: tl.constexpr, C: tl.constexpr, K_MAP: tl.constexpr, V_MAP: tl.constexpr,
    GATED: tl.constexpr, MARKED: tl.constexpr, HIDES: tl.constexpr, SIDE: tl.constexpr, NORMED: tl.constexpr,
    LINED: tl.constexpr, REVERSE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """STATES: [items, segments, numbers of a state]; REMAINS: [items, segments], what a segment leaves of the state
    before it. H: heads that have a state of their own; GK, GV, GG: how many of them share a head of K, V, GATES."""
    segment = tl.program_id(0)
    block = tl.program_id(1)
    item = tl.program_id(2)
    b = (item // H).to(tl.int64)
    h = (item % H).to(tl.int64)
    w = tl.arange(0, W)
    e = block * E + tl.arange(0, E)
    K += b * k_stride_b + h // GK * k_stride_h
    V += b * v_stride_b + h // GV * v_stride_h
    GATES += b * gate_stride_b + h // GG * gate_stride_h
    MARKS += b * mark_stride_b
    FACTOR += item.to(tl.int64) * T
    EXTRA += item.to(tl.int64) * T
    state = tl.zeros([W, E], tl.float32)
    line = tl.zeros([W if NORMED else E], tl.float32)
    kept = 1.0
    chunks = tl.cdiv(T, C)
    first = segment * segment_chunks
    last = tl.minimum(first + segment_chunks, chunks)
    for n in range(first, last):
        start = (first + last - 1 - n if REVERSE else n) * C
        at, _, _, hidden, _, adds, remains, factor, extra = _chunk(
            GATES, MARKS, FACTOR, EXTRA, start, gate_stride_t, T, C, GATED, MARKED, SIDE, REVERSE
        )
        there = at < T
        if HIDES:
            there = there & (hidden == 0)
        k = _load(K, at, k_stride_t, w, there, K_WIDTH, K_MAP, OPERAND)
        v = _load(V, at, v_stride_t, e, there, V_WIDTH, V_MAP, OPERAND)
        state, line = _add_to_state(
            state, line, k, v, adds, remains, factor, extra, SIDE, NORMED, LINED, OPERAND, PRECISION
        )
        kept *= remains
    blocks: tl.constexpr = (V_WIDTH + E - 1) // E
    size: tl.constexpr = W * blocks * E + (W if NORMED else blocks * E if LINED else 0)
    place = item.to(tl.int64) * tl.num_programs(0) + segment
    STATES += place * size
    tl.store(STATES + w[:, None] * (blocks * E) + e[None, :], state)
    if LINED:
        tl.store(STATES + W * blocks * E + e, line)
    if block == 0:
        tl.store(REMAINS + place, kept)
        if NORMED:
            tl.store(STATES + W * blocks * E + w, line)


@triton.jit(do_not_specialize=["segments", "size"])
def carry(
    STATES, REMAINS, FIRST, LAST, segments, size,
    BLOCK: tl.constexpr, REVERSE: tl.constexpr, STARTED: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """States of segments to those where they begin, in place. FIRST: [items, size], what the first one begins with
    (STARTED); LAST: the same behind the last (LEFT)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    item = tl.program_id(1).to(tl.int64)
    there = at < size
    state = tl.zeros([BLOCK], tl.float32)
    if STARTED:
        state = tl.load(FIRST + item * size + at, mask=there, other=0.0)
    for n in range(segments):
        place = item * segments + (segments - 1 - n if REVERSE else n)
        own = tl.load(STATES + place * size + at, mask=there, other=0.0)
        tl.store(STATES + place * size + at, state, mask=there)
        state = state * tl.load(REMAINS + place) + own
    if LEFT:
        tl.store(LAST + item * size + at, state, mask=there)


@triton.jit
def _inside(
    x, k, logs, document, factor, extra,
    C: tl.constexpr, GATED: tl.constexpr, MARKED: tl.constexpr, SIDE: tl.constexpr, LINED: tl.constexpr,
    REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Weights of the pairs in a chunk: [rows, tokens]."""
    weights = tl.dot(x, tl.trans(k), input_precision=PRECISION)
    if LINED:
        weights += extra[:, None] if SIDE == ROW_SIDE else extra[None, :]
    if SIDE == KEY_SIDE:
        weights *= factor[None, :]
    i = tl.arange(0, C)
    seen = i[:, None] <= i[None, :] if REVERSE else i[:, None] >= i[None, :]
    if MARKED:
        seen = seen & (document[:, None] == document[None, :])
    if GATED:
        between = logs[None, :] - logs[:, None] if REVERSE else logs[:, None] - logs[None, :]
        weights *= tl.exp2(tl.where(seen, between, 0.0))
    # filled rather than multiplied by 0: a product with a token that is not seen may have overflown
    return tl.where(seen, weights, 0.0)


@triton.jit(do_not_specialize=["T", "segment_chunks"])
def scan(
    X, K, V, GATES, MARKS, FACTOR, EXTRA, STATES, RAW, Y, WEIGHT, TURNED,
    x_stride_b, x_stride_h, x_stride_t, k_stride_b, k_stride_h, k_stride_t, v_stride_b, v_stride_h, v_stride_t,
    gate_stride_b, gate_stride_h, gate_stride_t, raw_stride_b, raw_stride_h, raw_stride_t, mark_stride_b, T,
    segment_chunks, scale,
    H: tl.constexpr, GX: tl.constexpr, GK: tl.constexpr, GV: tl.constexpr, GG: tl.constexpr, GS: tl.constexpr,
    GR: tl.constexpr, K_WIDTH: tl.constexpr, W: tl.constexpr, V_WIDTH: tl.constexpr, E: tl.constexpr, C: tl.constexpr,
    X_MAP: tl.constexpr, K_MAP: tl.constexpr, V_MAP: tl.constexpr, Y_MAP: tl.constexpr, GATED: tl.constexpr,
    MARKED: tl.constexpr, SIDE: tl.constexpr, NORMED: tl.constexpr, LINED: tl.constexpr, DIVIDED: tl.constexpr,
    TURNS: tl.constexpr, REVERSE: tl.constexpr, STARTED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Y: [B, H, T, V_WIDTH]; WEIGHT (NORMED): [B, H, T]; TURNED (TURNS): [B, H, T, blocks], products of a row's
    features (RAW, the rows that y is a gradient of, by Y_MAP) with their gradient, from which that of the gates is
    summed. STATES: where segments begin (STARTED). GX … GR: how many of the H heads share a head of X, K, V, GATES,
    STATES, RAW."""
    segment = tl.program_id(0)
    block = tl.program_id(1)
    item = tl.program_id(2)
    b = (item // H).to(tl.int64)
    h = (item % H).to(tl.int64)
    w = tl.arange(0, W)
    e = block * E + tl.arange(0, E)
    X += b * x_stride_b + h // GX * x_stride_h
    K += b * k_stride_b + h // GK * k_stride_h
    V += b * v_stride_b + h // GV * v_stride_h
    GATES += b * gate_stride_b + h // GG * gate_stride_h
    RAW += b * raw_stride_b + h // GR * raw_stride_h
    MARKS += b * mark_stride_b
    row = item.to(tl.int64) * T
    FACTOR += row
    EXTRA += row
    blocks: tl.constexpr = (V_WIDTH + E - 1) // E
    state = tl.zeros([W, E], tl.float32)
    line = tl.zeros([W if NORMED else E], tl.float32)
    if STARTED:
        size: tl.constexpr = W * blocks * E + (W if NORMED else blocks * E if LINED else 0)
        STATES += ((b * (H // GS) + h // GS) * tl.num_programs(0) + segment) * size
        state = tl.load(STATES + w[:, None] * (blocks * E) + e[None, :])
        if NORMED:
            line = tl.load(STATES + W * blocks * E + w)
        elif LINED:
            line = tl.load(STATES + W * blocks * E + e)
    chunks = tl.cdiv(T, C)
    first = segment * segment_chunks
    last = tl.minimum(first + segment_chunks, chunks)
    for n in range(first, last):
        start = (first + last - 1 - n if REVERSE else n) * C
        at, logs, document, hidden, reads, adds, remains, factor, extra = _chunk(
            GATES, MARKS, FACTOR, EXTRA, start, gate_stride_t, T, C, GATED, MARKED, SIDE, REVERSE
        )
        there = at < T
        # a hidden key is read nowhere: among the rows of y in gradients of keys, else among the tokens summed over
        of_keys = there & (hidden == 0)
        x = _load(X, at, x_stride_t, w, of_keys if REVERSE else there, K_WIDTH, X_MAP, OPERAND)
        k = _load(K, at, k_stride_t, w, there if REVERSE else of_keys, K_WIDTH, K_MAP, OPERAND)
        v = _load(V, at, v_stride_t, e, there if REVERSE else of_keys, V_WIDTH, V_MAP, OPERAND)
        weights = _inside(x, k, logs, document, factor, extra, C, GATED, MARKED, SIDE, LINED, REVERSE, PRECISION)
        y = tl.dot(x, state.to(OPERAND), input_precision=PRECISION)
        if LINED:
            y += extra[:, None] * line[None, :] if SIDE == ROW_SIDE else line[None, :]
        y = tl.dot(weights.to(OPERAND), v, y * reads[:, None], input_precision=PRECISION)
        if NORMED:
            weight = (tl.sum(x.to(tl.float32) * line[None, :], 1) * reads + tl.sum(weights, 1)) * scale
            if block == 0:
                tl.store(WEIGHT + row + at, weight, mask=there)
            if DIVIDED:
                y /= tl.where(weight == 0.0, 1.0, weight)[:, None]
        y *= scale
        if SIDE == ROW_SIDE:
            y *= factor[:, None]
        if REVERSE:
            y = tl.where(of_keys[:, None], y, 0.0)
        if TURNS or Y_MAP != 0:
            inside = of_keys if REVERSE else there
            raw = _load(RAW, at, raw_stride_t, e, inside, V_WIDTH, 0, tl.float32)
            if TURNS:
                tl.store(TURNED + (row + at) * blocks + block, tl.sum(_mapped(raw, Y_MAP) * y, 1), mask=there)
            if Y_MAP == ELU:
                y *= tl.where(raw > 0, 1.0, tl.exp2(raw * LOG2E))
            elif Y_MAP == RELU:
                y = tl.where(raw > 0, y, 0.0)
        where = (row + at)[:, None] * V_WIDTH + e[None, :]
        tl.store(Y + where, y.to(Y.dtype.element_ty), mask=there[:, None] & (e < V_WIDTH)[None, :])
        state, line = _add_to_state(
            state, line, k, v, adds, remains, factor, extra, SIDE, NORMED, LINED, OPERAND, PRECISION
        )


@triton.jit(do_not_specialize=["T"])
def row_numbers(
    DO, OUT, WEIGHT, FACTOR, EXTRA, stride_b, stride_h, stride_t, T,
    H: tl.constexpr, V_WIDTH: tl.constexpr, E: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """FACTOR: 1 / weights; EXTRA: −dO·out; a row without weights is divided by nothing. DO by its strides, OUT
    contiguous."""
    at = tl.program_id(0) * C + tl.arange(0, C)
    item = tl.program_id(1)
    e = tl.arange(0, E)
    there = at < T
    DO += (item // H).to(tl.int64) * stride_b + (item % H).to(tl.int64) * stride_h
    row = item.to(tl.int64) * T + at
    inside = there[:, None] & (e < V_WIDTH)[None, :]
    grad = tl.load(DO + at.to(tl.int64)[:, None] * stride_t + e[None, :], mask=inside, other=0.0).to(tl.float32)
    out = tl.load(OUT + row[:, None] * V_WIDTH + e[None, :], mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(WEIGHT + row, mask=there, other=0.0)
    tl.store(FACTOR + row, 1.0 / tl.where(weight == 0.0, 1.0, weight), mask=there)
    tl.store(EXTRA + row, tl.where(weight == 0.0, 0.0, -tl.sum(grad * out, 1)), mask=there)
