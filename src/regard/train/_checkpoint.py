"""A run's whole state in one safetensors file, which is replaced whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard._write import write_atomically

FORMAT = "regard-training"


def write(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Written next to its place, flushed, then moved there: a kill or a full disk leaves the one before."""
    from safetensors.torch import save

    held = {name: each.detach().cpu().contiguous() for name, each in tensors.items()}
    content = save(held, metadata={"format": FORMAT, "about": json.dumps(about)})
    write_atomically(path, [content])


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write` wrote.

    Raises:
        ValueError: the file is damaged or something else; the message names it.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise ValueError("it is no checkpoint of a training run")
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads(about["about"])  # noqa: SIM118
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Of the generators that dropout draws from."""
    found = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["random.cuda"] = torch.cuda.get_rng_state(device)
    return found


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["random.cpu"])
    if device.type == "cuda" and "random.cuda" in state:
        torch.cuda.set_rng_state(state["random.cuda"], device)


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {}
    for number, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            found[f"optimizer.{number}.{name}"] = torch.as_tensor(value)
    return found


def set_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Tensor]) -> None:
    whole = optimizer.state_dict()
    whole["state"] = {}
    for name, value in state.items():
        if name.startswith("optimizer."):
            _, number, field = name.split(".")
            whole["state"].setdefault(int(number), {})[field] = value.clone()
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict(whole)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate  # the tensor that a captured graph reads must stay the same object
