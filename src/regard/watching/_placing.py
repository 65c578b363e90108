"""Where the queries of a call stand among its keys, and among all tokens that its module has read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.watching._caches import tokens_held
from regard.watching._modules import Frame, has_cache

if TYPE_CHECKING:
    from regard.recording import Site
    from regard.watching._in_memory import InMemory
    from regard.watching._seen import Seen


class Places:
    """How far each module of a model has read."""

    def __init__(self) -> None:
        self.decoding = False  # whether the pass that is under way continues a sequence
        self._read: dict[str, int] = {}  # by module: tokens that its keys have come to

    def at_whole_texts(self, seen: Seen | InMemory, tokens: int, site: Site, stack: Sequence[Frame]) -> bool:
        """Whether nothing is to be found out about a call of as many queries as keys: it is one of whole texts with
        themselves, from their first tokens on."""
        offset, mask = seen.offset, getattr(seen, "mask", None)
        if isinstance(offset, Tensor) or offset or seen.real is not None or (mask is not None and mask.tensors):
            return False
        for frame in stack:
            if not frame.quiet:
                return False
        self.decoding, self._read[site.path] = False, tokens
        return True

    def placed(
        self, seen: Seen | InMemory, kind: str, site: Site, stack: Sequence[Frame]
    ) -> tuple[Seen | InMemory, str, int]:
        """The call with the place of its queries among its keys, its phase, and the token that its first key is.

        A call that has more keys than queries and continues a sequence has a cache. Its queries stand at the end of the
        keys that the last one may see: a cache that is allocated whole has unused keys after them. A cache that keeps
        only the last keys has dropped as many as its queries are further on than its keys go.
        """
        if kind == "cross":
            # queries are another text's: only a mask that counts from somewhere says where they stand among the keys
            offset = seen.offset if seen.placed and not seen.placeless else 0
            return seen._replace(offset=offset), "decode" if self.decoding else "prefill", 0
        if seen.queries > seen.keys and not seen.placed and seen.placeless:
            seen = seen._replace(offset=0)  # keys that stand for several tokens each, say; queries are all of them
        longer, before = seen.queries < seen.keys, self._read.get(site.path)
        total = tokens_held(stack, seen.queries, seen.keys) if longer else None
        if total is not None:  # the cache counts its tokens
            reached = min(total, seen.keys)
            if not seen.placed or seen.placeless:
                seen = seen._replace(offset=reached - seen.queries)
            self.decoding, self._read[site.path] = total > seen.queries, total
            return seen, "decode" if self.decoding else "prefill", total - reached
        decode = longer and (has_cache(stack) or (before is not None and before + seen.queries == seen.keys))
        self.decoding = decode
        end: Tensor | int = seen.keys
        if longer and not seen.placed:
            last = _end_of_memory(seen)
            if last is not None:
                end = last + 1
                seen = seen._replace(offset=(last - seen.queries + 1).clamp_min(0))
        if not decode:
            self._read[site.path] = seen.keys
            return seen, "prefill", 0
        reached = int(end.max()) if isinstance(end, Tensor) else end
        if before is None or seen.placed:
            self._read[site.path] = reached
            return seen, "decode", 0
        self._read[site.path] = before + seen.queries
        return seen, "decode", max(0, before + seen.queries - reached)


def _end_of_memory(seen: Seen | InMemory) -> Tensor | None:
    """The last key that the last query sees, where a mask hides what comes after it, as it hides memory that is not
    filled yet. Where another query sees further, the mask is of another kind."""
    rows = seen.queries
    last = seen.last_key(range(rows - 1, rows))
    before = None if last is None or rows == 1 or not seen.placeless else seen.last_key(range(rows - 1))
    if last is None or before is None:
        return last
    return torch.where((before > last).any(), seen.keys - 1, last)  # without waiting for a GPU
