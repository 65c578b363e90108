"""Functions that write into memory that is there already, so that they can be undone, and done again."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from regard.watching._silence import silence


class Write(NamedTuple):
    into: Tensor
    before: Tensor  # what stood there


def undo(write: Write | None) -> None:
    """Make a tensor as it was, before a function writes into it a second time."""
    if write is not None:
        with silence():
            write.into.copy_(write.before)


def put(given: Any, write: Write) -> Any:
    """Arguments with the tensor as it was in place of the one that was written into."""
    if isinstance(given, dict):
        return {name: put(one, write) for name, one in given.items()}
    if type(given) in (tuple, list):
        return type(given)(put(one, write) for one in given)
    return write.before if given is write.into else given


def name_of(func: Any) -> str:
    return getattr(func, "__name__", "")


def written_into(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The tensor that a function writes into."""
    name, out = name_of(func), kwargs.get("out")
    if isinstance(out, Tensor):
        return out
    writes = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__") and name not in _OF_NO_NUMBERS)
    return args[0] if writes and args and isinstance(args[0], Tensor) else None


_IN_PLACE = {"__setitem__"} | {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")}

# they change what is known of a tensor, not its numbers
_OF_NO_NUMBERS = frozenset(
    ("requires_grad_", "detach_", "share_memory_", "rename_", "squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_",
     "swapdims_", "as_strided_")
)  # fmt: skip


def with_item(target: Tensor, index: Any, value: Any) -> Tensor:
    """``target[index] = value``, in a tensor of its own."""
    target = target.clone()
    target[index] = value
    return target
