"""Intercepts attention at torch's operators, which every model calls in the end, however it is written.

A dispatch mode sees the operators that run on this thread, whoever calls them, and lets each run as it is: fused
attention kernels, torch's fused encoder layer, a softmax and the product that follows. Nothing is replaced, so models
that are not watched, on this thread or another, run as before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, overrides
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from regard.watching import _fused
from regard.watching._exponentials import EXPONENTIALS, SOFTMAXES
from regard.watching._silence import looking, silence, silent

if TYPE_CHECKING:
    from regard.watching._follower import Follower

_Function = TypeVar("_Function", bound=Callable[..., Any])

aten = torch.ops.aten
_IN_PLACE = frozenset((aten.mul_, aten.div_, aten.masked_fill_, aten.add_, aten.sub_, aten.copy_))
# Exponentials that say nothing where nothing is known of what they are given.
_OF_KNOWN = frozenset((aten.unsqueeze, aten.sub, aten.sub_, aten.sum, aten.div, aten.div_))
_SCORES = frozenset((aten.bmm, aten.mm, aten.baddbmm))
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def never_compiled(function: _Function) -> _Function:
    """torch's compiler takes apart every function that runs below a compiled one; not this one, nor what it calls."""
    frames: Any = torch._C._dynamo.eval_frame  # what torch._dynamo.disable sets, there without loading the compiler
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


class ListeningToFunctions(TorchFunctionMode):
    """Is told of functions that run on its thread, above torch's derivatives; not in silence."""


class Listening(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows a watcher what runs on its thread."""

    supports_higher_order_operators = True

    def __init__(self, watcher: Follower) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watcher, self.tracker, self.known = watcher, watcher.tracker, watcher.tracker.known
        watcher.listening = self

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it, torch would load all of its compiler: see never_compiled

    # torch asks the mode that is entered. Models that are not watched may be compiled, for the first time too.
    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        return not self.watcher.inside()

    # Pushed without the flags that torch sets for all threads at once: elsewhere models compile as ever.
    def __enter__(self) -> Listening:
        _python_dispatch._push_mode(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self.watcher.away is None:  # an interrupt may have left it off the stack
            _python_dispatch._pop_mode()

    @never_compiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kind = _kinds.get(id(func)) or _kind_of(func)
        if kind.plain and not self.known:  # most of what a model runs
            return kind.run(*args, **kwargs) if kwargs else kind.run(*args)
        kwargs = kwargs or {}
        if silent() and not self.watcher.hears_in_silence:
            return func(*args, **kwargs)
        if kind.packet is None:
            return self._higher_order(func, args, kwargs)
        if kind.composite and not types and not _has_nested(args):
            # in inference mode, and below autograd, torch hands operators over before it takes them apart
            with self, _views_as_ever(kind.packet):
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        if kind.kernel is not None:
            kernel, out = kind.kernel, func(*args, **kwargs)
            result = out[0] if isinstance(out, (tuple, list)) else out
            if result.numel():  # torch 2.11 runs its kernels for calls of no items too, later ones do not
                self.watcher.see(lambda: kernel(_named(func, args, kwargs), out))
            return out
        if self.known and kind.in_place:
            self._safely(self.tracker.before, args)
        out, begins = func(*args, **kwargs), None
        if kind.exponential and (self.watcher.entered or (kind.softmax and self.watcher.inside())):
            if kind.softmax and args[0].is_nested:
                self.watcher.miss("nested tensors")
            elif (not isinstance(out, Tensor) or out.numel()) and self._may_begin(kind, args):
                begins = self._safely(kind.exponential, self.tracker, args, kwargs, out)
        if self.known and not begins and _meets(self.known, args):
            self._safely(self.tracker.follow, func, args, kwargs, out)
        if kind.noise:
            self.tracker.note_noise(out)
        elif kind.attention:
            self.watcher.miss(f"torch.ops.{kind.packet} is an attention kernel that is not known here")
        return out

    def _may_begin(self, kind: _Kind, args: tuple[Any, ...]) -> bool:
        """Whether anything can come of an operator's exponentials: it takes a fraction of the time that ``_safely``
        takes, and most are no part of a softmax. Where this cannot be told, they are looked at."""
        if kind.of_known:
            return _meets(self.known, args[:2])
        if kind.packet is aten.pow:
            return isinstance(args[1], Tensor)
        if not kind.scores:
            return True
        try:  # most products are those of learned layers
            return not any([type(each) in _PLAIN_TENSORS and self.tracker.learned(each) for each in args])
        except Exception:
            return True

    def _safely(self, look: Callable[..., Any], *args: Any) -> Any:
        """Whatever goes wrong with looking is noted, and never reaches the model."""
        try:
            with looking():
                return look(*args)
        except Exception as error:
            self.watcher.miss(f"looking at it failed: {type(error).__name__}: {error}")

    def _higher_order(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """FlexAttention's: what it runs on a CPU is made of operators; what it compiles shows nothing."""
        name = str(getattr(func, "_name", func))
        if name != "flex_attention":
            return func(*args, **kwargs)
        plain = func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
        if plain is None or any(isinstance(x, Tensor) and x.device.type != "cpu" for x in args):
            out = func(*args, **kwargs)
            self.watcher.miss("FlexAttention off the CPU shows no weights")
            return out
        with self:
            return plain(*args, **kwargs)


class unheard(silence):
    """Silence in which operators are not even shown to those who listen last: passing them on takes time, and torch
    compiles no kernel for a backend while somebody listens to functions."""

    __slots__ = ("_functions", "_taken")

    def __enter__(self) -> None:
        super().__enter__()
        self._taken: list[Listening] = []
        self._functions: list[TorchFunctionMode] = []
        while depth := torch._C._len_torch_dispatch_stack():
            mode = torch._C._get_dispatch_stack_at(depth - 1)
            if not isinstance(mode, Listening) or mode.watcher.hears_in_silence:
                break
            self._taken.append(torch._C._pop_torch_dispatch_stack(None))
        while depth := torch._C._len_torch_function_stack():
            if not isinstance(torch._C._get_function_stack_at(depth - 1), ListeningToFunctions):
                break
            self._functions.append(overrides._pop_mode())  # type: ignore[no-untyped-call]

    def __exit__(self, *_: object) -> None:
        for each in reversed(self._functions):
            overrides._push_mode(each)  # type: ignore[no-untyped-call]
        for mode in reversed(self._taken):
            torch._C._push_on_torch_dispatch_stack(mode)
        super().__exit__()


def _views_as_ever(packet: Any) -> Any:
    """Inside a mode torch leaves out the step by which a view of a parameter is still one that wants a gradient, in
    inference mode too; whether it does decides which product a linear layer runs, and the bits that it gives. Of
    other tensors, such as the memory of a cache, torch then refuses views."""
    if packet not in (torch.ops.aten.linear, torch.ops.aten.matmul) or not torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


def _meets(known: dict[int, Any], args: tuple[Any, ...]) -> bool:
    """Whether one of the tensors that are followed is among the first arguments."""
    for given in args[:4]:
        if isinstance(given, (tuple, list)):
            if any([id(each) in known for each in given]):
                return True
        elif id(given) in known:
            return True
    return False


def _has_nested(args: tuple[Any, ...]) -> bool:
    return any(
        x.is_nested if isinstance(x, Tensor) else isinstance(x, (tuple, list)) and _has_nested(tuple(x)) for x in args
    )


class _Kind(NamedTuple):
    """What an operator is, whatever its arguments are."""

    func: Any  # kept, so that no other operator gets its number
    packet: Any  # None for higher-order operators
    composite: bool
    kernel: Callable[..., Any] | None  # of fused attention
    exponential: Callable[..., Any] | None
    softmax: bool
    in_place: bool
    noise: bool
    attention: bool  # by its name, of a kernel that is not known here
    scores: bool  # a product of two tensors
    of_known: bool  # its exponentials say nothing where nothing is known of what it is given
    plain: bool  # nothing that matters where nothing is known of any tensor
    run: Callable[..., Any]


_kinds: dict[int, _Kind] = {}


def _kind_of(func: Any) -> _Kind:
    packet = getattr(func, "overloadpacket", None)
    kernel, exponential = _fused.KERNELS.get(packet), EXPONENTIALS.get(packet)
    composite = packet is not None and _is_composite(func)
    noise = packet in (aten.bernoulli_, aten.bernoulli)
    attention = packet is not None and kernel is None and _looks_like_attention(packet)
    begins = exponential is not None and packet not in _OF_KNOWN
    kind = _kinds[id(func)] = _Kind(
        func,
        packet,
        composite=composite,
        kernel=kernel,
        exponential=exponential,
        softmax=packet in SOFTMAXES,
        in_place=packet in _IN_PLACE,
        noise=noise,
        attention=attention,
        scores=packet in _SCORES,
        of_known=packet in _OF_KNOWN,
        plain=packet is not None and not (composite or kernel or begins or noise or attention),
        run=func._op if type(func) is torch._ops.OpOverload else func,  # what calling it does
    )
    return kind


def _is_composite(func: Any) -> bool:
    name, has = func.name(), torch._C._dispatch_has_kernel_for_dispatch_key
    if not torch._C._dispatch_has_kernel(name):  # what tensors of other kinds are asked: a device, a size
        return False
    return has(name, "CompositeImplicitAutograd") and not has(name, "CPU") and not has(name, "CUDA")


def _looks_like_attention(packet: Any) -> bool:
    name = str(packet).lower()
    forward = "backward" not in name and "choice" not in name
    return forward and any(word in name for word in ("flash_attn", "attention", "fmha", "flash_mla"))


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """An operator's arguments by name, with its defaults."""
    found = {given.name: given.default_value for given in func._schema.arguments}
    found.update(zip(found, args, strict=False))
    found.update(kwargs)
    return found
