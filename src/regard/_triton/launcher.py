"""One kernel for one kind of call: compiled when it first runs, and from then on launched with addresses alone.

Working out a launch takes Python longer than a short kernel takes the device. What is the same for all calls of a kind
(grid, numbers, compile-time arguments) is kept here; a call brings its tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, partial, reduce
from operator import itemgetter, or_
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from regard.spec import Call

# the compiler is told of every address that 16 divides: a launch with another one is compiled on its own
_DIVIDES = 16
# the kind of memory that stands for what is not read
_UNREAD = torch.float32
_HERE = nullcontext()
_address: Any = torch._C.TensorBase.data_ptr


class Launch:
    """``launch(memory)`` is ``kernel[grid](*memory, *numbers, **constants)``, faster from the second time on.

    ``memory``: the kernel's leading arguments, tensors and descriptors; then come the numbers. None stands for what the
    kernel does not read: the same arguments in all calls of a launch, next to some tensor of float32.
    """

    __slots__ = ("_compiling", "_constants", "_grid", "_kernel", "_numbers", "_ready")

    def __init__(
        self, kernel: Any, grid: Sequence[int], numbers: Sequence[float], constants: Mapping[str, Any]
    ) -> None:
        x, y, z = (*grid, 1, 1)[:3]
        self._kernel, self._grid = kernel, (x, y, z)
        self._numbers, self._constants = tuple(numbers), dict(constants)
        self._ready: tuple[Any, ...] | None = None
        self._compiling: Future[None] | None = None

    def compile_ahead(self, memory: Sequence[Tensor | torch.dtype | None], device: torch.device) -> None:
        """Compile, in a thread of its own, for arguments like these; a dtype stands for a tensor that will be made."""
        if any(isinstance(each, Tensor) and _address(each) % _DIVIDES for each in memory):
            return
        dtypes = [each.dtype if isinstance(each, Tensor) else each or _UNREAD for each in memory]
        self._compiling = _threads().submit(self._compile, dtypes, device)

    def _compile(self, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        from triton.runtime import driver

        with suppress(Exception), torch.cuda.device(device):  # what fails here fails again where it is launched
            made = self._kernel.warmup(*dtypes, *self._numbers, grid=self._grid, **self._constants)
            if made.module is None:
                # Triton 3.6 compiles C for each list of arguments, and keeps it on the disk; nothing is loaded here,
                # which could disturb the recording of a graph
                driver.active.launcher_cls(made.src, made.metadata)

    def __call__(self, memory: Sequence[Any]) -> None:
        read = [each for each in memory if each is not None]
        try:
            given = [*map(_address, read)]
            divides = reduce(or_, given) % _DIVIDES == 0
        except TypeError:  # descriptors are among them, which are no addresses
            given = [_address(each) if isinstance(each, Tensor) else each for each in read]
            divides = reduce(or_, [each for each in given if type(each) is int], 0) % _DIVIDES == 0
        ready = self._ready
        if ready is not None and divides:
            run, function, metadata, rest, device, runtime, places = ready
            # only Triton's own way of launching tells a profiler of each launch
            if not (runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls):
                stream = torch._C._cuda_getCurrentRawStream(device)
                if places is not None:
                    given = places(given)
                run(*self._grid, stream, function, metadata, None, None, None, *given, *rest)
                return
        self._first(memory, read, divides)

    def _first(self, memory: Sequence[Any], read: Sequence[Any], divides: bool) -> None:
        """By Triton itself, which compiles the kernel where it has to."""
        if self._compiling is not None:
            self._compiling.result()
            self._compiling = None
        places = None
        if len(read) < len(memory):
            stands = [n for n, each in enumerate(read) if isinstance(each, Tensor) and each.dtype == _UNREAD][-1]
            found = iter(range(len(read)))
            at = [stands if each is None else next(found) for each in memory]
            places, memory = itemgetter(*at), [read[n] for n in at]
        made = self._kernel[self._grid](*memory, *self._numbers, **self._constants)
        if made is None or not divides:
            return  # the interpreter compiles nothing
        from triton import knobs

        left = self._kernel.arg_names[len(memory) + len(self._numbers) :]
        rest = (*self._numbers, *(self._constants[name] for name in left))
        device = torch.cuda.current_device()
        self._ready = made.run, made.function, made.packed_metadata, rest, device, knobs.runtime, places


# the two kernels of a backward pass, while the forward one is compiled
_THREADS = 2


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="regard-compile")


def can_compile_ahead(device: torch.device) -> bool:
    """Whether there are processors for it; the interpreter compiles nothing."""
    return device.type == "cuda" and (os.cpu_count() or 1) > _THREADS


# past torch's dispatcher, as its own compiler does: a third of the time
_guards: Any = torch._C._dynamo.guards
_ALLOCATE: dict[str, Any] = {"cuda": _guards._empty_strided_cuda, "cpu": _guards._empty_strided_cpu}


def maker(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """What makes tensors of this shape, of any contents, on the current device of the type of ``device``."""
    strides = torch.empty(shape, device="meta").stride()
    return partial(_ALLOCATE[device.type], tuple(shape), strides, dtype)


_kept: dict[tuple[Any, ...], Any] = {}
_MOST = 4096
Made = TypeVar("Made")


def kept_launch(call: Call, kind: tuple[Any, ...], make: Callable[[], Launch]) -> Launch:
    """The launch of a kernel for calls of this description and these strides; ``kind``: what else decides."""
    tensors = (call.query, call.key, call.value) if call.bias is None else (call.query, call.key, call.value, call.bias)
    return kept((*kind, call.spec, call.query.device, *[tensor.stride() for tensor in tensors]), make)


def kept(key: tuple[Any, ...], make: Callable[[], Made]) -> Made:
    """What was made for ``key``, which holds all that decides about it: a launch, or what runs a kind of call."""
    found: Made | None = _kept.get(key)
    if found is None:
        found = make()
        if len(_kept) >= _MOST:
            _kept.clear()
        _kept[key] = found
    return found


def on(device: torch.device) -> AbstractContextManager[object]:
    """A block in which kernels run on the device of their tensors."""
    if device.index is None or device.index == torch._C._cuda_getDevice():
        return _HERE  # of tensors on a CPU, which has no index, the interpreter runs the kernels
    return torch.cuda.device(device)


def run_on(device: torch.device, run: Callable[..., Made], *given: Any) -> Made:
    """``run(*given)`` in such a block; where nothing has to change, in less time."""
    if device.index is None or device.index == torch._C._cuda_getDevice():
        return run(*given)
    with torch.cuda.device(device):
        return run(*given)
