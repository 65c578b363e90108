"""Attention on DTensors that lie in parts, by tokens, on several processes (context parallelism)."""

from regard._sharded._calls import attention, explain, observe

__all__ = ["attention", "explain", "observe"]
