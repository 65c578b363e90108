"""A paged KV cache: blocks that several sequences can share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from regard._checks import check_count
from regard.backends._stored import Stored
from regard.cache import _files, _storage
from regard.cache._base import CacheFull, TokenCache
from regard.cache._given import Made
from regard.cache._lengths import Fresh, Lengths, order_of, places_of
from regard.cache._slots import shortened
from regard.cache._storage import Memory, Parts


class BlockPool:
    """Memory for `blocks` blocks of `block_size` tokens, shared by any number of `PagedCache`s.

    Blocks are reference-counted: an unused block is reused.
    """

    def __init__(self, blocks: int, block_size: int = 16, *, int8: bool = False) -> None:
        check_count("blocks", blocks, 1)
        check_count("block_size", block_size, 1)
        if not isinstance(int8, bool):
            raise TypeError(f"int8 must be True or False, got {int8!r}")
        self.blocks = int(blocks)
        self.block_size = int(block_size)
        self.int8 = int8
        self._users = [0] * self.blocks
        self._free = list(range(self.blocks - 1, -1, -1))
        self._made: Made | None = None
        self._memory = Memory()  # [block, place, head, dim]

    @property
    def free_blocks(self) -> int:
        """Number of unused blocks."""
        return len(self._free)

    @property
    def full(self) -> bool:
        """Whether the next block that is needed would raise `CacheFull`."""
        return not self._free

    @property
    def bytes(self) -> int:
        """Memory that the pool takes, used or not, in bytes."""
        return self._memory.bytes

    def __repr__(self) -> str:
        return f"BlockPool({self.blocks}, block_size={self.block_size}, int8={self.int8}): {self.free_blocks} free"

    def _allocate(self, made: Made) -> None:
        self._memory = Memory.allocate(made, (self.blocks, self.block_size, made.heads), self.int8)
        self._made = made

    def _take(self) -> int:
        block = self._free.pop()
        self._users[block] = 1
        return block

    def _share(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._users[block] += 1

    def _give_back(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free.append(block)


class _Need(NamedTuple):
    """A block that an item needs before it can write."""

    item: int
    column: int
    copied: int | None  # the shared block whose tokens go into it


class PagedCache(TokenCache):
    """Sequences of any length in blocks of a shared pool.

    `fork` and `reorder` copy nothing: sequences share the blocks of their common tokens. A sequence that writes to a
    shared block gets a copy of it first. `free` and `truncate` return blocks that no other sequence uses.

        pool = BlockPool(1024, block_size=16)
        cache = PagedCache(pool)
        y = mha(prompt, mask=masks.causal(), cache=cache)           # one sequence
        cache.reorder([0, 0, 0])                                    # three sequences that share the prompt

    Args:
        pool: the memory. A pool serves one layer (its heads and dims) and any number of caches.
    """

    def __init__(self, pool: BlockPool) -> None:
        if not isinstance(pool, BlockPool):
            raise TypeError(f"pool must be a regard.cache.BlockPool, got {type(pool).__name__}")
        super().__init__(pool.int8)
        self.pool = pool
        self._reads_views = False  # blocks are gathered
        self._blocks: list[list[int]] = []
        self._table: Tensor | None = None  # [batch, blocks of the pool]: the same, where memory is read

    @property
    def bytes(self) -> int:
        """Memory of the blocks that this cache uses, in bytes; a shared block counts once."""
        mine = len({block for blocks in self._blocks for block in blocks})
        return self.pool.bytes * mine // self.pool.blocks

    @property
    def blocks(self) -> list[list[int]]:
        """The blocks of each item, in order."""
        return [list(blocks) for blocks in self._blocks]

    def truncate(self, length: int | Sequence[int]) -> None:
        """Forget the tokens after the first `length`; empty blocks return to the pool."""
        wanted = shortened(self._held.counts, length)
        for item, count in enumerate(wanted):
            kept = -(-count // self.pool.block_size)
            self.pool._give_back(self._blocks[item][kept:])
            del self._blocks[item][kept:]
        self._held = self._view = Lengths(wanted, self._held.device)

    def reorder(self, index: Any) -> None:
        """Item i becomes what item `index[i]` was; blocks are shared, not copied."""
        order = order_of(index, len(self._blocks))
        old, self._blocks = self._blocks, [list(self._blocks[i]) for i in order]
        for blocks in self._blocks:
            self.pool._share(blocks)
        for blocks in old:
            self.pool._give_back(blocks)
        self._held = self._view = self._held.pick(order)
        self._draw_table()

    def fork(self) -> Self:
        """An independent copy; blocks are shared until one of the two writes."""
        other = type(self)(self.pool)
        other._take_over(self._made, [list(blocks) for blocks in self._blocks], self._held)
        for blocks in other._blocks:
            self.pool._share(blocks)
        return other

    def free(self) -> None:
        """Return all blocks; the cache is then empty."""
        for blocks in self._blocks:
            self.pool._give_back(blocks)
        self._take_over(None, [], Lengths((), self._held.device))

    def split(self) -> list[Self]:
        """One cache per sequence; this cache is empty afterwards."""
        parts = []
        for item, blocks in enumerate(self._blocks):
            part = type(self)(self.pool)
            part._take_over(self._made, [blocks], self._held.pick([item]))
            parts.append(part)
        self._take_over(None, [], Lengths((), self._held.device))
        return parts

    @classmethod
    def join(cls, caches: Sequence[PagedCache]) -> PagedCache:
        """One cache with the sequences of several caches, in order; those are empty afterwards."""
        if isinstance(caches, (str, bytes)) or not isinstance(caches, Sequence):
            raise TypeError(f"caches must be a sequence of PagedCaches, got {type(caches).__name__}")
        for cache in caches:
            if not isinstance(cache, PagedCache):
                raise TypeError(f"caches must hold PagedCaches of the same pool, got a {type(cache).__name__}")
        if not caches or any(cache.pool is not caches[0].pool for cache in caches):
            raise ValueError("caches must be one or more PagedCaches of the same pool")
        if len({id(cache) for cache in caches}) < len(caches):
            raise ValueError("caches holds the same cache twice; join it with its fork()")
        if any(cache._made is None for cache in caches):
            raise ValueError("caches holds one without any sequence; join those that have seen tokens")
        whole = cls(caches[0].pool)
        counts = [count for cache in caches for count in cache._held.counts]
        blocks = [blocks for cache in caches for blocks in cache._blocks]
        device = caches[0]._held.device
        whole._take_over(caches[0]._made, blocks, Lengths(counts, device))
        for cache in caches:
            cache._take_over(None, [], Lengths((), device))
        return whole

    def save(self, path: str | Path) -> None:
        """Write the contents to a safetensors file, completely or not at all; `regard.cache.load` makes a pool for it.

        Shared blocks are written once, and are shared again when loaded.
        """
        _files.save_paged(self, Path(path))

    def _move(self, made: Made) -> None:
        """Other caches may use the pool: this one leaves it for a pool of its own, `cache.pool`, of the same size."""
        old, before, used = self.pool, self._blocks, list(self._used_blocks())
        pool = BlockPool(old.blocks, old.block_size, int8=old.int8)
        pool._allocate(made)
        for part, other in zip(pool._memory.parts, old._memory.parts, strict=True):
            part[: len(used)].copy_(other[used])
        self._settle(pool, {block: at for at, block in enumerate(used)}, self._held.on(made.device))
        for blocks in before:
            old._give_back(blocks)

    def _used_blocks(self) -> dict[int, int]:
        """The blocks in use, and how many tokens each holds; one that is shared counts once."""
        size, used = self.pool.block_size, dict[int, int]()
        for blocks, count in zip(self._blocks, self._held.counts, strict=True):
            for column, block in enumerate(blocks):
                used[block] = max(used.get(block, 0), min(size, count - column * size))
        return used

    def _settle(self, pool: BlockPool, places: dict[int, int], held: Lengths) -> None:
        """Hold the blocks of another pool, the first of it, under their new numbers."""
        self.pool = pool
        pool._free = list(range(pool.blocks - 1, len(places) - 1, -1))
        padded, blocks = self._padded_by_mask, [[places[block] for block in blocks] for blocks in self._blocks]
        for item in blocks:
            pool._share(item)
        self._take_over(pool._made, blocks, held)
        self._padded_by_mask = padded

    def fill_unused(self, number: float) -> None:
        used, mine = self._used_blocks(), Counter[int]()
        for blocks in self._blocks:
            mine.update(blocks)
        for block, users in enumerate(self.pool._users):
            if users == mine[block]:  # another cache may hold more tokens of a block than this one
                for part in self.pool._memory.parts:
                    _storage.spoil(part[block, used.get(block, 0) :], number)

    def _take_over(self, made: Made | None, blocks: list[list[int]], held: Lengths) -> None:
        self._made, self._blocks = made, blocks
        self._held = self._view = held
        self._padded_by_mask = False
        self._draw_table()

    def _go_back(self, made: Made | None, held: Lengths, padded: bool) -> None:
        if made is None:
            self.free()
        else:
            self.truncate(held.counts)
        self._padded_by_mask = padded

    def _check_room(self, made: Made, added: Sequence[int]) -> None:
        like = self.pool._made
        if like is not None and like != made:
            raise ValueError(
                f"the pool holds {like.heads} heads of dims {like.key_dim} and {like.value_dim} in {like.dtype} on "
                f"{like.device}, got {made.heads} of {made.key_dim} and {made.value_dim} in {made.dtype} on "
                f"{made.device}; each layer needs a pool of its own"
            )
        size = self.pool.block_size
        needed = sum(-(-count // size) for count in added) if self._made is None else len(self._needs(added))
        if needed > self.pool.free_blocks:
            raise CacheFull(
                f"the pool is full: {needed} blocks of {size} tokens are needed, and "
                f"{self.pool.free_blocks} of {self.pool.blocks} are free; free() a sequence that is done"
            )

    def _allocate(self, made: Made, batch: int) -> None:
        if self.pool._made is None:
            self.pool._allocate(made)
        self._blocks = [[] for _ in range(batch)]
        self._made = made
        self._draw_table()

    def _draw_table(self) -> None:
        if self._made is None:
            self._table = None
            return
        rows = [blocks + [0] * (self.pool.blocks - len(blocks)) for blocks in self._blocks]
        with torch.inference_mode(False):
            self._table = torch.tensor(rows, dtype=torch.int64, device=self._made.device)
            self._table = self._table.view(len(rows), self.pool.blocks)

    def _take_blocks(self, added: Sequence[int]) -> None:
        assert self._table is not None
        for need in self._needs(added):
            block = self.pool._take()
            if need.copied is not None:
                for part in self.pool._memory.parts:
                    part[block].copy_(part[need.copied])
                self.pool._give_back([need.copied])
                self._blocks[need.item][need.column] = block
            else:
                self._blocks[need.item].append(block)
            self._table[need.item, need.column].fill_(block)  # an assignment would wait for the device

    def _needs(self, added: Sequence[int]) -> list[_Need]:
        needs, size = [], self.pool.block_size
        left: Counter[int] = Counter()  # users that shared blocks lose on the way: the last one need not copy
        for item, (held, more) in enumerate(zip(self._held.counts, added, strict=True)):
            if more == 0:
                continue
            column = held // size
            if held % size:
                block = self._blocks[item][column]
                if self.pool._users[block] - left[block] > 1:
                    left[block] += 1
                    needs.append(_Need(item, column, block))
                column += 1
            needs += [_Need(item, at, None) for at in range(column, -(-(held + more) // size))]
        return needs

    def _write(self, fresh: Fresh, key: Parts, value: Parts | None) -> Lengths:
        assert self._table is not None
        start, size = self._held, self.pool.block_size
        self._take_blocks(fresh.of(len(start.counts)))
        items, places, sources = places_of(fresh, start, key[0])
        blocks = self._table[items, places // size]
        for part, tokens in zip(self.pool._memory.parts, key + (value or ()), strict=True):
            part[blocks, places % size] = tokens.transpose(1, 2)[items, sources]
        self._held = self._view = start.plus(fresh.tokens if fresh.counts is None else fresh.counts)
        return start

    def _as_stored(self) -> Stored | None:
        if self._made is None or not self.pool._memory.value:
            return None
        assert self._table is not None
        by_heads = self.pool._memory.change(lambda part: part.transpose(1, 2))
        lengths = (self._view.tensor, self._view.longest)
        return Stored(*by_heads, *lengths, self._made.dtype, self._table, self.pool.block_size)

    def _read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        assert self._table is not None and self._made is not None
        size, dtype = self.pool.block_size, self._made.dtype
        first, last = start // size, -(-stop // size)
        blocks = self._table[:, first:last]
        inside = slice(start - first * size, stop - first * size)
        # [batch, blocks, block_size, heads, dim] -> [batch, tokens, heads, dim]
        found = self.pool._memory.read(lambda part: part[blocks].flatten(1, 2)[:, inside], dtype)
        if self._held.same is None:
            hidden = torch.arange(start, stop, device=blocks.device) >= self._held.tensor.unsqueeze(1)
            for gathered in found:
                gathered.masked_fill_(hidden[:, :, None, None], 0.0)
        return found[0].transpose(1, 2), found[1].transpose(1, 2)

    def __repr__(self) -> str:
        return f"PagedCache({self.pool!r}): {self.lengths}"
