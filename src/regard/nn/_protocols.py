"""What modules need from a key/value cache and from a position encoding."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Cache(Protocol):
    """Keys and values of the tokens that came before.

    `forward(..., cache=cache)` projects the new tokens, passes them to `update`, and attends to the keys and values
    that it returns. The mask covers those keys. A cache adds no mask of its own: pass `masks.causal()` in every call.

    A cache may also have the following, as those of `regard.cache` do; modules use them if they exist:

    - `check(query, key, value, *, mask, bias)`, called before `update`, raises if the call would fail.
    - `filled`, a mask or None: hides the slots that hold no token among the keys that `update` gave.
    - `pads`, `[batch, token]` or None: True at the new tokens that are padding; their output rows are 0.
    - `attend(query, key, value, *, mask, bias, …)` checks, stores and attends itself, in place of `update`, for a cache
      that stores keys and values in another form. `observe` and dropout still use `update`.
    - `preview(key, value)`: what `update` would return, for `explain`.
    """

    @property
    def position(self) -> int | Tensor:
        """The position of the next token, or one per batch item `[batch]`; read before `update`, and only if the
        module has `positions`."""
        ...

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, int | Tensor | None]:
        """Store the new tokens, `[batch, num_kv_heads, token, dim]`. Return all keys and values to attend to, and the
        position of the first new token among those keys (`query_offset` of `regard.attention`; None: the last ones)."""
        ...


class Positions(Protocol):
    """A position encoding that rotates queries and keys, such as RoPE."""

    def __call__(self, query: Tensor, key: Tensor, *, query_offset: int | Tensor) -> tuple[Tensor, Tensor]:
        """Encode `[batch, head, token, dim]` queries and keys, after projection and norm, before the cache.

        The first query stands at position `query_offset` (an int, or `[batch]`), and the last key stands level with
        the last query: the first key is at `query_offset + L - S`.
        """
        ...
