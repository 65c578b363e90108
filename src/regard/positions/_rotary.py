"""Rotary positions: pairs of entries of a head turn by an angle that grows with the position (Su et al., 2021)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.positions import _checks
from regard.positions._scaling import Scaling, plain_frequencies


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turn the first `2 · cos.shape[-1]` entries of `x` by the angles of the tables; the rest passes unchanged.

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


class Rotary(nn.Module):
    """Rotary position encoding of queries and keys.

        mha = MultiHeadAttention(512, 8, positions=Rotary(64))
        query, key = Rotary(64)(query, key, query_offset=0)         # [batch, head, token, dim]
        cos, sin = rotary.tables(position_ids)                      # once for many layers, then
        query = rotate(query, cos, sin)                             # as often as needed

    Args:
        dim: how many entries of a head are turned, the first ones; the rest of a wider head passes unchanged.
        base: the slowest pair turns by base^(2/dim − 1) a position.
        interleaved: pairs are neighbours (GPT-J, DeepSeek, Llama's own files); otherwise entry i is paired with entry
            i + dim/2 (GPT-NeoX, Hugging Face's Llama).
        scaling: `Linear`, `DynamicNTK`, `YaRN`, `Llama3` or your own `Scaling`.

    Angles are computed in float32 whatever the dtype of the queries, as the models were trained, and stay so when the
    module is moved to half precision. Nothing is learned and nothing is in the state dict.
    """

    frequencies: Tensor  # [dim/2], float32

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

    def tables(self, positions: Tensor, *, length: int | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the angles at `positions` (any shape): two float32 tensors `[*positions.shape, dim/2]`,
        times the scaling's `magnitude`.

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
        angles = positions.unsqueeze(-1).to(torch.float32) * frequencies.to(positions.device)
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.magnitude == 1.0 else (cos * self.magnitude, sin * self.magnitude)

    def turn(self, x: Tensor, start: int | Tensor = 0) -> Tensor:
        """`x` `[batch, head, token, dim]` turned, its first token standing at `start`, an int or `[batch]`.

        For heads of which only a part is turned and kept apart, such as the rotary part of latent attention."""
        _checks.tensor("x", x, "[batch, head, token, dim]")
        cos, sin = self._tables_from(_checks.start("start", start, x.shape[0]), x.shape[2], x.device)
        return self._rotate("x", x, cos, sin)

    def forward(self, query: Tensor, key: Tensor, *, query_offset: int | Tensor = 0) -> tuple[Tensor, Tensor]:
        """Both turned, as `regard.nn.Positions` says: the first query stands at `query_offset`, an int or `[batch]`,
        and the last key level with the last query."""
        _checks.tensor("query", query, "[batch, head, token, dim]")
        _checks.tensor("key", key, "[batch, head, token, dim]")
        offset = _checks.start("query_offset", query_offset, query.shape[0])
        queries, keys = query.shape[2], key.shape[2]
        longest = max(queries, keys)
        cos, sin = self._tables_from(offset + queries - longest, longest, query.device)
        turned = [
            self._rotate(name, x, cos.narrow(-2, longest - n, n), sin.narrow(-2, longest - n, n))
            for name, x, n in (("query", query, queries), ("key", key, keys))
        ]
        return turned[0], turned[1]

    def _tables_from(self, start: int | Tensor, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tables of consecutive positions: `[tokens, pairs]`, or `[batch, 1, tokens, pairs]`."""
        if isinstance(start, Tensor):
            start = start.to(device)
            length = start.max() + tokens if start.numel() else None
            # one step of positions for each item, and the head's dimension
            places = start.reshape(-1, 1, 1) + torch.arange(tokens, device=device)
            return self.tables(places, length=length)
        return self.tables(torch.arange(start, start + tokens, device=device), length=start + tokens)

    def _rotate(self, name: str, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if x.shape[-1] < self.dim:
            raise ValueError(f"{name} has heads of {x.shape[-1]}; Rotary(dim={self.dim}) turns {self.dim} entries")
        return rotate(x, cos, sin, interleaved=self.interleaved)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # .half() would round the frequencies, and .to_empty() forget them
        self.frequencies = self._frequencies(None).to(self.frequencies.device)
        return self

    def extra_repr(self) -> str:
        shown = f"{self.dim}, base={self.base:g}"
        shown += ", interleaved=True" if self.interleaved else ""
        return shown if self.scaling is None else f"{shown}, scaling={self.scaling!r}"
