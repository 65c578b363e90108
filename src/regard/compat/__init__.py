"""PyTorch's own attention function and module, with PyTorch's meaning, computed by regard.

    torch.nn.functional.scaled_dot_product_attention = regard.compat.scaled_dot_product_attention
    encoder_layer.self_attn = regard.compat.MultiheadAttention(512, 8, batch_first=True)

This is the one place where PyTorch's conventions hold: tensors of any rank from 2 up, batch dims that broadcast,
`is_causal` aligned to the top left, a bare tensor as mask. Few things differ, and only where PyTorch has no useful
answer: a query with nothing to attend to gets zeros (PyTorch gives NaN on some paths), NaN or +inf in a float mask
raises ValueError on CPU, and a negative `dropout_p` is refused on every path, as is `attn_mask` together with
`is_causal`. What PyTorch refuses is refused with the same kind of error.
"""

from __future__ import annotations

from regard.compat._attention import _four_dims as _four_dims
from regard.compat._attention import _mask as _mask
from regard.compat._attention import scaled_dot_product_attention
from regard.compat._multihead import MultiheadAttention

__all__ = ["MultiheadAttention", "scaled_dot_product_attention"]
