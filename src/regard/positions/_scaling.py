"""How the frequencies of a rotary encoding change, so that a model reads further than it was trained to.

All arithmetic is float32 and in the order of the published code, so that the tables equal those that models were
trained with to the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from regard._checks import check_count
from regard.positions import _checks


class Scaling(Protocol):
    """What `Rotary(scaling=…)` asks for."""

    @property
    def magnitude(self) -> float:
        """Multiplies cosine and sine, so that logits are multiplied by its square."""
        ...

    @property
    def by_length(self) -> bool:
        """Whether the frequencies depend on the length of the call."""
        ...

    def frequencies(self, dim: int, base: float, length: int | Tensor | None = None) -> Tensor:
        """The angle by which each of the dim/2 pairs turns from one position to the next, float32.

        `length` is the last position of the call plus one (a tensor where only the device knows it), None before any
        call.
        """
        ...


def plain_frequencies(dim: int, base: float | Tensor, device: torch.device | str = "cpu") -> Tensor:
    """base^(−2i/dim) for pair i."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    return 1.0 / (base**exponents)


@dataclass(frozen=True)
class Linear:
    """Positions divided by `factor` (position interpolation)."""

    factor: float

    magnitude = 1.0
    by_length = False

    def __post_init__(self) -> None:
        _checks.at_least_one("factor", self.factor)

    def frequencies(self, dim: int, base: float, length: int | Tensor | None = None) -> Tensor:
        return plain_frequencies(dim, base) / self.factor


@dataclass(frozen=True)
class DynamicNTK:
    """A base that grows with the length once that passes `original_length`: calls up to it are left alone.

    The frequencies are those of the call's own length. Keys that a cache kept from a shorter call keep the angles of
    that call, as in every implementation that stores turned keys.
    """

    factor: float
    original_length: int

    magnitude = 1.0
    by_length = True

    def __post_init__(self) -> None:
        _checks.at_least_one("factor", self.factor)
        check_count("original_length", self.original_length)

    def frequencies(self, dim: int, base: float, length: int | Tensor | None = None) -> Tensor:
        if dim <= 2:
            raise ValueError(f"DynamicNTK needs dim of at least 4, got {dim}")
        if isinstance(length, Tensor):
            length = length.clamp_min(self.original_length)
        else:
            length = self.original_length if length is None else max(length, self.original_length)
        grown = (self.factor * length / self.original_length) - (self.factor - 1)
        device = length.device if isinstance(length, Tensor) else "cpu"
        return plain_frequencies(dim, base * grown ** (dim / (dim - 2)), device)


@dataclass(frozen=True)
class YaRN:
    """Fast pairs keep their frequency, slow ones are divided by `factor`, with a ramp between (Peng et al., 2023).

    A pair is fast if it turns more than `beta_fast` times within `original_length` tokens, slow if fewer than
    `beta_slow` times; `truncate` widens the ramp to whole pairs. Cosine and sine are multiplied by `attention_factor`,
    or by 0.1 ln(factor) + 1 where it is not given. `mscale` and `mscale_all_dim` are DeepSeek's: they choose that
    number in another way, and `logit_factor`, by which DeepSeek multiplies the attention's scale.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    by_length = False

    def __post_init__(self) -> None:
        _checks.at_least_one("factor", self.factor)
        check_count("original_length", self.original_length)
        _checks.above("beta_slow", self.beta_slow)
        _checks.above("beta_fast", self.beta_fast, self.beta_slow)
        if self.attention_factor is not None:
            _checks.above("attention_factor", self.attention_factor)

    def _gain(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.mscale and self.mscale_all_dim:
            return self._gain(self.mscale) / self._gain(self.mscale_all_dim)
        return self._gain(1.0)

    @property
    def logit_factor(self) -> float:
        """What DeepSeek multiplies the attention's `scale` by, besides the magnitude of the tables."""
        return self._gain(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def frequencies(self, dim: int, base: float, length: int | Tensor | None = None) -> Tensor:
        low, high = self._pair_of(self.beta_fast, dim, base), self._pair_of(self.beta_slow, dim, base)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001  # the ramp would divide by 0
        ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
        periods = base ** (torch.arange(0, dim, 2, device="cpu").to(torch.float32) / dim)
        keep = 1 - ramp
        return 1.0 / (self.factor * periods) * (1 - keep) + 1.0 / periods * keep

    def _pair_of(self, turns: float, dim: int, base: float) -> float:
        """The (fractional) pair that turns this many times within the original length."""
        return (dim * math.log(self.original_length / (turns * 2 * math.pi))) / (2 * math.log(base))


@dataclass(frozen=True)
class Llama3:
    """Wavelengths below original_length / `high_freq_factor` stay, those above original_length / `low_freq_factor` are
    stretched by `factor`, with a ramp between (Llama 3.1)."""

    factor: float
    original_length: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    magnitude = 1.0
    by_length = False

    def __post_init__(self) -> None:
        _checks.at_least_one("factor", self.factor)
        check_count("original_length", self.original_length)
        _checks.above("low_freq_factor", self.low_freq_factor)
        _checks.above("high_freq_factor", self.high_freq_factor, self.low_freq_factor)

    def frequencies(self, dim: int, base: float, length: int | Tensor | None = None) -> Tensor:
        plain = plain_frequencies(dim, base)
        wavelength = 2 * math.pi / plain
        slow = wavelength > self.original_length / self.low_freq_factor
        fast = wavelength < self.original_length / self.high_freq_factor
        span = self.high_freq_factor - self.low_freq_factor
        ramp = (self.original_length / wavelength - self.low_freq_factor) / span
        between = (1 - ramp) * plain / self.factor + ramp * plain
        return torch.where(fast, plain, torch.where(slow, plain / self.factor, between))
