"""What the module asks of a key/value cache and of a position encoding."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Cache(Protocol):
    """Keys and values of the tokens that came before.

    `forward(..., cache=cache)` projects the new tokens, hands them to `update`, and attends to what comes back. The
    mask then speaks about those keys, as always: pass `masks.causal()` in every call, a cache adds no mask of its own.

    A cache may have more, as those of `regard.cache` have, and the modules use what is there:

    - `check(query, key, value, *, mask, bias)`, called before `update`, raises where the call cannot go well.
    - `filled`, a mask or None: hides the slots that hold no token among the keys that `update` gave.
    - `pads`, `[batch, token]` or None: True at the new tokens that are padding; their rows come out as 0.
    - `attend(query, key, value, *, mask, bias, …)` checks, stores and attends by itself, in place of `update`, where
      keys and values are kept in a form that is not theirs. `observe` and dropout still go through `update`.
    - `preview(key, value)`: what `update` would give, for `explain`.
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
