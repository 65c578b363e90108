"""What linear attention keeps of the tokens it has seen: sums of fixed size, however many there were."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from regard._errors import Refused


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
        return sum(t.numel() * t.element_size() for t in (self.sums, self.norms) if t is not None)

    @property
    def batch(self) -> int | None:
        return None if self.sums is None else self.sums.shape[0]

    def fork(self) -> LinearState:
        """A second state that goes on from here on its own."""
        copy = LinearState()
        copy.sums, copy.norms, copy.position = self.sums, self.norms, self.position  # tensors are replaced, not changed
        return copy

    def reorder(self, items: Tensor) -> None:
        """Batch item n becomes what item ``items[n]`` was (beam search)."""
        if self.sums is not None and self.norms is not None:
            self.sums, self.norms = self.sums.index_select(0, items), self.norms.index_select(0, items)

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
