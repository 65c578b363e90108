"""The length of each value as it enters the residual stream: ‖v_j W_O‖, with the head's own block of W_O."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.backends._base import accumulation, no_autocast
from regard.spec import Call


def value_lengths(call: Call, given: Any = None, output: Any = None) -> Tensor:
    """[B, H, S]: what was given, or the length of each value, taken through the output projection where there is one.

    Args:
        given: the lengths, broadcastable to [B, H, S]; with the key heads' number they are those of their groups.
        output: [model dim, H · value dim], as the weight of the ``torch.nn.Linear`` that reads the heads side by side.
    """
    spec, work = call.spec, accumulation(call.spec.dtype)
    group = spec.heads // spec.kv_heads
    with torch.no_grad(), no_autocast(spec.device):
        if given is not None:
            found = _given(call, given).to(work)
        elif output is None:
            found = torch.linalg.vector_norm(call.value.detach().to(work), dim=-1)
        else:
            return _through(call, _output(call, output).to(work))
        if found.shape[1] not in (1, spec.heads):
            found = found.repeat_interleave(group, 1)
        return found.expand(spec.batch, spec.heads, spec.keys)


def _through(call: Call, output: Tensor) -> Tensor:
    """‖W_h v‖ is ‖R_h v‖ with W_h = Q_h R_h: as wide as a head, not as the model."""
    spec, work = call.spec, accumulation(call.spec.dtype)
    blocks = output.view(output.shape[0], spec.heads, spec.value_dim).transpose(0, 1)
    if output.shape[0] > spec.value_dim:
        blocks = torch.linalg.qr(blocks, mode="r").R
    group = spec.heads // spec.kv_heads
    found = call.value.new_empty(spec.batch, spec.heads, spec.keys, dtype=work)
    for head in range(spec.heads):
        value = call.value[:, head // group].detach().to(work)
        found[:, head] = torch.linalg.vector_norm(value @ blocks[head].T, dim=-1)
    return found


def _given(call: Call, given: Any) -> Tensor:
    spec = call.spec
    if not isinstance(given, Tensor) or not given.is_floating_point():
        raise TypeError(f"value_norms must be a floating-point tensor [batch, head, key], got {_what(given)}")
    if given.device != call.query.device:
        raise TypeError(f"value_norms is on {given.device}, and query on {call.query.device}")
    sizes = given.shape if given.dim() == 3 else ()
    fits = [(1, spec.batch), (1, spec.kv_heads, spec.heads), (spec.keys,)]
    if len(sizes) != 3 or any(size not in fit for size, fit in zip(sizes, fits, strict=True)):
        raise ValueError(
            f"value_norms must be [batch, head, key], here {[spec.batch, spec.heads, spec.keys]}, got "
            f"{list(given.shape)}: one length for each value"
        )
    found: Tensor = given.detach()
    return found


def _output(call: Call, given: Any) -> Tensor:
    spec = call.spec
    if not isinstance(given, Tensor) or not given.is_floating_point():
        raise TypeError(f"output must be the weight of the output projection, a tensor, got {_what(given)}")
    width = spec.heads * spec.value_dim
    if given.dim() != 2 or given.shape[1] != width:
        raise ValueError(
            f"output must be [model dim, heads · value dim], here [model dim, {width}], as the weight of a "
            f"torch.nn.Linear is, got {list(given.shape)}"
        )
    if given.device != call.query.device:
        raise TypeError(f"output is on {given.device}, and query on {call.query.device}")
    found: Tensor = given.detach()
    return found


def _what(given: object) -> str:
    return f"a tensor of {given.dtype}" if isinstance(given, Tensor) else type(given).__name__
