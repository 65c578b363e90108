"""The NumPy oracle as a backend: slow, float64, no gradients. For checking the others, never chosen by "auto"."""

from __future__ import annotations

import torch
from torch import Tensor

from regard import reference as oracle
from regard.backends._base import Backend
from regard.backends._bias import bias_over
from regard.spec import Call, CallSpec, Result


class Reference(Backend):
    name = "reference"
    about = "the NumPy float64 oracle; forward only"

    def refuse(self, spec: CallSpec) -> list[str]:
        reasons = []
        if spec.device != "cpu":
            reasons.append(f"it runs in NumPy on the CPU, not on {spec.device}")
        if spec.grad:
            reasons.append("it has no gradients: use torch.no_grad() or another backend")
        if spec.dropout:
            reasons.append("it draws nothing at random: dropout must be 0")
        if spec.mode != "plain":
            reasons.append("it leaves torch, so compile, vmap, torch.func and forward-mode AD cannot see it")
        return reasons

    def takes_rules(self, spec: CallSpec) -> bool:
        return True

    def peak_bytes(self, call: Call) -> int:
        # four matrices of NumPy's, and the output twice
        return call.spec.pairs * 8 * 4 + call.spec.lines * call.spec.value_dim * 8 + self.result_bytes(call.spec)

    def run(self, call: Call, *, named: bool) -> Result:
        spec = call.spec
        rows, keys = range(spec.queries), range(spec.keys)
        permitted = None if call.mask is None else call.permitted(rows, keys).numpy()
        bias = None if call.bias is None else call.bias.detach().to(torch.float64)
        bias = bias_over(call.replace(bias=bias), rows, keys)
        result = oracle.attention(
            _array(call.query),
            _array(call.key),
            _array(call.value),
            mask=permitted,
            bias=None if bias is None else bias.numpy(),
            scale=spec.scale,
            softcap=spec.softcap,
            sinks=None if call.sinks is None else _array(call.sinks),
            return_weights=True,
        )
        return Result(torch.from_numpy(result.out).to(spec.dtype), torch.from_numpy(result.lse))


def _array(tensor: Tensor):  # type: ignore[no-untyped-def]
    return tensor.detach().to(torch.float64).numpy()
