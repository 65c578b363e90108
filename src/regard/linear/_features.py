"""Feature maps, which replace exp(q·k) so that keys can be summed before any query is known.

A map turns rows [..., dim] into features [..., m]; the weight of a pair is the product of its features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._checks import check_count
from regard.backends._base import accumulation

Map = Callable[[Tensor], Tensor]


def elu_plus_one(x: Tensor) -> Tensor:
    return F.elu(x) + 1.0


NAMED: dict[str, Map] = {"elu": elu_plus_one, "relu": F.relu, "identity": lambda x: x}


class RandomFeatures(nn.Module):
    """Positive random features: φ(q)·φ(k) is exp(scale·q·k) on average over the draw, so that normalised linear
    attention approximates softmax attention. The error falls as 1/√count.

        φ(x) = exp(w·x − |x|²/2) / √count,  with x scaled by √scale and w the rows of `projection`

    Args:
        head_dim: width of a query or key head.
        count: number of features m.
        orthogonal: rows are drawn in groups of `head_dim` at right angles, which lowers the error; else independently.
        seed: of the draw, which is the same on every device.
    """

    projection: Tensor  # [count, head_dim]

    def __init__(
        self,
        head_dim: int,
        count: int,
        *,
        orthogonal: bool = True,
        seed: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("head_dim", head_dim), ("count", count)):
            check_count(name, size, kind=int)
        self.head_dim = head_dim
        self.count = count
        self.orthogonal = orthogonal
        drawn = _draw(head_dim, count, orthogonal, torch.Generator().manual_seed(seed))
        wanted = torch.get_default_dtype() if dtype is None else dtype
        self.register_buffer("projection", drawn.to(device=device, dtype=wanted))

    def query_features(self, x: Tensor, scale: float) -> Tensor:
        exponent = self._exponent(x, scale)
        # a row's own factor is in its numerator and its normaliser alike, so it may be chosen to prevent overflow
        return torch.exp(exponent - exponent.detach().amax(-1, keepdim=True))

    def key_features(self, x: Tensor, scale: float) -> Tensor:
        # A factor of all keys cancels too, but must not depend on data: a later key would change earlier rows. The
        # exponent is at most |w|²/2, so this one leaves half of that on either side.
        bound = self.projection.to(x.dtype).square().sum(-1).amax() / 4
        return torch.exp(self._exponent(x, scale) - bound)

    def _exponent(self, x: Tensor, scale: float) -> Tensor:
        x = x * math.sqrt(scale)
        return F.linear(x, self.projection.to(x.dtype)) - x.square().sum(-1, keepdim=True) / 2

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, count={self.count}, orthogonal={self.orthogonal}"


def _draw(head_dim: int, count: int, orthogonal: bool, generator: torch.Generator) -> Tensor:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    if not orthogonal:
        return normal(count, head_dim)
    directions = [_rotation(normal(head_dim, head_dim)) for _ in range(-(-count // head_dim))]
    # lengths as those of normal rows, drawn apart, so that each row alone is normally distributed
    lengths: Tensor = torch.linalg.vector_norm(normal(count, head_dim), dim=-1, keepdim=True)
    return torch.cat(directions)[:count] * lengths


def _rotation(square: Tensor) -> Tensor:
    """A rotation drawn evenly, from a matrix of normal numbers: the signs that QR happens to choose are undone."""
    q, r = torch.linalg.qr(square)
    even: Tensor = q * r.diagonal().sign()
    return even.T


class Features:
    """A call's feature map, its scale resolved: what to do with queries and with keys."""

    def __init__(self, given: object, scale: float | None, head_dim: int, normalize: bool) -> None:
        self.given = given
        if isinstance(given, RandomFeatures):
            if given.head_dim != head_dim:
                raise ValueError(f"feature_map is for head_dim {given.head_dim}, but query has head dim {head_dim}")
            if not normalize:
                raise ValueError("RandomFeatures approximate a softmax, which is normalised: leave out normalize=False")
            self.scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
            if self.scale <= 0:
                raise ValueError(f"scale must be above 0 with RandomFeatures, got {scale}")
            return
        self.scale = 1.0
        if given == "identity":
            self.scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
        elif isinstance(given, str) and given not in NAMED:
            raise ValueError(
                f"feature_map must be one of {', '.join(map(repr, NAMED))}, a regard.linear.RandomFeatures or a "
                f"function of a tensor, got {given!r}"
            )
        elif not isinstance(given, str) and not callable(given):
            raise TypeError(
                f"feature_map must be a name such as 'elu', a regard.linear.RandomFeatures or a function of a tensor, "
                f"got {type(given).__name__}"
            )
        elif scale is not None:
            raise ValueError(
                f"scale={scale} has no meaning with feature_map={self.name!r}: scale query and key before the call; "
                "'identity' and RandomFeatures have a scale"
            )

    @property
    def name(self) -> str:
        if isinstance(self.given, RandomFeatures):
            return f"random features ({self.given.count})"
        return self.given if isinstance(self.given, str) else getattr(self.given, "__name__", type(self.given).__name__)

    def count(self, query: Tensor) -> int:
        """Features m of a head; a function of the caller's is asked with a row of zeros."""
        if isinstance(self.given, RandomFeatures):
            return self.given.count
        dim = query.shape[-1]
        if isinstance(self.given, str):
            return dim
        with torch.no_grad():
            return int(self._map(query.new_zeros(1, 1, 1, dim, dtype=accumulation(query.dtype))).shape[-1])

    def of_query(self, x: Tensor) -> Tensor:
        if isinstance(self.given, RandomFeatures):
            return self.given.query_features(x, self.scale)
        return self._map(x) if self.scale == 1.0 else self._map(x) * self.scale

    def of_key(self, x: Tensor) -> Tensor:
        if isinstance(self.given, RandomFeatures):
            return self.given.key_features(x, self.scale)
        return self._map(x)

    def _map(self, x: Tensor) -> Tensor:
        found: object = NAMED[self.given](x) if isinstance(self.given, str) else self.given(x)  # type: ignore[operator]
        if not isinstance(found, Tensor) or found.shape[:-1] != x.shape[:-1]:
            raise ValueError(
                f"feature_map must turn [batch, head, token, dim] into [batch, head, token, features]; of "
                f"{list(x.shape)} it made {list(found.shape) if isinstance(found, Tensor) else type(found).__name__}"
            )
        return found.to(x.dtype)
