"""Our own kernels, forward and backward: any mask by its tiles, any modifier, and row statistics in the same pass.

Compiled once for each kind of call (dtype, head sizes, which modifiers), in a second or two.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from regard.backends._autograd import FusedBackend
from regard.backends._base import has_triton
from regard.backends._tiled import sink_gradient
from regard.backends.blockwise import Blockwise
from regard.spec import Call, CallSpec, Result

if TYPE_CHECKING:
    from regard._triton.attend import Attended

_make: Any = tuple.__new__  # a named tuple without the Python function that makes one
# of masks whose booleans are too many to be there at once
_gradients = Blockwise()


class Triton(FusedBackend):
    name = "triton"
    about = "our Triton kernel: any mask by its tiles, no compilation for each mask"

    def refuse(self, spec: CallSpec) -> list[str]:
        if not has_triton():
            return ["triton is not installed"]
        if spec.device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return [f"the Triton kernels run on CUDA devices, the call is on {spec.device}"]
        from regard._triton.attend import refuse

        return refuse(spec)

    def peak_bytes(self, call: Call) -> int:
        from regard._triton.attend import table_bytes

        return self.result_bytes(call.spec) + table_bytes(call)

    def takes_rules(self, spec: CallSpec) -> bool:
        return True

    def leaves_out_padding(self, spec: CallSpec) -> bool:
        # a band, whose flags say so; padding joined to anything else is tested pair by pair
        return spec.bias is None and spec.flags is not None and spec.flags[-1] is None

    def forward(self, call: Call) -> Result:
        attend, _ = _passes()
        done = attend(call, call.wants_rows)
        if done.entropy is None or done.max_weight is None:
            return _make(Result, (done.out, done.lse, None, None))  # type: ignore[no-any-return]
        return Result(done.out, done.lse, {"entropy": done.entropy, "max_weight": done.max_weight})

    def backward(
        self, call: Call, grad_out: Tensor, out: Tensor, lse: Tensor, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        _, gradients = _passes()
        found = gradients(call, grad_out, out, lse, needs)
        if found is None:
            return _gradients.backward(call, grad_out, out, lse, needs)
        return (*found, sink_gradient(call, grad_out, out, lse) if needs[4] else None)


@cache
def _passes() -> tuple[Callable[..., Attended], Callable[..., tuple[Tensor | None, ...] | None]]:
    """Imported where they are first used: not every machine has triton."""
    from regard._triton.attend import attend
    from regard._triton.gradients import gradients

    return attend, gradients
