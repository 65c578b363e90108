"""Causal linear attention and its gradients by the kernels of ``scan``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard._triton.inputs import power
from regard._triton.launcher import Launch, kept, on
from regard._triton.tile_sizes import shared_memory

MAPS = {"identity": 0, "elu": 1, "relu": 2}  # those of ``scan``
# columns of values that a program has, programs that fill a device, chunks that a segment has at least, and numbers of
# a state that ``carry`` takes at once
_COLUMNS, _PROGRAMS, _FEWEST, _CARRIED = 64, 512, 2, 1024
# bytes of shared memory that states of 256 rows take
_NEEDED_BY_256 = 120_000
_NO_SIDE, _ROW_SIDE, _KEY_SIDE = 0, 1, 2


def widest(dtype: torch.dtype, device: str) -> int:
    """Most features, and most numbers of a value, that the kernels' states hold."""
    roomy = shared_memory(device) > _NEEDED_BY_256
    return 256 if dtype == torch.bfloat16 and roomy else 128


class Given(NamedTuple):
    """A call of linear attention over T positions that queries and keys share; last dims are contiguous."""

    query: Tensor  # [B, H, T, m]: before the map where it is one of MAPS, else features
    key: Tensor  # [B, Hkv, T, m]
    value: Tensor  # [B, Hkv, T, e]
    gates: Tensor | None  # [B or 1, H or Hkv, T]: logs
    marks: Tensor | None  # [B or 1, T] int32: twice the number of the document, and 1 more where a key is hidden
    dtype: torch.dtype  # of the result
    map: int
    scale: float
    normalize: bool

    @property
    def state_heads(self) -> int:
        return self.key.shape[1] if self.gates is None else max(self.key.shape[1], self.gates.shape[1])


class _Sum(NamedTuple):
    """One of the sums that ``scan`` describes."""

    name: str
    x: Tensor
    k: Tensor
    v: Tensor
    maps: tuple[int, int, int]  # of x, k, v
    side: int = _NO_SIDE
    lined: bool = False
    reverse: bool = False
    raw: Tensor | None = None  # what the sum is the gradient of, where a map or the gates ask for it
    turns: bool = False


class Numbers(NamedTuple):
    """Of rows, for the gradients: 1 / weights and −dO·out, [B, H, T]."""

    factor: Tensor
    extra: Tensor


def attend(given: Given, before: Tensor | None, leave: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The result [B, H, T, e]; the sums of its weights [B, H, T], if it is normalised or has a state; the state behind
    the last token, if it is to be left. States are those of ``packed``."""
    query, value = given.query, given.value
    B, H, T, _ = query.shape
    out = query.new_empty(B, H, T, value.shape[3], dtype=given.dtype)
    weighed = given.normalize or leave or before is not None
    weight = query.new_empty(B, H, T, dtype=torch.float32) if weighed else None
    one = _Sum("out", query, given.key, value, (given.map, given.map, 0))
    with on(query.device):
        after = _run(given, one, out, None, weight, None, before, leave)
    return out, weight, after


def gradients(
    given: Given, grad_out: Tensor, out: Tensor, weight: Tensor | None, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Of query, key, value and gates; None where ``needs`` is False. ``grad_out``: its last dim contiguous."""
    query, key, value, which = given.query, given.key, given.value, given.map
    normed = weight is not None
    with on(query.device):
        numbers = None if weight is None else _row_numbers(grad_out, out, weight)
        column = _KEY_SIDE if normed else _NO_SIDE
        turned: list[Tensor] = []

        def gradient(one: _Sum) -> Tensor:
            like = one.raw if one.raw is not None else value
            shared = like.shape[1] != query.shape[1]
            B, H, T, _ = query.shape
            # summed below over the heads that share it
            y = query.new_empty(B, H, T, like.shape[3], dtype=torch.float32 if shared else like.dtype)
            turns = query.new_empty(B, H, T, _blocks(like.shape[3])[0], dtype=torch.float32) if one.turns else None
            _run(given, one, y, numbers, None, turns, None, False)
            if turns is not None:
                turned.append(turns)
            return _summed(y, like.shape[1]).to(like.dtype) if shared else y

        made: list[Tensor | None] = [None] * 4
        if needs[0] or needs[3]:
            row = _ROW_SIDE if normed else _NO_SIDE
            one = _Sum("query", grad_out, value, key, (0, 0, which), row, normed, False, query, needs[3])
            made[0] = gradient(one)
        if needs[1] or needs[3]:
            one = _Sum("key", value, grad_out, query, (0, 0, which), column, normed, True, key, needs[3])
            made[1] = gradient(one)
        if needs[2]:
            made[2] = gradient(_Sum("value", key, query, grad_out, (which, which, 0), column, False, True))
        if needs[3]:
            assert given.gates is not None
            made[3] = _gate_gradient(given.gates, *turned)
    return tuple(grad if need else None for grad, need in zip(made, needs, strict=True))


def _gate_gradient(gates: Tensor, of_queries: Tensor, of_keys: Tensor) -> Tensor:
    """A gate is in the weights of the pairs that lie on both sides of it: those of later rows, less those of later
    keys."""
    each = of_queries.sum(-1, dtype=torch.float64) - of_keys.sum(-1, dtype=torch.float64)  # [B, H, T]
    each = _summed(each, gates.shape[1])
    later: Tensor = each.flip(2).cumsum(2).flip(2)
    return (later.sum(0, keepdim=True) if gates.shape[0] == 1 else later).to(gates.dtype)


def _summed(x: Tensor, heads: int) -> Tensor:
    """[B, H, …] over the heads that share one of ``heads``."""
    return torch.unflatten(x, 1, (heads, -1)).sum(2)


def packed(sums: Tensor, norms: Tensor) -> Tensor:
    """A state [B, K, m, e] and its norms [B, K, m] as the kernels keep it: [B·K, numbers]."""
    B, K, m, e = sums.shape
    rows, columns = _state_shape(m, e)
    wide = sums.new_zeros(B * K, rows * (columns + 1))
    wide[:, : rows * columns].view(B, K, rows, columns)[:, :, :m, :e] = sums
    wide[:, rows * columns :].view(B, K, rows)[:, :, :m] = norms
    return wide


def unpacked(wide: Tensor, shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    """Of a packed state of this shape [B, K, m, e]."""
    B, K, m, e = shape
    rows, columns = _state_shape(m, e)
    sums = wide[:, : rows * columns].view(B, K, rows, columns)[:, :, :m, :e]
    return sums.contiguous(), wide[:, rows * columns :].view(B, K, rows)[:, :, :m].contiguous()


def _state_shape(features: int, width: int) -> tuple[int, int]:
    blocks, columns = _blocks(width)
    return max(16, power(features)), blocks * columns


def _blocks(width: int) -> tuple[int, int]:
    """In how many blocks of how many columns values are taken."""
    columns = min(_COLUMNS, max(16, power(width)))
    return -(-width // columns), columns


def _operand(dtype: torch.dtype) -> tuple[Any, str, int]:
    """In what the tensor cores multiply, how, and tokens of a chunk. A state may pass what float16 holds."""
    import triton.language as tl

    if dtype == torch.bfloat16:
        return tl.bfloat16, "ieee", 64
    return tl.float32, "tf32" if dtype == torch.float16 else "tf32x3", 32


def split_tokens(tokens: int, chunk: int, items: int) -> tuple[int, int]:
    """Segments, and chunks of each: as many as fill a device."""
    chunks = -(-tokens // chunk)
    segments = max(1, min(-(-_PROGRAMS // items), chunks // _FEWEST))
    each = -(-chunks // segments)
    return -(-chunks // each), each


def launch_options(wide: int, dtype: torch.dtype) -> dict[str, int]:
    """Warps and stages of the pipeline, for states of this many rows."""
    return {"num_warps": 8 if wide > 64 else 4, "num_stages": 2 if dtype.itemsize == 2 and wide <= 128 else 1}


def _run(
    given: Given, one: _Sum, y: Tensor, numbers: Numbers | None, weight: Tensor | None, turned: Tensor | None,
    before: Tensor | None, leave: bool,
) -> Tensor | None:  # fmt: skip
    """Writes ``y`` and what comes with it; the state behind the last token, if it is to be left."""
    from regard._triton import scan as kernels

    B, H, T, _ = given.query.shape
    heads = H if one.reverse else given.state_heads
    width, blocks, columns = one.v.shape[3], *_blocks(one.v.shape[3])
    operand, precision, chunk = _operand(given.dtype)
    wide = max(16, power(one.k.shape[3]))
    segments, each = split_tokens(T, chunk, B * H * blocks)
    started = segments > 1 or before is not None or leave
    normed = weight is not None
    empty = y  # stands for what a kernel does not read
    gates = empty if given.gates is None else given.gates
    marks = empty if given.marks is None else given.marks
    factor, extra = (empty, empty) if numbers is None else numbers
    gate_strides = (0, 0, 0)
    if given.gates is not None:
        gate_strides = (gates.stride(0) if gates.shape[0] > 1 else 0, gates.stride(1), gates.stride(2))
    mark_stride = marks.stride(0) if given.marks is not None and marks.shape[0] > 1 else 0
    raw = empty if one.raw is None else one.raw
    key = (
        one.name, given.dtype, y.device, B, H, T, given.map, given.scale, given.normalize, normed, one.side, one.turns,
        started, segments, before is None, leave, given.marks is None, given.gates is None, gates.dtype,
        gates.shape[1], gate_strides, mark_stride,
        *[(t.shape, t.stride(), t.dtype) for t in (one.x, one.k, one.v, raw, y)],
    )  # fmt: skip

    def shared(tensor: Tensor | None, among: int) -> int:
        return 1 if tensor is None else among // tensor.shape[1]

    def constants(among: int) -> dict[str, Any]:
        return {
            "H": among, "GK": shared(one.k, among), "GV": shared(one.v, among), "GG": shared(given.gates, among),
            "K_WIDTH": one.k.shape[3], "W": wide, "V_WIDTH": width, "E": columns, "C": chunk, "K_MAP": one.maps[1],
            "V_MAP": one.maps[2], "GATED": given.gates is not None, "MARKED": given.marks is not None,
            "NORMED": normed, "LINED": one.lined, "REVERSE": one.reverse, "OPERAND": operand, "PRECISION": precision,
            **launch_options(wide, given.dtype),
        }  # fmt: skip

    def summing() -> Launch:
        strides = (*one.k.stride()[:3], *one.v.stride()[:3], *gate_strides, mark_stride)
        # the numbers of rows belong to y there
        side = _NO_SIDE if one.side == _ROW_SIDE else one.side
        more = {**constants(heads), "SIDE": side, "HIDES": given.marks is not None and not one.reverse}
        return Launch(kernels.sum_segments, (segments, blocks, B * heads), (*strides, T, each), more)

    def carrying() -> Launch:
        more = {"BLOCK": _CARRIED, "REVERSE": one.reverse, "STARTED": before is not None, "LEFT": leave, "num_warps": 4}
        return Launch(kernels.carry, (-(-size // _CARRIED), B * heads), (segments, size), more)

    def scanning() -> Launch:
        strides = (*one.x.stride()[:3], *one.k.stride()[:3], *one.v.stride()[:3], *gate_strides, *raw.stride()[:3])
        more = {
            **constants(H), "SIDE": one.side, "GX": shared(one.x, H), "GS": H // heads, "GR": shared(one.raw, H),
            "X_MAP": one.maps[0], "Y_MAP": 0 if one.raw is None else given.map, "TURNS": one.turns, "STARTED": started,
            "DIVIDED": given.normalize and normed,
        }  # fmt: skip
        numbers = (*strides, mark_stride, T, each, given.scale)
        return Launch(kernels.scan, (segments, blocks, B * H), numbers, more)

    states = after = y
    if started:
        size = wide * blocks * columns + (wide if normed else blocks * columns if one.lined else 0)
        states = y.new_empty(B * heads * segments * (size + 1), dtype=torch.float32)
        remains = states[B * heads * segments * size :]
        kept((*key, "sum"), summing)([one.k, one.v, gates, marks, factor, extra, states, remains])
        after = y.new_empty(B * heads, size, dtype=torch.float32) if leave else states
        first = states if before is None else before
        kept((*key, "carry"), carrying)([states, remains, first, after])
    weights, turns = (empty if each is None else each for each in (weight, turned))
    memory = [one.x, one.k, one.v, gates, marks, factor, extra, states, raw, y, weights, turns]
    kept((*key, "scan"), scanning)(memory)
    return after if leave else None


def _row_numbers(grad_out: Tensor, out: Tensor, weight: Tensor) -> Numbers:
    from regard._triton import scan as kernels

    B, H, T, width = out.shape
    both = torch.empty(2, *weight.shape, dtype=torch.float32, device=weight.device)

    def make() -> Launch:
        shape = {"H": H, "V_WIDTH": width, "E": max(16, power(width)), "C": 32, "num_warps": 4}
        return Launch(kernels.row_numbers, (-(-T // 32), B * H), (*grad_out.stride()[:3], T), shape)

    key = ("rows", out.device, out.shape, grad_out.stride(), grad_out.dtype, out.dtype)
    kept(key, make)([grad_out, out, weight, both[0], both[1]])
    return Numbers(both[0], both[1])
