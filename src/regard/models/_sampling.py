"""Which token comes next, given its logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

# How fine draws are: coarse enough that u · total stays below total in float64, and no token of weight 0 is drawn.
_FINE = 2**40
NOTHING = -1  # in place of a token where the logits are NaN


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy; otherwise a token is sampled from the `top_k` likeliest and the `top_p` nucleus, with
    numbers that `seed` decides: one for all items, or one per item."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be a finite number, at least 0, got {self.temperature!r}")
        if self.top_k is not None and (not _is_int(self.top_k) or self.top_k < 1):
            raise ValueError(f"top_k must be an int, at least 1, got {self.top_k!r}")
        if self.top_p is not None and (not _is_number(self.top_p) or not 0.0 < self.top_p <= 1.0):
            raise ValueError(f"top_p must be a number in (0, 1], got {self.top_p!r}")
        for name in ("top_k", "top_p"):
            if self.temperature == 0.0 and getattr(self, name) is not None:
                raise ValueError(f"{name} is given, but temperature 0 takes the likeliest token; give a temperature")
        if self.temperature == 0.0 and self.seed is not None:
            raise ValueError("seed is given, but temperature 0 draws nothing; give a temperature")

    @property
    def draws(self) -> bool:
        return self.temperature > 0.0

    def draws_for(self, items: int) -> Draws | None:
        """What decides; None where nothing does."""
        return Draws(self.seed, items) if self.draws else None

    def choose(self, logits: Tensor, uniform: Tensor | None) -> Tensor:
        """Token numbers [row] from logits [row, vocab]; `uniform` [row] in [0, 1) decides, in float64."""
        best, likeliest = logits.max(-1, keepdim=True)
        if not self.draws:
            return likeliest.masked_fill(best.isnan(), NOTHING).squeeze(1)
        assert uniform is not None
        # the likeliest is at 0: the others fall without a limit, and none rises beyond it, however cold it is
        scores, numbers = (logits.double() - best.double()) / self.temperature, None
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            scores, numbers = scores.topk(self.top_k)
        elif self.top_p is not None:
            scores, numbers = scores.sort(descending=True, stable=True)
        weights = scores.softmax(-1)
        if self.top_p is not None:
            before = weights.cumsum(-1) - weights  # that of all likelier tokens: the first always stays
            weights = weights.masked_fill(before >= self.top_p, 0.0)
        summed = weights.cumsum(-1)
        total = summed[:, -1:]
        at = torch.searchsorted(summed, uniform.to(summed.device).unsqueeze(1) * total, right=True)
        at = at.clamp_max(summed.shape[1] - 1)  # where the total is NaN
        chosen = at if numbers is None else numbers.gather(1, at)
        return chosen.masked_fill(total.isnan(), NOTHING).squeeze(1)


class Draws:
    """A stream of numbers in [0, 1) for each item: its own, whatever else is in the batch and on whatever device."""

    def __init__(self, seed: int | Sequence[int] | None, items: int) -> None:
        self._generators = [torch.Generator().manual_seed(each) for each in _seeds(seed, items)]

    def next(self, items: Sequence[int]) -> Tensor:
        """One for each of these items, float64."""
        drawn = [torch.randint(_FINE, (), generator=self._generators[item]) for item in items]
        return torch.stack(drawn).double() / _FINE


def _seeds(seed: Any, items: int) -> list[int]:
    if seed is None:
        seed = int(torch.randint(2**31, ()))  # torch.manual_seed governs it
    each = [seed] if _is_int(seed) else seed
    if isinstance(each, Sequence) and any(_is_int(one) and not -(2**63) <= one < 2**64 for one in each):
        raise ValueError(f"seed must be from −2^63 to 2^64 − 1, got {seed!r}")
    if _is_int(seed):
        return torch.randint(2**62, (items,), generator=torch.Generator().manual_seed(seed)).tolist()
    if isinstance(seed, Sequence) and len(seed) == items and all(_is_int(each) for each in seed):
        return list(seed)
    raise ValueError(f"seed must be an int, or one int for each of the {items} prompts, got {seed!r}")


def _is_int(number: object) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool)


def _is_number(number: object) -> bool:
    return isinstance(number, Real) and not isinstance(number, bool)
