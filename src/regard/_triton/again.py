"""The launches of a call again, for other tensors. Like calls launch the same kernels with the same numbers and differ
only in addresses; at short lengths, working out the numbers anew takes longer than the kernels.

What is kept of a call is what it launched, without its own tensors, in the memory of its mask, whose tables it needs.
``likeness`` says which calls are alike; the others work everything out.
"""

from __future__ import annotations

import math
from functools import reduce
from itertools import accumulate, takewhile
from operator import or_
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from regard.masks._memo import Memo

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from regard._triton.run import Launched
    from regard.spec import Call

# the compiler is told of every address that 16 divides: calls of which one is not such are not alike
_DIVIDES = 16
# bytes between the beginnings of what shares an allocation
_STEP = 256
_unmasked = Memo()
Answer = TypeVar("Answer")


class Layout(NamedTuple):
    """The memory that kernels write: results by name, what starts at 0, and what one kernel leaves to another."""

    results: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    zeros: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    between: Mapping[str, tuple[int, torch.dtype]]

    @property
    def nbytes(self) -> int:
        shaped = sum(
            math.prod(shape) * dtype.itemsize for shape, dtype in (*self.results.values(), *self.zeros.values())
        )
        return shaped + sum(count * dtype.itemsize for count, dtype in self.between.values())

    def allocate(self, device: torch.device) -> dict[str, Tensor]:
        found = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in self.results.items()}
        for name, (shape, dtype) in self.zeros.items():
            found[name] = torch.zeros(shape, dtype=dtype, device=device)
        for name, (count, dtype) in self.between.items():
            found[name] = torch.empty(count, dtype=dtype, device=device)
        return found


def likeness(
    call: Call, kind: tuple[Any, ...], rows: tuple[Tensor, ...], others: tuple[Tensor, ...]
) -> tuple[Any, ...] | None:
    """Equal for calls that launch the same but for the addresses of these inputs; None where that is not known.

    ``rows``: inputs [B, H, L, D] of which kernels read whole rows. ``kind``: all that decides beside the call's spec
    and mask and the strides and device of its inputs.
    """
    spec, inputs = call.spec, (*rows, *others)
    if spec.offset is None or (spec.bias is not None and spec.bias.rule is not None) or _launches_are_watched():
        return None  # what positions and rules give is computed for each call
    strides = [tensor.stride() for tensor in inputs]
    if any([stride[3] != 1 for stride in strides[: len(rows)]]):
        return None  # such rows are copied
    if reduce(or_, [tensor.data_ptr() for tensor in inputs]) % _DIVIDES:
        return None
    return (*kind, spec, inputs[0].device, *strides)


def remembered(call: Call, key: tuple[Any, ...], make: Callable[[], Answer]) -> Answer:
    """``make()`` of the first such call with this mask."""
    if call.mask is None:
        return _unmasked.recall(key, make)
    return call.mask.remember(key, call.offset, make)


def _launches_are_watched() -> bool:
    """Whether a profiler is to be told of each launch, which only Triton's own way of launching does."""
    from triton import knobs

    return bool(knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls)


class _Launch(NamedTuple):
    compiled: Any  # held, as its code is unloaded with it
    run: Callable[..., None]
    grid: tuple[int, int, int]
    handles: tuple[Any, Any]
    places: tuple[int, ...]  # of the leading arguments among the values of a call
    rest: tuple[Any, ...]


class _Descriptor(NamedTuple):
    """A descriptor for the copy engine, but for its tensor."""

    of: Any
    source: int  # which of the inputs
    fields: dict[str, Any]

    def describe(self, tensor: Tensor) -> Any:
        # without the checks of its constructor: the first call's tensor had these sizes, strides and multiples
        made = self.of.__new__(self.of)
        made.__dict__.update(self.fields, base=tensor)
        return made


class Again:
    """What a call launched, to be launched for other inputs.

    The values from which arguments are taken: addresses of the inputs and of what is allocated; then descriptors of
    inputs and addresses of tables, in the order in which they were met.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        sizes = [-(-count * dtype.itemsize // _STEP) * _STEP for count, dtype in layout.between.values()]
        *self._starts, self._room = accumulate(sizes, initial=0)
        self._launches: list[_Launch] = []
        self._tables: list[Tensor] = []
        self._more: list[int | _Descriptor] = []

    @classmethod
    def of(
        cls, launched: Sequence[Launched | None], inputs: Sequence[Tensor], layout: Layout, found: Mapping[str, Tensor]
    ) -> Again | None:
        """``found``: what was allocated by ``layout``. None where something cannot be repeated."""
        made = cls(layout)
        own = [*inputs, *found.values()]
        known: dict[Any, int] = {id(tensor): n for n, tensor in enumerate(own)}
        for each in launched:
            if each is None:  # the interpreter
                return None
            leading = list(takewhile(_is_memory, each.args))
            rest = each.args[len(leading) :]
            if any(map(_is_memory, rest)):
                return None
            places = tuple(made._place(arg, known, len(own)) for arg in leading)
            compiled = each.compiled
            handles = compiled.function, compiled.packed_metadata
            made._launches.append(_Launch(compiled, compiled.run, each.grid, handles, places, rest))
        held = [tensor.data_ptr() for tensor in (*own, *made._tables)]
        return None if reduce(or_, held) % _DIVIDES else made

    def _place(self, arg: Any, known: dict[Any, int], own: int) -> int:
        """Where a tensor's address, or a descriptor, is among the values."""
        base = getattr(arg, "base", None)
        key = id(arg) if base is None else (id(base), *arg.block_shape)
        if key not in known:
            known[key] = own + len(self._more)
            if base is None:
                self._tables.append(arg)
                self._more.append(arg.data_ptr())
            else:
                fields = {name: value for name, value in vars(arg).items() if name != "base"}
                self._more.append(_Descriptor(type(arg), known[id(base)], fields))
        return known[key]

    @property
    def nbytes(self) -> int:
        """Of the tables: large ones are not kept by the mask's memory."""
        return sum(table.nbytes for table in self._tables)

    def __call__(self, inputs: Sequence[Tensor]) -> dict[str, Tensor] | None:
        """The results; None where memory was allocated that is not alike."""
        from triton.runtime import driver

        device, layout = inputs[0].device, self._layout
        found = {
            name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in layout.results.items()
        }
        values: list[Any] = [tensor.data_ptr() for tensor in (*inputs, *found.values())]
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in layout.zeros.values()]
        values += [tensor.data_ptr() for tensor in zeros]
        if self._room:
            room = torch.empty(self._room, dtype=torch.uint8, device=device)
            start = room.data_ptr()
            values += [start + at for at in self._starts]
        if reduce(or_, values) % _DIVIDES:
            return None
        values += [more.describe(inputs[more.source]) if isinstance(more, _Descriptor) else more for more in self._more]
        stream = driver.active.get_current_stream(device.index)
        for _, run, grid, handles, places, rest in self._launches:
            # no hooks, and nothing that would be told to them
            run(*grid, stream, *handles, None, None, None, *map(values.__getitem__, places), *rest)
        return found


def _is_memory(arg: Any) -> bool:
    return isinstance(arg, Tensor) or hasattr(arg, "block_shape")
