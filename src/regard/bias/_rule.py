"""What a bias by distance is: a tensor-free rule and a small table of numbers, one column or more for each head.

Legend: H heads, R rows and C columns of a tile, distance = key position − query position. A tile of such a bias has
equal numbers along its diagonals, so it is made from one line of R + C numbers, and its gradient comes back as one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

Offset = int | Tensor
Structure = tuple[Any, ...]

RULES: dict[str, Any] = {}


class Rule(ABC):
    """How a table and a distance make a bias. Holds numbers only: two equal structures are the same rule."""

    kind: ClassVar[str]
    # whether the table may hold -inf, which hides pairs
    may_hide: ClassVar[bool]
    # whether the table is one slope for each head, and the bias −slope·|distance|
    is_linear: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        RULES[cls.kind] = cls

    def __init__(self, structure: Structure = ()) -> None:
        self.structure: Structure = (self.kind, *structure)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rule) and self.structure == other.structure

    def __hash__(self) -> int:
        return hash(self.structure)

    @property
    def code(self) -> str:
        """The rule as text, for what carries text only; `rebuild` reads it."""
        return ",".join(str(part) for part in self.structure)

    @abstractmethod
    def __str__(self) -> str:
        """The rule in a few words, for a plan."""

    @abstractmethod
    def line(self, table: Tensor, distance: Tensor) -> Tensor:
        """The bias of every head at distances [..., n]: [..., H, n], in float32 or float64."""

    @abstractmethod
    def pairs(self, table: Tensor, head: Tensor, distance: Tensor) -> Tensor:
        """The bias of head[n] at distance[n, s]: [n, s]."""

    @abstractmethod
    def line_gradient(self, grad_table: Tensor, grad_line: Tensor, distance: Tensor) -> None:
        """Add to the table's gradient what a line's gradient [b, H, n] at distances [b or 1, n] gives it."""

    @abstractmethod
    def of_heads(self, table: Tensor, heads: slice | list[int]) -> Tensor:
        """The part of the table that belongs to some heads."""

    @abstractmethod
    def check_shape(self, table: Tensor, heads: int) -> None:
        """Raise ValueError when the table is not for this many heads."""

    @abstractmethod
    def check_values(self, table: Tensor) -> None:
        """Raise ValueError for numbers that mean nothing. Reads the table."""

    def tile(self, table: Tensor, rows: range, cols: range, offset: Offset) -> Tensor:
        """The bias over a rectangle of the call: [B or 1, H, R, C]; B is 1 where all items have one offset."""
        line = self.line(table, _distances(rows, cols, offset, table.device))
        # window s of the line is row R − 1 − s of the tile
        windows = line.unfold(-1, len(cols), 1)[..., : len(rows), :]
        return windows.flip(-2)

    def add_gradient(self, grad_table: Tensor, grad_tile: Tensor, rows: range, cols: range, offset: Offset) -> None:
        """Add to the table's gradient what the gradient of a tile [B, H, R, C] gives it."""
        distance = _distances(rows, cols, offset, grad_tile.device)
        if distance.shape[0] == 1:
            grad_tile = grad_tile.sum(0, keepdim=True)
        self.line_gradient(grad_table, diagonal_sums(grad_tile), distance)


def rebuild(code: str) -> Rule:
    """The rule whose `code` this is."""
    kind, *numbers = code.split(",")
    rule: Rule = RULES[kind](*(int(number) for number in numbers))
    return rule


def _distances(rows: range, cols: range, offset: Offset, device: torch.device) -> Tensor:
    """What lies along a tile's diagonals, from its lower left corner on: [B or 1, R + C]; the last is not used."""
    first = cols.start - (rows.start + len(rows) - 1)
    steps = torch.arange(len(rows) + len(cols), device=device) + first
    return steps.unsqueeze(0) - (offset.reshape(-1, 1) if isinstance(offset, Tensor) else offset)


def diagonal_sums(tile: Tensor) -> Tensor:
    """[b, H, R, C] to [b, H, R + C]: entry (r, c) counts at R − 1 − r + c."""
    *lead, rows, cols = tile.shape
    # rows of R + C numbers, read again as rows of R + C + 1, stand one more to the left each: diagonals become columns
    room = F.pad(tile, (0, rows)).flatten(-2)
    room = F.pad(room, (rows - 1, 1)) if rows else room
    return room.reshape(*lead, rows, rows + cols + 1).sum(-2)[..., : rows + cols]


_constants: dict[tuple[Any, ...], Tensor] = {}


def constant(numbers: tuple[float, ...] | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A few numbers on a device, copied there once: a copy at every call would make the host wait."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return torch.tensor(numbers, dtype=dtype, device=device)  # of this trace, or of this mode (fake tensors)
    key = (numbers, dtype, device)
    found = _constants.get(key)
    if found is None:
        with torch.inference_mode(False):  # it outlives the block, and may be saved for a backward pass
            found = torch.tensor(numbers, dtype=dtype, device=device)
        _constants[key] = found
    return found


def working(table: Tensor) -> Tensor:
    """The table in the precision that biases are computed in."""
    return table if table.dtype == torch.float64 else table.to(torch.float32)
