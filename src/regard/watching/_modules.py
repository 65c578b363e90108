"""Which module is running: its path, its inputs, and whether its attention looks at itself or at something else."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
import torch.nn.modules.module as _of_all
from torch import Tensor, nn

# Arguments by which modules are handed what cross attention looks at.
_SOURCES = (
    "key_value_states", "encoder_hidden_states", "cross_attention_states", "memory", "context", "encoder_output",
    "encoder_outputs", "encoder_states", "image_features",
)  # fmt: skip
_OWN = ("query", "queries", "hidden_states", "x", "q", "target", "tgt")


class Frame:
    """A call of a module that is under way."""

    __slots__ = (
        "__weakref__", "_caches", "_given", "_masked", "_quiet", "_weighs", "args", "crosses", "kwargs", "module",
        "path", "turn",
    )  # fmt: skip

    def __init__(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.path, self.module, self.args, self.kwargs = path, module, args, kwargs
        self.turn: int | None = None  # which of the module's calls in this pass it is, once it has attended
        self._given: dict[str, Any] | None = None
        self._weighs: bool | None = None
        self._caches: list[tuple[str, Any]] | None = None
        self._masked: bool | None = None
        self._quiet: bool | None = None
        self.crosses: tuple[tuple[int, int], bool] | None = None  # queries and keys, and what ``is_cross`` found

    @property
    def names(self) -> tuple[str, ...]:
        return names_of(self.module)

    def given(self) -> dict[str, Any]:
        """The call's arguments by name."""
        if self._given is None:
            self._given = {**dict(zip(self.names, self.args, strict=False)), **self.kwargs}
        return self._given

    @property
    def has_weights(self) -> bool:
        """Whether the module has weights of its own, or below it."""
        if self._weighs is None:
            own = self.module._parameters.values()  # asked first: most have some, and to walk over all takes long
            self._weighs = any(each is not None for each in own) or next(self.module.parameters(), None) is not None
        return self._weighs

    @property
    def caches(self) -> list[tuple[str, Any]]:
        """Arguments that are given, and by their names are caches."""
        if self._caches is None:
            given = self.given()
            self._caches = [(name, given[name]) for name in given if _is_cache(name) and given[name] is not None]
        return self._caches

    @property
    def handed_a_mask(self) -> bool:
        """Whether the module was given anything that can hide tokens, under whatever name."""
        if self._masked is None:
            self._masked = any(
                value is not None and _is_mask(name) and not isinstance(value, (bool, int, float, str))
                for name, value in self.given().items()
            )
        return self._masked

    @property
    def quiet(self) -> bool:
        """Whether no argument is a cache, or says what is hidden, or could be another sequence to look at. Where no
        module on the way was told anything, a call of as many queries as keys is one of whole texts with themselves."""
        if self._quiet is None:
            self._quiet = not any(
                [
                    value is not None and _speaks(name) and not isinstance(value, (bool, int, float, str))
                    for name, value in self.given().items()
                ]
            )
        return self._quiet


@functools.lru_cache(4096)
def _speaks(name: str) -> bool:
    cache = _is_cache(name) and "position" not in name
    return cache or _is_mask(name) or name == "key" or name in _SOURCES


@functools.lru_cache(4096)
def _is_cache(name: str) -> bool:
    return "past" in name or "cache" in name


@functools.lru_cache(4096)
def _is_mask(name: str) -> bool:
    return any(word in name for word in ("mask", "bias", "padding", "lengths", "cu_seqlens"))


def attribute(module: nn.Module, name: str, default: Any = None) -> Any:
    """What a module has set itself, or its class: torch takes long to say that there is no such attribute."""
    if name in module.__dict__ or name in module._modules or hasattr(type(module), name):
        return getattr(module, name, default)
    return default


def attending(stack: Sequence[Frame]) -> Frame:
    """The module that attends: the innermost one with weights of its own, which a softmax, or a function dressed as a
    module, has not."""
    for frame in reversed(stack):
        if frame.has_weights:
            return frame
    return stack[-1]


def is_cross(stack: Sequence[Frame], queries: int, keys: int) -> bool:
    """Whether the module that attends was handed another sequence to look at.

    A module without weights (see ``attending``) was handed queries and keys, and cannot tell."""
    frame = attending(stack)
    if frame.crosses is None or frame.crosses[0] != (queries, keys):
        frame.crosses = (queries, keys), _is_cross(frame, queries, keys)
    return frame.crosses[1]


def _is_cross(frame: Frame, queries: int, keys: int) -> bool:
    given = frame.given()
    own = next((given[name] for name in _OWN if isinstance(given.get(name), Tensor)), None)
    if own is None:
        own = next((value for value in given.values() if isinstance(value, Tensor)), None)
    for name in _SOURCES:
        source = _tensor(given.get(name))
        if source is not None and not _same(source, own) and source.dim() >= 2 and keys >= source.shape[-2]:
            return True
    key = given.get("key")
    if isinstance(key, Tensor) and isinstance(own, Tensor) and not _same(key, own):
        given_now = key.shape[:-1]
        # torch's module may add keys of its own to those
        added = (getattr(frame.module, "bias_k", None) is not None) + bool(
            getattr(frame.module, "add_zero_attn", False)
        )
        if keys - added in given_now or 0 in given_now:  # none at all where a cache holds those of the first call
            return True
    if queries == keys or not isinstance(own, Tensor) or queries not in own.shape[:-1]:
        return False
    return any(
        isinstance(other, Tensor) and other.is_floating_point() and other.dim() == own.dim() >= 3
        and other.shape[-1] >= 2 and keys in other.shape[1:-1] and not _same(other, own)
        and "mask" not in name and "bias" not in name and "pos" not in name
        for name, other in given.items()
    )  # fmt: skip


def has_cache(stack: Sequence[Frame]) -> bool:
    """Whether a module on the way was handed keys of earlier tokens."""
    for frame in stack:
        for name, value in frame.caches:
            if not isinstance(value, (bool, int, str)) and "position" not in name:
                return True
    return False


def paths(model: nn.Module) -> dict[str, nn.Module]:
    """Every module by its path, without the name that torch.compile puts in between."""
    return {plain_path(name): module for name, module in model.named_modules()}


def plain_path(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def parameters(module: nn.Module) -> Iterator[Tensor]:
    """Those of a module and of all below it, in a fraction of the time that torch takes, which works out names."""
    left, met = [module], {id(module)}
    while left:
        one = left.pop()
        yield from [each for each in one._parameters.values() if each is not None]
        below = [each for each in one._modules.values() if each is not None and id(each) not in met]
        met.update(map(id, below))
        left.extend(below)


# Modules of torch's own that never attend, and of which nothing needs to be followed where nothing is known yet; and
# those of them that run several operators.
NEVER_ATTEND = frozenset((
    nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.Dropout,
    nn.Identity, nn.GELU, nn.SiLU, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Conv1d, nn.Conv2d,
))  # fmt: skip
STEPS_ASIDE: frozenset[type] = frozenset((nn.Linear, nn.RMSNorm))
_AS_WRITTEN: dict[type, Any] = {kind: kind.forward for kind in (nn.Linear, nn.RMSNorm)}


def runs_as_torch_wrote_it(module: nn.Module) -> bool:
    """Whether a module of ``STEPS_ASIDE`` runs torch's code and nothing else, with parameters: a linear layer that was
    given keys in place of its matrix computes scores."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    return (
        "forward" not in module.__dict__
        and type(module).forward is _AS_WRITTEN.get(type(module))
        and type(module._parameters.get("weight")) is nn.Parameter
        and not (_of_all._global_forward_pre_hooks or _of_all._global_forward_hooks)
        and ((len(before) == 1 and len(after) == 1) or all(type(each) is Hook for each in _values(before, after)))
    )


def _values(*several: dict[int, Any]) -> Iterator[Any]:
    for one in several:
        yield from one.values()


def takes_no_hooks(module: nn.Module) -> bool:
    """Whether a hook would change what runs (torch's encoder layer leaves its fused path), or cannot be made."""
    return isinstance(module, (nn.TransformerEncoderLayer, torch.jit.ScriptModule))


def running(modules: dict[int, tuple[str, nn.Module]]) -> list[tuple[FrameType, Frame]]:
    """The modules whose code is under way, outermost first, from the interpreter's own stack: for calls of
    ``module.forward`` itself, which runs no hooks."""
    found: list[tuple[FrameType, Frame]] = []
    for frame in frames():
        owner = _owner(frame)
        if owner is not None and id(owner) in modules:
            path, module = modules[id(owner)]
            if not found or found[-1][1].module is not module:
                given = {name: frame.f_locals[name] for name in names_of(module) if name in frame.f_locals}
                found.append((frame, Frame(path, module, (), given)))
    return found[::-1]


def frames() -> Iterator[FrameType]:
    """The interpreter's stack around who asks, innermost first. Who asks is not part of it: a function that holds its
    own frame, and reads what that holds, lives until garbage is collected, and all that is around it too."""
    frame: FrameType | None = sys._getframe(1).f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def _owner(frame: FrameType) -> nn.Module | None:
    """The module whose method runs in a frame of the interpreter, whatever the method calls it."""
    code = frame.f_code
    owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    if not isinstance(owner, nn.Module):
        return None
    if code.co_varnames[0] == "self":
        return owner
    methods = (vars(kind).get(code.co_name) for kind in type(owner).__mro__)
    return owner if any(getattr(method, "__code__", None) is code for method in methods) else None


def inside_transform() -> bool:
    """Whether vmap, grad or another of torch.func's transforms is under way: tensors have hidden dims there."""
    return torch._C._functorch.peek_interpreter_stack() is not None or runs_code_of(TRANSFORMS)


def runs_code_of(*ways: str) -> bool:
    """Whether code of one of these kinds is under way: TRANSFORMS, CHECKPOINTS."""
    frame, known = sys._getframe(1).f_back, _ways
    while frame is not None:
        file = frame.f_code.co_filename
        way = known[file] if file in known else _way_of(file)
        if way is not None and way in ways:
            return True
        frame = frame.f_back
    return False


_ways: dict[str, str | None] = {}


def _way_of(file: str) -> str | None:
    if len(_ways) > 4096:
        _ways.clear()
    found = _ways[file] = next((way for way, files in _FILES.items() if file.endswith(files)), None)
    return found


TRANSFORMS, CHECKPOINTS = "transforms", "checkpoints"
_FILES = {
    TRANSFORMS: ("_functorch/vmap.py", "_functorch/eager_transforms.py"),
    CHECKPOINTS: ("torch/utils/checkpoint.py",),
}


def calls_itself(module: nn.Module) -> bool:
    """Whether a call of the module runs inside another of its own."""
    calls = (frame for frame in frames() if frame.f_code.co_name == "_call_impl")
    return sum(frame.f_locals.get("self") is module for frame in calls) > 1


class LeftBehind:
    """A hook that stays behind when its module is copied or saved: there it becomes one that does nothing."""

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


class Hook(LeftBehind):
    """A hook of a watch."""

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run

    def __call__(self, *args: Any) -> None:
        self.run(*args)

    # torch's compiler, where it takes a watched model apart inside the block, calls a hook as it is
    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]


def names_of(module: nn.Module) -> tuple[str, ...]:
    """The names of what its forward takes; none for code that Python cannot read."""
    return () if isinstance(module, torch.jit.ScriptModule) else _names(type(module).forward)


@functools.lru_cache(maxsize=256)
def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(forward).parameters)[1:]
    except (TypeError, ValueError):
        return ()


def _tensor(given: Any) -> Tensor | None:
    if isinstance(given, (tuple, list)) and given:
        given = given[0]
    return given if isinstance(given, Tensor) else None


def _same(a: Tensor, b: object) -> bool:
    return isinstance(b, Tensor) and (a is b or (a.shape == b.shape and a.data_ptr() == b.data_ptr()))
