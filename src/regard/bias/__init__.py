"""Biases of the logits that are rules: what they add depends on the head and on the distance between query and key.

    out = regard.attention(query, key, value, mask=masks.causal(), bias=bias.alibi(num_heads))

Backends evaluate them in the tile they are computing: no L × S tensor is made. Distances are between absolute
positions, so `query_offset` (and a cache) moves them as it moves the mask.
"""

from regard.bias._alibi import alibi as alibi
from regard.bias._base import Bias as Bias
from regard.bias._base import TableBias as TableBias
from regard.bias._rule import Rule as Rule
from regard.bias._rule import rebuild as rebuild
from regard.bias._t5 import T5Bias as T5Bias

__all__ = ["Bias", "T5Bias", "alibi"]
