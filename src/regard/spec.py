"""The description of one call: hashable, without tensors, so that a plan can be chosen once and kept.

Legend of sizes: B batch, H query heads, Hkv key/value heads, L queries, S keys, D head dim, Dv value dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from regard.bias import Rule
    from regard.masks import Mask


class BiasSpec(NamedTuple):
    """A bias, as far as choosing a backend needs it: the tensor, or the rule and its table."""

    shape: tuple[int, ...]  # of the tensor, or of the table
    dtype: torch.dtype
    needs_grad: bool
    rule: Rule | None = None


class CallSpec(NamedTuple):
    """All that a backend may look at before it runs. Two calls with equal specs get the same backend."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: str
    mask: tuple[Any, ...] | None  # the mask's structure: kinds, numbers, shapes; never contents
    flags: tuple[Any, ...] | None  # what of the mask a fused kernel can take as flags; only where that decides
    bias: BiasSpec | None
    scale: float
    softcap: float | None
    sinks: bool
    dropout: float
    offset: int | None  # None: one offset per batch item, in a tensor
    grad: bool  # some input requires grad, and grad mode is on
    unit_stride: bool  # the last dim of query, key and value is contiguous
    mode: str  # "plain", "compile", "fake", "transform" (vmap, torch.func), "dual" (forward-mode AD)
    want: tuple[Any, ...] | None

    @property
    def pairs(self) -> int:
        """Query-key pairs of the call, permitted or not."""
        return self.batch * self.heads * self.queries * self.keys

    @property
    def empty(self) -> bool:
        return self.pairs == 0 or self.value_dim == 0


class Call:
    """A call's tensors beside its spec. Tensors that may need gradients are apart from the rest on purpose:
    backends receive them explicitly, so that autograd sees them."""

    __slots__ = ("bias", "clean", "key", "lse", "mask", "offset", "query", "rows", "seed", "sinks", "spec", "value")

    def __init__(
        self,
        spec: CallSpec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask | None,
        bias: Tensor | None,
        sinks: Tensor | None,
        offset: int | Tensor,
    ) -> None:
        self.spec = spec
        self.query = query
        self.key = key
        self.value = value
        self.mask = mask
        self.bias = bias  # 4-D, or the table of the rule in the spec, or None
        self.sinks = sinks
        self.offset = offset  # resolved: never None
        self.seed: Tensor | None = None  # drawn by the api when dropout > 0
        self.clean: bool | None = None  # a backend that looked at all numbers says whether all were finite
        self.rows: dict[str, Tensor] | None = None  # where row statistics are wanted of the forward pass, if it can
        self.lse: Tensor | None = None  # left here by a fused forward pass, which returns only what has gradients

    def without_tensors(self) -> Call:
        """What a backward pass needs beside the tensors that autograd saves for it."""
        nothing: Any = None
        rest = Call(self.spec, nothing, nothing, nothing, self.mask, None, None, self.offset)
        rest.seed = self.seed
        return rest

    def replace(self, **changes: Any) -> Call:
        """A copy with other tensors; for the paths that clean the inputs first."""
        copy = Call.__new__(Call)
        for name in Call.__slots__:
            setattr(copy, name, changes[name] if name in changes else getattr(self, name))
        return copy
