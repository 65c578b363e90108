"""The description of one call, hashable and without tensors, so that a plan can be chosen once and kept; and the call.

Legend of sizes: B batch, H query heads, Hkv key/value heads, L queries, S keys, D head dim, Dv value dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from regard.bias import Rule
    from regard.masks import Mask
    from regard.masks._areas import Area


class Refused(ValueError):
    """A backend that was named cannot do the call; the message says why and what to change."""


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
    areas: tuple[Area, ...] | None  # the mask as a few plain calls; only on devices where that decides
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
    def lines(self) -> int:
        """Rows of all items and heads."""
        return self.batch * self.heads * self.queries

    @property
    def empty(self) -> bool:
        return self.pairs == 0 or self.value_dim == 0


class Call(NamedTuple):
    """A call: its tensors, and its description. Frozen: what runs it gives a ``Result``, and writes nothing here."""

    spec: CallSpec
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None
    bias: Tensor | None  # 4-D, or the table of the rule in the spec
    sinks: Tensor | None
    offset: int | Tensor  # resolved: never None
    seed: Tensor | None = None  # what dropout is derived from, where there is some
    wants_rows: bool = False  # entropy and largest weight of each row, where the forward pass can give them

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Those that may have gradients."""
        return self.query, self.key, self.value, self.bias, self.sinks

    def permitted(self, rows: range, keys: range) -> Tensor:
        """What the mask says about some rows and keys: bool [B or 1, H or 1, rows, keys]."""
        assert self.mask is not None
        sizes = self.spec.queries, self.spec.keys
        return self.mask.tile(rows, keys, *sizes, offset=self.offset, device=self.query.device)

    def without_tensors(self) -> Call:
        """What a backward pass needs next to the tensors that autograd saves for it."""
        return self.of(None, None, None, None, None)

    def of(self, query: Any, key: Any, value: Any, bias: Any, sinks: Any) -> Call:
        """The call of these tensors; as ``replace``, in a fraction of its time."""
        made: Call = tuple.__new__(Call, (self.spec, query, key, value, self.mask, bias, sinks, *self[7:]))
        return made

    def replace(self, **changes: Any) -> Call:
        return self._replace(**changes)


class Result(NamedTuple):
    """What running a call gives."""

    out: Tensor
    lse: Tensor  # [B, H, L], for reading, not for gradients; -inf for an empty row
    rows: dict[str, Tensor] | None = None  # statistics of rows, where they were wanted and the forward pass has them
    finite: bool | None = None  # whether all numbers that were used are finite; None: nobody looked


class OfOtherCall(Result):
    """The result of a call that ``regard.edit`` changed before it ran."""

    ran: Call
