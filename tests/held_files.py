"""What is in a file that regard wrote, read and changed by the library whose format it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    save_file(
        {name: each.clone(memory_format=torch.contiguous_format) for name, each in tensors.items()}, path, metadata
    )


def checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Of a training run: its tensors, and where it stands."""
    tensors, metadata = read(path)
    return tensors, json.loads(metadata["about"])
