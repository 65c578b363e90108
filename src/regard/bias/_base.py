"""What `regard.attention(bias=…)` takes in addition to tensors."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from regard.bias._rule import Offset, Rule


class Bias:
    """A bias by distance, made by `alibi`, or a `T5Bias`: pairs at the same distance get the same number.

    >>> from regard import bias
    >>> bias.alibi(2).dense(2, 3)[0]                  # head 0: 2 queries at positions 1 and 2, 3 keys
    tensor([[-0.0625,  0.0000, -0.0625],
            [-0.1250, -0.0625,  0.0000]])
    """

    rule: Rule

    def table(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The numbers of the rule, for a call whose sums are kept in `dtype`."""
        raise NotImplementedError

    def tile(
        self,
        rows: range,
        cols: range,
        L: int,
        S: int,
        *,
        offset: Offset,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """The bias over some rows and columns of a call: `[B or 1, num_heads, len(rows), len(cols)]`.

        Row r stands at position `r + offset` among the keys; `offset` may be a tensor `[B]`.
        """
        rows, cols = range(L)[rows.start : rows.stop], range(S)[cols.start : cols.stop]
        table = self.table(dtype, torch.device(device))
        if isinstance(offset, Tensor):
            offset = offset.to(table.device)
        return self.rule.tile(table, rows, cols, offset)

    def dense(
        self,
        L: int,
        S: int,
        *,
        query_offset: Offset | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """The whole bias as a tensor: `[num_heads, L, S]`, or `[B, num_heads, L, S]` with an offset for each item."""
        offset = S - L if query_offset is None else query_offset
        whole = self.tile(range(L), range(S), L, S, offset=offset, device=device, dtype=dtype)
        return whole if isinstance(offset, Tensor) else whole[0]

    def __add__(self, other: Any) -> NoReturn:
        raise TypeError(
            f"a bias rule cannot be added to a {type(other).__name__}: a call takes one bias, a rule or a tensor. What "
            "a tensor hides belongs to mask= (masks.from_additive); for a sum in full, add the tensor to .dense(L, S)"
        )

    __radd__ = __add__


class TableBias(Bias):
    """A rule with the table that a call holds: what is left of a bias once its call is described."""

    def __init__(self, rule: Rule, table: Tensor) -> None:
        self.rule, self._table = rule, table

    def table(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._table

    def of_heads(self, heads: slice | list[int]) -> TableBias:
        return TableBias(self.rule, self.rule.of_heads(self._table, heads))
