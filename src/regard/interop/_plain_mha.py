"""The module that tutorials write out, with `q_linear`, `k_linear`, `v_linear` and `out`, as ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from regard.nn import MultiHeadAttention

_NAMES = {"q_linear": "q_proj", "k_linear": "k_proj", "v_linear": "v_proj", "out": "out_proj"}
_HEADS = ("h", "heads", "num_heads", "n_heads")


def from_plain(given: nn.Module | Mapping[str, Tensor], num_heads: int | None = None) -> MultiHeadAttention:
    """A copy of a plain `MultiHeadAttention(heads, d_model, dropout)` with `q_linear`, `k_linear`, `v_linear`, `out`.

    Such modules are in many notes and tutorials. Weights load by name, from the module or from its state dict, and
    give the same outputs. Their mask is 0 where attention is forbidden: pass `mask=masks.keep(mask != 0)`. A row where
    all is forbidden gives zeros here, before the output projection; theirs gives the mean of all values.

    Args:
        given: the module, or its state dict.
        num_heads: how many heads; read from the module (`h`, `heads`, `num_heads`) where it has them.

    Raises:
        TypeError: `given` is neither a module nor a state dict.
        ValueError: a weight is missing, unknown or of another shape, or the number of heads is not known.
    """
    if not isinstance(given, (nn.Module, Mapping)):
        raise TypeError(f"from_plain takes a module or its state dict, got {type(given).__name__}")
    weights: Mapping[str, Any] = given.state_dict() if isinstance(given, nn.Module) else given
    wanted = [f"{name}.weight" for name in _NAMES]
    unknown = [name for name in weights if name.removesuffix(".bias").removesuffix(".weight") not in _NAMES]
    if missing := [name for name in wanted if name not in weights]:
        raise ValueError(f"from_plain: no {', '.join(missing)} among {', '.join(weights) or 'no weights'}")
    if unknown:
        raise ValueError(f"from_plain: {', '.join(unknown)} has no place here; expected weights and biases of {_NAMES}")
    found = [getattr(given, name) for name in _HEADS if isinstance(getattr(given, name, None), int)]
    heads = num_heads if num_heads is not None else found[0] if found else None
    if heads is None:
        raise ValueError("from_plain: the weights do not say how many heads there are; give num_heads=")
    total, width = weights["q_linear.weight"].shape
    like = weights["q_linear.weight"]
    drop = getattr(given, "dropout", None)
    made = MultiHeadAttention(
        width,
        heads,
        head_dim=total // heads,
        qkv_bias="q_linear.bias" in weights,
        out_bias="out.bias" in weights,
        dropout=drop.p if isinstance(drop, nn.Dropout) else 0.0,
        device=like.device,
        dtype=like.dtype,
    )
    renamed = {}
    for name, weight in weights.items():
        part, end = name.rsplit(".", 1)
        renamed[f"{_NAMES[part]}.{end}"] = weight
    try:
        made.load_state_dict(renamed)
    except RuntimeError as error:
        raise ValueError(f"from_plain: {str(error).splitlines()[-1].strip()}") from None
    return made.train(given.training) if isinstance(given, nn.Module) else made
