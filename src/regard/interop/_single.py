"""One attention module of another library, or of a tutorial, as a `regard.nn.MultiHeadAttention`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard._checks import check_count
from regard.interop._hf_family import refuse
from regard.nn import MultiHeadAttention

# Names of the four projections; the last may be missing, where what follows the heads belongs to another module.
_PROJECTIONS = (
    ("query", "key", "value", None),  # BertSelfAttention, ViTSelfAttention and their many copies
    ("q_proj", "k_proj", "v_proj", "o_proj"),  # ViTAttention
    ("q_lin", "k_lin", "v_lin", "out_lin"),  # DistilBERT's
    ("q_linear", "k_linear", "v_linear", "out"),  # the module that most tutorials write
)
# Classes of Hugging Face's that do nothing else: no positions, no cache of their own, no norm.
_CLASSES = (
    "BertSelfAttention", "RobertaSelfAttention", "ElectraSelfAttention", "DeiTSelfAttention", "ViTSelfAttention",
    "ViTAttention", "DistilBertSelfAttention", "MultiHeadSelfAttention",
)  # fmt: skip
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "heads", "h")


def is_attention_of_hf(module: nn.Module) -> bool:
    return type(module).__name__ in _CLASSES and _names(module) is not None


def is_written_out(module: nn.Module) -> bool:
    """Whether it has the four linear layers of the tutorials' module, and no other parameters."""
    names = _names(module)
    return names == _PROJECTIONS[3] and {name.split(".")[0] for name, _ in module.named_parameters()} == set(names)


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
    names = _PROJECTIONS[3]
    unknown = [name for name in weights if name.removesuffix(".bias").removesuffix(".weight") not in names]
    if missing := [f"{name}.weight" for name in names if f"{name}.weight" not in weights]:
        raise ValueError(f"from_plain: no {', '.join(missing)} among {', '.join(weights) or 'no weights'}")
    if unknown:
        raise ValueError(f"from_plain: {', '.join(unknown)} has no place here; expected weights and biases of {names}")
    if wrong := [name for name, weight in weights.items() if not isinstance(weight, Tensor)]:
        raise TypeError(f"from_plain: {wrong[0]} must be a tensor, got {type(weights[wrong[0]]).__name__}")
    width = weights["q_linear.weight"].shape[0]
    for name, weight in weights.items():
        wanted = (width, width) if name.endswith(".weight") else (width,)
        if tuple(weight.shape) != wanted:
            raise ValueError(f"from_plain: {name} has the shape {list(weight.shape)}; expected {list(wanted)}")
    plain: Any = nn.Module()
    for name in names:
        linear = nn.Linear(width, width, bias=f"{name}.bias" in weights, device="meta")
        plain.add_module(str(name), linear)
    plain.load_state_dict(weights, assign=True)
    heads = num_heads if num_heads is not None else _num_heads(given)
    if heads is None:
        raise ValueError("from_plain: the weights do not say how many heads there are; give num_heads=")
    check_count("num_heads", heads)
    plain.heads, plain.dropout = heads, getattr(given, "dropout", None)
    return attention_of(plain.train(getattr(given, "training", True)))


def attention_of(module: nn.Module) -> MultiHeadAttention:
    """A copy with the same weights and outputs, in the same mode and dtype.

    A module without an output projection keeps none: its result is the heads next to each other.
    """
    names = _names(module)
    assert names is not None
    parts: list[Any] = [None if name is None else getattr(module, name) for name in names]
    query, key, value, out = parts
    heads = _num_heads(module)
    if heads is None:
        raise ValueError(f"{type(module).__name__} does not say how many heads it has; expected {', '.join(_HEADS)}")
    if query.out_features % heads:
        raise ValueError(f"{heads} heads do not divide the width {query.out_features} of the projected query")
    width = query.out_features // heads
    scale = getattr(module, "scaling", None)
    found = MultiHeadAttention(
        query.in_features,
        heads,
        num_kv_heads=key.out_features // width,
        head_dim=width,
        key_dim=key.in_features,
        value_dim=value.in_features,
        qkv_bias=query.bias is not None,
        out_bias=out is not None and out.bias is not None,
        dropout=_dropout(module),
        scale=None if scale is None or scale == width**-0.5 else float(scale),
        device="meta",
        dtype=query.weight.dtype,
    ).to_empty(device=query.weight.device)
    pairs = [(found.q_proj, query), (found.k_proj, key), (found.v_proj, value)]
    if out is None:
        found.out_proj = nn.Identity()  # type: ignore[assignment]
    else:
        pairs.append((found.out_proj, out))
    with torch.no_grad():
        for ours, theirs in pairs:
            ours.weight.copy_(theirs.weight)
            if ours.bias is not None:
                ours.bias.copy_(theirs.bias)
    return found.train(module.training)


def to_single(transformers: Any, module: MultiHeadAttention) -> nn.Module:
    """The way back: a ViTAttention of Hugging Face's, or a BertSelfAttention where there is no output projection."""
    heads, bare = module.num_heads, isinstance(module.out_proj, nn.Identity)
    widths = {module.embed_dim, module.key_dim, module.value_dim}
    widths |= {heads * module.head_dim, heads * module.value_head_dim}
    refuse(
        "BertSelfAttention" if bare else "ViTAttention",
        {
            **beyond_plain(module),
            "inputs or heads of several widths": len(widths) > 1,
            "packed=True": module.packed,
            "qkv_bias=False without an output projection": bare and not module.packed and module.q_proj.bias is None,
            "out_bias=False": not bare and module.out_proj.bias is None,
        },
    )
    sizes = {"hidden_size": module.embed_dim, "num_attention_heads": heads, "attn_implementation": "sdpa"}
    sizes["attention_probs_dropout_prob"] = module.dropout
    built: nn.Module
    if bare:
        built = transformers.models.bert.modeling_bert.BertSelfAttention(transformers.BertConfig(**sizes))
    else:
        config = transformers.ViTConfig(**sizes, qkv_bias=module.q_proj.bias is not None)
        built = transformers.models.vit.modeling_vit.ViTAttention(config)
    built = built.to(module.q_proj.weight.device, module.q_proj.weight.dtype)
    names = _names(built)
    ours = (module.q_proj, module.k_proj, module.v_proj, module.out_proj)
    with torch.no_grad():
        for name, projection in zip(names, ours, strict=True):
            if name is not None:
                getattr(built, name).load_state_dict(projection.state_dict())
    return built.train(module.training)


def beyond_plain(module: MultiHeadAttention) -> dict[str, bool]:
    """What this module may do that plain ones of other libraries do not, in words."""
    return {
        f"num_kv_heads={module.num_kv_heads}": module.num_kv_heads != module.num_heads,
        "qk_norm=True": module.q_norm is not None,
        "positions": module.positions is not None,
        f"scale={module.scale}": module.scale is not None,
        f"softcap={module.softcap}": module.softcap is not None,
        "sinks=True": module.sinks is not None,
        f"out_dropout={module.out_dropout}": module.out_dropout != 0.0,
    }


def _num_heads(module: Any) -> int | None:
    return next((getattr(module, name) for name in _HEADS if isinstance(getattr(module, name, None), int)), None)


def _names(module: nn.Module) -> Any:
    for names in _PROJECTIONS:
        if all(name is None or isinstance(getattr(module, name, None), nn.Linear) for name in names):
            return names
    return None


def _dropout(module: nn.Module) -> float:
    """On the weights; a number, or a layer of torch's."""
    for name in ("attention_dropout", "dropout", "dropout_prob"):
        given = getattr(module, name, None)
        given = given.p if isinstance(given, nn.Dropout) else given
        if isinstance(given, float):
            return given
    return 0.0
