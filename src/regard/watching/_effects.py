"""What an operator that is neither a view nor a product makes of weights: zeros among them, or other numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def is_filled(packet: Any) -> bool:
    """Whether an operator leaves numbers as they are, but for some that it writes."""
    return packet in _FILLS


def fills_with_zeros(packet: Any, at: int, args: Any) -> bool:
    """Whether the numbers that such an operator writes into its argument ``at`` are zeros."""
    if packet is aten.where:
        return _is_zero(args[3 - at]) if at > 0 else False
    where = _FILLS[packet]
    return at == 0 and (where is None or (len(args) > where and _is_zero(args[where])))


def is_mask(other: Any) -> bool:
    """Whether what weights are multiplied by leaves each as it is, or makes it 0."""
    return isinstance(other, Tensor) and (
        other.dtype == torch.bool or (not other.is_meta and bool(((other == 0) | (other == 1)).all()))
    )


def carried_by(func: Any, out: Any) -> Tensor | None:
    """What an operator that is not known made of its inputs, if it made it number by number, or moved them: not their
    sums, and not something new in the same shape."""
    packet = getattr(func, "overloadpacket", None)
    if packet is None or packet in _NEW or any(given.name == "keepdim" for given in func._schema.arguments):
        return None
    out = out[0] if isinstance(out, (tuple, list)) and out else out
    return out if isinstance(out, Tensor) and out.is_floating_point() and out.dim() >= 2 else None


def makes_new(packet: Any) -> bool:
    """Whether an operator gives new numbers in the shape of its input, or logarithms: no weights."""
    return packet in _NEW


def picks(packet: Any) -> bool:
    """Whether an operator picks some numbers of a row, in an order of its own."""
    return packet in (aten.topk, aten.sort, aten.gather)


def name_of(packet: Any) -> str:
    return str(packet).removeprefix("aten.")


def _is_zero(fill: Any) -> bool:
    if isinstance(fill, Tensor):
        return fill.numel() == 1 and not fill.is_meta and float(fill) == 0.0
    return isinstance(fill, (int, float)) and fill == 0


# By operator: which argument is written; None where it is 0.
_FILLS: dict[Any, int | None] = {
    **dict.fromkeys((aten.masked_fill, aten.masked_fill_, aten.where), 2),
    **dict.fromkeys((aten.nan_to_num, aten.nan_to_num_, aten.tril, aten.tril_, aten.triu, aten.triu_), None),
    **dict.fromkeys((aten.hardshrink,), None),
    **dict.fromkeys((aten.threshold, aten.threshold_), 2),
    **dict.fromkeys((aten.index_fill, aten.index_fill_, aten.scatter, aten.scatter_), 3),
    **dict.fromkeys((aten.masked_scatter, aten.masked_scatter_), 2),
}
# Operators whose outputs are no weights: new numbers in the same shape, and logarithms, which are logits again.
_NEW = frozenset(
    (aten.zeros_like, aten.ones_like, aten.empty_like, aten.full_like, aten.rand_like, aten.randn_like, aten.new_zeros,
     aten.new_ones, aten.new_empty, aten.new_full, aten.bernoulli, aten.new_empty_strided, aten._softmax_backward_data,
     aten.log, aten.log_, aten.log2)
)  # fmt: skip
# Operators that move numbers: their outputs are followed whatever the softmax was of.
MOVERS = frozenset(
    (aten.constant_pad_nd, aten.as_strided, aten.cat, aten.index, aten.gather, aten.index_select, aten.select,
     aten.roll, aten.flip, aten.stack, aten._to_dense)
)  # fmt: skip
SCATTERS = frozenset((aten.index_put, aten.index_put_, aten.scatter, aten.scatter_, aten.index_copy, aten.index_add))
CUTS = frozenset((aten.split, aten.split_with_sizes, aten.unbind, aten.chunk, aten.tensor_split))
