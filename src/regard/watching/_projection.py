"""The output projection of an attention call: the matrix that reads what the call gave, found by comparing the two."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.recording import Site
from regard.watching._in_memory import InMemory
from regard.watching._modules import Frame
from regard.watching._seen import Seen


class Projection(NamedTuple):
    path: str
    weight: Tensor  # [model dim, heads · value dim]


class Waiting(NamedTuple):
    """A call that has run, until it is known what reads its output."""

    seen: Seen | InMemory
    stack: list[Frame]
    site: Site
    layer: int
    number: int
    out: Any


def matrix_of(module: nn.Module) -> Tensor | None:
    """The matrix of a linear layer as torch.nn.Linear holds it; None of any other module."""
    weight = _own_part(module._parameters.get("weight"))
    if not isinstance(weight, Tensor) or weight.dim() != 2 or isinstance(module, nn.Embedding):
        return None
    if isinstance(module, nn.Linear):
        return weight.detach()
    # GPT-2's linear layers hold the transpose
    return weight.detach().T if type(module).__name__ == "Conv1D" else None


def _own_part(weight: Any) -> Any:
    """Under tensor parallelism, the columns that read this process's heads; None where it has other parts."""
    placements = getattr(weight, "placements", None)
    if placements is None:
        return weight
    return weight.to_local() if all(each.is_shard(1) or each.is_replicate() for each in placements) else None


def known_projection(stack: list[Frame], path: str) -> Projection | None:
    """That of torch's own module, which multiplies by the weight of its projection without calling it."""
    module = next((f.module for f in reversed(stack) if isinstance(f.module, nn.MultiheadAttention)), None)
    if module is None and isinstance(stack[-1].module, nn.TransformerEncoderLayer):
        module = stack[-1].module.self_attn
    return None if module is None else Projection(f"{path}.out_proj".lstrip("."), module.out_proj.weight)


def version_of(tensor: Tensor | None) -> int | None:
    """How often a tensor was written into; None where torch does not count."""
    return None if tensor is None or tensor.is_inference() else tensor._version


def reads(seen: Seen | InMemory, args: tuple[Any, ...], weight: Tensor) -> bool:
    """Whether a linear layer was handed exactly what a call gave, heads side by side."""
    given = args[0] if args and isinstance(args[0], Tensor) else None
    result = seen.result
    if result is not None and isinstance(seen, Seen) and seen.by_token:
        result = result.transpose(1, 2)
    if result is None or given is None or given.numel() != result.numel() or given.is_nested:
        return False
    batch, heads, queries, dim = result.shape
    if weight.shape[1] != heads * dim or given.shape[-1] != heads * dim:
        return False
    return torch.equal(given.detach().reshape(batch, queries, heads, dim).transpose(1, 2), result.detach())
