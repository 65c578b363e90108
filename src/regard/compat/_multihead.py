"""`torch.nn.MultiheadAttention`, computed by regard."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard import api, masks
from regard.compat._attention import check_tensors

# what to give in place of a mask of regard's, whose True has the other meaning
_HIDDEN = "call .dense(L, S) of ~mask, as True means hidden here"
_PADDING = "it is [batch, key], True = padding: of lengths, torch.arange(S) >= lengths[:, None]"


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with another engine: the same constructor, call, parameters and state dict.

        layer = nn.TransformerEncoderLayer(512, 8, batch_first=True)
        layer.self_attn = compat.MultiheadAttention(512, 8, batch_first=True)
        layer.self_attn.load_state_dict(weights_of_torchs)

    It is the place of torch's in any code: in `nn.TransformerEncoder`, `nn.TransformerDecoder`, `nn.Transformer`. Those
    have a fast path in which they call no attention module at all; next to this one they do not take it. What differs:
    a query that may attend to nothing gets zeros before the output projection, where torch gives NaN, and what is in
    keys that are padding never reaches a row.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        # the fast path of nn.TransformerEncoderLayer calls no attention module; where one has a hook, it is not taken
        self.register_forward_pre_hook(_do_nothing)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Called exactly as torch's; `True` in a mask means *forbidden* here, and a float mask is added to the logits.

        Returns:
            the output, and the weights where `need_weights` is set: `[batch, L, S]`, the mean over heads, or
            `[batch, head, L, S]` with `average_attn_weights=False`.
        """
        check_tensors(query=query, key=key, value=value)
        if key_padding_mask is not None:
            check_tensors(_PADDING, key_padding_mask=key_padding_mask)
        if attn_mask is not None:
            check_tensors(_HIDDEN, attn_mask=attn_mask)
        if query.is_nested or key.is_nested or value.is_nested:
            return self._nested(query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights)
        batched = query.dim() == 3
        given = (query, key, value)
        if not batched:
            given = (query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            given = (query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
            if query is key and key is value:
                given = (given[0],) * 3
        self._check((query, key, value), given, key_padding_mask, attn_mask, is_causal)
        q, k, v = (self._split(x) for x in self._project(*given))
        seen = self._masks(attn_mask, key_padding_mask, is_causal and not need_weights, q)
        q, k, v, seen = self._with_added_keys(q, k, v, seen)
        dropout = self.dropout if self.training else 0.0
        weights = _weights(q, _without_hidden(k, seen), seen) if need_weights else None
        if weights is not None and dropout:
            weights = F.dropout(weights, dropout)  # torch gives these, and so the output must be theirs
            heads = weights @ _without_hidden(v, seen)
        else:
            heads = api.attention(
                q, k, v, mask=seen.mask, bias=seen.bias, dropout=dropout, query_offset=seen.query_offset
            )
        out: Tensor = self.out_proj(heads.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _check(
        self,
        named: tuple[Tensor, Tensor, Tensor],
        given: tuple[Tensor, Tensor, Tensor],
        padding: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> None:
        """What torch refuses, as the errors that its callers know."""
        shapes = [list(x.shape) for x in named]
        if named[0].dim() not in (2, 3) or not named[0].dim() == named[1].dim() == named[2].dim():
            raise AssertionError(f"query, key and value must all have 2 dims (no batch) or 3, got shapes {shapes}")
        query, key, value = given
        widths = (self.embed_dim, self.kdim, self.vdim)
        if any(x.shape[-1] != width for x, width in zip(given, widths, strict=True)):
            raise AssertionError(f"query, key and value must have widths {list(widths)}, got shapes {shapes}")
        if not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[1] != value.shape[1]:
            raise AssertionError(f"query, key and value must agree in batch, key and value in length, got {shapes}")
        if is_causal and attn_mask is None:
            raise RuntimeError(
                "is_causal=True is a hint about attn_mask, which is missing: give it too, such as "
                "nn.Transformer.generate_square_subsequent_mask(length)"
            )
        batch, queries, keys = query.shape[0], query.shape[1], key.shape[1]
        for name, mask, expected in (
            ("key_padding_mask", padding, [(batch, keys)]),
            ("attn_mask", attn_mask, [(queries, keys), (batch * self.num_heads, queries, keys)]),
        ):
            if mask is None:
                continue
            if mask.dtype != torch.bool and not mask.is_floating_point():
                raise AssertionError(f"{name} must be bool (True = forbidden) or float (added), got {mask.dtype}")
            if tuple(mask.shape) not in expected:
                wanted = " or ".join(str(list(shape)) for shape in expected)
                raise RuntimeError(f"{name} has shape {list(mask.shape)}; expected {wanted}")

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        if self.in_proj_weight is not None and query is key and key is value:
            return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        if self.in_proj_weight is not None:
            weights: Any = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def _masks(self, attn_mask: Tensor | None, padding: Tensor | None, is_causal: bool, query: Tensor) -> _Seen:
        forbidden: Tensor | None = None
        bias: Tensor | None = None
        if is_causal and padding is None and self.bias_k is None and not self.add_zero_attn:
            return _Seen(masks.causal(), None, None, 0)
        if attn_mask is not None:
            batch = (1, 1) if attn_mask.dim() == 2 else (query.shape[0], self.num_heads)
            shaped = attn_mask.reshape(*batch, *attn_mask.shape[-2:])
            forbidden, bias = (shaped, None) if shaped.dtype == torch.bool else (None, shaped)
        if padding is not None:
            columns = padding[:, None, None, :]
            if columns.dtype == torch.bool:
                forbidden = columns if forbidden is None else forbidden | columns
            else:
                bias = columns if bias is None else bias + columns
        return _Seen(None if forbidden is None else masks.drop(forbidden), forbidden, bias, None)

    def _with_added_keys(
        self, query: Tensor, key: Tensor, value: Tensor, seen: _Seen
    ) -> tuple[Tensor, Tensor, Tensor, _Seen]:
        """The keys that torch's options add behind the others, which every query may attend to."""
        added = []
        if self.bias_k is not None and self.bias_v is not None:
            added.append([self._split(part).expand(key.shape[0], -1, -1, -1) for part in (self.bias_k, self.bias_v)])
        if self.add_zero_attn:
            added.append([torch.zeros_like(x[:, :, :1]) for x in (key, value)])
        if not added:
            return query, key, value, seen
        key, value = (torch.cat([x, *(pair[at].to(x.dtype) for pair in added)], 2) for at, x in ((0, key), (1, value)))
        forbidden, bias = (None if x is None else F.pad(x, (0, len(added))) for x in (seen.forbidden, seen.bias))
        return query, key, value, _Seen(None if forbidden is None else masks.drop(forbidden), forbidden, bias, None)

    def _nested(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        average_attn_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Items of different lengths, as nn.TransformerEncoder makes them of a padded batch."""
        if query is not key or key is not value:
            raise AssertionError("nested tensors are for self attention: query, key and value must be the same tensor")
        if key_padding_mask is not None or attn_mask is not None:
            raise AssertionError("key_padding_mask and attn_mask cannot be given with a nested tensor, which has none")
        if not self.batch_first:
            raise AssertionError("a nested tensor is [batch, token, dim]; build the module with batch_first=True")
        jagged = query.layout == torch.jagged
        lengths = query.offsets().diff() if jagged else query._nested_tensor_size()[:, 0]  # type: ignore[attr-defined]
        padded = torch.nested.to_padded_tensor(query, 0.0)
        real = torch.arange(padded.shape[1], device=padded.device) < lengths.to(padded.device)[:, None]
        out, weights = self.forward(
            padded, padded, padded, ~real, need_weights, average_attn_weights=average_attn_weights
        )
        if jagged:
            offsets: Tensor = query.offsets()  # type: ignore[attr-defined]
            return torch.nested.nested_tensor_from_jagged(out[real], offsets=offsets), weights
        return torch._nested_tensor_from_mask(out, real), weights


class _Seen(NamedTuple):
    """Who may attend to whom: as a rule for the engine, and as tensors `[B or 1, H or 1, L or 1, S]`."""

    mask: masks.Mask | None
    forbidden: Tensor | None
    bias: Tensor | None
    query_offset: int | None


def _do_nothing(module: nn.Module, given: Any) -> None:
    return None


def _weights(query: Tensor, key: Tensor, seen: _Seen) -> Tensor:
    """softmax(QKᵀ/√d + bias) written out: whoever asks for all weights wants them with a gradient. 0 in empty rows."""
    logits = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    forbidden = _forbidden(seen)
    if seen.bias is not None:
        logits = logits + seen.bias
    if forbidden is None:
        return torch.softmax(logits, -1).to(query.dtype)
    empty = forbidden.all(-1, keepdim=True)
    logits = logits.masked_fill(forbidden, float("-inf")).masked_fill(empty, 0.0)
    return torch.softmax(logits, -1).masked_fill(forbidden, 0.0).to(query.dtype)


def _forbidden(seen: _Seen) -> Tensor | None:
    if seen.bias is None:
        return seen.forbidden
    by_bias = torch.isneginf(seen.bias)
    return by_bias if seen.forbidden is None else by_bias | seen.forbidden


def _without_hidden(x: Tensor, seen: _Seen) -> Tensor:
    """Zeros in place of keys or values that no query of an item may see: 0 · NaN would reach every row."""
    forbidden = _forbidden(seen)
    return x if forbidden is None else x.masked_fill(forbidden.all(-2).unsqueeze(-1), 0.0)
