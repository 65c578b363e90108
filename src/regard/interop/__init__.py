"""Weights and models of other libraries: `torch.nn.MultiheadAttention` both ways, Hugging Face's models."""

from __future__ import annotations

from regard.interop._hf_export import to_hf
from regard.interop._hf_register import register_hf
from regard.interop._hf_weights import from_hf
from regard.interop._onnx import decompositions, to_onnx
from regard.interop._saved import load, save
from regard.interop._single import from_plain
from regard.interop._torch_mha import from_torch, to_torch

__all__ = [
    "decompositions",
    "from_hf",
    "from_plain",
    "from_torch",
    "load",
    "register_hf",
    "save",
    "to_hf",
    "to_onnx",
    "to_torch",
]
