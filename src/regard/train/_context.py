"""Attention over a sequence that lies in parts on several processes (context parallelism).

Each process holds the queries, keys and values of its tokens. Keys and values are gathered, each process computes the
rows of its own queries, and every statistic is merged as tiles of one process are: rows are put together, sums added.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import regard
from regard import Observation, Plan, Want
from regard._checks import check_choice
from regard._sharded import outside_block
from regard._sharded._calls import own_draws
from regard.masks import Mask

LAYOUTS = ("balanced", "contiguous")
_ROWS = (
    "lse", "entropy", "max_weight", "top_keys", "top_weights", "first_mass", "relations", "value_sum", "value_top_keys",
    "value_top_lengths",
)  # fmt: skip


class ContextParallel:
    """How a sequence is spread over the processes of a group, and attention on it.

        spread = ContextParallel()                                          # of the default process group
        q, k, v = (spread.shard(x) for x in (query, key, value))            # [batch, head, token / n, dim]
        out = spread.attention(q, k, v, mask=masks.causal())                # this process's rows
        seen = spread.observe(q, k, v, mask=masks.causal())                 # statistics of the whole sequence
        whole = spread.gather(out)

    Args:
        group: of `torch.distributed`; the default one when not given.
        layout: "balanced": of 2n pieces, process r has pieces r and 2n − 1 − r, so that causal rows cost all of them
            the same; "contiguous": process r has piece r of n, as a DTensor with `Shard(2)` has.
    """

    def __init__(self, group: Any = None, *, layout: str = "balanced") -> None:
        if not dist.is_initialized():
            raise RuntimeError("ContextParallel needs torch.distributed.init_process_group first (torchrun sets it up)")
        check_choice("layout", layout, LAYOUTS)
        self.group, self.layout = group, layout
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        # which pieces each process has, by their place in the sequence
        last = 2 * self.count - 1
        self._pieces = [(r, last - r) if layout == "balanced" else (r,) for r in range(self.count)]

    def shard(self, x: Tensor, dim: int = 2) -> Tensor:
        """This process's tokens of a whole sequence."""
        pieces = x.chunk(self._number(x.shape[dim]), dim)
        return torch.cat([pieces[at] for at in self._pieces[self.rank]], dim)

    def gather(self, x: Tensor, dim: int = 2) -> Tensor:
        """The whole sequence of what each process holds; gradients go back to whom they belong."""
        found: Tensor = _Gather.apply(x, self, dim)  # type: ignore[no-untyped-call]
        return found

    def attention(self, query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
        """`regard.attention` of this process's queries with the keys of all; its keywords, its result's rows.

        DTensors, which say themselves how they lie, go to `regard.attention` as they are.

        Raises:
            ValueError: a mask that names rows of a call by number (`masks.keep`), or parts of different lengths.
        """
        if hasattr(query, "device_mesh"):
            return regard.attention(query, key, value, **keywords)
        calls = self._calls(query, key, keywords)
        keys, values = self.gather(key), self.gather(value)
        with outside_block(), own_draws(self.rank, query.device.type, keywords):
            return torch.cat([regard.attention(query[:, :, rows], keys, values, **given) for rows, given in calls], 2)

    def observe(self, query: Tensor, key: Tensor, value: Tensor, *, want: Want | None = None, **keywords: Any) -> Any:
        """`regard.observe`: `.out` has this process's rows, the statistics are those of the whole sequence.

        Raises:
            ValueError: `want` asks for a rectangle of weights, for pairs, for some queries, or for a map whose rows the
                pieces do not share evenly; or `differentiable` is asked for.
        """
        if keywords.get("differentiable"):
            raise ValueError("differentiable: statistics of several processes carry no gradients")
        want = Want() if want is None else want
        part = self._part_of(want, query.shape[2] * self.count)
        calls = self._calls(query, key, keywords)
        keys, values = self.gather(key), self.gather(value)
        with outside_block(), own_draws(self.rank, query.device.type, keywords):
            seen = [regard.observe(query[:, :, rows], keys, values, want=part, **given) for rows, given in calls]
        found: dict[str, Tensor] = {}
        for name in (*_ROWS, "map", "value_map"):
            if name in vars(seen[0]):
                found[name] = self.gather(torch.cat([getattr(each, name) for each in seen], 2))
        if "value_length" in vars(seen[0]):
            found["value_length"] = seen[0].value_length  # every process has all keys
        for name in ("key_mass", "distance", "value_mass"):
            if name in vars(seen[0]):
                found[name] = torch.stack([getattr(each, name) for each in seen]).sum(0)
                dist.all_reduce(found[name], group=self.group)
        out = torch.cat([each.out for each in seen], 2)
        return Observation(out, found.pop("lse"), seen[0].plan, want, found)

    def explain(self, query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> list[Plan]:
        """The plans of this process's calls; nothing runs, and nothing is sent."""
        shape = [*key.shape[:2], key.shape[2] * self.count, key.shape[3]]
        keys = key.new_empty(1).expand(shape)
        values = value.new_empty(1).expand(*shape[:3], value.shape[3])
        calls = self._calls(query, key, keywords)
        with outside_block():
            return [regard.explain(query[:, :, rows], keys, values, **given) for rows, given in calls]

    def _number(self, tokens: int) -> int:
        """Of pieces."""
        number = self.count * len(self._pieces[0])
        if tokens % number:
            raise ValueError(
                f"{tokens} tokens cannot be spread evenly over {self.count} processes: give a multiple of {number}"
            )
        return number

    def _calls(self, query: Tensor, key: Tensor, keywords: dict[str, Any]) -> list[tuple[slice, dict[str, Any]]]:
        """The rows of each local piece, and the keywords of its call."""
        mask, bias, offset = (keywords.get(name) for name in ("mask", "bias", "query_offset"))
        _refuse_rows(mask)
        queries, keys = query.shape[2] * self.count, key.shape[2] * self.count
        size = queries // self._number(queries)
        self._number(keys)
        first = keys - queries if offset is None else offset
        calls = []
        for at, place in enumerate(self._pieces[self.rank]):
            start = place * size
            given = {**keywords, "query_offset": first + start}
            if isinstance(bias, Tensor) and bias.dim() >= 2 and bias.shape[-2] > 1:
                given["bias"] = bias[..., start : start + size, :]
            calls.append((slice(at * size, (at + 1) * size), given))
        return calls

    def _part_of(self, want: Want, tokens: int) -> Want:
        """What each piece is asked, so that its answers can be put together."""
        if want.weights is not None or want.queries is not None or want.pairs is not None:
            raise ValueError(
                "want: weights, pairs and queries name rows of the whole sequence; observe it in one process"
            )
        if want.map is None:
            return want
        number = self._number(tokens)
        rows = min(want.map[0], tokens)
        if rows % number:
            raise ValueError(
                f"want.map has {rows} rows, which {number} pieces cannot share: give a multiple of {number}"
            )
        return want.but(map=(rows // number, want.map[1]))


class _Gather(torch.autograd.Function):
    """Forward: every process gets all pieces in order. Backward: gradients of all are added, each keeps its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spread: ContextParallel, dim: int) -> Tensor:
        ctx.spread, ctx.dim = spread, dim
        x = x.contiguous()
        held = [torch.empty_like(x) for _ in range(spread.count)]
        dist.all_gather(held, x, group=spread.group)
        pieces: dict[int, Tensor] = {}
        for places, part in zip(spread._pieces, held, strict=True):
            pieces |= dict(zip(places, part.chunk(len(places), dim), strict=True))
        return torch.cat([pieces[at] for at in range(len(pieces))], dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.spread.group)
        return ctx.spread.shard(grad, ctx.dim), None, None


def _refuse_rows(mask: Any) -> None:
    if isinstance(mask, Mask) and mask.by_call:
        raise ValueError(
            "mask: masks.keep and masks.drop name rows of one call by number; over several processes give a rule of "
            "positions (causal, window, padding, documents, …)"
        )
