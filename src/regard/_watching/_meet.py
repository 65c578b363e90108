"""Where attention calls are met: torch's function, torch.nn.MultiheadAttention, Hugging Face's interface, regard's own.

Each place runs what the model asked for, untouched, and shows the call to the watchers of this thread. The patches are
made when the first watcher comes and taken back when the last one leaves, so that watchers may nest and threads may
each have their own.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from regard import _guard
from regard._watching import _seen
from regard._watching._silence import silence

if TYPE_CHECKING:
    from regard._watching._watcher import Watcher

_sdpa = F.scaled_dot_product_attention
_multi_head = inspect.signature(F.multi_head_attention_forward)
_lock = threading.Lock()
_watchers: list[Watcher] = []
_undo: list[Callable[[], None]] = []


_SOFTMAX = (F.softmax, torch.softmax, torch.Tensor.softmax)


class Meeting(TorchFunctionMode):
    """Sees calls of torch's function by whatever name they are made, except inside torch's own Python functions."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is _sdpa:
            self.watcher.see(lambda: _seen.from_torch(*args, **kwargs))
        elif func is F.multi_head_attention_forward:
            given = _multi_head.bind(*args, **kwargs).arguments
            if given.get("need_weights", True):
                self.watcher.see(lambda: _from_weighted(given))
        elif func in _SOFTMAX:
            self.watcher.suspect(args, kwargs)
        return out


def join(watcher: Watcher) -> None:
    with _lock:
        if not _watchers:
            try:
                _install()
            except BaseException:
                _take_back()
                raise
        _watchers.append(watcher)


def leave(watcher: Watcher) -> None:
    with _lock:
        _watchers.remove(watcher)
        if not _watchers:
            _take_back()


def _take_back() -> None:
    while _undo:
        _undo.pop()()


def _here() -> list[Watcher]:
    thread = threading.get_ident()
    return [watcher for watcher in _watchers if watcher.thread == thread]


def _install() -> None:
    _take_plain_paths()
    _replace(F, "scaled_dot_product_attention", _torch_function)
    _replace(_guard, "run", _own(_guard.run))
    interface: Any = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
    if hasattr(interface, "get_interface"):
        _replace(interface, "get_interface", _interface(interface.get_interface))


def _take_plain_paths() -> None:
    """torch's fused encoder layer and compiled code would pass by the places where calls are met."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    _undo.append(lambda: torch.backends.mha.set_fastpath_enabled(fast))
    if "torch._dynamo" in sys.modules:
        stance = torch.compiler.set_stance("force_eager")
        _undo.append(lambda: stance.__exit__(None, None, None))


def _replace(owner: Any, name: str, new: Any) -> None:
    old = getattr(owner, name)
    setattr(owner, name, new)
    _undo.append(lambda: setattr(owner, name, old))


def _shown(run: Callable[[], Any], make: Callable[[Any], _seen.Seen], *, checked: bool = False) -> Any:
    """Run the model's own function, and show the call to the watchers that did not meet it further in."""
    before = [(watcher, watcher.met, len(watcher.suspects)) for watcher in _here()]
    out = run()
    for watcher, met, suspects in before:
        del watcher.suspects[suspects:]
        if watcher.met == met:
            watcher.see(lambda: make(out), out=out if checked else None)
    return out


@functools.wraps(_sdpa)
def _torch_function(*args: Any, **kwargs: Any) -> Any:
    capture = getattr(_captured, "into", None)
    if capture is not None:
        capture.append(_seen.from_torch(*args, **kwargs))
        return torch.zeros_like(args[0])
    return _shown(lambda: _sdpa(*args, **kwargs), lambda out: _seen.from_torch(*args, **kwargs))


def _own(run: Callable[..., Any]) -> Callable[..., Any]:
    def shown(program: Any, call: Any) -> Any:
        with silence():  # a backend may call torch's function in pieces; the call is shown once, whole
            result = run(program, call)
        for watcher in _here():
            watcher.see(lambda: _seen.from_call(call))
        return result

    return shown


def _interface(get: Callable[..., Any]) -> Callable[..., Any]:
    def get_interface(self: Any, attn_implementation: Any, default: Any) -> Any:
        real = get(self, attn_implementation, default)

        @functools.wraps(real)
        def shown(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *rest: Any, **given: Any) -> Any:
            return _shown(
                lambda: real(module, query, key, value, attention_mask, *rest, **given),
                lambda out: _seen.from_interface(attn_implementation, module, query, key, value, attention_mask, given),
                checked=True,
            )

        return shown if _here() else real

    return get_interface


_captured = threading.local()


def _from_weighted(given: dict[str, Any]) -> _seen.Seen:
    """The heads of a torch.nn.MultiheadAttention call that returns weights: that path multiplies matrices by itself, so
    the projections run again on the other path, up to the function that takes the heads."""
    into: list[_seen.Seen] = []
    _captured.into = into
    try:
        # is_causal is only a hint about attn_mask, and one that this path does not follow
        F.multi_head_attention_forward(**{**given, "need_weights": False, "training": False, "is_causal": False})
    finally:
        _captured.into = None
    return into[0]
