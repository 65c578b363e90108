"""Checks of what callers give, with one wording everywhere: which argument, what was expected, what was given."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import torch


def is_exporting() -> bool:
    """As ``torch.compiler.is_exporting``, which is True in everything that torch 2.11 compiles."""
    return torch.compiler._is_exporting_flag


def is_int(given: object) -> TypeGuard[int]:
    """Whether it is a whole number of Python's own; True and False are none."""
    return isinstance(given, int) and not isinstance(given, bool)


def as_int(given: Any) -> int | None:
    """The int that a whole number of any library is, an array or a tensor of one number too; None for anything else."""
    if isinstance(given, Integral) and not isinstance(given, bool):
        return int(given)
    return as_int(given.item()) if getattr(given, "shape", None) == () and hasattr(given, "item") else None


def check_count(name: str, given: Any, least: int = 1, *, kind: type = Integral) -> None:
    """Refuse what is not a whole number of at least ``least``. ``kind=int`` refuses NumPy's numbers too, which a
    configuration could not save; a symbolic size of a traced call is left to the tracer."""
    if isinstance(given, bool) or not isinstance(given, (kind, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {given!r} ({type(given).__name__})")
    if given < least:  # type: ignore[operator]
        raise ValueError(f"{name} must be at least {least}, got {given}")


def check_number(
    name: str, given: Any, expected: str = "finite", fits: Callable[[float], bool] = math.isfinite, *, kind: Any = Real
) -> None:
    """Refuse what is no number, or not ``expected``: a range, as "in [0, 1]", or words, as "finite and above 0"."""
    if isinstance(given, bool) or not isinstance(given, kind):
        words = f" {expected}" if expected.startswith("in") else ""
        raise TypeError(f"{name} must be a number{words}, got {given!r} ({type(given).__name__})")
    if not fits(given):
        raise ValueError(f"{name} must be {expected}, got {given}")


def check_field(name: str, kind: str, given: Any, least: int = 1, *number: Any) -> None:
    """Check one field of a configuration by its annotation: a size of at least ``least``, a flag, a number as
    `check_number` has them; None where it is optional. All are Python's own, which can be saved."""
    if given is None and kind.endswith("| None"):
        return
    if kind.startswith("int"):
        check_count(name, given, least, kind=int)
    elif kind == "bool" and not isinstance(given, bool):
        raise TypeError(f"{name} must be True or False, got {given!r}")
    elif kind.startswith("float"):
        check_number(name, given, *number, kind=(int, float))


def check_choice(name: str, given: Any, choices: Iterable[str]) -> None:
    if not isinstance(given, str) or given not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {given!r}")


def as_path(name: str, given: Any) -> Path:
    if not isinstance(given, (str, PathLike)):
        raise TypeError(f"{name} must be a path, as text or a pathlib.Path, got {given!r} ({type(given).__name__})")
    return Path(given)


def autocasts(device: str) -> bool:
    """Whether torch makes one dtype of what it is given, on devices of this kind."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


# what arguments of torch's scaled_dot_product_attention are here, and those of its MultiheadAttention
SDPA_NAMES = {
    "attn_mask": "give a boolean tensor (True = may attend) as mask=masks.keep(tensor), a float tensor as bias=tensor",
    "is_causal": "give mask=masks.causal(), and query_offset=0 if the first query stands at the first key",
    "dropout_p": "give dropout=",
    "enable_gqa": "leave it out: key and value may have fewer heads",
}
MODULE_NAMES = {
    "attn_mask": "give a boolean tensor (True = hidden) as mask=masks.drop(tensor), a float tensor as bias=tensor",
    "key_padding_mask": "give masks.drop(tensor[:, None, None, :]) (True = padding) or masks.padding(lengths) as mask=",
    "is_causal": "give mask=masks.causal()",
    "need_weights": "leave it out, and call observe for weights and their statistics",
    "average_attn_weights": "leave it out, and call observe for weights and their statistics",
}


def unknown_names(given: Iterable[str], known: Mapping[str, str], otherwise: str) -> str:
    """What to write for arguments that there are not: by torch's names, or in general."""
    found = {name: known[name] for name in sorted(given) if name in known}
    return "; ".join(f"{name}: {hint}" for name, hint in found.items()) or otherwise


def refuse_names(call: str, given: Iterable[str], otherwise: str) -> NoReturn:
    """Refuse arguments that a function does not have."""
    names = sorted(given)
    raise TypeError(f"{call} has no argument {', '.join(names)}; {unknown_names(names, SDPA_NAMES, otherwise)}")
