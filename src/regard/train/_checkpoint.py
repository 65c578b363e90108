"""A run's whole state in one safetensors file, which is replaced whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard._files.write import write_atomically
from regard.train._processes import put, whole

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
            place = json.loads(about["about"])
            if not isinstance(place, dict):
                raise ValueError("it does not say where the run stands")
            return {name: file.get_tensor(name) for name in file.keys()}, place  # noqa: SIM118
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Of the generators that dropout draws from."""
    found = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["random.cuda"] = torch.cuda.get_rng_state(device)
    return found


def set_random_state(state: dict[str, Tensor], device: torch.device, rank: int = 0) -> None:
    """A run that goes on with more processes than it had keeps what they drew themselves."""
    if f"random.cpu.{rank}" in state:
        torch.set_rng_state(state[f"random.cpu.{rank}"])
    if device.type == "cuda" and f"random.cuda.{rank}" in state:
        torch.cuda.set_rng_state(state[f"random.cuda.{rank}"], device)


def set_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """`load_state_dict` for whole weights, into a model that may lie in parts on several processes."""
    own = model.state_dict()
    if wrong := sorted(own.keys() ^ weights.keys()):
        raise ValueError(f"weights {', '.join(wrong[:3])} are on one side only")
    for name, each in own.items():
        if each.shape != weights[name].shape:
            raise ValueError(f"{name} has shape {list(weights[name].shape)}, expected {list(each.shape)}")
        put(each, weights[name])


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {}
    for number, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            found[f"optimizer.{number}.{name}"] = whole(torch.as_tensor(value))
    return found


def set_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Tensor]) -> None:
    held = optimizer.state_dict()
    held["state"] = {}
    weights = [each for group in optimizer.param_groups for each in group["params"]]
    for name, value in state.items():
        if name.startswith("optimizer."):
            _, number, field = name.split(".")
            like = weights[int(number)]
            own = torch.zeros_like(like) if value.shape == like.shape else value.clone()
            if value.shape == like.shape:
                put(own, value)
            held["state"].setdefault(int(number), {})[field] = own
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict(held)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate  # the tensor that a captured graph reads must stay the same object
