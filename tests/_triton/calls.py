"""Small calls for the kernels' tests: random tensors, compared with the definitions."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from tests._triton import definitions
from tests._triton.inside import observing
from tests.core_calls import prepare
from torch import Tensor

from regard import Want, masks
from regard.spec import Call

# The interpreter takes CPU tensors, the compiler CUDA ones.
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def sample(every: list[Any], few: slice) -> list[Any]:
    """Every case on a GPU; on the interpreter, which takes seconds for each, some that reach all branches."""
    return every if DEVICE == "cuda" else every[few]


def placed(mask: masks.Mask | None) -> masks.Mask | None:
    """The mask with its caller's tensors on the device."""
    if mask is None or not mask.given:
        return mask
    return masks.rebuild(mask.code, tuple(tensor.to(DEVICE) for tensor in mask.tensors))


def tensors(
    B: int = 1, H: int = 2, G: int = 1, L: int = 70, S: int = 143, D: int = 11, dtype: Any = None
) -> list[Tensor]:
    shapes = (B, H, L, D), (B, G, S, D)
    return [torch.randn(shape, device=DEVICE).to(dtype or torch.float32) for shape in shapes]


def call_of(query: Tensor, key: Tensor, **given: Any) -> Call:
    names = ("mask", "bias", "scale", "softcap", "sinks")
    given["mask"] = placed(given.get("mask"))
    return prepare(query, key, key, *(given.get(name) for name in names), 0.0, given.get("query_offset"))


def found_and_wrong(query: Tensor, key: Tensor, want: Want, **given: Any) -> tuple[dict[str, Tensor], list[str]]:
    """What the kernels find, and in what it differs from the definitions."""
    call = call_of(query, key, **given)
    assert observing.refuse(call.spec, want) == []
    lse, exact = definitions.statistics(call, want)
    found = observing.observe(call, lse.float(), want)
    return found, definitions.wrong(found, exact)


def multiply_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as its bits, and multiplies those."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        return multiply(self, wide(a), wide(b), *more)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
