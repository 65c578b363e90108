"""What functions change besides what they give: memory that is there already, and the generator of random numbers. So
that they can be undone, and done again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
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


class Draw(NamedTuple):
    """Where a device's generator of random numbers stood before a function drew some."""

    device: torch.device
    state: Tensor

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """The same numbers are drawn once more, and none in addition."""
        now = _state(self.device)
        _put_state(self.device, self.state)
        try:
            yield
        finally:
            _put_state(self.device, now)


def drawn_by(func: Any, given: list[Tensor]) -> Draw | None:
    """Asked before a function runs; None where it draws nothing."""
    name = name_of(func)
    if ("dropout" not in name and not name.startswith("bernoulli")) or given[0].is_meta:
        return None
    return Draw(given[0].device, _state(given[0].device))


def _state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _put_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
