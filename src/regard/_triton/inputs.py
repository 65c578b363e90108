"""A call's tensors as the kernels take them, and what they cannot take."""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard._triton.encode import DENSE, Encoded, dense_piece, pieces

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regard.spec import Call, CallSpec

_LOG2E = math.log2(math.e)
# smaller ones may be 0 in float32, and -inf·0 is NaN
_SMALLEST_SCALE = 1e-30
# three products of rounded halves keep float32's accuracy on the tensor cores
PRECISION = {torch.float32: "tf32x3", torch.float16: "ieee", torch.bfloat16: "ieee"}
_FAR = 1 << 30
# half of what a grid holds on its second axis
_MOST_HEADS = 32_767


def refuse(spec: CallSpec) -> list[str]:
    """Why no kernel of this package can take such a call; nothing when they can."""
    reasons = []
    if spec.device != "cuda" and not _interpreted():
        reasons.append("the Triton kernels run on CUDA devices")
    if spec.dtype == torch.float64:
        reasons.append("the Triton kernels accumulate in float32")
    if spec.head_dim > widest(spec.dtype):
        reasons.append(f"head dim {spec.head_dim} does not fit the Triton kernels' tiles")
    if spec.mode not in ("plain", "compile"):
        reasons.append(f"the Triton kernels cannot be traced ({spec.mode} mode)")
    if spec.batch * spec.heads > _MOST_HEADS:
        reasons.append(f"more than {_MOST_HEADS:,} heads of all items: the grid of a kernel has no more room")
    if max(spec.queries, spec.keys) + abs(spec.offset or 0) >= _FAR:
        reasons.append("positions beyond 2^30")
    return reasons


def widest(dtype: torch.dtype) -> int:
    return 128 if dtype == torch.float32 else 256


def _interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


def power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@lru_cache(16)
def has_copy_engine(device: torch.device) -> bool:
    """Whether tiles can be loaded by the copy engine of the device (Hopper and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@lru_cache(16)
def has_asynchronous_products(device: torch.device) -> bool:
    """Whether products of matrices go on while a program computes other things, in registers of its own (Hopper)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def can_be_copied(*tensors: Tensor) -> bool:
    """The copy engine wants addresses and strides in multiples of 16 bytes."""
    if not has_copy_engine(tensors[0].device):
        return False
    for tensor in tensors:
        unit = 16 // tensor.element_size()
        *outer, last = tensor.stride()
        if tensor.data_ptr() % 16 or last != 1 or any(stride % unit or not stride for stride in outer):
            return False
    return True


def described(tensor: Tensor, rows: int, width: int) -> Any:
    """A tensor [B, H, L, D] for the copy engine, in blocks of rows."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, rows, width])


class Inputs:
    """A call's tensors and numbers, as arguments of the kernels."""

    def __init__(self, call: Call) -> None:
        spec = call.spec
        self.call = call
        self.query, self.key = rows_of_unit_stride(call.query), rows_of_unit_stride(call.key)
        self.bias = self.query
        self.bias_strides: tuple[int, ...] = (0, 0, 0, 0)
        if call.bias is not None:
            self.bias, self.bias_strides = _bias(call)
        # (scale, 0) or, with a softcap, (scale / softcap, softcap): of natural logits, and of powers of two
        if spec.softcap is None:
            self.natural_scales, self.scales = (spec.scale, 0.0), (spec.scale * _LOG2E, 0.0)
        else:
            inner = spec.scale / spec.softcap
            self.natural_scales, self.scales = (inner, spec.softcap), (inner, spec.softcap * _LOG2E)

    def shape(self, **more: Any) -> dict[str, Any]:
        """The compile-time arguments that every kernel takes."""
        spec = self.call.spec
        return {
            "H": spec.heads,
            "GROUP": spec.heads // spec.kv_heads,
            "HEAD": spec.head_dim,
            "D": max(16, power(spec.head_dim)),
            "SOFTCAP": spec.softcap is not None,
            "BIASED": spec.bias is not None,
            "PRECISION": PRECISION[spec.dtype],
            **more,
        }

    @cached_property
    def copied(self) -> bool:
        """Whether the copy engine can load query and key."""
        return can_be_copied(self.query, self.key)

    @property
    def precision(self) -> str:
        """How products of matrices are made."""
        return PRECISION[self.call.spec.dtype]

    def rises(self) -> bool:
        """Whether a logit is the product of query and key times a positive number, and nothing more."""
        spec = self.call.spec
        return spec.softcap is None and spec.bias is None and spec.scale >= _SMALLEST_SCALE


def rows_of_unit_stride(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _bias(call: Call) -> tuple[Tensor, tuple[int, ...]]:
    """The bias and its four strides. One that goes by distance is a line, in which each row starts one earlier."""
    spec = call.spec
    assert call.bias is not None and spec.bias is not None
    rule = spec.bias.rule
    if rule is None:
        whole = call.bias.detach().expand(spec.batch, spec.heads, spec.queries, spec.keys)
        return whole, whole.stride()
    offset = call.offset.view(-1, 1) if isinstance(call.offset, Tensor) else call.offset
    steps = torch.arange(1 - spec.queries, spec.keys, device=call.query.device).unsqueeze(0) - offset
    line = rule.line(call.bias.detach(), steps).contiguous()  # [B or 1, H, L + S - 1]
    strides = (line.stride(0) if len(line) > 1 else 0, line.stride(1), -1, 1)
    return line[..., spec.queries - 1 :], strides


class Piece(NamedTuple):
    """Some rows of the call, and the test of their pairs."""

    rows: range
    lo: Tensor
    hi: Tensor
    strides: tuple[int, ...]
    test: dict[str, int]


def pieces_of(call: Call, encoded: Encoded, block_q: int) -> Iterator[Piece]:
    """One after the other: the booleans of a large mask are not to be there all at once."""
    every, lo, hi = range(call.spec.queries), encoded.lo, encoded.hi
    test = {"PREDICATE": encoded.test, "SLOTS": 0}
    if encoded.test == DENSE:
        for rows in pieces(call, block_q):
            seen = dense_piece(call, rows).view(torch.uint8)
            yield Piece(rows, seen, seen, seen.stride(), test)
    elif lo is not None and hi is not None:
        strides = (lo.stride(0) if lo.shape[0] > 1 else 0, 0, 1, lo.stride(1))
        yield Piece(every, lo, hi, strides, {**test, "SLOTS": lo.shape[1]})
    else:
        nothing = encoded.runs.table
        yield Piece(every, nothing, nothing, (0, 0, 0, 0), test)
