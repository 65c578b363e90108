"""Which tokens the queries of a call are, and how many of its keys are tokens: what caches say, where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from regard.watching._caches import cache_of, layer_number, slides, tokens_held, tokens_seen
from regard.watching._modules import Frame, attending, has_cache

if TYPE_CHECKING:
    from regard.watching._in_memory import InMemory
    from regard.watching._seen import Seen


class Positions(NamedTuple):
    offset: int | Tensor  # of the first query among the keys
    first: int | Tensor | None  # of the first query among all tokens; None where nothing says which it is
    read: int | Tensor | None  # keys that are tokens: memory that is not filled yet comes after them; None likewise
    dropped: int  # tokens before the first key
    in_order: bool = False  # whether the keys are then the tokens that follow those, one after another


def of_cross(seen: Seen | InMemory, stack: Sequence[Frame]) -> Positions:
    """Queries are tokens of the decoder, which keys of another sequence do not tell."""
    first = _of_decoder(seen.queries, stack)
    offset: int | Tensor = first or 0
    if seen.placed:  # the call's own mask counts from there
        offset = seen.keys - seen.queries if seen.offset is None else seen.offset
    return Positions(offset, first, seen.keys, 0)


def of_self(seen: Seen | InMemory, stack: Sequence[Frame], counted: int) -> Positions:
    """``counted``: tokens that a cache seems to have dropped, by the calls that came before."""
    queries, keys = seen.queries, seen.keys
    read: int | Tensor | None
    total = tokens_held(stack, queries, keys)
    offset = keys - queries if seen.offset is None else seen.offset
    if total is not None:
        read = min(total, keys)
        offset = offset if seen.placed and not seen.placeless else read - queries
        return Positions(offset, total - queries, read, total - read, slides(stack))
    read = offset + queries
    if seen.placed and not (isinstance(read, int) and read == keys):
        everything = getattr(seen, "mask", None) is None and getattr(seen, "bias", None) is None
        read = keys if everything else None
    lengths = [] if counted else _lengths(stack, queries)
    dropped = counted or max(0, max(lengths, default=0) - keys)
    if not dropped:
        return Positions(offset, offset, read, 0)
    # calls that were counted may have been of several texts: what a cache says is sure, what was counted is not
    return Positions(offset, lengths[0] - queries if len(set(lengths)) == 1 else None, read, dropped)


def _of_decoder(queries: int, stack: Sequence[Frame]) -> int | None:
    """The position of the decoder's first token in this call. Its self attention ran before, and filled the cache."""
    frame = attending(stack)
    cache = cache_of(frame)
    if cache is not None and hasattr(cache, "self_attention_cache"):
        before = tokens_seen(cache, layer_number(frame)) - queries
        return before if before >= 0 else None
    for frame in stack:  # a layer of regard's own
        given = frame.given()
        if given.get("memory_cache") is not None:
            lengths: list[int] = list(getattr(given.get("cache"), "lengths", ()))
            return lengths[0] - queries if len(set(lengths)) == 1 and lengths[0] >= queries else None
    return None if has_cache(stack) else 0


def _lengths(stack: Sequence[Frame], queries: int) -> list[int]:
    """How many tokens of each item a cache of regard's own has seen, those of this call too."""
    for frame in reversed(stack):
        cache = frame.given().get("cache")
        lengths: list[int] | None = getattr(cache, "lengths", None)
        if isinstance(lengths, list) and lengths:
            more = queries if getattr(cache, "attends_whole", False) else 0  # it counts them after the call
            return [length + more for length in lengths]
    return []
