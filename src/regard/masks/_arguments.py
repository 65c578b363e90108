"""Checks of what callers hand to the constructors, and the one explanation of the two boolean conventions."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard._checks import as_int

CONVENTIONS = (
    "Two conventions exist: True = may attend (masks.keep, and torch's scaled_dot_product_attention), "
    "and True = forbidden (masks.drop, and torch.nn.MultiheadAttention's attn_mask and key_padding_mask)."
)

DTYPE_NAMES = {
    torch.bool: "bool",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
LARGEST = 2**63 - 1
_FROM_THREE = (
    ": reshape it to [B, H, L, S]; that is t[:, None] for a mask [batch, query, key], and t.unflatten(0, (B, H)) for "
    "[batch · head, query, key], as torch.nn.MultiheadAttention takes it"
)


def plain(tensor: Tensor) -> bool:
    """Whether the contents of a tensor may be read without synchronising or breaking a transform."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def whole(mask: str, name: str, value: Any, least: int = 0) -> int:
    """``value`` as an int of at least ``least``, or an error that names the mask and the argument."""
    if isinstance(value, (bool, Tensor)) or not (isinstance(value, int) or hasattr(value, "__index__")):
        raise TypeError(f"masks.{mask}: {name} must be an int, got {describe(value)}")
    number = operator.index(value)
    if not least <= number <= LARGEST:
        raise ValueError(f"masks.{mask}: {name} must be in {least} … 2**63 − 1, got {number}")
    return number


def describe(value: Any) -> str:
    """A value in an error message: tensors by dtype and shape, anything else by type."""
    if isinstance(value, Tensor):
        kind = DTYPE_NAMES.get(value.dtype, str(value.dtype))
        return f"{'an' if kind.startswith('int') else 'a'} {kind} tensor of shape {list(value.shape)}"
    return f"{type(value).__name__}"


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """The shape as plain ints: under dynamic shapes, `operator.index` fixes a size, so that it can be written down."""
    return tuple([operator.index(size) for size in tensor.shape])


def integers(mask: str, name: str, value: Any, ranks: tuple[int, ...], hint: str = "") -> tuple[Tensor, bool]:
    """``value`` as an integer tensor, and whether we made it (from a list) rather than the caller.

    ``hint`` ends the message where a tensor is of the wrong kind.
    """
    made = not isinstance(value, Tensor)
    tensor = _from_list(mask, name, value) if made else value
    if tensor.dtype not in INTEGERS:
        raise TypeError(f"masks.{mask}: {name} must hold integers, got {describe(value)}{hint}")
    if tensor.dim() not in ranks:
        wanted = " or ".join(str(rank) for rank in ranks)
        raise ValueError(f"masks.{mask}: {name} must have {wanted} dimension(s), got shape {list(tensor.shape)}{hint}")
    return tensor, made


def _from_list(mask: str, name: str, value: Any) -> Tensor:
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes)):
        raise TypeError(f"masks.{mask}: {name} must be a list of ints or an integer tensor, got {describe(value)}")
    items = _whole_numbers(value.tolist() if hasattr(value, "tolist") else list(value))
    if items is None:
        raise TypeError(f"masks.{mask}: {name} must hold integers, got {value!r}")
    # A tensor made inside inference mode could never be saved for a backward pass, and the mask may outlive the block.
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return torch.tensor(items, dtype=torch.int64, device="cpu")
    return torch.tensor(items, dtype=torch.int64, device="cpu")


def _whole_numbers(items: list[Any]) -> list[Any] | None:
    """Lists of ints; None where they hold anything else."""
    if set(map(type, items)) == {int}:  # thousands of ids, or of lengths for every token that is decoded
        return items
    found = [_whole_numbers(item) if isinstance(item, list) else as_int(item) for item in items]
    return None if any(item is None for item in found) else found


def at_least(mask: str, name: str, tensor: Tensor, least: int) -> None:
    """Refuse a readable tensor that holds a number below ``least``."""
    if torch.compiler.is_compiling() or not plain(tensor) or tensor.numel() == 0:
        return
    smallest = int(tensor.min())
    if smallest < least:
        raise ValueError(f"masks.{mask}: every element of {name} must be at least {least}, got {smallest}")


def attendance(mask: str, value: Any, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """The tensor given to keep, drop or from_additive, or an error that says what it means elsewhere."""
    if not isinstance(value, Tensor):
        hint = ": wrap it in torch.from_numpy" if isinstance(value, np.ndarray) else ""
        raise TypeError(f"masks.{mask}: expected a tensor, got {describe(value)}{hint}. {CONVENTIONS}")
    if value.dtype not in dtypes:
        raise TypeError(_wrong_kind(mask, value))
    if value.dim() not in (1, 2, 4):
        raise ValueError(
            f"masks.{mask}: expected a tensor of shape [S], [L, S] or [B or 1, H or 1, L or 1, S or 1], "
            f"got {list(value.shape)}{_FROM_THREE if value.dim() == 3 else ''}"
        )
    return value


def _wrong_kind(mask: str, value: Tensor) -> str:
    given = f"masks.{mask}: got {describe(value)}"
    if mask == "from_additive":
        hint = "masks.keep (True = may attend) or masks.drop (True = forbidden)"
        return f"{given}, expected floats that are added to the logits; for booleans use {hint}. {CONVENTIONS}"
    if value.dtype in FLOATS:
        return (
            f"{given}, expected booleans. A float tensor is never a mask: pass it as bias= if it is added to the "
            "logits, or to masks.from_additive if it holds only 0 and -inf."
        )
    return f"{given}, expected booleans: 0 and 1 do not say which one may attend. {CONVENTIONS} Convert with == or !=."
