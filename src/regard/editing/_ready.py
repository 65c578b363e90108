"""What becomes of the calls of one kind: worked out for the first of them, so that the others only have to run.

Remembered are masks and programs; tensors are those of each call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from regard import api
from regard.backends import _guard
from regard.backends._areas import result_like
from regard.editing import _fused
from regard.spec import Call

if TYPE_CHECKING:
    from regard.backends._base import Program
    from regard.edits._edit import Place
    from regard.masks import Mask
    from regard.spec import CallSpec
    from regard.watching._seen import Seen

Apart = Sequence[tuple[tuple[int, ...], "Seen | Call"]]  # some of the heads, as a call of their own


class Part(NamedTuple):
    """Some heads of a call, or all of them, and what runs them."""

    own: _fused.Heads | None
    shared: _fused.Heads | None  # heads of keys
    program: Program
    spec: CallSpec
    mask: Mask | None
    bias: Tensor | None  # the same for all calls of a kind
    offset: int | Tensor

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.own is not None:
            query, key, value = query[:, self.own], key[:, self.shared], value[:, self.shared]
        call = Call(self.spec, query, key, value, self.mask, self.bias, None, self.offset)
        return _guard.run(self.program, call).out


class Ready(NamedTuple):
    """The calls that a call becomes; none where it stays as it is."""

    parts: tuple[Part, ...]

    def run(self, seen: Seen) -> Tensor:
        made = [part.run(*seen.tensors) for part in self.parts]
        if len(made) == 1:
            return made[0]
        return joined(seen, [(part.own, out) for part, out in zip(self.parts, made, strict=True)])


def joined(seen: Seen, parts: Sequence[tuple[_fused.Heads | None, Tensor]]) -> Tensor:
    """Outputs of some heads each, as that of all."""
    out = result_like(seen.query, seen.value.shape[3], parts[0][1].dtype)  # under autocast, not that of the query
    for heads, part in parts:
        out[:, heads] = part
    return out


def kind_of(seen: Seen, place: Place) -> Hashable:
    """What is the same for calls of which the same becomes, where edits go by the numbers of a place alone; None where
    tensors decide as well."""
    if place.alike is None or (seen.mask is not None and seen.mask.tensors):
        return None
    described = api.kind_of(seen.given(seen.offset))
    return None if described is None else (place.alike, seen.mask, seen.offset, described)


def ready_of(seen: Seen, changed: Seen, apart: Apart | None, place: Place) -> Ready | None:
    """``changed``: the call as its edits have it; or its heads, as they are ``apart``. None where tensors of the call
    were made into others."""
    if apart is not None:
        group = seen.query.shape[1] // seen.key.shape[1]
        each = [(part, _fused.heads_and_groups(heads, group, seen.query.device)) for heads, part in apart]
        return Ready(tuple(_part(part, place, *heads) for part, heads in each))
    if any(mine is not theirs for mine, theirs in zip(seen.tensors, changed.tensors, strict=True)):
        return None
    return Ready((_part(changed, place),))


def _part(
    given: Seen | Call, place: Place, own: _fused.Heads | None = None, shared: _fused.Heads | None = None
) -> Part:
    if isinstance(given, Call):
        program, call = _fused.SDPA.program(given, named=False), given
    else:
        offset = place.offset if given.offset is None else given.offset
        program, call = api.prepared(given.given(offset))
    return Part(own, shared, program, call.spec, call.mask, call.bias, call.offset)
