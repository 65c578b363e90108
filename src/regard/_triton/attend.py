"""Attention by the kernel of this package: out and lse, and row statistics in the same pass where they are wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from regard._triton import inputs
from regard._triton.encode import Tiling, encode
from regard._triton.inputs import Inputs, can_be_copied, described, pieces_of, power, rows_of_unit_stride
from regard._triton.run import on, run

if TYPE_CHECKING:
    from regard.spec import Call, CallSpec


def refuse(spec: CallSpec) -> list[str]:
    """Why the kernel cannot run such a call; nothing when it can."""
    reasons = inputs.refuse(spec)
    if spec.value_dim > inputs.widest(spec.dtype):
        reasons.append(f"value dim {spec.value_dim} does not fit the Triton kernels' tiles")
    return reasons


def mask_bytes(call: Call) -> int:
    """Bytes of the tables of the call's mask, and of its largest piece where pairs are tested one by one."""
    tiles = tiles_of(call.spec)
    encoded = encode(call, Tiling(tiles["BM"], tiles["BN"]))
    return encoded.nbytes + max(piece.lo.nbytes if piece.rows else 0 for piece in pieces_of(call, encoded, tiles["BM"]))


class Attended(NamedTuple):
    out: Tensor  # [B, H, L, Dv]
    lse: Tensor  # [B, H, L], float32, likewise the rest
    entropy: Tensor | None
    max_weight: Tensor | None


def tiles_of(spec: CallSpec) -> dict[str, int]:
    """Sizes of the tiles, warps and stages of the pipeline."""
    if spec.dtype == torch.float32:
        return {"BM": 64, "BN": 32, "num_warps": 4, "num_stages": 2}
    widest = max(spec.head_dim, spec.value_dim)
    if widest > 128:
        return {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2}
    if spec.queries <= 64:
        return {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 3}
    if widest <= 64:
        return {"BM": 128, "BN": 64, "num_warps": 4, "num_stages": 3}
    if inputs.has_copy_engine(torch.device(spec.device)):  # such devices have the shared memory
        return {"BM": 128, "BN": 128, "num_warps": 8, "num_stages": 3}
    return {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 3}


def attend(call: Call, rows: bool) -> Attended:
    """The call's result; ``rows`` asks for entropy and largest weight too. Reads nothing from the device."""
    from regard._triton.forward import attend as kernel

    spec, tiles = call.spec, tiles_of(call.spec)
    if spec.empty:
        return _nothing(call, rows)
    given = Inputs(call)
    value = rows_of_unit_stride(call.value)
    lead = (spec.batch, spec.heads, spec.queries)
    new = call.query.new_empty
    # gradients are made from the output as it was before it is rounded
    out = new(*lead, spec.value_dim, dtype=torch.float32 if spec.grad else spec.dtype)
    lse = new(lead, dtype=torch.float32)
    entropy, largest = (new(lead, dtype=torch.float32) for _ in range(2)) if rows else (lse, lse)
    wide, wide_v = max(16, power(spec.head_dim)), max(16, power(spec.value_dim))
    copied = given.copied and can_be_copied(value)
    query, key, source = given.query, given.key, value
    if copied:
        query, key = described(query, tiles["BM"], wide), described(key, tiles["BN"], wide)
        source = described(value, tiles["BN"], wide_v)
    encoded = encode(call, Tiling(tiles["BM"], tiles["BN"]))
    runs = encoded.runs
    sinks = lse if call.sinks is None else call.sinks.detach().contiguous()
    more = {"VALUE": spec.value_dim, "DV": wide_v, "COPIED": copied, "SINK": call.sinks is not None, "ROWS": rows}
    for piece in pieces_of(call, encoded, tiles["BM"]):
        args = (
            query, key, source, given.bias, piece.lo, piece.hi, sinks, runs.table, runs.counts, out, lse, entropy,
            largest, *given.query.stride()[:3], *given.key.stride()[:3], *value.stride()[:3], *given.bias_strides,
            *piece.strides, int(runs.groups > 1), spec.queries, spec.keys, piece.rows.start, runs.blocks,
            *given.natural_scales,
        )  # fmt: skip
        grid = -(-len(piece.rows) // tiles["BM"]), spec.batch * spec.heads
        with on(call.query.device):
            run(kernel, grid, args, given.shape(**tiles, **piece.test, **more, RISING=given.rises()))
    return Attended(out, lse, entropy, largest) if rows else Attended(out, lse, None, None)


def _nothing(call: Call, rows: bool) -> Attended:
    """Without keys every row is empty; without rows there are none."""
    spec, new = call.spec, call.query.new_full
    lead = (spec.batch, spec.heads, spec.queries)
    missing = new(lead, torch.nan, dtype=torch.float32) if rows else None
    out = new((*lead, spec.value_dim), 0.0)
    return Attended(out, new(lead, -torch.inf, dtype=torch.float32), missing, missing)
