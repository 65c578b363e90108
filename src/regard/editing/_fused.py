"""A call given by query, key and value, changed: cuts become its mask, a steer a bias of one row, one more dim or a
call of its own, a pattern its query and key.

Tensors keep their gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard import backends, masks
from regard.backends import _cuda, _guard
from regard.backends._areas import steered
from regard.backends._base import accumulation
from regard.bias import TableBias
from regard.edits._edit import Added, Change, Place
from regard.masks._joins import both
from regard.masks._rectangle import rectangle
from regard.watching._index import index_of, kept
from regard.watching._read import Read
from regard.watching._seen import Seen
from regard.watching._silence import silence

if TYPE_CHECKING:
    from regard.masks import Mask
    from regard.spec import Call

SDPA = backends.ALL["sdpa"]
_read = Read()
_STEP = 8
_MOST_RUNS = 3  # of queries, and of keys, that are steered apart
Heads = slice | Tensor


class Pattern(NamedTuple):
    """What the weights of a recorded call come from: a call without its values, or the weights themselves."""

    seen: Seen | None
    weights: Tensor | None = None  # [batch, head, query, key], with what stands for a sink after the last key
    extra: int = 0  # how many keys of the weights stand for sinks


def changed(seen: Seen, change: Change, place: Place) -> Seen:
    if change.pattern is not None:
        seen = _patched(seen, change.pattern, place)
    if change.hide is not None:
        seen = seen._replace(mask=_cut(seen, change.hide, place))
    if change.add is not None:
        seen = _steered(seen, change.add, place)
    return seen


def edges_of(seen: Seen, place: Place) -> Callable[[range, range], Tensor]:
    """The edges that a call has, as ``Place.has_edges`` gives them."""
    offset = place.offset if seen.offset is None else seen.offset
    # the place holds this function: if that held the place, query and key would live until garbage is collected
    mask, bias = seen.mask, seen.bias.detach() if isinstance(seen.bias, Tensor) else None
    queries, keys, device = place.queries, place.keys, place.device

    def has_edges(rows: range, columns: range) -> Tensor:
        with silence(), torch.no_grad():
            there = torch.ones(1, 1, len(rows), len(columns), dtype=torch.bool, device=device)
            if mask is not None:
                there = mask.tile(rows, columns, queries, keys, offset=offset, device=device)
            if bias is not None:
                whole = bias.expand(-1, -1, queries, keys)
                there = there & (whole[:, :, rows.start : rows.stop, columns.start : columns.stop] > -torch.inf)
            return there

    return has_edges


def kind_of_edges(seen: Seen, place: Place) -> Hashable:
    """What is the same for all calls that have the same edges, by the numbers of their place; None where that is not
    known."""
    offset = place.offset if seen.offset is None else seen.offset
    if isinstance(seen.bias, Tensor) or isinstance(offset, Tensor):
        return None
    if seen.mask is None or not seen.mask.tensors:
        return seen.mask, offset
    # the layers of a model are handed the same tensor
    if any(type(each) is not Tensor or each.is_inference() for each in seen.mask.tensors):
        return None
    return seen.mask.code, offset, *(_read.once(each, "edges", object) for each in seen.mask.tensors)


def head_rows(place: Place) -> Tensor:
    """bool [1, head, 1, 1]: the heads that are edited."""
    return _rows_of(place.heads, place.count, place.device)


@functools.lru_cache(256)
def _rows_of(heads: tuple[int, ...], count: int, device: torch.device) -> Tensor:
    return kept([[[[head in heads]] for head in range(count)]], device)


def all_heads(place: Place) -> bool:
    return len(place.heads) == place.count


def _cut(seen: Seen, hide: Mask, place: Place) -> Mask | None:
    """The call's mask without some edges."""
    if hide.tensors or (seen.mask is not None and seen.mask.tensors) or type(seen.query) is not Tensor:
        return both(seen.mask, _only_for(~hide, place))
    return _cut_by_rule(seen.mask, (hide,), place.count, place.heads, place.device)


@functools.lru_cache(64)
def _cut_by_rule(
    mask: Mask | None, hides: tuple[Mask, ...], count: int, heads: tuple[int, ...], device: torch.device
) -> Mask | None:
    """The same mask for all calls that are cut alike: it remembers how they run."""
    with torch.inference_mode(False):  # it outlives the block, and may be saved for a backward pass
        for hide in hides:
            left = ~hide if len(heads) == count else ~hide | masks.drop(_rows_of(heads, count, device))
            mask = left if mask is None else mask & left
        return mask


def _only_for(mask: Mask, place: Place) -> Mask:
    return mask if all_heads(place) else mask | masks.drop(head_rows(place))


def by_heads(seen: Seen, changes: list[Change], place: Place) -> list[tuple[tuple[int, ...], Seen | Call]] | None:
    """The heads that are cut or steered, and the others, as a call each: masks stay rules, where a mask that differs
    from head to head would be tested pair by pair on a GPU, and a steer stays out of the tensors. None where a call is
    changed in another way, has one query, or is better off whole."""
    if seen.query.device.type == "cpu" or seen.query.shape[2] == 1 or seen.bias is not None:
        return None
    hidden = tuple(change.hide for change in changes if change.hide is not None)
    added = [change.add for change in changes if change.add is not None]
    if any(change.pattern is not None for change in changes) or len(added) > 1:
        return None
    if not added and (not hidden or all_heads(place)):
        return None
    known = (*hidden, *(() if seen.mask is None else (seen.mask,)))
    if any(mask.heads != 1 or mask.is_open for mask in known):
        return None
    if any(mask.tensors for mask in known):
        left = functools.reduce(both, [~hide for hide in hidden], seen.mask)
    else:
        left = _cut_by_rule(seen.mask, hidden, place.count, tuple(range(place.count)), place.device)
    edited = _of_heads(seen, place.heads, left)
    ready = in_areas(edited, added[0], place) if added else edited
    if ready is None:
        return None
    others = tuple(head for head in range(place.count) if head not in place.heads)
    parts: list[tuple[tuple[int, ...], Seen | Call]] = [(place.heads, ready)]
    return [*parts, (others, _of_heads(seen, others, seen.mask))] if others else parts


def run_in_areas(call: Call) -> Tensor:
    return _guard.run(SDPA.program(call, named=False), call).out


def in_areas(seen: Seen, added: Added, place: Place) -> Call | None:
    """The steered call as a few plain ones: of the edges that are steered, and of the others. None where those are not
    few, or where wider heads take less time."""
    offset = place.offset if seen.offset is None else seen.offset
    if isinstance(offset, Tensor) or len(added.queries) > 1 or len(added.keys) > 1:
        return None
    call = seen._replace(offset=offset).call()
    if not _cuda.is_worth_areas(call.spec):
        return None
    where = added.once("where", lambda: rectangle(added.queries[0], added.keys[0], _MOST_RUNS))
    if where is None:
        return None
    mask = masks.everything() if seen.mask is None else seen.mask

    def areas() -> Any:
        return steered(mask, where, added.amount, *seen.shape[2:], offset)

    found = areas() if mask.tensors else added.once(("areas", mask, offset), areas)
    if found is None:
        return None
    call = call.replace(spec=call.spec._replace(areas=found))
    return None if SDPA.refuse(call.spec) else call


def _of_heads(seen: Seen, heads: tuple[int, ...], mask: Mask | None) -> Seen:
    own, shared = heads_and_groups(heads, seen.query.shape[1] // seen.key.shape[1], seen.query.device)
    sinks = None if seen.sinks is None else seen.sinks[own]
    return seen._replace(
        query=seen.query[:, own], key=seen.key[:, shared], value=seen.value[:, shared], mask=mask, sinks=sinks, lse=None
    )


@functools.lru_cache(256)
def heads_and_groups(heads: tuple[int, ...], group: int, device: torch.device) -> tuple[Heads, Heads]:
    groups = tuple(sorted({head // group for head in heads}))
    if tuple(each * group + at for each in groups for at in range(group)) != heads:
        groups = tuple(head // group for head in heads)  # parts of groups: keys of each head
    return index_of(heads, device), index_of(groups, device)


def _steered(seen: Seen, added: Added, place: Place) -> Seen:
    """scale·(q·k + u·b/scale): u and b/scale are numbers more of query and key. In half precision b is written as the
    sum of three numbers, so that what is added is exact to float32."""
    query, key, device = seen.query, seen.key, place.device
    scale = 1 / math.sqrt(query.shape[3]) if seen.scale is None else seen.scale
    one_row = seen.bias is None or (isinstance(seen.bias, Tensor) and seen.bias.shape[2] == 1)
    by_key = query.device.type == "cpu" and one_row and added.of_all_queries
    of_heads = (place.heads, place.count, device, query.dtype)
    if by_key or seen.softcap is not None or scale == 0 or _too_large(added, scale, query.dtype):
        return _biased(seen, added.once(("bias", by_key, of_heads), lambda: _bias(added, by_key, place, seen)), place)
    # kernels of a GPU want the dims of heads to be a multiple of some numbers; on a CPU each more costs time
    step, count = 1 if query.device.type == "cpu" else _STEP, 3 if query.dtype.itemsize == 2 else 1
    more = -query.shape[3] % step
    more += -(-(count - more) // step) * step if more < count else 0
    wide_query, wide_key = added.once(
        ("wide", of_heads, more, scale), lambda: _wide(added, place, query.dtype, count, more, scale)
    )
    value = seen.value
    if value.shape[3] == query.shape[3]:  # fused kernels want values as wide as keys; the output is cut to its width
        value = torch.nn.functional.pad(value, (0, more))
    query = torch.cat((query, wide_query.expand(*query.shape[:3], -1)), 3)
    key = torch.cat((key, wide_key.expand(*key.shape[:3], -1)), 3)
    return seen._replace(query=query, key=key, value=value, scale=scale, lse=None)


def _too_large(added: Added, scale: float, dtype: torch.dtype) -> bool:
    """Whether what is added is too large for a number of query or key."""
    return abs(added.amount) > abs(scale) * torch.finfo(dtype).max


def _bias(added: Added, by_key: bool, place: Place, seen: Seen) -> Tensor:
    u, b = added.factors()
    # torch's kernel takes one number for each key at no cost
    rows = (u[:, None, :1, None] if by_key else u[:, None, :, None]).to(place.device) * head_rows(place)
    return (rows * b[:, None, None].to(place.device)).to(accumulation(seen.query.dtype))


def _wide(added: Added, place: Place, dtype: torch.dtype, count: int, more: int, scale: float) -> tuple[Tensor, Tensor]:
    """What joins query and key: [batch or 1, head, query, more] and [batch or 1, 1, key, more]."""
    u, b = added.factors()
    parts, left = [], b / scale
    for _ in range(count):
        parts.append(left.to(dtype))
        left = left - parts[-1].double()
    rows = (u[:, None, :, None].to(place.device) * head_rows(place)).to(dtype)
    wide = torch.nn.functional.pad(torch.stack(parts, -1)[:, None], (0, more - count))
    return torch.nn.functional.pad(rows.expand(-1, -1, -1, count), (0, more - count)), wide.to(place.device)


def _biased(seen: Seen, more: Tensor, place: Place) -> Seen:
    if isinstance(seen.bias, TableBias):
        raise place.refuse("it has a softcap and a bias that is a rule, to which a steer cannot be added")
    return seen._replace(bias=more if seen.bias is None else seen.bias + more)


def _patched(seen: Seen, pattern: Pattern, place: Place) -> Seen:
    other = pattern.seen
    if other is None:
        raise place.refuse("the recording has the weights of code that wrote them out, and this call is a fused one")
    mine, theirs = seen.shape, other.shape
    if mine[1:] != theirs[1:] or theirs[0] not in (1, mine[0]) or other.query.shape[3] != seen.query.shape[3]:
        raise place.refuse(
            f"it is a call of {list(mine)} [batch, head, query, key], and the recorded one {list(theirs)}: patch a "
            "pattern from a run of the same length"
        )
    if (seen.scale, seen.softcap) != (other.scale, other.softcap):
        raise place.refuse("the recorded call has another scale or softcap")
    if isinstance(seen.bias, TableBias) != isinstance(other.bias, TableBias):
        raise place.refuse("the recorded call has another kind of bias")
    batch = mine[0]
    query, key = (x.to(seen.query).expand(batch, -1, -1, -1) for x in (other.query, other.key))
    if all_heads(place):
        value = seen.value
        if key.shape[1] != value.shape[1]:
            key, value = _spread(key, place.count), _spread(value, place.count)
        return seen._replace(query=query, key=key, value=value, mask=other.mask, bias=other.bias, offset=other.offset)
    rows = head_rows(place)
    key, own, value = (_spread(x, place.count) for x in (key, seen.key, seen.value))
    mask = both(
        None if other.mask is None else _only_for(other.mask, place),
        None if seen.mask is None else seen.mask | masks.keep(rows),
    )
    bias: Any = seen.bias
    if isinstance(seen.bias, Tensor) or isinstance(other.bias, Tensor):
        zero = torch.zeros(1, 1, 1, 1, dtype=query.dtype, device=query.device)
        one = other.bias.to(query.device) if isinstance(other.bias, Tensor) else zero
        bias = torch.where(rows, one, seen.bias if isinstance(seen.bias, Tensor) else zero)
    return seen._replace(
        query=torch.where(rows, query, seen.query), key=torch.where(rows, key, own), value=value, mask=mask, bias=bias
    )


def _spread(x: Tensor, heads: int) -> Tensor:
    """One head of keys for each of the queries'."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def with_heads(new: Tensor, out: Tensor, place: Place) -> Tensor:
    """The edited heads of ``new`` among the others of ``out``."""
    return new if all_heads(place) else torch.where(head_rows(place), new, out)
