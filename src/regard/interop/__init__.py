"""Weights of other libraries' attention, both ways."""

from __future__ import annotations

from regard.interop._torch_mha import from_torch, to_torch

__all__ = ["from_torch", "to_torch"]
