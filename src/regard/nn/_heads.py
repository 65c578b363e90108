"""What modules that project query, key and value share: sizes, projections, initial weights, output."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.nn import _checks, _inputs
from regard.nn._inputs import Inputs
from regard.nn._products import product
from regard.nn._protocols import Positions

_NAMES = ("q_proj", "k_proj", "v_proj")
# of the module MultiHeadAttention(heads, d_model, dropout) that many tutorials write
_TUTORIAL = {"q_linear": "q_proj", "k_linear": "k_proj", "v_linear": "v_proj", "out": "out_proj"}


class Call(NamedTuple):
    """The inputs of the heads of a call, and what finishes its result."""

    inputs: Inputs
    tensors: tuple[Any, Any, Any]  # query, key, value: [B, head, token, dim]; the new tokens' with a cache
    keywords: dict[str, Any]
    pads: Tensor | None  # [B or 1, L]: tokens that are padding
    itself: bool  # self attention: padding among the keys is padding among the rows
    # of the keywords, those that say how: scale, softcap, sinks, backend, where they were given. None: a cache must not
    # attend by itself
    how: dict[str, Any] | None
    queries: tuple[Tensor, Tensor] | None = None  # of latent attention, where they meet keys that are expanded


class ProjectedHeads(nn.Module):
    """The sizes of `MultiHeadAttention`, and `q_proj`, `k_proj`, `v_proj`, or one `qkv_proj` instead."""

    out_proj: nn.Linear
    _input_widths = ("embed_dim", "key_dim", "value_dim")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None,
        head_dim: int | None,
        value_head_dim: int | None,
        key_dim: int | None,
        value_dim: int | None,
        *,
        qkv_bias: bool,
        packed: bool,
        out_dropout: float,
        positions: Positions | None,
        **made: Any,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        _checks.check_sizes({**sizes, "value_head_dim": value_head_dim, "key_dim": key_dim, "value_dim": value_dim})
        _checks.check_heads(embed_dim, num_heads, num_kv_heads, head_dim)
        _checks.check_probability("out_dropout", out_dropout)
        _checks.check_positions(positions)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.value_head_dim = self.head_dim if value_head_dim is None else value_head_dim
        self.key_dim = embed_dim if key_dim is None else key_dim
        self.value_dim = self.key_dim if value_dim is None else value_dim
        self.packed = packed
        self.out_dropout = out_dropout
        self.positions = positions
        q_width, k_width, v_width = self.projection_widths
        if packed:
            if (self.key_dim, self.value_dim) != (embed_dim, embed_dim):
                raise ValueError(
                    f"packed=True needs one width for query, key and value; got embed_dim {embed_dim}, key_dim "
                    f"{self.key_dim}, value_dim {self.value_dim}: leave packed out"
                )
            self.qkv_proj = nn.Linear(embed_dim, q_width + k_width + v_width, bias=qkv_bias, **made)
        else:
            self.q_proj = nn.Linear(embed_dim, q_width, bias=qkv_bias, **made)
            self.k_proj = nn.Linear(self.key_dim, k_width, bias=qkv_bias, **made)
            self.v_proj = nn.Linear(self.value_dim, v_width, bias=qkv_bias, **made)

    @property
    def _input_projections(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        """The layers that query, key and value meet."""
        return (self.qkv_proj,) * 3 if self.packed else (self.q_proj, self.k_proj, self.v_proj)

    @property
    def projection_widths(self) -> tuple[int, int, int]:
        """Total widths of the projected query, key and value: the rows of `qkv_proj` in order."""
        return (
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
            self.num_kv_heads * self.value_head_dim,
        )

    def reset_parameters(self) -> None:
        projections = (self.qkv_proj,) if self.packed else (self.q_proj, self.k_proj, self.v_proj)
        for projection in projections:
            nn.init.xavier_uniform_(projection.weight)
        self.out_proj.reset_parameters()
        for projection in (*projections, self.out_proj):
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any, **keywords: Any) -> None:
        _convert(state_dict, prefix, packed=self.packed, widths=self.projection_widths)
        super()._load_from_state_dict(state_dict, prefix, *rest, **keywords)


def finish(module: Any, heads: Tensor, call: Any) -> Tensor:
    """The module's output from its heads `[B, H, L, D]`; rows of padding are 0."""
    out = product(module.out_proj, heads.transpose(1, 2).flatten(2))
    if module.training and module.out_dropout > 0.0:
        out = F.dropout(out, module.out_dropout)
    if call.pads is not None and call.itself:
        out = out.masked_fill(call.pads.unsqueeze(-1), 0.0)
    return out if call.inputs.ragged is None else _inputs.to_nested(out, call.inputs.ragged)


def check_inputs(module: Any, inputs: Inputs, cached: bool) -> None:
    """Refuse what the module cannot take. A cache checks the batch itself."""
    if inputs.ragged is None and not cached:
        _checks.check_batch(*inputs[:3])
    if inputs.ragged is not None and cached:
        raise ValueError("cache takes padded [batch, token, dim] input; got nested tensors")
    if inputs.query_offset is not None and module.positions is not None:
        raise ValueError("positions cannot be placed on nested query and key of different lengths; attend item by item")
    for name, x, width in zip(("query", "key", "value"), inputs[:3], module._input_widths, strict=True):
        if x.shape[-1] != getattr(module, width):
            raise ValueError(
                f"{name} has width {x.shape[-1]}; the module was built with {width}={getattr(module, width)}"
            )


def shown(module: Any, usual: dict[str, Any], **given: Any) -> str:
    """The text of `extra_repr`: sizes, and settings that differ from their default; `given` replaces attributes."""
    others = {name: given.get(name, getattr(module, name)) for name in usual}
    parts = {name: getattr(module, name) for name in ("embed_dim", "num_heads", "head_dim")}
    parts |= {name: value for name, value in others.items() if value != usual[name]}
    return ", ".join(f"{name}={value}" for name, value in parts.items())


def _convert(state_dict: dict[str, Any], prefix: str, *, packed: bool, widths: tuple[int, int, int]) -> None:
    """Rewrite the entries under `prefix` to the layout wanted, in place; leave them where they are in it already.

    What does not fit (a missing part, rows that do not add up) is left for `load_state_dict` to report.
    """
    for kind in ("weight", "bias"):
        for theirs, ours in _TUTORIAL.items():
            if f"{prefix}{theirs}.{kind}" in state_dict and f"{prefix}{ours}.{kind}" not in state_dict:
                state_dict[f"{prefix}{ours}.{kind}"] = state_dict.pop(f"{prefix}{theirs}.{kind}")
        whole, parts = f"{prefix}qkv_proj.{kind}", [f"{prefix}{name}.{kind}" for name in _NAMES]
        if packed and whole not in state_dict and all(name in state_dict for name in parts):
            rows = [state_dict.pop(name) for name in parts]
            state_dict[whole] = torch.cat(rows)
        elif not packed and whole in state_dict and state_dict[whole].shape[0] == sum(widths):
            state_dict.update(zip(parts, state_dict.pop(whole).split(widths), strict=True))
