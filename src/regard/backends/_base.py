"""What every backend answers: why it cannot run a call, what it costs, and the call itself."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from regard.spec import Call, CallSpec


class Backend(ABC):
    """One way to compute attention. Stateless: an instance serves every call."""

    name: str
    about: str  # one line for tables

    @abstractmethod
    def refuse(self, spec: CallSpec) -> list[str]:
        """Reasons why this backend cannot run the call, as short clauses; empty when it can."""

    @abstractmethod
    def seconds(self, spec: CallSpec) -> float:
        """A rough time for the call, comparable between backends on one device. Looks at no data."""

    @abstractmethod
    def workspace(self, spec: CallSpec, kept_pairs: int) -> int:
        """Bytes alive at the peak of a forward pass beyond the inputs: output included."""

    @abstractmethod
    def run(self, call: Call, *, named: bool) -> tuple[Tensor, Tensor]:
        """(out, lse); lse [B, H, L] is for reading, not for gradients. ``named``: the caller asked for this one."""


class FusedBackend(Backend):
    """A backend with a hand-written backward pass: two functions on plain tensors, no autograd inside.

    lse is [B, H, L] in accumulation precision, -inf for an empty row, sinks included.
    """

    @abstractmethod
    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """(out, lse) of the call's tensors; out may be in accumulation precision, which makes gradients more exact."""

    @abstractmethod
    def backward(
        self, call: Call, grad_out: Tensor, out: Tensor, lse: Tensor, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of (query, key, value, bias, sinks), None where ``needs`` is False."""

    def run(self, call: Call, *, named: bool) -> tuple[Tensor, Tensor]:
        from regard.backends._autograd import run_fused

        return run_fused(self, call, named=named)


def norm_of(tensor: Tensor) -> float:
    """The Euclidean norm of all numbers, read from the device; inf or NaN when one of them is, or is huge."""
    tensor = tensor.detach()
    if tensor.is_contiguous() and tensor.dtype in (torch.float32, torch.float64):
        flat = tensor.view(-1)  # the fastest reduction there is
        return math.sqrt(torch.dot(flat, flat).item())
    return float(torch.linalg.vector_norm(tensor, dtype=accumulation(tensor.dtype)).item())


def accumulation(dtype: torch.dtype) -> torch.dtype:
    """The precision sums are kept in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def reads_values(spec: CallSpec) -> bool:
    """Whether a masked call's numbers are looked at, and cleaned, before a backend sees them (see ``_guard``)."""
    return spec.mode == "plain" and spec.device == "cpu"


def look_bytes(spec: CallSpec) -> int:
    """Bytes it takes to look at the values of a masked call on CPU: half precision is copied to float32."""
    if spec.device != "cpu" or spec.dtype.itemsize > 2 or (spec.mask is None and spec.bias is None):
        return 0
    keys = spec.kv_heads * spec.keys * max(spec.head_dim, spec.value_dim)
    return 4 * spec.batch * max(spec.heads * spec.queries * spec.head_dim, keys)
