"""Observation on a GPU: Triton kernels that recompute the logits tile by tile and fold statistics from the weights.

Nothing here is imported by ``import regard``: Triton is optional, and slow to load.
"""
