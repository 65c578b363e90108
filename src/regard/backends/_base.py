"""What every backend answers: why it cannot run a call, what it needs, and the program that runs it."""

from __future__ import annotations

import importlib.util
import math
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor

from regard.backends._meter import peak_bytes, without_values
from regard.spec import Call, CallSpec, Result


class Backend(ABC):
    """One way to compute attention. Stateless: an instance serves every call."""

    name: str
    about: str  # one line for tables

    @abstractmethod
    def refuse(self, spec: CallSpec) -> list[str]:
        """Reasons why this backend cannot run the call, as short clauses; empty when it can."""

    def takes_rules(self, spec: CallSpec) -> bool:
        """Whether it evaluates a bias that is a rule; a backend that does not say so is given tensors only."""
        return False

    def leaves_out_padding(self, spec: CallSpec) -> bool:
        """Whether its kernels read zeros in place of keys that a whole item hides, whatever lies there."""
        return False

    def peak_bytes(self, call: Call) -> int:
        """Bytes alive at the peak of a forward pass beyond the inputs, output included: counted, not foretold."""
        bare = without_values(call)
        return peak_bytes(lambda: self.run(bare, named=True), bare)

    def result_bytes(self, spec: CallSpec) -> int:
        """Of output and log-sum-exp."""
        return spec.lines * (spec.value_dim * spec.dtype.itemsize + accumulation(spec.dtype).itemsize)

    def program(self, call: Call, *, named: bool) -> Program:
        """What runs this call, and every other of the same description. ``named``: the caller asked for this backend.
        Made from the description, and from the mask where its contents may be read; computes nothing."""
        return Program(self, call.spec, named=named)

    @abstractmethod
    def run(self, call: Call, *, named: bool) -> Result:
        """The call, with nothing prepared for it."""


class Program:
    """What a plan runs for the calls of one description: see ``Backend.program``."""

    nbytes = 0  # of what it keeps, for the memory that it is remembered in

    def __init__(self, backend: Backend, spec: CallSpec, *, named: bool) -> None:
        self.backend = backend
        self.spec = spec
        self.named = named
        # whether numbers that are masked have to be looked for, once it has run (see ``_guard``)
        self.guarded = (spec.mask is not None or spec.bias is not None) and not spec.empty
        self.reads = reads_values(spec)
        # known once it has run, where values are not looked for: nothing has to be cleaned before (see ``_guard``)
        self.hides_nothing = False

    def run(self, call: Call) -> Result:
        return self.backend.run(call, named=self.named)


# the square of a larger number overflows in float32
_HUGE = 1e19


def norm_of(tensor: Tensor) -> float:
    """No row of a tensor [..., dim] is longer than this; inf or NaN when a number is, or is huge. Reads the device."""
    tensor = tensor.detach()
    if tensor.dtype.itemsize == 2:  # a norm would copy it to float32
        low, high = torch.aminmax(tensor)
        largest = float(torch.maximum(high, -low).item())
        return math.inf if largest > _HUGE else largest * math.sqrt(tensor.shape[-1])
    if tensor.numel() > 1 << 15 and tensor.is_contiguous():
        flat = tensor.view(-1)  # the fastest reduction there is
        return math.sqrt(torch.dot(flat, flat).item())
    return float(torch.linalg.vector_norm(tensor).item())


_autocasts = torch._C._is_any_autocast_enabled
_AS_IT_IS = nullcontext()


def no_autocast(device: str) -> AbstractContextManager[object]:
    """A block in which torch keeps the dtypes it is given: under autocast, even float32 matrices would be rounded."""
    if not _autocasts():
        return _AS_IT_IS
    usual = device in ("cpu", "cuda") or torch.amp.is_autocast_available(device)
    if usual and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return _AS_IT_IS


def accumulation(dtype: torch.dtype) -> torch.dtype:
    """The precision sums are kept in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def reads_values(spec: CallSpec) -> bool:
    """Whether a masked call's numbers are looked at, and cleaned, before a backend sees them (see ``_guard``)."""
    return spec.mode == "plain" and spec.device == "cpu"


def refuse_transforms(spec: CallSpec) -> list[str]:
    """What only plain operations can do."""
    if spec.mode == "transform":
        return ["torch.func transforms (vmap, grad, jvp) need operations that torch can see through: use eager"]
    return ["it has no forward-mode derivative: use eager"] if spec.mode == "dual" else []


@lru_cache(1)
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
