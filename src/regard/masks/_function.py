"""Masks from a function of (item, head, query position, key position)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from types import CellType, CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.masks._arguments import DTYPE_NAMES, describe, shape_of, whole
from regard.masks._base import Mask, Structure
from regard.masks._blocks import states_of
from regard.masks._flex import Frame, Predicate, several
from regard.masks._grid import Grid
from regard.masks._intervals import States, Strip

See = Callable[[Tensor, Tensor, Tensor, Tensor], Any]
Reads = tuple[bool, bool]  # whether a function reads b, and h
Sizes = tuple[int | None, int | None]  # how many items and heads; None where it reads which, and is not told

# Sizes by which a first evaluation shows which of its arguments a function reads.
_TRIAL = (2, 3, 5, 7)
# Pairs evaluated at once, and in all: beyond, every block counts as partly permitted.
_AT_ONCE, _MOST_PAIRS = 2**24, 2**34

# Functions met so far, by what they do: code and captured values, without the captured tensors (those are the mask's).
# A mask is named by a function's number here, which a compiled graph holds; so they are kept.
_numbers: dict[Any, int] = {}
_functions: list[Callable[..., Any]] = []
_lock = threading.Lock()


class Rule(Mask):
    """``function(b, h, i, j)``, known by its number; ``tensors`` are those it captured."""

    kind = "rule"

    def __init__(self, function: See, number: int, reads: Reads, sizes: Sizes, tensors: tuple[Tensor, ...]) -> None:
        shapes = tuple([(shape_of(tensor), DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))) for tensor in tensors])
        super().__init__((self.kind, number, reads, sizes, shapes), tensors, sizes[0] or 1, sizes[1] or 1)
        self._function = function
        self._reads = reads
        self._sizes = sizes
        self.is_open = None in sizes
        self._source = function  # as it was given: by its name it can be pickled

    @classmethod
    def _rebuild(cls, structure: Structure, tensors: Iterator[Tensor]) -> Mask:
        _, number, reads, sizes, shapes = structure
        found = tuple(next(tensors) for _ in shapes)
        return cls(
            _with_tensors(_functions[number], found) if found else _functions[number], number, reads, sizes, found
        )

    def __reduce__(self) -> Any:
        return rule, (self._source, *self._sizes)

    def __deepcopy__(self, memo: Any) -> Mask:
        return self

    def _sized(self, B: int, H: int) -> Mask:
        batch, heads = self._sizes
        sizes = (B if batch is None else batch, H if heads is None else heads)
        return Rule(self._function, self.structure[1], self._reads, sizes, self.tensors)

    def _on_device(self, device: torch.device) -> See:
        """The function with its captured tensors where they are needed; only what is on CPU is moved."""
        if all(tensor.device == device or tensor.device.type != "cpu" for tensor in self.tensors):
            return self._function
        return _with_tensors(self._function, [t.to(device) if t.device.type == "cpu" else t for t in self.tensors])

    def _see(self, grid: Grid) -> Tensor:
        self._check_shape(0, 0, 0, 0)
        b = torch.arange(self.batch, device=grid.device).view(-1, 1, 1, 1)
        h = torch.arange(self.heads, device=grid.device).view(1, -1, 1, 1)
        i, j = grid.i, grid.j.view(1, 1, 1, -1)
        seen = self._on_device(grid.device)(b, h, i if i.dim() == 4 else i[None, None], j)
        return seen if isinstance(seen, Tensor) else torch.full((1, 1), seen, device=grid.device)

    def _block_states(self, strip: Strip, block_q: int, block_k: int) -> States | None:
        if strip.L * strip.S * self.batch * self.heads > _MOST_PAIRS or not self.readable():
            return None
        place, states = int(strip.offsets[0, 0]), []
        rows = max(1, _AT_ONCE // (strip.S * self.batch * self.heads * block_q)) * block_q
        for start in range(strip.start, strip.stop, rows):
            some = range(start, min(start + rows, strip.stop))
            seen = self.tile(some, range(strip.S), strip.L, strip.S, offset=place).numpy()
            states.append(states_of(strip.pick(seen)[0], block_q, block_k))
        return np.concatenate(states)

    def _predicate(self, frame: Frame) -> Predicate:
        self._check_shape(0, 0, 0, 0)
        function, start = self._on_device(frame.device), frame.start
        each = several(start, 0)
        return Predicate((*self.structure, each), lambda b, h, q, k: function(b, h, q + start[b * each], k))

    def _check_shape(self, B: int, H: int, L: int, S: int) -> None:
        for name, letter, size in zip(("batch", "heads"), "bh", self._sizes, strict=True):
            if size is None:
                raise ValueError(
                    f"the function of {self!r} reads {letter}, and outside a call nothing says how many there are: "
                    f"give {name}= to masks.rule"
                )

    def _text(self) -> str:
        given = [f"{name}={size}" for name, size in zip(("batch", "heads"), self._sizes, strict=True) if size != 1]
        known = [text for text in given if not text.endswith("None")]
        return f"rule({', '.join([getattr(self._function, '__name__', repr(self._function)), *known])})"


def rule(function: See, batch: int | None = None, heads: int | None = None) -> Mask:
    """Your own rule: query position i of item b and head h sees key position j where ``function(b, h, i, j)`` is True.

    The function is called with integer tensors that broadcast against each other and returns booleans: write it with
    ``& | ~``, comparisons, ``torch.where`` and indexing of tensors, not with ``and``, ``or``, ``not`` and ``if``. It is
    evaluated once for each size of call, from which the table of blocks is made. Variables that it reads (of the
    function around it, defaults, globals) keep the values they have now; tensors among them may be changed in place.
    Where it reads b or h, a call says how many there are; to look at the mask outside of one, give ``batch`` or
    ``heads``.

    >>> print(rule(lambda b, h, i, j: (j <= i) & (i // 2 != j)).show(3, 5))
    rule(<lambda>): 3 queries, 5 keys, first query at 2
        0 1 2 3 4
     2  ■ · ■ · ·
     3  ■ · ■ ■ ·
     4  ■ ■ · ■ ■

    Raises:
        TypeError: ``function`` cannot be called, or does not return booleans.
        ValueError: it cannot be evaluated on tensors.
    """
    if torch.compiler.is_compiling():
        raise ValueError("masks.rule: make the mask outside of the compiled function, and pass it to it")
    if not callable(function):
        raise TypeError(f"masks.rule: function must be a function of (b, h, i, j), got {describe(function)}")
    tensors = _captured(function)
    device = tensors[0].device if tensors else torch.device("cpu")
    shapes = [tuple(size if dim == at else 1 for dim in range(4)) for at, size in enumerate(_TRIAL)]
    try:
        found = function(*[torch.zeros(shape, dtype=torch.int64, device=device) for shape in shapes])
    except Exception as error:
        raise ValueError(
            f"masks.rule: the function cannot be evaluated on tensors: {error}. It is called with integer tensors b, "
            "h, i, j that broadcast to [batch, head, query, key]: use & | ~ and torch.where, not and, or, not and if"
        ) from error
    if isinstance(found, Tensor) and found.dtype == torch.bool:
        size = (1,) * (4 - found.dim()) + tuple(found.shape)
    elif isinstance(found, bool):
        size = (1, 1, 1, 1)
    else:
        raise TypeError(f"masks.rule: the function must return booleans (True = may attend), got {describe(found)}")
    if any(got not in (1, wanted) for got, wanted in zip(size, _TRIAL, strict=True)):
        raise ValueError(f"masks.rule: the function must keep the shape of its arguments, {_TRIAL} became {size}")
    reads = (size[0] != 1, size[1] != 1)
    given = [None if n is None else whole("rule", name, n, 1) for name, n in (("batch", batch), ("heads", heads))]
    sizes = (given[0] if reads[0] else 1, given[1] if reads[1] else 1)
    mask = Rule(_with_tensors(function, tensors), _number(function), reads, sizes, tensors)
    mask._source = function
    return mask


def _places(function: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
    """What a function reads besides its arguments: its cells, its defaults, and the globals that it names."""
    if not isinstance(function, FunctionType):
        return (), (), {}
    cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    known = function.__globals__
    return (
        cells,
        function.__defaults__ or (),
        {name: known[name] for name in _names(function.__code__) if name in known},
    )


def _names(code: CodeType) -> list[str]:
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names(constant)]
    return [*code.co_names, *inner]


def _captured(function: Any) -> tuple[Tensor, ...]:
    cells, defaults, named = _places(function)
    return tuple(value for value in (*cells, *defaults, *named.values()) if isinstance(value, Tensor))


def _with_tensors(function: Any, tensors: Iterable[Any]) -> See:
    """The function with these tensors in place of those it captured, and its other captured values as they are now."""
    if not isinstance(function, FunctionType):
        return function  # type: ignore[no-any-return]
    cells, defaults, named = _places(function)
    rest = iter(tensors)

    def swap(value: Any) -> Any:
        return next(rest) if isinstance(value, (Tensor, _Gone)) else value

    new_cells = tuple(CellType(swap(value)) for value in cells)
    new_defaults = tuple(swap(value) for value in defaults)
    # Only what the function names: a copy of a whole notebook's variables would keep them all alive.
    new_names = {"__builtins__": function.__globals__["__builtins__"]} | {n: swap(v) for n, v in named.items()}
    made = FunctionType(function.__code__, new_names, function.__name__, new_defaults or None, new_cells or None)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


class _Gone:
    """Stands where a function that is kept had a tensor."""


def _number(function: Any) -> int:
    """The same number for functions of the same code that captured equal values."""
    values = tuple(_key(value) for part in _places(function)[:2] for value in part)
    names = tuple((name, _key(value)) for name, value in _places(function)[2].items())
    key = (function.__code__, values, names) if isinstance(function, FunctionType) else _key(function)
    with _lock:
        if key not in _numbers:
            tensors = len(_captured(function))
            _functions.append(_with_tensors(function, [_Gone()] * tensors))
            _numbers[key] = len(_functions) - 1
        return _numbers[key]


def _key(value: Any) -> Any:
    """A value by its contents where they cannot change, else by identity (what is kept keeps it alive)."""
    if isinstance(value, Tensor):
        return "tensor"
    return (type(value), value) if isinstance(value, (int, float, str, type(None))) else (type(value), id(value))
