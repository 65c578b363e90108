"""Caches that store items in one tensor, slot after slot: all tokens, or the newest and the first few."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from regard import masks
from regard._checks import check_count, is_int
from regard.backends._stored import Stored
from regard.cache import _files, _storage
from regard.cache._base import CacheFull, TokenCache
from regard.cache._given import Asked, Made, Updated
from regard.cache._lengths import Fresh, Lengths, counts_of, order_of, places_of
from regard.cache._storage import Memory, Parts
from regard.masks import Mask


class _Slots(TokenCache):
    """Memory [batch, heads, slots, dim]; tokens of an item lie in order from slot 0."""

    def __init__(self, slots: int, int8: bool) -> None:
        super().__init__(int8)
        self._slots = slots
        self._memory = self._shown = Memory()  # `_read` reads what is shown: the memory, or a longer copy for one call

    @property
    def bytes(self) -> int:
        return self._memory.bytes

    def reorder(self, index: Any) -> None:
        """Item i becomes what item `index[i]` was: one step of a beam search."""
        batch = len(self._held.counts)
        order = order_of(index, batch)
        at = torch.from_numpy(np.array(order, dtype=np.int64)).to(self._held.device)
        used = self._held.longest

        def pick(part: Tensor) -> Tensor:
            chosen = part.narrow(2, 0, used).index_select(0, at)
            with torch.inference_mode(False):
                kept = part if len(order) == batch else part.new_zeros(len(order), *part.shape[1:])
            kept.narrow(2, 0, used).copy_(chosen)
            return kept

        self._change(pick)
        self._held = self._view = self._held.pick(order)

    def fork(self) -> Self:
        other = copy.copy(self)
        with torch.inference_mode(False):
            other._change(torch.clone)
        return other

    def save(self, path: str | Path) -> None:
        _files.save(self, Path(path))

    def fill_unused(self, number: float) -> None:
        for part in self._memory.parts:
            for item, used in enumerate(self._held.counts):
                _storage.spoil(part[item, :, used:], number)

    def _allocate(self, made: Made, batch: int) -> None:
        self._memory = self._shown = Memory.allocate(made, (batch, made.heads, self._slots), self.int8)

    def _go_back(self, made: Made | None, held: Lengths, padded: bool) -> None:
        self._made, self._held, self._view, self._padded_by_mask = made, held, held, padded
        if made is None:
            self._memory = Memory()
        self._shown = self._memory

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self._memory = self._shown = self._memory.change(change)

    def _move(self, made: Made) -> None:
        kind = None if self.int8 else made.dtype
        self._change(lambda part: part.to(made.device, kind))
        self._made, self._held, self._view = made, self._held.on(made.device), self._view.on(made.device)

    def _write(self, fresh: Fresh, key: Parts, value: Parts | None) -> Lengths:
        start = self._held
        keys, values = self._memory
        write(keys + values, key + (value or ()), fresh, start)
        if fresh.counts is None and start.same is not None:
            held = Lengths((start.same + fresh.tokens,) * len(start.counts), start.device)
        else:
            held = start.plus(fresh.tokens if fresh.counts is None else fresh.counts)
        self._held = self._view = held
        self._shown = self._memory
        return start

    def _as_stored(self) -> Stored | None:
        if self._made is None or not self._memory.value:
            return None
        return Stored(*self._memory, self._view.tensor, self._view.longest, self._made.dtype)

    def _read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        assert self._made is not None
        if self._reads_views:
            keys, values = self._shown
            key = keys[0].narrow(2, start, stop - start)
            return key, values[0].narrow(2, start, stop - start) if values else key
        return self._shown.read(lambda part: part.narrow(2, start, stop - start), self._made.dtype)


class KVCache(_Slots):
    """Keeps every token, in memory allocated for `capacity` tokens.

    `update` writes the new tokens in place and returns views, so a decoding step allocates nothing that grows.
    With gradients enabled, it returns copies, which later tokens do not change.

        cache = KVCache(4096)
        y = mha(prompt, mask=masks.causal(), cache=cache)           # prefill, at once or in chunks
        y = mha(next_token, mask=masks.causal(), cache=cache)       # decoding, [batch, 1, dim]

    Args:
        capacity: maximum number of tokens per item; more raise `CacheFull` and leave the cache unchanged.
        int8: store each number in one byte, with a scale for every 32 numbers: 1.125 bytes per number. On normally
            distributed data, the output is within 1 % of its norm.
    """

    def __init__(self, capacity: int, *, int8: bool = False) -> None:
        check_count("capacity", capacity, 1)
        super().__init__(int(capacity), int8)
        self.capacity = int(capacity)

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """All slots, of keys and of values: `[batch, num_kv_heads, capacity, dim]`. Of a cache that holds something,
        as it was given."""
        (key,), (value,) = self._memory
        return key, value

    def truncate(self, length: int | Sequence[int]) -> None:
        """Forget the tokens after the first `length`."""
        self._held = self._view = Lengths(shortened(self._held.counts, length), self._held.device)

    def _check_room(self, made: Made, added: Sequence[int]) -> None:
        held = self._held.counts if self._made is not None else (0,) * len(added)
        if max(held, default=0) + max(added, default=0) > self.capacity and _most(held, added) > self.capacity:
            raise CacheFull(
                f"the cache has room for {self.capacity} tokens an item, holds {self._held.longest}, and was given "
                f"{max(added)} more; make a larger one, truncate it, or use a RollingCache"
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.capacity}, int8={self.int8}): {self.lengths}"


class LatentCache(KVCache):
    """A `KVCache` for latent attention: one vector per token, from which both keys and values are made.

    It stores `kv_lora_rank + rope_dim` numbers per token, whatever the number of heads.
    """

    def _check_new(self, fresh: Fresh, key: Tensor, value: Tensor | None) -> None:
        if value is not None:
            raise ValueError(
                "value was given to a LatentCache, which holds one tensor per token, for regard.nn.LatentAttention. "
                "Other modules take a KVCache, RollingCache or PagedCache"
            )
        super()._check_new(fresh, key, value)


class RollingCache(_Slots):
    """The first `sinks` tokens (attention sinks), and the current token with the `window` before it: bounded memory.

    Use it with `cache.mask`, which is `masks.causal() & (masks.window(left=window) | masks.columns(sinks))`, or with a
    narrower mask of such rules; any other is refused. Positions count all tokens so far.

    `update` returns keys as [sinks, newest …], up to twice the window; the mask hides the older ones. Distances among
    the newest tokens do not change. A sink comes nearer than it was, but stays outside the window.
    """

    _forgets = True

    def __init__(self, window: int, *, sinks: int = 0, int8: bool = False) -> None:
        check_count("window", window, 0)
        check_count("sinks", sinks, 0)
        # tokens are moved to the front when the memory is full: with so much room, less than once per step on average
        super().__init__(int(sinks) + int(window) + max(int(window), 64), int8)
        self.window = int(window)
        self.sinks = int(sinks)
        self._gone = self._held

    @property
    def mask(self) -> Mask:
        """The mask that sees exactly the tokens that are kept."""
        near = masks.window(left=self.window)
        return masks.causal() & (near | masks.columns(self.sinks) if self.sinks else near)

    @property
    def _seen(self) -> Lengths:
        return self._held.plus(self._gone) if self._gone.longest else self._held

    def truncate(self, length: int | Sequence[int]) -> None:
        """Forget the tokens after the first `length`."""
        wanted = shortened(self._seen.counts, length)
        kept = [new - gone for new, gone in zip(wanted, self._gone.counts, strict=True)]
        for new, gone in zip(kept, self._gone.counts, strict=True):
            if gone and new < self.sinks + self.window:
                raise ValueError(
                    f"length {new + gone} needs the {self.window} tokens before it, of which some are forgotten; the "
                    f"item can go back to {gone + self.sinks + self.window} tokens at least"
                )
        self._held = self._view = Lengths(kept, self._held.device)
        self._shown = self._memory

    def reorder(self, index: Any) -> None:
        """Item i becomes what item `index[i]` was: one step of a beam search."""
        gone = self._gone
        super().reorder(index)
        self._gone = gone.pick(counts_of("index", index))

    def _check(self, asked: Asked, rehearsed: bool = True) -> None:
        _check_rolling(asked.mask, asked.bias, self.window, self.sinks)
        super()._check(asked, rehearsed)

    def _allocate(self, made: Made, batch: int) -> None:
        super()._allocate(made, batch)
        self._gone = Lengths((0,) * batch, made.device)

    def _move(self, made: Made) -> None:
        super()._move(made)
        self._gone = self._gone.on(made.device)

    def _start_after(self, held: Sequence[int], added: Sequence[int]) -> Sequence[int]:
        limit = self.sinks + self.window
        return held if _most(held, added) <= self._slots else [min(count, limit) for count in held]

    def _check_room(self, made: Made, added: Sequence[int]) -> None:
        """Tokens are dropped while the new ones are written."""

    def _write(self, fresh: Fresh, key: Parts, value: Parts | None) -> Lengths:
        added = fresh.of(len(self._held.counts))
        if _most(self._held.counts, added) > self._slots:
            self._forget(self._memory)
        most = _most(self._held.counts, added)
        if most <= self._slots:
            return super()._write(fresh, key, value)
        # a chunk that is longer than the memory: attended to in a copy, of which the memory then takes the end
        own, self._memory = self._memory, self._memory.change(lambda part: _longer(part, most))
        start = super()._write(fresh, key, value)
        shown, seen = self._shown, self._view
        last = shown.change(torch.clone)
        self._forget(last)
        for part, longer in zip(own.parts, last.parts, strict=True):
            part.narrow(2, 0, self._held.longest).copy_(longer.narrow(2, 0, self._held.longest))
        self._memory, self._shown, self._view = own, shown, seen
        return start

    def _forget(self, memory: Memory) -> None:
        """Keep the sinks and the newest `window` of each item, side by side."""
        limit, width = self.sinks + self.window, self.window
        held = self._held
        kept, over = held.cut(limit)
        if not over.longest:
            return
        for part in memory.parts:
            if held.same is not None:
                newest = part.narrow(2, held.same - width, width).clone()
            else:
                # items that have no more than is kept stay where they are
                first = (held.tensor.clamp_min(limit) - width).unsqueeze(1) + torch.arange(width, device=part.device)
                at = first[:, None, :, None].expand(-1, part.shape[1], -1, part.shape[3])
                newest = part.gather(2, at)
            part.narrow(2, self.sinks, width).copy_(newest)
        self._held = self._view = kept
        self._gone = over.plus(self._gone)

    def _update(self, fresh: Fresh, key: Tensor, value: Tensor | None, recorded: bool) -> Updated:
        found = super()._update(fresh, key, value, recorded)
        self._shown = self._memory  # the longer copy of a long chunk goes with the call
        return found

    def _attend(self, asked: Asked) -> Tensor:
        out = super()._attend(asked)
        self._shown = self._memory
        return out

    def __repr__(self) -> str:
        return f"RollingCache(window={self.window}, sinks={self.sinks}, int8={self.int8}): {self.lengths}"


def _check_rolling(mask: object, bias: object, window: int, sinks: int) -> None:
    """Refuse what needs a key that is gone, or means something else once keys are gone."""
    kept = f"(masks.window(left={window}) | masks.columns({sinks}))" if sinks else f"masks.window(left={window})"
    hint = f"pass mask=cache.mask, which is masks.causal() & {kept}"
    if mask is None:
        raise ValueError(f"mask is None, but a RollingCache forgets keys that would then be seen: {hint}")
    if isinstance(mask, Mask):
        for rule in mask.leaves:
            if not rule.survives(window, sinks):
                raise ValueError(
                    f"mask {mask!r}: {rule!r} does not keep its meaning when keys are forgotten; a "
                    f"RollingCache(window={window}, sinks={sinks}) takes causal, window(left ≤ {window}), columns and "
                    f"prefix (n ≤ {sinks}): {hint}; for padded batches cache.padded(lengths)"
                )
        if not mask.bounded:
            raise ValueError(f"mask {mask!r} lets a query see keys that a RollingCache has forgotten: {hint}")
    whole = bias is None or (isinstance(bias, Tensor) and (bias.dim() == 0 or bias.shape[-1] == 1))
    if not whole and (sinks or isinstance(bias, Tensor)):
        raise ValueError(
            "bias goes by the positions of keys, and in a RollingCache they move: leave it out"
            + ("" if isinstance(bias, Tensor) else ", or use sinks=0 for a bias that goes by distance alone")
        )


def write(memory: Parts, new: Parts, fresh: Fresh, start: Lengths) -> None:
    """Put new tokens [batch, heads, token, dim] into their slots of memory [batch, heads, slots, dim]."""
    if fresh.counts is None and start.same is not None:
        for part, tokens in zip(memory, new, strict=True):
            part.narrow(2, start.same, fresh.tokens).copy_(tokens)
        return
    if fresh.one:
        items = torch.arange(len(start.counts), device=start.tensor.device)
        for part, tokens in zip(memory, new, strict=True):
            part[items, :, start.tensor] = tokens[:, :, 0]
        return
    items, places, sources = places_of(fresh, start, new[0])
    for part, tokens in zip(memory, new, strict=True):
        part.transpose(1, 2)[items, places] = tokens.transpose(1, 2)[items, sources]


def shortened(counts: Sequence[int], length: int | Sequence[int]) -> list[int]:
    """What `truncate(length)` leaves of items that have `counts` tokens."""
    if is_int(length):
        check_count("length", length, 0)
        if length > max(counts, default=0):
            raise ValueError(f"length {length} is beyond the {max(counts, default=0)} tokens that the cache has seen")
        return [min(count, length) for count in counts]
    wanted = counts_of("length", length)
    if len(wanted) != len(counts) or any(new > count for new, count in zip(wanted, counts, strict=True)):
        raise ValueError(f"length {wanted} must be at most {list(counts)}, item by item")
    return wanted


def _most(held: Sequence[int], added: Sequence[int]) -> int:
    return max((a + b for a, b in zip(held, added, strict=True)), default=0)


def _longer(part: Tensor, slots: int) -> Tensor:
    with torch.inference_mode(False):
        longer = part.new_zeros(*part.shape[:2], slots, part.shape[3])
    longer.narrow(2, 0, part.shape[2]).copy_(part)
    return longer
