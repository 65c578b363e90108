"""Which module is running: its path, its inputs, and whether its attention looks at itself or at something else."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Arguments by which modules are handed what cross attention looks at.
_SOURCES = ("key_value_states", "encoder_hidden_states", "memory", "context", "key")


class Frame(NamedTuple):
    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def names(self) -> tuple[str, ...]:
        return _names(type(self.module).forward)

    def given(self) -> dict[str, Any]:
        """The call's arguments by name."""
        return {**dict(zip(self.names, self.args, strict=False)), **self.kwargs}

    def is_cross(self, keys: int) -> bool:
        """Whether the module was handed another sequence, of as many tokens as there are keys."""
        given = self.given()
        own = given.get("query", self.args[0] if self.args else None)
        for name in _SOURCES:
            source = given.get(name)
            if isinstance(source, Tensor) and not _same(source, own) and keys in source.shape[:-1]:
                return True
        return False


def paths(model: nn.Module) -> dict[str, nn.Module]:
    """Every module by its path, without the name that torch.compile puts in between."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{name or 'the model'} is a TorchScript module: what runs inside it cannot be seen. Watch the module "
                "that it was made from"
            )
        found[".".join(part for part in name.split(".") if part != "_orig_mod")] = module
    return found


@functools.lru_cache(maxsize=256)
def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(forward).parameters)[1:]
    except (TypeError, ValueError):
        return ()


def _same(a: Tensor, b: object) -> bool:
    return isinstance(b, Tensor) and (a is b or (a.shape == b.shape and a.data_ptr() == b.data_ptr()))
