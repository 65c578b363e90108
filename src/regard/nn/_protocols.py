"""What the module asks of a key/value cache and of a position encoding."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Cache(Protocol):
    """Keys and values of the tokens that came before.

    `forward(..., cache=cache)` projects the new tokens, hands them to `update`, and attends to what comes back. The
    mask then speaks about those keys, as always: pass `masks.causal()` in every call, a cache adds no mask of its own.
    """

    @property
    def position(self) -> int | Tensor:
        """The position of the next token, or one for each batch item `[batch]`; read only if the module has
        `positions`, before `update`."""
        ...

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, int | Tensor | None]:
        """Store the new tokens' `[batch, num_kv_heads, token, dim]`; give all keys and values to attend to, and where
        among those keys the first new token stands (`query_offset` of `regard.attention`; None: they are the last)."""
        ...


class Positions(Protocol):
    """A position encoding that turns queries and keys, such as a rotary one."""

    def __call__(self, query: Tensor, key: Tensor, *, query_offset: int | Tensor) -> tuple[Tensor, Tensor]:
        """Encode `[batch, head, token, dim]` queries and keys, after projection and norm, before the cache.

        The first query stands at position `query_offset` (an int, or `[batch]`), and the last key stands level with
        the last query: the first key is at `query_offset + L - S`.
        """
        ...
