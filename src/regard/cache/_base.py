"""What all caches share: the methods that modules call, and the checks before anything changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from regard import api, masks
from regard._checks import autocasts, check_count
from regard.backends import _stored
from regard.backends._stored import Stored
from regard.bias import Bias
from regard.cache import _pieces, _storage
from regard.cache._given import Asked, Made, Preview, Updated, check_dtype, check_heads, fits
from regard.cache._lengths import Fresh, Lengths, counts_of, first_row, places_of
from regard.cache._padded import Padded
from regard.cache._storage import Parts
from regard.masks import Mask
from regard.masks._joins import both

_autocasts = torch._C._is_any_autocast_enabled


class CacheFull(ValueError):
    """The new tokens do not fit; the cache is as it was."""


class TokenCache(ABC):
    """Keys and values of the tokens that came before, for one attention layer.

    The first `update` allocates memory, for the batch, heads, dims, dtype and device of its tokens.
    Gradients reach the tokens of the current call; tokens of earlier calls are constants.
    """

    def __init__(self, int8: bool) -> None:
        if not isinstance(int8, bool):
            raise TypeError(f"int8 must be True or False, got {int8!r}")
        self.int8 = int8
        self._reads_views = not int8
        self._made: Made | None = None
        self._held = Lengths((), torch.device("cpu"))  # tokens that can be attended to
        self._view = self._held  # likewise, as `update` last gave them
        self._padded_by_mask = False
        self._will_be_padded: bool | None = None  # the same, once the call that was checked has stored its tokens

    @property
    def lengths(self) -> list[int]:
        """Number of tokens seen so far, item by item."""
        return list(self._seen.counts)

    @property
    def position(self) -> int | Tensor:
        """The position of the next token: an int, or `[batch]` where items differ."""
        return self._seen.place

    @property
    def _seen(self) -> Lengths:
        return self._held

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Memory allocated for keys and values, in bytes."""

    @property
    def filled(self) -> Mask | None:
        """A mask that hides the slots without a token in the last result of `update`; None if there are none."""
        return None if self._view.same is not None else masks.padding(self._view.tensor)

    pads: Tensor | None = None  # [batch, token]: new tokens that are padding; see `padded`

    def padded(self, lengths: Any, side: str = "right", tokens: int | None = None) -> Padded:
        """This cache for one call whose tokens are padded: item b has `lengths[b]` real ones, and only those are kept.

        `tokens` is the number of tokens including padding; that of the longest item when not given.

            out = mha(x, mask=masks.causal(), cache=cache.padded([7, 3, 5]))     # then as usual: cache=cache
        """
        counts = counts_of("lengths", lengths)
        if side not in ("left", "right"):
            raise ValueError(f"side must be 'left' or 'right', got {side!r}")
        longest = max(counts, default=0)
        if tokens is not None:
            check_count("tokens", tokens, longest)
        return Padded(self, Fresh(longest if tokens is None else tokens, tuple(counts), side))

    def check(self, query: Tensor, key: Tensor, value: Tensor | None, *, mask: Mask | None, bias: Any) -> None:
        """Raise if `update`, or attention over its result, would fail or silently compute something else."""
        self._check(Asked(_all_of(key), query, key, value, mask, bias))

    def update(self, key: Tensor, value: Tensor | None = None) -> Updated:
        """Store `[batch, num_kv_heads, token, dim]`; return all keys and values, and the position of the first new one.

        Without values (latent attention, where they are a part of the keys), the keys are returned twice.
        """
        fresh = _all_of(key)
        self._check_new(fresh, key, value)
        return self._update(fresh, key, value, torch.is_grad_enabled())

    def preview(self, key: Tensor, value: Tensor | None = None) -> Preview:
        """What `update` would return, as tensors that take no memory; then `filled`, and the number of pieces in which
        `attend` would read it. Changes nothing."""
        return self._preview(_all_of(key), key, value)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        mask: Mask | None = None,
        bias: Any = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        value_dim: int | None = None,
        backend: str = "auto",
    ) -> Tensor:
        """`update`, then attend from the new tokens' queries to everything in the cache, without copying it.

        `mask` and `bias` count positions of the item's own tokens, as in `regard.attention`. If the cache holds only
        keys, the values are their first `value_dim` numbers.
        """
        fresh = Fresh(key.shape[2]) if type(key) is Tensor and key.dim() == 4 else _all_of(key)
        return self._attend(Asked(fresh, query, key, value, mask, bias, scale, softcap, sinks, value_dim, backend))

    @abstractmethod
    def truncate(self, length: int | Sequence[int]) -> None:
        """Forget all tokens from `length` on, in each item, as if they had never been seen."""

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Move the contents to a device, to a dtype, or both; returns the cache itself. int8 numbers stay int8 and are
        read as the new dtype."""
        if isinstance(device, torch.dtype):  # to(torch.bfloat16), as a tensor takes it
            device, dtype = None, device
        check_dtype(dtype)
        place, made = None if device is None else torch.device(device), self._made
        if made is not None:  # else it takes the place and dtype of its first tokens
            if place is not None:
                place = torch.empty(0, device=place).device  # as tensors there name it: "cuda" is "cuda:0"
            moved = made._replace(device=place or made.device, dtype=dtype or made.dtype)
            if moved != made:
                with torch.inference_mode(False):
                    self._move(moved)
        return self

    @abstractmethod
    def save(self, path: str | Path) -> None:
        """Write the contents to a safetensors file, completely or not at all; `regard.cache.load` reads it."""

    @abstractmethod
    def reorder(self, index: Any) -> None:
        """Item i becomes what item `index[i]` was (a step of beam search); the number of items may change."""

    @abstractmethod
    def fork(self) -> Self:
        """An independent copy of this cache."""

    @abstractmethod
    def fill_unused(self, number: float) -> None:
        """Write `number` to every slot without a token. It cannot reach any result: tests write NaN."""

    # What a kind of cache defines.

    _forgets = False  # whether storing tokens drops others, so that a call that fails afterwards could not be undone

    @abstractmethod
    def _go_back(self, made: Made | None, held: Lengths, padded: bool) -> None:
        """As before a call whose tokens were stored, and which then failed."""

    @abstractmethod
    def _move(self, made: Made) -> None:
        """What is held, to the device and dtype of ``made``, which differ from its own."""

    @abstractmethod
    def _check_room(self, made: Made, added: Sequence[int]) -> None:
        """Raise, with nothing changed, where there is no room for that many more tokens of such sizes."""

    @abstractmethod
    def _allocate(self, made: Made, batch: int) -> None:
        """Set the memory aside."""

    @abstractmethod
    def _write(self, fresh: Fresh, key: Parts, value: Parts | None) -> Lengths:
        """Store the tokens, for which `_check_room` found room; where the first of them stands in each item's view."""

    @abstractmethod
    def _read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of view slots start … stop − 1; views of the memory where that is possible."""

    def _check(self, asked: Asked, rehearsed: bool = True) -> None:
        fresh, query, key, value, mask, bias, *_ = asked
        self._check_new(fresh, key, value)
        # what marks padding holds tensors
        padded = isinstance(mask, Mask) and bool(mask.tensors) and mask.marks_padding
        side = mask.padding_side if padded and mask is not None else None
        ragged = fresh.counts is not None or self._held.same is None
        if side == "right" or (side is not None and ragged):
            raise ValueError(
                f"mask {mask!r} pads on the {side} with a cache, which would keep the padding between the tokens: "
                f"leave it out and pass cache=cache.padded(lengths, side={side!r}), in the calls that have padding"
            )
        if self._padded_by_mask and not padded:
            raise ValueError(
                "mask has no masks.padding(…, side='left'), but earlier calls with this cache had: their padding is in "
                "it, and would be seen. Pass it in every call, or use cache=cache.padded(lengths, side='left') instead"
            )
        if rehearsed:
            # a rule without tensors fits every call; anything else is tried on keys of the right size without memory
            usual = mask is None or (isinstance(mask, Mask) and not mask.tensors)
            if bias is not None or not usual or not fits(query, key):
                keys, values, offset, _, _ = self._preview(fresh, key, value)
                api.explain(query, keys, values, mask=mask, bias=bias, query_offset=offset)
        self._will_be_padded = padded

    def _preview(self, fresh: Fresh, key: Tensor, value: Tensor | None) -> Preview:
        start = self._start_of(fresh, key)
        view = start.plus(fresh.of(key.shape[0]))
        keys, values = (
            x.new_empty(x.shape[3]).expand(*x.shape[:2], view.longest, x.shape[3])
            for x in (key, key if value is None else value)
        )
        filled = None if view.same is not None else masks.padding(view.tensor)
        at_once = self._is_read_whole(fresh, key)
        if fresh.one and not at_once:  # there may be kernels that read it as it is
            stored = self._as_stored()
            at_once = stored is not None and _stored.can_decode(key, stored)
        pieces = 1 if at_once else -(-view.longest // _pieces.PIECE)
        return keys, values, first_row(fresh, start), filled, pieces

    def _start_of(self, fresh: Fresh, key: Tensor) -> Lengths:
        """Where the first of new tokens will stand in each item's view."""
        held = self._held.counts if self._made is not None else (0,) * key.shape[0]
        return Lengths(self._start_after(held, fresh.of(key.shape[0])), key.device)

    def _start_after(self, held: Sequence[int], added: Sequence[int]) -> Sequence[int]:
        """Likewise, of `added` tokens after those that are held."""
        return held

    def _is_read_whole(self, fresh: Fresh, like: Tensor) -> bool:
        """Whether all keys are there as a view, without slots to hide where that costs, and nothing has to be made of
        them."""
        half = like.device.type == "cpu" and like.dtype.itemsize == 2  # would be copied to float32
        # the kernels of a GPU leave out the empty slots of items of unequal lengths by themselves
        even = self._held.same is not None or like.is_cuda
        return self._reads_views and not half and fresh.counts is None and even

    def _check_new(self, fresh: Fresh, key: Tensor, value: Tensor | None) -> None:
        if fresh.counts is None and self._made is not None and self._made.fits(key, value, len(self._held.counts)):
            return
        for name, given in (("key", key), ("value", value)):
            if given is not None:
                check_heads(name, given)
        differ = value is not None and (value.dtype, value.device) != (key.dtype, key.device)
        if value is not None and differ and not autocasts(key.device.type):
            raise TypeError(
                f"key and value must have one dtype and device, got key {key.dtype} on {key.device} and value "
                f"{value.dtype} on {value.device}; convert one with .to"
            )
        if value is not None and value.shape[:3] != key.shape[:3]:
            raise ValueError(
                f"key and value must agree in batch, heads and tokens: {list(key.shape)}, {list(value.shape)}"
            )
        if fresh.counts is not None and (len(fresh.counts) != key.shape[0] or fresh.tokens != key.shape[2]):
            raise ValueError(
                f"padded({list(fresh.counts)}) is for {len(fresh.counts)} items of {fresh.tokens} tokens, got key "
                f"{list(key.shape)}; give one length an item, and tokens= where no item fills its row"
            )
        if self._made is not None:
            self._made.check(key, value)
            if key.shape[0] != len(self._held.counts):
                raise ValueError(f"key has {key.shape[0]} items, but this cache holds {len(self._held.counts)}")

    def _store(self, fresh: Fresh, key: Tensor, value: Tensor | None) -> Lengths:
        """Everything of `update` but checks and reading back: where the first new token stands in each item."""
        batch = key.shape[0]
        added = (fresh.tokens,) * batch if fresh.counts is None else fresh.counts
        made = Made.of(key, value) if self._made is None else self._made
        self._check_room(made, added)
        # what is stored carries no gradients
        parts: tuple[Parts, Parts | None]
        if self.int8:
            parts = _storage.encode(key), None if value is None else _storage.encode(value)
        else:
            parts = (key.detach(),), None if value is None else (value.detach(),)
        if self._made is None:
            self._allocate(made, batch)
            self._held = self._view = Lengths((0,) * batch, key.device)
            self._made = made
        start = self._write(fresh, *parts)
        if self._will_be_padded is not None:
            self._padded_by_mask, self._will_be_padded = self._will_be_padded, None
        return start

    def _update(self, fresh: Fresh, key: Tensor, value: Tensor | None, recorded: bool) -> Updated:
        """`recorded`: gradients will be asked of what is made of the result, which later calls must then not change."""
        start = self._store(fresh, key, value)
        view = self._view
        keys, values = self._read(0, view.longest if view.same is None else view.same)
        if torch.is_grad_enabled() and (key.requires_grad or (value is not None and value.requires_grad)):
            keys = self._with_gradient(fresh, keys, key, start)
            values = keys if value is None else self._with_gradient(fresh, values, value, start)
        elif recorded and self._reads_views:
            keys = keys.clone()
            values = keys if value is None else values.clone()
        return keys, values, first_row(fresh, start) if start.same is None or fresh.counts is not None else start.same

    def _with_gradient(self, fresh: Fresh, whole: Tensor, new: Tensor, start: Lengths) -> Tensor:
        """A copy of what was read in which the new tokens carry their gradients."""
        items, places, sources = places_of(fresh, start, new)
        tokens = new.transpose(1, 2)[items, sources]  # [n, heads, dim]
        whole = whole.detach().transpose(1, 2)
        if self.int8:
            # the rounded number, with the gradient of the one it was rounded from
            tokens = whole[items, places] + (tokens - tokens.detach())
        return whole.index_put((items, places), tokens).transpose(1, 2)

    def _attend(self, asked: Asked) -> Tensor:
        fresh, query, key, value, mask, bias, scale, softcap, sinks, value_dim, backend = asked
        recorded = torch.is_grad_enabled() and _wants_gradients(query, key, value, bias, sinks)
        at_once = recorded or self._is_read_whole(fresh, key) or torch.compiler.is_compiling()
        # one call refuses what it is given, and then the tokens go again. A cache that forgets cannot go back, one in
        # pieces has to be checked as a whole, and under autocast what is stored is not what was given.
        rehearsed = self._forgets or not at_once or (not torch.compiler.is_compiling() and _autocasts())
        self._check(asked, rehearsed)
        if value_dim is not None:
            width = (key if value is None else value).shape[3]
            check_count("value_dim", value_dim, 0)
            if value_dim > width:
                raise ValueError(f"value_dim must be at most {width}, the width of what is held, got {value_dim}")
        usual = backend == "auto" and scale is None and softcap is None and sinks is None
        if rehearsed and not usual:
            self._try(asked, at_once)  # the rest has been checked
        before = self._made, self._held, self._padded_by_mask
        try:
            if not at_once:
                return self._attend_in_pieces(asked)
            keys, values, offset = self._update(fresh, key, value, recorded)
            values = values if value_dim is None else values[..., :value_dim]
            joined = mask if self._view.same is not None else both(mask, self.filled)
            return api.attention(
                query, keys, values, mask=joined, bias=bias, scale=scale, softcap=softcap, sinks=sinks,
                query_offset=offset, backend=backend,
            )  # fmt: skip
        except BaseException:
            if not self._forgets:
                self._go_back(*before)
            raise

    def _attend_in_pieces(self, asked: Asked) -> Tensor:
        """Of a cache whose memory is no view: kernels that read it as it is, or piece by piece."""
        query, value_dim = asked.query, asked.value_dim
        start = self._store(asked.fresh, asked.key, asked.value)
        if asked.fresh.one and value_dim is None and asked.bias is None and asked.backend in ("auto", "triton"):
            stored = self._as_stored() if _pieces.sees_all(asked.mask) else None
            if stored is not None and _stored.can_decode(query, stored):
                return _stored.decode(query, stored, asked.scale, asked.softcap, asked.sinks)

        def read(a: int, b: int) -> tuple[Tensor, Tensor]:
            keys, values = self._read(a, b)
            return keys, values if value_dim is None else values[..., :value_dim]

        return _pieces.attend(asked, read, self._view, first_row(asked.fresh, start))

    def _as_stored(self) -> Stored | None:
        """Keys and values as they are kept, for kernels that read them so; None where those have no name for it."""
        return None

    def _try(self, asked: Asked, at_once: bool) -> None:
        """Raise what `attend` would raise once the tokens are stored: the same call, on keys that take no memory. For a
        cache that forgets tokens when it stores new ones: it cannot go back."""
        if torch.compiler.is_compiling():
            return  # a call that fails while it is traced has not run
        fresh, query, key, value, mask, bias, scale, softcap, sinks, value_dim, backend = asked
        keys, values, offset, filled, _ = self._preview(fresh, key, value)
        values = values if value_dim is None else values[..., :value_dim]
        api.explain(
            query, keys, values, mask=both(mask, filled) if at_once else mask, bias=bias, scale=scale, softcap=softcap,
            sinks=sinks, query_offset=offset, backend=backend if at_once else "auto",
        )  # fmt: skip
        if not at_once and backend != "auto":
            _pieces.explain(asked, keys, values, self._start_of(fresh, key).plus(fresh.of(key.shape[0])), offset)


def _all_of(key: Tensor) -> Fresh:
    """New tokens that are tokens, all of them."""
    check_heads("key", key)
    return Fresh(key.shape[2])


def _wants_gradients(*given: Any) -> bool:
    if not torch.is_grad_enabled():
        return False
    tables = (x.table(torch.float32, torch.device("cpu")) if isinstance(x, Bias) else x for x in given)
    return any(isinstance(x, Tensor) and x.requires_grad for x in tables)
