"""Our own kernels, forward and backward: any mask by its tiles, any modifier, and row statistics in the same pass.

Compiled once for each kind of call (dtype, head sizes, which modifiers), in a second or two.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from regard.backends._autograd import FusedBackend
from regard.backends._tiled import sink_gradient
from regard.backends.blockwise import Blockwise
from regard.masks._rebuild import of_intervals

if TYPE_CHECKING:
    from torch import Tensor

    from regard.spec import Call, CallSpec

# of masks whose booleans are too many to be there at once
_gradients = Blockwise()


class Triton(FusedBackend):
    name = "triton"
    about = "our Triton kernel: any mask by its tiles, no compilation for each mask"

    def refuse(self, spec: CallSpec) -> list[str]:
        if not _has_triton():
            return ["triton is not installed"]
        if spec.device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return [f"the Triton kernels run on CUDA devices, the call is on {spec.device}"]
        from regard._triton.attend import refuse

        return refuse(spec)

    def seconds(self, spec: CallSpec) -> float:
        if spec.device != "cuda":
            return math.inf  # the interpreter is for tests
        return measured_seconds(spec)

    def workspace(self, spec: CallSpec, kept_pairs: int) -> int:
        # where a bias is learned, the output is kept before it is rounded too
        exact = 4 if spec.grad and spec.bias is not None and spec.bias.needs_grad and spec.dtype.itemsize < 4 else 0
        return spec.batch * spec.heads * spec.queries * (spec.value_dim * (spec.dtype.itemsize + exact) + 4)

    def takes_rules(self, spec: CallSpec) -> bool:
        return True

    def mask_bytes(self, call: Call) -> int:
        from regard._triton.attend import mask_bytes

        return mask_bytes(call)

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        from regard._triton.attend import attend

        done = attend(call, rows=call.rows is not None)
        if call.rows is not None and done.entropy is not None and done.max_weight is not None:
            call.rows.update(entropy=done.entropy, max_weight=done.max_weight)
        return done.out, done.lse

    def backward(
        self, call: Call, grad_out: Tensor, out: Tensor, lse: Tensor, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        from regard._triton.attend import gradients, refuse_gradients

        if refuse_gradients(call):
            return _gradients.backward(call, grad_out, out, lse, needs)
        found = gradients(call, grad_out, out, lse, needs)
        return (*found, sink_gradient(call, grad_out, out, lse) if needs[4] else None)


@lru_cache(1)
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@lru_cache(1)
def _table() -> dict[str, float]:
    """Picoseconds a query-key pair takes, by kind of call; measured by ``benchmarks/backends_gpu.py``."""
    found = json.loads(Path(__file__).with_name("triton_seconds.json").read_text())
    return dict(found["picoseconds a pair"])


def measured_seconds(spec: CallSpec) -> float:
    kind = "float32" if spec.dtype == torch.float32 else "half"
    if spec.mask is not None and not of_intervals(spec.mask):
        kind += ", masked pair by pair"
    elif spec.bias is not None and spec.bias.rule is None:
        kind += ", with a bias tensor"
    launch = 1.5e-4 if spec.queries * spec.keys >= 1 << 20 else 3e-5
    return launch + spec.pairs * _table()[kind] * 1e-12
