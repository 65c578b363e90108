"""How caches store numbers: unchanged, or in int8 with a scale for every few of them.

Stored numbers are a tuple of tensors with the same leading dims: (numbers,), or (codes, scales). Code that moves tokens
does the same to each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.cache._given import Made

Parts = tuple[Tensor, ...]

# One scale for this many neighbouring numbers of a head. A number is off by at most 1/254 of its group's largest: among
# 32 normal numbers, 0.5 % of their spread on average; and one number that is far too large spoils 31 others only.
GROUP = 32
_TOP = 127


def allocate(lead: tuple[int, ...], dim: int, dtype: torch.dtype, device: torch.device, int8: bool) -> Parts:
    """Room for numbers [*lead, dim], zero; usable inside and outside inference mode alike."""
    with torch.inference_mode(False):
        if not int8:
            return (torch.zeros(*lead, dim, dtype=dtype, device=device),)
        codes = torch.zeros(*lead, dim, dtype=torch.int8, device=device)
        return codes, torch.zeros(*lead, -(-dim // GROUP), dtype=torch.float32, device=device)


def encode(numbers: Tensor) -> Parts:
    """What is stored for [..., dim] in one byte per number. In a group that holds NaN or an infinity all become NaN."""
    numbers = numbers.detach()
    dim = numbers.shape[-1]
    grouped = F.pad(numbers.float(), (0, -dim % GROUP))
    grouped = grouped.view(*numbers.shape[:-1], -1, GROUP)
    scales = grouped.abs().amax(-1) / _TOP
    codes = grouped / scales.masked_fill(scales == 0, 1.0).unsqueeze(-1)
    codes = codes.nan_to_num_(0.0).round_().clamp_(-_TOP, _TOP).to(torch.int8)
    return codes.flatten(-2)[..., :dim], scales


def decode(parts: Parts, dtype: torch.dtype) -> Tensor:
    """The stored numbers: the tensor itself, or a new one of `dtype`."""
    if len(parts) == 1:
        return parts[0]
    codes, scales = parts
    wide = scales.repeat_interleave(GROUP, -1)[..., : codes.shape[-1]]
    return (codes * wide).to(dtype)


def apply(change: Callable[[Tensor], Tensor], parts: Parts) -> Parts:
    return tuple([change(part) for part in parts])


class Memory(NamedTuple):
    """Stored keys, and values where there are any."""

    key: Parts = ()
    value: Parts = ()

    @classmethod
    def allocate(cls, made: Made, lead: tuple[int, ...], int8: bool) -> Memory:
        """Room for keys and values [*lead, dim]."""
        dims = (made.key_dim,) if made.value_dim is None else (made.key_dim, made.value_dim)
        return cls(*(allocate(lead, dim, made.dtype, made.device, int8) for dim in dims))

    @property
    def parts(self) -> Parts:
        return self.key + self.value

    @property
    def bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.parts)

    def change(self, change: Callable[[Tensor], Tensor]) -> Memory:
        return Memory(apply(change, self.key), apply(change, self.value))

    def read(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Numbers of keys and values, from what ``change`` takes of them; without values the keys twice."""
        found = [decode(apply(change, parts), dtype) for parts in self if parts]
        return found[0], found[-1]

    def named(self) -> dict[str, Tensor]:
        """As a file has them."""
        return {f"{name}.{at}": part for name, parts in self._asdict().items() for at, part in enumerate(parts)}


def spoil(part: Tensor, number: float) -> Tensor:
    """`part` filled with `number`; codes keep their integers, their scales take it."""
    return part if part.dtype == torch.int8 else part.fill_(number)
