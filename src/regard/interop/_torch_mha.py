"""`torch.nn.MultiheadAttention` to `regard.nn.MultiHeadAttention` and back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.interop._hf_family import refuse
from regard.interop._single import attention_of, beyond_plain, is_written_out
from regard.nn import MultiHeadAttention


def from_torch(module: nn.Module) -> MultiHeadAttention:
    """A copy of `module` as a `regard.nn.MultiHeadAttention`: same outputs, same gradients, same mode and dtype.

    `module` is a `torch.nn.MultiheadAttention`, or the one that many tutorials write out: linear layers `q_linear`,
    `k_linear`, `v_linear`, `out`, and a number of heads `h`, whose mask is `masks.keep(mask != 0)` here.

    The copy takes `[batch, token, dim]` whatever `batch_first` was. torch's masks say True = forbidden; they become

        attn_mask (bool)          mask=masks.drop(attn_mask)        [L, S], or reshaped to [batch, head, L, S]
        attn_mask (float)         bias=attn_mask
        key_padding_mask (bool)   mask=masks.drop(key_padding_mask[:, None, None, :])

    A row that these leave without any key is 0 before the output projection, where torch gives NaN.

    Raises:
        TypeError: `module` is neither.
        ValueError: it was built with `add_bias_kv` or `add_zero_attn`, which add a key that is not in the input.
    """
    if isinstance(module, nn.Module) and is_written_out(module):
        return attention_of(module)
    if not isinstance(module, nn.MultiheadAttention):
        raise TypeError(
            f"from_torch takes a torch.nn.MultiheadAttention, got {type(module).__name__}; of a layer of torch's, give "
            "its self_attn"
        )
    if module.bias_k is not None or module.add_zero_attn:
        what = "add_bias_kv" if module.bias_k is not None else "add_zero_attn"
        raise ValueError(f"module was built with {what}=True, which adds a key of its own; it has no counterpart here")
    packed = module.in_proj_weight is not None
    out = MultiHeadAttention(
        module.embed_dim,
        module.num_heads,
        key_dim=module.kdim,
        value_dim=module.vdim,
        qkv_bias=module.in_proj_bias is not None,
        out_bias=module.out_proj.bias is not None,
        packed=packed,
        dropout=module.dropout,
        device="meta",
        dtype=module.out_proj.weight.dtype,
    ).to_empty(device=module.out_proj.weight.device)
    _copy(out.out_proj.weight, module.out_proj.weight)
    _copy(out.out_proj.bias, module.out_proj.bias)
    if packed:
        _copy(out.qkv_proj.weight, module.in_proj_weight)
        _copy(out.qkv_proj.bias, module.in_proj_bias)
    else:
        biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        for projection, weight, bias in zip((out.q_proj, out.k_proj, out.v_proj), weights, biases, strict=True):
            _copy(projection.weight, weight)
            _copy(projection.bias, bias)
    return out.train(module.training)


def to_torch(module: MultiHeadAttention, *, batch_first: bool = True) -> nn.MultiheadAttention:
    """A copy of `module` as a `torch.nn.MultiheadAttention`: same outputs, same gradients, same mode and dtype.

    Raises:
        TypeError: `module` is not a `regard.nn.MultiHeadAttention`.
        ValueError: it does what torch's cannot: grouped heads, head widths other than `embed_dim / num_heads`,
            `qk_norm`, `positions`, `out_dropout`, or a bias on only one side of the attention.
    """
    if not isinstance(module, MultiHeadAttention):
        raise TypeError(f"to_torch takes a regard.nn.MultiHeadAttention, got {type(module).__name__}")
    if isinstance(module.out_proj, nn.Identity):
        raise ValueError("module has no output projection, which torch.nn.MultiheadAttention cannot express")
    parts = [module.qkv_proj] if module.packed else [module.q_proj, module.k_proj, module.v_proj]
    has_bias = module.out_proj.bias is not None
    _refuse_what_torch_lacks(module, has_bias, parts[0].bias is not None)
    out = nn.MultiheadAttention(
        module.embed_dim,
        module.num_heads,
        dropout=module.dropout,
        bias=has_bias,
        kdim=module.key_dim,
        vdim=module.value_dim,
        batch_first=batch_first,
        device="meta",
        dtype=module.out_proj.weight.dtype,
    ).to_empty(device=module.out_proj.weight.device)
    _copy(out.out_proj.weight, module.out_proj.weight)
    _copy(out.out_proj.bias, module.out_proj.bias)
    if out.in_proj_weight is not None:
        _copy(out.in_proj_weight, *(part.weight for part in parts))
    else:
        for target, part in zip((out.q_proj_weight, out.k_proj_weight, out.v_proj_weight), parts, strict=True):
            _copy(target, part.weight)
    _copy(out.in_proj_bias, *(part.bias for part in parts))
    return out.train(module.training)


def _refuse_what_torch_lacks(module: MultiHeadAttention, out_bias: bool, qkv_bias: bool) -> None:
    lacking = {
        **beyond_plain(module),
        f"head_dim={module.head_dim}": module.head_dim * module.num_heads != module.embed_dim,
        f"value_head_dim={module.value_head_dim}": module.value_head_dim != module.head_dim,
        f"qkv_bias={qkv_bias} with out_bias={out_bias}": qkv_bias != out_bias,
    }
    refuse("torch.nn.MultiheadAttention", lacking, "module")


def _copy(target: Tensor | None, *sources: Tensor | None) -> None:
    """Fill a parameter from one or several stacked, and take over whether it is trained."""
    rows = [source for source in sources if source is not None]
    if target is None or not rows:
        return
    with torch.no_grad():
        target.copy_(torch.cat(rows) if len(rows) > 1 else rows[0])
    target.requires_grad_(any(row.requires_grad for row in rows))
