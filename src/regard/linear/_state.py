"""What linear attention keeps of the tokens it has seen: sums of fixed size, however many there were."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import NoReturn

import torch
from torch import Tensor

from regard.spec import Refused


class LinearState:
    """The state of a causal call, which the next call goes on from: pass it as ``state=`` (or, to the module, as
    ``cache=``); each call leaves it behind its last token.

    A state begins empty, and takes its sizes from the first call. It holds ``sums`` [batch, head, features, value dim]
    and ``norms`` [batch, head, features], in float32 (float64 for float64 input).

    >>> state = LinearState()
    >>> state
    LinearState(position=0, empty)
    """

    def __init__(self) -> None:
        self.sums: Tensor | None = None
        self.norms: Tensor | None = None
        self.position = 0

    @property
    def nbytes(self) -> int:
        """Memory that the sums take, whatever the length."""
        return sum(t.numel() * t.element_size() for t in (self.sums, self.norms) if t is not None)

    @property
    def batch(self) -> int | None:
        """How many items it holds."""
        return None if self.sums is None else self.sums.shape[0]

    def fork(self) -> LinearState:
        """A second state that goes on from here on its own."""
        copy = LinearState()
        copy.sums, copy.norms, copy.position = self.sums, self.norms, self.position  # tensors are replaced, not changed
        return copy

    def reorder(self, items: Tensor | Sequence[int]) -> None:
        """Batch item n becomes what item ``items[n]`` was (beam search)."""
        index = _index(items, self.batch)
        if self.sums is not None and self.norms is not None:
            index = index.to(self.sums.device)
            self.sums, self.norms = self.sums.index_select(0, index), self.norms.index_select(0, index)

    def reset(self) -> None:
        """Forget everything."""
        self.sums = self.norms = None
        self.position = 0

    def truncate(self, length: int) -> NoReturn:
        """Always refused: a key that has been added to a sum cannot be taken out of it."""
        raise Refused(
            f"truncate({length}): a linear state is a sum over its {self.position} tokens, and what one of them added "
            "cannot be taken back; keep state.fork() from before those tokens"
        )

    def detach(self) -> LinearState:
        """A fork that no gradient passes through (training on stretches of a long text)."""
        copy = self.fork()
        if self.sums is not None and self.norms is not None:
            copy.sums, copy.norms = self.sums.detach(), self.norms.detach()
        return copy

    def __repr__(self) -> str:
        if self.sums is None:
            return f"LinearState(position={self.position}, empty)"
        return f"LinearState(position={self.position}, sums={list(self.sums.shape)}, {self.nbytes:,} bytes)"


def _index(items: Tensor | Sequence[int], batch: int | None) -> Tensor:
    """Batch items as int64 [n]; those on another device than the CPU are not read."""
    wanted = "items must be integers [n], each the number of a batch item"
    if not isinstance(items, Tensor):
        whole = isinstance(items, Sequence) and not isinstance(items, (str, bytes))
        if not whole or any(isinstance(n, bool) or not isinstance(n, Integral) for n in items):
            raise TypeError(f"{wanted}, got {items!r}")
        items = torch.tensor([int(n) for n in items], dtype=torch.int64)
    if items.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{wanted}, got a {items.dtype} tensor")
    if items.dim() != 1:
        raise ValueError(f"{wanted}, got shape {list(items.shape)}")
    if batch is not None and items.device.type == "cpu" and not bool(((items >= 0) & (items < batch)).all()):
        raise ValueError(f"{wanted} of {batch}, got {items.tolist()}")
    return items.to(torch.int64)
