"""Encodings that are added to the tokens before the first layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard._checks import check_count
from regard.masks._arguments import plain
from regard.positions import _checks


def sinusoidal(
    length: int,
    dim: int,
    *,
    offset: int | Tensor = 0,
    base: float = 10_000.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """PE(pos, 2i) = sin(pos / base^(2i/dim)), PE(pos, 2i + 1) = cos(pos / base^(2i/dim))  (Vaswani et al., 2017).

    Returns `[length, dim]` for positions `offset` … `offset + length − 1`; with an integer tensor `offset` `[batch]`,
    as of a batch whose items stand at different places, `[batch, length, dim]`. Computed in float64 where the device
    has it, and given in `dtype` (torch's default dtype when not given). The paper adds it to embeddings times √dim.
    """
    check_count("length", length, 0)
    check_count("dim", dim)
    _checks.above("base", base, 1.0)
    first = _checks.start("offset", offset)
    if device is None:
        device = first.device if isinstance(first, Tensor) else torch.get_default_device()
    device = torch.device(device)
    working = torch.float32 if device.type == "mps" else torch.float64
    places = torch.arange(length, dtype=working, device=device)
    places = places + (first.to(device, working).unsqueeze(-1) if isinstance(first, Tensor) else first)
    pair = torch.arange(dim, device=device).div(2, rounding_mode="floor").to(working)
    angles = places.unsqueeze(-1) * base ** (-2 * pair / dim)  # [..., length, dim], each frequency twice
    odd = torch.arange(dim, device=device) % 2 == 1
    table = torch.where(odd, angles.cos(), angles.sin())
    return table.to(torch.get_default_dtype() if dtype is None else dtype)


class LearnedPositions(nn.Module):
    """One learned vector per position, added to the token there (BERT, GPT-2, ViT).

        positions = LearnedPositions(1024, 768)
        x = positions(tokens)                  # [batch, token, 768]
        x = positions(tokens, offset=17)       # the first token is at position 17, as after 17 cached ones

    Args:
        length: number of positions.
        dim: width of the tokens.
        std: of the normal distribution the vectors start from.
    """

    def __init__(
        self,
        length: int,
        dim: int,
        *,
        std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_count("length", length)
        check_count("dim", dim)
        _checks.above("std", std)
        self.length, self.dim, self.std = length, dim, std
        self.weight = nn.Parameter(torch.empty(length, dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, x: Tensor, *, offset: int | Tensor = 0) -> Tensor:
        """`x` `[batch, token, dim]` plus the vectors of positions `offset` …, an int or `[batch]`.

        A position beyond the last is refused. (An `offset` tensor on a GPU, or while compiling, is not read; there the
        lookup's own bounds check answers.)
        """
        _checks.tensor("x", x, "[batch, token, dim]")
        if x.shape[-1] != self.dim:
            raise ValueError(f"x has width {x.shape[-1]}; LearnedPositions was built with dim={self.dim}")
        first, tokens = _checks.start("offset", offset, x.shape[0]), x.shape[1]
        if not isinstance(first, Tensor):
            self._check_range(first, first + tokens)
            return x + self.weight[first : first + tokens]
        if first.numel() and not torch.compiler.is_compiling() and plain(first):
            self._check_range(int(first.min()), int(first.max()) + tokens)
        places = first.to(x.device).reshape(-1, 1) + torch.arange(tokens, device=x.device)
        return x + nn.functional.embedding(places, self.weight)

    def _check_range(self, first: int, end: int) -> None:
        if first < 0 or end > self.length:
            raise ValueError(
                f"positions {first} … {end - 1} were asked for (offset, and a position for each token of x); "
                f"LearnedPositions was built with length={self.length}, so they go from 0 to {self.length - 1}"
            )

    def extra_repr(self) -> str:
        return f"{self.length}, {self.dim}"
