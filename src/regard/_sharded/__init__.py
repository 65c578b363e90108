"""Attention on sequences that lie in parts, by tokens, on several processes (context parallelism).

DTensors say themselves how they lie; plain tensors inside torch's `context_parallel` are such parts too.
"""

from regard._sharded._block import alone
from regard._sharded._block import current as current_block
from regard._sharded._calls import attention, explain, observe

__all__ = ["alone", "attention", "current_block", "explain", "observe"]
