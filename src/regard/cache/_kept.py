"""A KV cache that keeps a budget of keys, chosen by the weight they received; and the choice itself."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from regard import api
from regard.cache._base import CacheFull
from regard.cache._given import Updated
from regard.cache._lengths import counts_of
from regard.cache._paged import BlockPool, PagedCache
from regard.masks import Mask
from regard.statistics import Want

POLICIES = ("key_mass", "recent", "window")


class Budget(NamedTuple):
    """Which keys stay when there are more than ``keys``: the first few, the newest, and those with most weight.

    key_mass  by the weight from all queries so far (H2O)
    window    by the weight from the last ``recent`` queries of each call (SnapKV)
    recent    the newest only (StreamingLLM)
    """

    policy: str
    keys: int
    first: int
    recent: int

    def counted(self) -> slice | None:
        """The queries of a call whose weight counts."""
        return slice(-self.recent, None) if self.policy == "window" else None

    def chosen(self, mass: Tensor, places: Tensor) -> Tensor | None:
        """Slots that stay, int64 [batch, head, keys], in order; None where all do.

        ``mass`` [batch, head, slot] is what each received, ``places`` (alike) the position of its token."""
        slots = mass.shape[2]
        if slots <= self.keys:
            return None
        worth = mass.float()
        always = places < self.first
        newest = self.keys - self.first if self.policy == "recent" else self.recent
        always = always | (torch.arange(slots, device=mass.device) >= slots - newest)
        worth = worth.masked_fill(always, torch.inf)
        # of equals the newer stays; topk does not promise an order among them
        order = worth.flip(2).sort(dim=2, descending=True, stable=True).indices[:, :, : self.keys]
        return (slots - 1 - order).sort(2).values


class KeptCache:
    """Keys and values of a budget of tokens, chosen for each head; after each call, memory shrinks to the budget.

    A call sees the keys kept so far and its own tokens. Afterwards, the budget is chosen from all that the call saw:
    the memory of a layer is ``[batch, num_kv_heads, budget, dim]``, whatever the length of the text. Heads that share
    keys share the choice. Made by ``regard.edits.keep(…).caches(model)``.

    With a ``pool``, keys and values lie in its blocks, as in a `PagedCache`. The cache takes only the blocks that the
    budget needs, and forks share them until one of the two reads more tokens.
    """

    attends_whole = True
    pads: Tensor | None = None

    def __init__(self, budget: Budget, pool: BlockPool | None = None) -> None:
        self.budget = budget
        self._paged = None if pool is None else PagedCache(pool)
        self._whole: tuple[Tensor, Tensor] | None = None  # keys and values, where they are not in blocks
        self._mass: Tensor | None = None  # [batch, kv head, slot], what each received
        self._places: Tensor | None = None  # likewise, the position of its token
        self._seen = 0

    @property
    def lengths(self) -> list[int]:
        """Number of tokens seen so far, item by item."""
        return [] if self._places is None else [self._seen] * self._places.shape[0]

    @property
    def position(self) -> int:
        """The position of the next token."""
        return self._seen

    @property
    def held(self) -> int:
        """Number of tokens whose keys and values are in memory."""
        return 0 if self._places is None else self._places.shape[2]

    @property
    def places(self) -> Tensor:
        """The positions of the tokens that each head holds, ``[batch, num_kv_heads, held]``."""
        if self._places is None:
            raise ValueError("the cache is empty")
        return self._places

    @property
    def bytes(self) -> int:
        """Memory of keys and values, in bytes."""
        if self._paged is not None:
            return self._paged.bytes
        return 0 if self._whole is None else sum(part.nbytes for part in self._whole)

    @property
    def filled(self) -> Mask | None:
        return None

    def padded(self, lengths: Any, side: str = "right", tokens: int | None = None) -> Any:
        raise ValueError("a KeptCache holds as many tokens of every item: give prompts of one length, or one at a time")

    def check(self, query: Tensor, key: Tensor, value: Tensor | None, *, mask: Mask | None, bias: Any) -> None:
        """Refuse a call that would mean something else because keys are gone."""
        if value is None:
            raise ValueError("a KeptCache holds keys and values; latent attention takes a LatentCache")
        if bias is not None:
            raise ValueError("bias goes by the positions of keys, and in a KeptCache they move: leave it out")
        if not (mask is None and query.shape[2] == 1) and not (isinstance(mask, Mask) and mask.is_causal):
            raise ValueError(f"a KeptCache goes with mask=masks.causal(), got {mask!r}: keys have moved in it")

    def update(self, key: Tensor, value: Tensor | None = None) -> Updated:
        raise ValueError("a KeptCache attends by itself, to see what each key receives: call cache.attend")

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        mask: Mask | None = None,
        bias: Any = None,
        **how: Any,
    ) -> Tensor:
        """Attend from the new tokens to the kept keys and to themselves; then keep the budget. `how` is as in
        `regard.attention`: scale, softcap, sinks, backend."""
        self.check(query, key, value, mask=mask, bias=bias)
        assert value is not None
        if self._places is not None and key.shape[:2] != (held := self._places.shape)[:2]:
            raise ValueError(f"key is {list(key.shape)}, and the cache holds [batch, head, token] {list(held)}")
        self._check_room(key)
        keys, values = key, value
        if self.held:
            before = self._whole if self._paged is None else self._paged._read(0, self.held)
            assert before is not None
            keys, values = torch.cat((before[0], key), 2), torch.cat((before[1], value), 2)
        want = Want.none()
        if self.budget.policy != "recent":
            want = Want(rows=False, map=None, top_k=0, distance=False, queries=self.budget.counted())
        seen = api.observe(query, keys, values, want=want, mask=mask, query_offset=self.held, **how)
        mass = keys.new_zeros(keys.shape[:3], dtype=torch.float32)
        if self.budget.policy != "recent":
            mass = seen.key_mass.float().reshape(*key.shape[:2], -1, keys.shape[2]).sum(2)
        self._keep(keys.detach(), values.detach(), mass, key.shape[2])
        return seen.out

    def _keep(self, keys: Tensor, values: Tensor, mass: Tensor, new: int) -> None:
        places = torch.arange(self._seen, self._seen + new, device=keys.device).expand(*keys.shape[:2], new)
        if self._mass is not None and self._places is not None:
            mass[:, :, : self._mass.shape[2]] += self._mass
            places = torch.cat((self._places, places), 2)
        at = self.budget.chosen(mass, places)
        if at is not None:
            keys, values = (x.gather(2, at.unsqueeze(-1).expand(-1, -1, -1, x.shape[3])) for x in (keys, values))
            mass, places = mass.gather(2, at), places.gather(2, at)
        if self._paged is None:
            self._whole = keys, values
        else:
            self._paged.free()
            self._paged.update(keys, values)
        self._mass, self._places = mass, places
        self._seen += new

    def _check_room(self, key: Tensor) -> None:
        """Raise, with nothing changed, where the pool has too few blocks for what will be kept."""
        if self._paged is None:
            return
        pool, mine = self._paged.pool, Counter(block for blocks in self._paged.blocks for block in blocks)
        there = pool.free_blocks + sum(pool._users[block] == count for block, count in mine.items())
        needed = key.shape[0] * -(-min(self.budget.keys, self.held + key.shape[2]) // pool.block_size)
        if needed > there:
            raise CacheFull(
                f"the pool is full: {needed} blocks of {pool.block_size} tokens are needed for a budget of "
                f"{self.budget.keys}, and {there} of {pool.blocks} are free or its own; free() one that is done"
            )

    def reorder(self, index: Any) -> None:
        """Item i becomes what item `index[i]` was."""
        order = list(counts_of("index", index))
        if self._places is None or self._mass is None:
            return
        if self._paged is not None:
            self._paged.reorder(order)
        elif self._whole is not None:
            self._whole = self._whole[0][order], self._whole[1][order]
        self._mass, self._places = self._mass[order], self._places[order]

    def truncate(self, length: int | Sequence[int]) -> None:
        """Only to length 0: what was dropped cannot come back."""
        if length != 0:
            raise ValueError(f"a KeptCache can go back to 0 tokens only, got length {length}")
        self.free()

    def free(self) -> None:
        """Forget everything; blocks return to their pool."""
        if self._paged is not None:
            self._paged.free()
        self._whole = self._mass = self._places = None
        self._seen = 0

    def fork(self) -> Self:
        """An independent copy of this cache."""
        other = copy.copy(self)  # a step makes new tensors, and changes none
        other._paged = None if self._paged is None else self._paged.fork()
        return other

    def __repr__(self) -> str:
        return f"KeptCache({self.budget}): {self.held} of {self._seen} tokens"
