"""What operators alone do not say: regard's own calls, foreign kernels behind Hugging Face's interface, compiled code.

These places are marked while any watch is open. On threads and in models that nobody watches, the marks do nothing.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from regard.backends import _guard
from regard.watching import _packed, _seen
from regard.watching._operators import unheard
from regard.watching._silence import silent

if TYPE_CHECKING:
    from regard.watching._follower import Follower

_lock = threading.Lock()
_watchers: list[Follower] = []
_undo: list[Callable[[], None]] = []


def join(watcher: Follower) -> None:
    with _lock:
        if not _watchers:
            try:
                _install()
            except BaseException:
                _take_back()
                raise
        _watchers.append(watcher)


def leave(watcher: Follower) -> None:
    with _lock:
        _watchers.remove(watcher)
        if not _watchers:
            _take_back()


def _take_back() -> None:
    while _undo:
        _undo.pop()()


def here() -> list[Follower]:
    thread = threading.get_ident()
    return [watcher for watcher in _watchers if watcher.thread == thread]


def _install() -> None:
    _replace(_guard, "run", _own(_guard.run))
    for name in ("regard.nn._multi_head", "regard.nn._cached"):
        module: Any = sys.modules.get(name)
        if hasattr(module, "can_attend"):
            _replace(module, "can_attend", _whole(module.can_attend))
    interface: Any = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
    if hasattr(interface, "get_interface"):
        _replace(interface, "get_interface", _interface(interface.get_interface))
    causal: Any = getattr(sys.modules.get("torch.nn.attention.bias"), "CausalBias", None)
    if causal is not None and "__new__" not in vars(causal):
        causal.__new__ = _made_without_modes
        _undo.append(lambda: delattr(causal, "__new__"))
    if "torch.nn.attention.flex_attention" in sys.modules:
        importlib.import_module("torch._dynamo")  # it compiles what it runs
    if "torch._dynamo" in sys.modules:
        _run_plain()


def _replace(owner: Any, name: str, new: Any) -> None:
    old = getattr(owner, name)
    setattr(owner, name, new)
    _undo.append(lambda: setattr(owner, name, old))


def _made_without_modes(cls: Any, *args: Any) -> Any:
    """torch cannot make a subclass of Tensor by its plain constructor while operators are listened to."""
    with _disable_current_modes():
        return Tensor.__new__(cls, *args)


def _own(run: Callable[..., Any]) -> Callable[..., Any]:
    def shown(program: Any, call: Any) -> Any:
        if silent() or not (watchers := here()):
            return run(program, call)

        def seen(program: Any, call: Any) -> Any:
            with unheard():  # a backend may call torch's function in pieces; the call is shown once, whole
                result = run(program, call)
            for watcher in watchers:
                if not watcher.changes_calls:
                    watcher.see(lambda: _seen.from_call(call, result.lse, result.out))
            return result

        last = seen
        for editor in watchers:
            if editor.changes_calls:  # the innermost is asked first, and watches see what really ran
                last = functools.partial(editor.own_call, last)
        return last(program, call)

    return shown


def _whole(can_attend: Callable[..., bool]) -> Callable[..., bool]:
    """A cache that attends piece by piece shows keys without their places: while an edit is open it gives them all."""

    def asked(cache: Any, keywords: dict[str, Any]) -> bool:
        if any(watcher.changes_calls and watcher.inside() for watcher in here()):
            return bool(getattr(cache, "attends_whole", False))
        return can_attend(cache, keywords)

    return asked


def _interface(get: Callable[..., Any]) -> Callable[..., Any]:
    def get_interface(self: Any, attn_implementation: Any, default: Any) -> Any:
        real = get(self, attn_implementation, default)

        @functools.wraps(real)
        def shown(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *rest: Any, **given: Any) -> Any:
            before = [(watcher, watcher.met) for watcher in here()]
            with _packed.asking(query):
                out = real(module, query, key, value, attention_mask, *rest, **given)
            if all(watcher.met == met for watcher, met in before):  # none of its operators was known
                for watcher, _ in before:
                    watcher.see(
                        lambda: _seen.from_interface(
                            attn_implementation, module, query, key, value, attention_mask, given, out
                        ),
                        out=out,
                    )
            return out

        return shown if here() else real

    return get_interface


class _Stance:
    """torch's compiler stance, which for watched models is to run the code as it is written: compiled code shows no
    operators. A property of the code that runs, not of the process: other threads and models stay compiled."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        # in silence a backend of regard runs, and what that compiles is its kernel
        if name == "stance" and not silent() and any(watcher.inside() for watcher in here()):
            return "force_eager"
        return getattr(self.real, name)


def _run_plain() -> None:
    module: Any = sys.modules["torch._dynamo.eval_frame"]
    stance = _Stance(module._stance)
    module._stance = stance

    def restore() -> None:
        if module._stance is stance:
            module._stance = stance.real

    _undo.append(restore)


def plain_calls(modules: list[nn.Module]) -> Callable[[], None]:
    """Let modules that were compiled in place (``module.compile()``) run as they are written, until undone."""
    compiled = [
        (module, call) for module in modules if (call := module.__dict__.get("_compiled_call_impl")) is not None
    ]
    for module, _ in compiled:
        module._compiled_call_impl = None

    def restore() -> None:
        for module, call in compiled:
            module._compiled_call_impl = call

    return restore
