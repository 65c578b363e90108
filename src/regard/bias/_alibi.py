"""ALiBi: keys lose weight in proportion to their distance, at one rate per head (Press et al., 2021)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from regard._checks import check_count
from regard.bias._base import Bias
from regard.bias._rule import Rule, constant, working
from regard.masks._arguments import plain


def alibi(num_heads: int, *, slopes: Sequence[float] | Tensor | None = None) -> Bias:
    """−slope[h] · |i − j| for query position i and key position j.

    Args:
        num_heads: heads of the query.
        slopes: `[num_heads]`, where they are not the published ones; a tensor may require grad, and is then learned.

    The published slopes of n = 2^k heads are 2^(−8/n), 2^(−16/n), …, 2^−8. For another n they are those of the next
    smaller power of two, then every second one of the next larger.
    """
    check_count("num_heads", num_heads)
    if slopes is None:
        return _Alibi(int(num_heads), published_slopes(int(num_heads)))
    if isinstance(slopes, Tensor):
        if not slopes.is_floating_point():
            raise TypeError(f"slopes must be floating point, got {slopes.dtype}")
        if slopes.shape != (num_heads,):
            raise ValueError(f"slopes must have shape [num_heads] = [{num_heads}], got {list(slopes.shape)}")
        if not torch.compiler.is_compiling() and plain(slopes):
            AlibiRule().check_values(slopes)
        return _Alibi(int(num_heads), slopes)
    numbers = tuple(slopes)
    if not all(isinstance(slope, Real) and math.isfinite(slope) for slope in numbers):
        raise ValueError(f"slopes must be finite numbers, got {slopes!r}")
    if len(numbers) != num_heads:
        raise ValueError(f"slopes must be {num_heads} numbers, one per head, got {len(numbers)}")
    return _Alibi(int(num_heads), tuple(float(slope) for slope in numbers))


def published_slopes(num_heads: int) -> tuple[float, ...]:
    """
    >>> published_slopes(3)
    (0.0625, 0.00390625, 0.25)
    """
    below = 1 << (num_heads.bit_length() - 1)  # the largest power of two that is not above
    first = [2.0 ** (-8.0 * n / below) for n in range(1, below + 1)]
    between = [2.0 ** (-8.0 * n / (2 * below)) for n in range(1, 2 * below, 2)]
    return tuple(first + between[: num_heads - below])


class AlibiRule(Rule):
    """The table is the slopes, [H]."""

    kind = "alibi"
    may_hide = False
    is_linear = True

    def __str__(self) -> str:
        return "alibi"

    def line(self, table: Tensor, distance: Tensor) -> Tensor:
        slopes = working(table)
        return slopes.unsqueeze(-1) * distance.abs().neg().to(slopes.dtype).unsqueeze(-2)

    def pairs(self, table: Tensor, head: Tensor, distance: Tensor) -> Tensor:
        slopes = working(table)
        return slopes[head].unsqueeze(-1) * distance.abs().neg().to(slopes.dtype)

    def line_gradient(self, grad_table: Tensor, grad_line: Tensor, distance: Tensor) -> None:
        far = distance.abs().to(grad_line.dtype).unsqueeze(-2)
        grad_table -= (grad_line * far).sum((0, -1))

    def of_heads(self, table: Tensor, heads: slice | list[int]) -> Tensor:
        return table[heads]

    def check_shape(self, table: Tensor, heads: int) -> None:
        if table.shape != (heads,):
            raise ValueError(f"bias alibi({table.shape[0]}) is for {table.shape[0]} heads, but query has {heads}")

    def check_values(self, table: Tensor) -> None:
        if not torch.isfinite(table.detach()).all():
            raise ValueError("bias: the slopes of alibi must be finite, and one is not")


class _Alibi(Bias):
    rule = AlibiRule()

    def __init__(self, num_heads: int, slopes: tuple[float, ...] | Tensor) -> None:
        self.num_heads = num_heads
        self.slopes = slopes

    def table(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.slopes if isinstance(self.slopes, Tensor) else constant(self.slopes, dtype, device)

    def __repr__(self) -> str:
        if isinstance(self.slopes, Tensor):
            return f"alibi({self.num_heads}, slopes=tensor)"
        usual = self.slopes == published_slopes(self.num_heads)
        return f"alibi({self.num_heads})" if usual else f"alibi({self.num_heads}, slopes={self.slopes})"
