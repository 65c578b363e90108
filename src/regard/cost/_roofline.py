"""The least time that an attention call can take on a device: its work over the device's rates."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from regard.cost import _given
from regard.cost._describe import causal_pairs
from regard.cost._devices import Device


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """One call of `regard.attention`, by its sizes.

    Args:
        length: queries, and as many keys.
        heads: of the query.
        head_dim: width of a head.
        kv_heads: of key and value; `heads` when None.
        batch: items.
        causal: whether a query sees only the keys up to itself.
        window: a query sees itself and this many keys before it.
        dtype: as in `cost.of`.
    """

    length: int
    heads: int
    head_dim: int
    kv_heads: int | None = None
    batch: int = 1
    causal: bool = False
    window: int | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        _given.check_counts(length=self.length, heads=self.heads, head_dim=self.head_dim, batch=self.batch)
        if self.kv_heads is not None:
            _given.check_count("kv_heads", self.kv_heads)
            if self.heads % self.kv_heads:
                raise ValueError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        if self.window is not None:
            _given.check_count("window", self.window, 0)
            if not self.causal:
                raise ValueError(f"window={self.window} is counted back from each query; it needs causal=True")
        object.__setattr__(self, "dtype", _given.dtype_of(self.dtype))

    @property
    def shared_heads(self) -> int:
        """Heads of key and value."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def pairs(self) -> int:
        """Pairs of query and key that are computed, over all items and heads."""
        one = causal_pairs(self.length, self.window) if self.causal else self.length**2
        return self.batch * self.heads * one

    def flops(self, *, backward: bool = False) -> int:
        """Of a fused kernel, over the pairs that the mask keeps: two products, and five on the way back."""
        return (10 if backward else 4) * self.pairs * self.head_dim

    def bytes(self, *, backward: bool = False) -> int:
        """Query, key, value and output, once; on the way back their gradients too, and the sums of the rows."""
        size = _given.SIZES[self.dtype]
        rows = self.batch * self.length
        numbers = 2 * rows * (self.heads + self.shared_heads) * self.head_dim * size
        return (2 if backward else 1) * numbers + rows * self.heads * max(4, size)


@dataclass(frozen=True)
class Roofline:
    """The least time of a call on a device, and what bounds it.

    Args:
        device: its name.
        seconds: the time.
        bound: "matrix products", "softmax" or "memory": what takes most of it.
        products: seconds for the matrix products alone.
        softmax: seconds for the exponentials alone; 0 where their rate is unknown.
        memory: seconds for reading inputs and writing outputs alone.
    """

    device: str
    seconds: float
    bound: str
    products: float
    softmax: float
    memory: float

    def to_dict(self) -> dict[str, Any]:
        """As what JSON holds."""
        return asdict(self)


def roofline(call: AttentionCall, device: Device, *, backward: bool = False) -> Roofline:
    """The least time that a fused kernel needs for a call.

    A kernel that is written well comes near it where the length is large; short calls, and masks that cut through
    many tiles, take longer.

    Args:
        call: what is computed.
        device: of `cost.device`, `cost.measured` or `cost.measure`.
        backward: the backward pass alone, in place of the forward pass.
    """
    products = call.flops(backward=backward) / device.rate(call.dtype)
    softmax = 0.0 if device.exponentials is None else call.pairs / device.exponentials
    memory = call.bytes(backward=backward) / device.bandwidth
    named = {"matrix products": products, "softmax": softmax, "memory": memory}
    seconds = max(named.values()) if device.overlaps else max(products + softmax, memory)
    return Roofline(device.name, seconds, max(named, key=lambda one: named[one]), products, softmax, memory)
