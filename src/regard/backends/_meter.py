"""The memory a program takes, counted by running it on tensors that have sizes and no values.

Each tensor that the run makes is noted when it comes and when it goes: no backend foretells what it allocates. Loops
over tiles go through ``some``, those over steps through ``each_kind``: while memory is counted, few of them run.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from regard.spec import Call

Item = TypeVar("Item")


class _Counting(threading.local):
    meter: Meter | None = None


_counting = _Counting()


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """``peak``: the most bytes alive at once of those allocated inside the block."""

    def __init__(self, given: Iterable[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        # what is given has been allocated by others
        self._alive = {each.untyped_storage()._cdata: 0 for each in given if isinstance(each, Tensor)}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would load the compiler: nothing is compiled here

    def __enter__(self) -> Meter:
        _counting.meter = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *given: Any) -> None:
        _counting.meter = None
        super().__exit__(*given)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, shape = tree_flatten((args, kwargs or {}))
        valueless = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_meta]
        for tensor in valueless:  # one that was not made inside was there before: masks remember some
            self._alive.setdefault(tensor.untyped_storage()._cdata, 0)
        if valueless:
            # offsets and places of blocks have values
            leaves = [leaf.to("meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(leaves, shape)
        made = function(*args, **kwargs)
        # what a mask has is there already
        moved = function is torch.ops.aten._to_copy.default and not args[0].is_meta
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, Tensor) and tensor.is_meta:  # a mask may be read meanwhile, on a CPU
                storage = tensor.untyped_storage()
                self._note(storage, 0 if moved else storage.nbytes())
        self.peak = max(self.peak, self.now)
        return made

    def _note(self, storage: torch.UntypedStorage, count: int) -> None:
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = count
            self.now += count
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._alive.pop(key)


def peak_bytes(run: Callable[[], object], given: Iterable[Any]) -> int:
    """The most bytes alive at once of those that ``run`` allocates next to what it is given, without values."""
    with Meter(given) as meter:
        run()
    return meter.peak


def some(places: range) -> Iterable[int]:
    """All of them; while memory is counted, as many as are needed for that."""
    if _counting.meter is None or len(places) <= 4:
        return places
    return places[0], places[1], places[-2], places[-1]  # the last may be shorter


def each_kind(items: Sequence[Item], kind: Callable[[Item], tuple[Hashable, float]]) -> Sequence[Item]:
    """All of them; while memory is counted, the largest of each kind. ``kind`` says which it is, and how large."""
    if _counting.meter is None:
        return items
    largest: dict[Hashable, Item] = {}
    for item in sorted(items, key=lambda item: kind(item)[1]):
        largest[kind(item)[0]] = item
    return list(largest.values())


def note_inside(count: int) -> None:
    """Tell a count of bytes that a kernel allocates for itself, and frees."""
    if _counting.meter is not None:
        _counting.meter.peak = max(_counting.meter.peak, _counting.meter.now + count)


def without_values(call: Call) -> Call:
    """The call on tensors of the same sizes, strides and dtypes on the device "meta"; nothing is to be derived."""

    def bare(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    seed = torch.zeros((), dtype=torch.int64, device="cpu") if call.spec.dropout else None
    return call.of(*map(bare, call.tensors)).replace(spec=call.spec._replace(grad=False, mode="plain"), seed=seed)
