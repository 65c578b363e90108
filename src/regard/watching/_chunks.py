"""Modules that attend for some of their queries at a time, each over all keys: which tokens those are."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from regard.statistics import Want
from regard.watching._layout import loops_over_heads
from regard.watching._modules import Frame, attending, has_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from regard.recording import Recorded
    from regard.watching._in_memory import InMemory
    from regard.watching._seen import Seen


class _Chunk(NamedTuple):
    call: Recorded
    start: int
    parts: dict[str, Tensor]  # what else it would say if its first query stood there
    memory: tuple[int, tuple[int, ...], int] | None  # of its queries: whose, and strides and start in it


class Chunks:
    """Without a cache, queries that are fewer than the keys are taken for the last tokens. Where the calls of a module
    have as many queries in all as keys, and each would stand at the end, they are all of the tokens in their order; but
    for slices of one tensor that are taken in another order, which stay where they are."""

    def __init__(self) -> None:
        self._open: weakref.WeakKeyDictionary[Frame, list[_Chunk]] = weakref.WeakKeyDictionary()

    def start(self, seen: Seen | InMemory, what: tuple[str, str, int], stack: Sequence[Frame]) -> int | None:
        """Where the first query stands if the call is such a chunk; None where it is none."""
        kind, _, dropped = what
        if kind != "self" or dropped or seen.queries >= seen.keys or seen.placed or not seen.placeless:
            return None
        if has_cache(stack) or loops_over_heads(stack, seen.shape[1]):
            return None
        before = self._open.get(attending(stack), [])
        return sum(chunk.call.queries for chunk in before)

    def parts(self, seen: Seen | InMemory, start: int, want: Want, permitted: Tensor) -> dict[str, Tensor]:
        """The statistics that depend on where the queries stand."""
        want = Want.none().but(distance=want.distance, scores=want.scores)
        if not want.distance and want.scores is False:
            return {}
        found = seen._replace(offset=start).statistics(want, permitted)
        return {name: part for name, part in found.items() if name in ("distance", "relations")}

    def add(
        self, call: Recorded, start: int, parts: dict[str, Tensor], stack: Sequence[Frame], seen: Seen | InMemory
    ) -> None:
        group = self._open.setdefault(attending(stack), [])
        chunk = _Chunk(call, start, parts, _memory_of(getattr(seen, "query", None)))
        if group and (
            group[0].call.keys != call.keys or not _same_end(group[0].call, call) or not _may_follow(group[-1], chunk)
        ):
            group.clear()
            return
        group.append(chunk)
        length = start + call.queries
        if length < call.keys:
            return
        if length == call.keys and len(group) > 1:
            for chunk in group:
                device = chunk.call.parts["lse"].device  # it may have been moved already
                chunk.call.parts.update({name: part.to(device) for name, part in chunk.parts.items()})
                chunk.call.phase = "prefill"  # the first may have looked like the next tokens of the text before
                chunk.call.positions = torch.full_like(chunk.call.positions, chunk.start)
        group.clear()


def _memory_of(query: Tensor | None) -> tuple[int, tuple[int, ...], int] | None:
    return None if query is None else (query.untyped_storage().data_ptr(), query.stride(), int(query.storage_offset()))


def _may_follow(one: _Chunk, other: _Chunk) -> bool:
    """Whether the rows of the other may be the next ones. Equal places in memory say nothing: it is used again."""
    if one.memory is None or other.memory is None or one.memory[:2] != other.memory[:2]:
        return True
    (_, strides, before), (_, _, at) = one.memory, other.memory
    return at in (before, before + one.call.queries * strides[2])


def _same_end(one: Recorded, other: Recorded) -> bool:
    ends: list[Any] = [call.positions.cpu() + call.queries for call in (one, other)]
    return ends[0].shape == ends[1].shape and bool((ends[0] == ends[1]).all())
