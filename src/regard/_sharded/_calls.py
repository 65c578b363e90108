"""The public calls on DTensors: every process does its share of the rows by one ordinary call.

Queries go to the process that computes their rows, keys and values to those whose rows may see them, results back to
where the queries came from. Statistics merge as tiles of one process do: rows stand next to each other, sums are added.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from regard import masks, statistics
from regard._sharded._moving import Shared, added, move
from regard._sharded._shares import Shares, Span, chunks, shares_of
from regard.masks import Mask
from regard.observation import Observation
from regard.spec import Refused
from regard.statistics import Want

if TYPE_CHECKING:
    from regard.plan import Plan

# numbers of the map that each row of a call gives before rows are put together; more rows are several calls
NUMBERS = 1 << 26
_MERGED = {"out", "plan", "want", "map", "weights", "pairs", *statistics.OF_ROWS, *statistics.SUMS}


def attention(call: Callable[..., Tensor], tensors: tuple[Any, Any, Any], how: dict[str, Any]) -> Tensor:
    """`regard.attention`, here `call`, of DTensors: a DTensor that lies as the query does."""
    spread = _spread(*tensors, how)
    with own_draws(spread.rank, spread.mesh.device_type, how):
        out: Tensor = spread.back(call(*spread.tensors(*tensors), **spread.keywords(how, *spread.mine)))
    return out


def observe(call: Callable[..., Observation], tensors: tuple[Any, Any, Any], how: dict[str, Any]) -> Observation:
    """`regard.observe`, here `call`: rows lie as the query does, `key_mass` as the keys do, sums are whole."""
    keywords = dict(how)
    want: Want = keywords.pop("want")
    if want.value_mass:
        raise Refused("want: value_mass cannot be asked for where tokens lie on several processes; leave it out")
    spread = _spread(*tensors, keywords)
    queries, keys, values = spread.tensors(*tensors)
    merged = _Merged(spread, want)
    pieces = []
    for start, stop in spread.calls(want):
        asked = merged.asked(start, stop)
        rows = slice(start - spread.mine[0], stop - spread.mine[0])
        with own_draws(spread.rank, spread.mesh.device_type, keywords):
            seen = call(queries[:, :, rows], keys, values, want=asked, **spread.keywords(keywords, start, stop))
        if unknown := vars(seen).keys() - _MERGED:
            raise Refused(f"want: {', '.join(sorted(unknown))} cannot be merged over processes; observe it in one")
        merged.add(seen, start, stop)
        pieces.append(seen)
    out = spread.back(torch.cat([each.out for each in pieces], 2))
    found = merged.result()
    return Observation(out, found.pop("lse"), pieces[0].plan, want, found)


def explain(call: Callable[..., Plan], tensors: tuple[Any, Any, Any], how: dict[str, Any]) -> Plan:
    """`regard.explain`: the plan of this process's call. Nothing runs, and nothing is sent."""
    query, key, value = tensors
    spread = _spread(query, key, value, how)
    grad = any(each.requires_grad for each in tensors)

    def like(x: Any, tokens: int) -> Tensor:
        shape = (*x.shape[:2], tokens, x.shape[3])
        made: Tensor = x.to_local().detach().new_empty(shape[3]).as_strided(shape, (0, 0, 0, 1))
        return made.requires_grad_() if grad else made

    start, stop = spread.mine
    mine = like(query, stop - start), like(key, spread.keys), like(value, spread.keys)
    return call(*mine, **spread.keywords(how, start, stop))


class _Spread(NamedTuple):
    """How one call lies on the processes of a mesh."""

    mesh: Any
    group: Any
    rank: int
    batch: int
    heads: int
    queries: int
    keys: int
    offset: int | Tensor  # of the whole call's first query
    mask: Mask | None
    held_queries: list[Span]
    held_keys: list[Span]
    shares: Shares

    @property
    def mine(self) -> Span:
        """The rows that this process computes."""
        return self.shares.rows[self.rank]

    def tensors(self, query: Any, key: Any, value: Any) -> tuple[Tensor, Tensor, Tensor]:
        """This process's queries, and all keys and values: zeros where none of its rows may look."""
        queries = move(query.to_local(), self.held_queries, self.shares.rows, self.group)
        return queries, self._needed(key), self._needed(value)

    def _needed(self, x: Any) -> Tensor:
        if x.placements[0].is_replicate():
            return _local(x)
        low, high = self.shares.keys[self.rank]
        found = move(x.to_local(), self.held_keys, self.shares.keys, self.group)
        return F.pad(found, (0, 0, low, self.keys - high))

    def keywords(self, given: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
        """Those of the call for these rows."""
        found = {**given, "mask": self.mask, "query_offset": self.offset + start}
        if self.mask is not None and self.mask.by_call:
            # it names rows of the whole call by number; of this call they have others
            how: dict[str, Any] = {"offset": self.offset, "device": self.mesh.device_type}
            tile = self.mask.tile(range(start, stop), range(self.keys), self.queries, self.keys, **how)
            found["mask"] = masks.keep(tile)
        for name in ("bias", "sinks"):
            whole = given.get(name)
            if not isinstance(whole, Tensor):
                continue
            whole = _local(whole) if hasattr(whole, "device_mesh") else Shared.apply(whole, self.group)  # type: ignore[no-untyped-call]
            if name == "bias" and whole.dim() >= 2 and whole.shape[-2] != 1:
                if whole.shape[-2] != self.queries:
                    raise ValueError(f"bias has {whole.shape[-2]} rows, and the call {self.queries} queries")
                whole = whole[..., start:stop, :]
            found[name] = whole
        return found

    def calls(self, want: Want) -> list[Span]:
        """This process's rows in calls: one, but for maps of very many rows."""
        start, stop = self.mine
        most = stop - start
        if want.map is not None:
            most = max(1, NUMBERS // max(1, self.batch * self.heads * want.map[1]))
        return [(at, min(at + most, stop)) for at in range(start, stop, max(1, most))] or [(start, stop)]

    def back(self, rows: Tensor) -> Any:
        """Rows that this process computed, to where their queries lie."""
        return self.as_dtensor(move(rows, self.shares.rows, self.held_queries, self.group), self.queries)

    def as_dtensor(self, local: Tensor, tokens: int | None) -> Any:
        """With `tokens`, sharded over them; else the same in every process."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if tokens is None:
            return DTensor.from_local(local, self.mesh, [Replicate()], run_check=False)
        shape = torch.Size((*local.shape[:2], tokens, *local.shape[3:]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, [Shard(2)], run_check=False, shape=shape, stride=stride)


def _spread(query: Any, key: Any, value: Any, keywords: dict[str, Any]) -> _Spread:
    mesh: Any = getattr(query, "device_mesh", None)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if mesh is None or getattr(x, "device_mesh", None) != mesh:
            raise TypeError(
                f"{name} must be a DTensor on the mesh of the query, as one of the three is a DTensor; "
                "distribute_tensor makes one, x.to_local() or x.full_tensor() a plain one"
            )
        if x.dim() != 4:
            raise ValueError(f"{name} must be [batch, head, token, dim], got {list(x.shape)}")
        if mesh.ndim != 1:
            raise ValueError(f"{name} lies on a mesh of {mesh.ndim} dims; expected one dim: take it, as in mesh['cp']")
    if not query.placements[0].is_shard(2):
        raise ValueError(f"query must be sharded over its tokens, [Shard(2)], got {list(query.placements)}")
    placed = {each.placements[0] for each in (key, value)}
    if len(placed) > 1 or not (key.placements[0].is_shard(2) or key.placements[0].is_replicate()):
        raise ValueError(
            "key and value must both be sharded over their tokens, [Shard(2)], or both be whole, [Replicate()], got "
            f"{list(key.placements)} and {list(value.placements)}"
        )
    batch, heads, queries, _ = query.shape
    keys, count, group = key.shape[2], mesh.size(), mesh.get_group()
    given = keywords.get("query_offset")
    offset: int | Tensor = keys - queries if given is None else given
    mask = keywords.get("mask")
    if isinstance(mask, Mask):
        mask = mask.sized(batch, heads)
        mask.check(batch, heads, queries, keys)
    elif mask is not None:
        raise TypeError(f"mask must be a value of regard.masks (masks.keep or masks.drop take a tensor), got {mask!r}")
    shares = shares_of(mask, queries, keys, offset, batch, count)
    held = chunks(queries, count), chunks(keys, count)
    return _Spread(
        mesh, group, dist.get_rank(group), batch, heads, queries, keys, offset, mask, held[0], held[1], shares
    )


def _local(x: Any) -> Tensor:
    """A DTensor whole; its gradient is the sum of what each process's rows give it."""
    from torch.distributed.tensor import Partial, Replicate

    found: Tensor = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return found


@contextlib.contextmanager
def own_draws(rank: int, device_type: str, keywords: dict[str, Any]) -> Iterator[None]:
    """Dropout of different rows must differ also where all processes have the same seed."""
    if not keywords.get("dropout"):
        yield
        return
    drawn = int(torch.randint(0, 2**31 - 1, ()))
    devices = [torch.cuda.current_device()] if device_type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(drawn + rank)
        yield


class _Merged:
    """Statistics of a call from those of its parts."""

    def __init__(self, spread: _Spread, want: Want) -> None:
        self.spread, self.want = spread, want
        self.counted = _span(spread.queries, want.queries)
        self.rectangle = None if want.weights is None else _span(spread.queries, want.weights[0])
        self.parts: dict[str, list[Tensor]] = {}
        self.grid: statistics.Grid | None = None
        self.map: Tensor | None = None
        self.all_pairs = None
        if want.pairs is not None:
            self.all_pairs = statistics.checked_pairs(want.pairs, spread.queries, spread.keys).cpu()
        self.pairs: Tensor | None = None

    def asked(self, start: int, stop: int) -> Want:
        """What the call for these rows is asked: a map with one row per query, so that any cut of rows will do."""
        counted = _within(self.counted, start, stop)
        some = counted[1] > counted[0]
        asked = self.want.but(queries=None if self.want.queries is None else slice(*counted))
        if self.want.map is not None:
            asked = asked.but(map=(counted[1] - counted[0], self.want.map[1]) if some else None)
        if self.rectangle is not None:
            asked = asked.but(weights=(slice(*_within(self.rectangle, start, stop)), self.want.weights[1]))
        if self.all_pairs is not None:
            asked = asked.but(pairs=self.all_pairs[self._here(start, stop)] - torch.tensor([start, 0]))
        return asked

    def _here(self, start: int, stop: int) -> Tensor:
        """Which of the pairs have their query in these rows."""
        assert self.all_pairs is not None
        rows = self.all_pairs[:, 0]
        return (rows >= start) & (rows < stop)

    def add(self, seen: Observation, start: int, stop: int) -> None:
        found = {name: part for name, part in vars(seen).items() if isinstance(part, Tensor) and name != "out"}
        if self.want.map is not None:
            self._add_map(self.want.map, found.pop("map", None), seen.lse, start, stop)
        if self.all_pairs is not None:
            own = found.pop("pairs")
            if self.pairs is None:
                self.pairs = own.new_zeros(*own.shape[:2], len(self.all_pairs))
            self.pairs[:, :, self._here(start, stop).to(own.device)] = own
        for name, part in found.items():
            self.parts.setdefault(name, []).append(part)

    def _add_map(self, most: tuple[int, int], rows: Tensor | None, lse: Tensor, start: int, stop: int) -> None:
        if self.grid is None or self.map is None:
            size = self.counted[1] - self.counted[0]
            self.grid = statistics.Grid(most, size, self.spread.keys, lse.device)
            self.map = lse.new_zeros(*lse.shape[:2], *self.grid.shape)
        if rows is not None:
            first = _within(self.counted, start, stop)[0] + start - self.counted[0]
            self.map.index_add_(2, self.grid.row_cells[first : first + rows.shape[2]], rows * self.grid.widths)

    def result(self) -> dict[str, Any]:
        spread, found = self.spread, dict[str, Any]()
        for name, parts in self.parts.items():
            if name == "weights":
                found[name] = spread.as_dtensor(self._everywhere(torch.cat(parts, 2)), None)
            elif name == "key_mass":
                low, high = spread.held_keys[spread.rank]
                mass = added(torch.stack(parts).sum(0), spread.group)[:, :, low:high]
                found[name] = spread.as_dtensor(mass.contiguous(), spread.keys)
            elif name in statistics.SUMS:
                found[name] = spread.as_dtensor(added(torch.stack(parts).sum(0), spread.group), None)
            else:
                found[name] = spread.back(torch.cat(parts, 2))
        if self.pairs is not None:
            found["pairs"] = spread.as_dtensor(added(self.pairs, spread.group), None)
        if self.grid is not None and self.map is not None:
            found["map"] = spread.as_dtensor(added(self.map, spread.group).div_(self.grid.pairs), None)
        return found

    def _everywhere(self, rows: Tensor) -> Tensor:
        """The rectangle's rows of all processes, in each of them."""
        assert self.rectangle is not None
        low, high = self.rectangle
        held = [
            (start + inside[0] - low, start + inside[1] - low)
            for start, stop in self.spread.shares.rows
            for inside in [_within(self.rectangle, start, stop)]
        ]
        return move(rows, held, [(0, high - low)] * len(held), self.spread.group)


def _span(size: int, given: slice | None) -> Span:
    chosen = range(size)[slice(None) if given is None else given]
    return chosen.start, max(chosen.start, chosen.stop)


def _within(span: Span, start: int, stop: int) -> Span:
    """The part of a span of all rows that lies in these, counted from their first."""
    low = min(max(span[0], start), stop)
    return low - start, max(low, min(span[1], stop)) - start
