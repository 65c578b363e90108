"""Rotary positions: pairs of entries of a head turn by an angle that grows with the position (Su et al., 2021)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.masks._arguments import plain
from regard.positions import _checks
from regard.positions._scaling import Scaling, plain_frequencies

Tables = tuple[Tensor, Tensor]

_transforms = torch._C._functorch.peek_interpreter_stack
_watchers = torch._C._len_torch_dispatch_stack
_tracing = torch._C._get_tracing_state

# tables up to this many numbers are kept for the next layer; larger ones cost little next to the products of their call
_KEPT = 1 << 16
# positions that tables for one token are made for
_AHEAD = 64


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first `2 · cos.shape[-1]` entries of `x` by the angles of the tables; the rest passes unchanged.

    Args:
        x: `[..., token, dim]`.
        cos, sin: `[..., token, pairs]` (see `Rotary.tables`), broadcast against `x`'s leading dimensions.
        interleaved: pairs are entries (0, 1), (2, 3), …; otherwise (0, n), (1, n + 1), … with n pairs.

    Half precision is turned in float32. The result is laid out as `x` is.
    """
    pairs = cos.shape[-1]
    if 2 * pairs > x.shape[-1]:
        raise ValueError(f"tables of {pairs} pairs turn {2 * pairs} entries; x has {x.shape[-1]}")
    turning, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    working = torch.float64 if x.dtype == torch.float64 else torch.float32
    turning, cos, sin = turning.to(working), cos.to(working), sin.to(working)
    if interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
    else:
        first, second = turning[..., :pairs], turning[..., pairs:]
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    turned = turned.to(x.dtype)
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), -1)


def _widened(cos: Tensor, sin: Tensor, interleaved: bool) -> Tables:
    """The tables with an entry for each entry that turns: what it is times, and what its partner is times."""
    if interleaved:
        return torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _turned(x: Tensor, own: Tensor, partner: Tensor, *, interleaved: bool) -> Tensor:
    """As `rotate`, to the bit, in fewer operations, by wide tables."""
    width, dtype = own.shape[-1], x.dtype
    turning = x if width == x.shape[-1] else x[..., :width]
    working = torch.float64 if dtype == torch.float64 else torch.float32
    # a GPU widens numbers while it multiplies them; a CPU is faster with a copy
    if not (turning.is_cuda and own.dtype == working) and not dtype == own.dtype == partner.dtype == working:
        turning, own, partner = turning.to(working), own.to(working), partner.to(working)
    if interleaved:
        partners = torch.stack((turning[..., 1::2], turning[..., 0::2]), -1).flatten(-2)
    else:
        partners = turning.roll(width // 2, -1)
    turned = turning * own + partners * partner
    if dtype != working:
        turned = turned.to(dtype)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), -1)


def _is_traced() -> bool:
    """Whether operations are recorded or transformed: tables of an earlier call would be constants there."""
    return torch.compiler.is_compiling() or _tracing() is not None or _watchers() > 0 or _transforms() is not None


class _Last(NamedTuple):
    """The tables that were made last, and what for."""

    frequencies: Tensor
    start: Any  # where they begin: a number, or one for each item
    tokens: int
    made: tuple[Any, ...]  # what else they depend on
    tables: Tables


class Rotary(nn.Module):
    """Rotary position encoding of queries and keys.

        mha = MultiHeadAttention(512, 8, positions=Rotary(64))
        query, key = Rotary(64)(query, key, query_offset=0)         # [batch, head, token, dim]
        cos, sin = rotary.tables(position_ids)                      # once for many layers, then
        query = rotate(query, cos, sin)                             # as often as needed

    Args:
        dim: number of entries of a head to rotate, the first ones; the rest of a wider head passes unchanged.
        base: the slowest pair turns by base^(2/dim − 1) per position.
        interleaved: pairs are neighbours (GPT-J, DeepSeek, Llama's own files); otherwise entry i is paired with entry
            i + dim/2 (GPT-NeoX, Hugging Face's Llama).
        scaling: `Linear`, `DynamicNTK`, `YaRN`, `Llama3` or your own `Scaling`.

    Angles are computed in float32, as the models were trained, and stay so when the module is moved to half precision;
    for float64 queries they are computed in float64 (from the same frequencies), so that turning by i and back by j is
    turning by i − j to the last digits. Nothing is learned and nothing is in the state dict.
    """

    frequencies: Tensor  # [dim/2], float32
    _last: _Last | None = None

    def __init__(
        self,
        dim: int,
        *,
        base: float = 10_000.0,
        interleaved: bool = False,
        scaling: Scaling | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _checks.even_size("dim", dim)
        _checks.above("base", base, 1.0)
        if scaling is not None and not callable(getattr(scaling, "frequencies", None)):
            raise TypeError(
                f"scaling must be positions.Linear, DynamicNTK, YaRN or Llama3 (or follow positions.Scaling), "
                f"got {scaling!r}"
            )
        self.dim, self.base, self.interleaved, self.scaling = dim, float(base), interleaved, scaling
        self.magnitude = 1.0 if scaling is None else float(scaling.magnitude)
        self.register_buffer("frequencies", self._frequencies(None).to(device), persistent=False)

    def _frequencies(self, length: int | Tensor | None) -> Tensor:
        if self.scaling is None:
            return plain_frequencies(self.dim, self.base)
        return self.scaling.frequencies(self.dim, self.base, length)

    def tables(
        self, positions: Tensor, *, length: int | Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the angles at `positions` (any shape): two tensors `[*positions.shape, dim/2]`, times the
        scaling's `magnitude`, in float32 or, where `dtype` says so, in float64.

        `length` is for `DynamicNTK`: the call's last position plus one, by default read off `positions`.
        """
        frequencies = self.frequencies
        if self.scaling is not None and self.scaling.by_length:
            if length is None:
                length = positions.max() + 1 if positions.numel() else None
            elif not isinstance(length, Tensor) and positions.device.type != "cpu":
                # frequencies made on the host would have to be copied, and the host would wait
                length = torch.full((), length, device=positions.device)
            frequencies = self._frequencies(length)
        angles = positions.unsqueeze(-1).to(dtype) * frequencies.to(positions.device, dtype)
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.magnitude == 1.0 else (cos * self.magnitude, sin * self.magnitude)

    def turn(self, x: Tensor, start: int | Tensor = 0) -> Tensor:
        """`x` `[batch, head, token, dim]` turned, its first token standing at `start`, an int or `[batch]`.

        For heads of which only a part is turned and kept apart, such as the rotary part of latent attention."""
        _checks.tensor("x", x, "[batch, head, token, dim]")
        return self._turn({"x": x}, _checks.start("start", start, x.shape[0]), x.shape[2])[0]

    def forward(self, query: Tensor, key: Tensor, *, query_offset: int | Tensor = 0) -> tuple[Tensor, Tensor]:
        """Both turned, as `regard.nn.Positions` says: the first query stands at `query_offset`, an int or `[batch]`,
        and the last key level with the last query."""
        _checks.tensor("query", query, "[batch, head, token, dim]")
        _checks.tensor("key", key, "[batch, head, token, dim]")
        offset = query_offset
        if type(offset) is not int:
            offset = _checks.start("query_offset", query_offset, query.shape[0])
        queries, keys = query.shape[2], key.shape[2]
        if queries < keys:
            offset = offset + queries - keys
        query, key = self._turn({"query": query, "key": key}, offset, max(queries, keys))
        return query, key

    def _turn(self, given: dict[str, Tensor], start: int | Tensor, tokens: int) -> list[Tensor]:
        """Tensors whose last tokens are level; `start`: where the first of `tokens` stands."""
        for name, x in given.items():
            if x.shape[-1] < self.dim:
                raise ValueError(f"{name} has heads of {x.shape[-1]}; Rotary(dim={self.dim}) turns {self.dim} entries")
        tensors = list(given.values())
        asked = self._asked(start, tokens, tensors)
        kept = None if type(start) is int or torch.compiler.is_compiling() else getattr(start, "tables", None)
        turn: Callable[..., Tensor] = rotate if asked is None and kept is None else _turned
        if kept is not None:
            tables = self._tables_with(kept, start, tokens, tensors[0])
        elif asked is None:
            tables = self._tables_from(start, tokens, tensors[0])
        else:
            tables = self._last_tables(asked, start, tokens, tensors[0])
        turned = []
        for x in tensors:
            own = (
                tables if x.shape[2] == tokens else tuple(t.narrow(-2, tokens - x.shape[2], x.shape[2]) for t in tables)
            )
            turned.append(turn(x, *own, interleaved=self.interleaved))
        return turned

    def _last_tables(self, asked: tuple[Any, ...], start: int | Tensor, tokens: int, like: Tensor) -> Tables:
        """Wide tables. The layers of a model ask for the same ones, one after another, so that the last are kept; and
        for a token at a time, when a text is decoded, so that some positions ahead are in them."""
        first, made = asked[0], asked[1:]
        last = self._last  # once: another thread may put its own there
        if last is not None and last.made == made and last.frequencies is self.frequencies:
            if last.start == first and last.tokens == tokens:
                return last.tables
            if type(first) is int and type(last.start) is int:
                skipped = first - last.start
                if 0 <= skipped <= last.tokens - tokens:
                    return last.tables[0].narrow(0, skipped, tokens), last.tables[1].narrow(0, skipped, tokens)
        wider = _AHEAD if tokens == 1 and type(first) is int else tokens
        with torch.inference_mode(False):  # they may be kept from there to a call outside of it
            tables = _widened(*self._tables_from(start, wider, like), self.interleaved)
        if plain(tables[0]) and tables[0].numel() <= _KEPT:
            self._last = _Last(self.frequencies, first, wider, made, tables)
        return tables if wider == tokens else (tables[0].narrow(0, 0, tokens), tables[1].narrow(0, 0, tokens))

    def _tables_with(self, kept: dict[Any, Tables], start: int | Tensor, tokens: int, like: Tensor) -> Tables:
        """Wide tables, kept with the tensor of positions that asks for them: a dict, its attribute `tables`, which says
        that the tensor will not change. So the layers of a model share them where positions cannot be read (on a GPU)
        and nothing may be left for the next call (in a CUDA graph)."""
        key = (id(self), tokens, like.dtype == torch.float64)
        if key not in kept:
            kept[key] = _widened(*self._tables_from(start, tokens, like), self.interleaved)
        return kept[key]

    def _asked(self, start: int | Tensor, tokens: int, tensors: list[Tensor]) -> tuple[Any, ...] | None:
        """Where tables begin, and what else they depend on besides the frequencies. None where that cannot be read for
        nothing (on a GPU), or where they would mean nothing in the next call (of a transform, of a trace), or depend on
        what only a subclass knows; and where gradients are wanted, which would keep wide tables, twice as large, until
        the backward pass."""
        turning = self.frequencies
        if _is_traced() or not plain(tensors[0]) or type(self).tables is not Rotary.tables:
            return None
        if torch.is_grad_enabled() and any([x.requires_grad for x in tensors]):
            return None
        if turning.requires_grad or turning.is_inference() or (self.scaling is not None and self.scaling.by_length):
            return None
        if isinstance(start, Tensor) and not plain(start):
            return None
        first = start.reshape(-1).tolist() if isinstance(start, Tensor) else start
        double = tensors[0].dtype == torch.float64
        return first, double, turning.data_ptr(), turning._version, self.magnitude, self.interleaved

    def _tables_from(self, start: int | Tensor, tokens: int, like: Tensor) -> Tables:
        """Tables of consecutive positions: `[tokens, pairs]`, or `[batch, 1, tokens, pairs]`."""
        device, how = like.device, {"dtype": like.dtype} if like.dtype == torch.float64 else {}
        if isinstance(start, Tensor):
            start = start.to(device)
            length = start.max() + tokens if start.numel() else None
            # one step of positions for each item, and the head's dimension
            places = start.reshape(-1, 1, 1) + torch.arange(tokens, device=device)
            return self.tables(places, length=length, **how)
        return self.tables(torch.arange(start, start + tokens, device=device), length=start + tokens, **how)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # .half() would round the frequencies, and .to_empty() forget them
        self.frequencies = self._frequencies(None).to(self.frequencies.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: kept for name, kept in self.__dict__.items() if name != "_last"}

    def extra_repr(self) -> str:
        shown = f"{self.dim}, base={self.base:g}"
        shown += ", interleaved=True" if self.interleaved else ""
        return shown if self.scaling is None else f"{shown}, scaling={self.scaling!r}"
