"""Several processes that train one model: PyTorch's own engine under `torchrun`, or one process alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard._checks import check_choice

Result = TypeVar("Result")
WAYS = ("copies", "shards", "heads")  # DDP, FSDP2, tensor parallelism


class Processes:
    """The group that this process trains in. Alone, everything here does nothing."""

    def __init__(self, device: torch.device, how: str = "copies") -> None:
        check_choice("how", how, WAYS)
        self.device, self.how = device, how
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.count = dist.get_world_size() if dist.is_initialized() else 1

    @property
    def data(self) -> tuple[int, int]:
        """Which part of each batch this process has, of how many: by heads, all have the whole batch."""
        return (0, 1) if self.how == "heads" else (self.rank, self.count)

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and reports."""
        return self.rank == 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as it runs here: a copy that shares its gradients (DDP), a shard (FSDP2), or some of its heads."""
        if self.count == 1:
            return model
        if self.how == "shards":
            return sharded(model)
        if self.how == "heads":
            from torch.distributed.device_mesh import init_device_mesh

            from regard.train._tensor_parallel import tensor_parallel

            return tensor_parallel(model, init_device_mesh(self.device.type, (self.count,)))
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model, device_ids=[self.device] if self.device.type == "cuda" else None)

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.count > 1:
            dist.all_reduce(numbers)
        return numbers

    def agree(self, thing: Any) -> Any:
        """What the first process has."""
        if self.count == 1:
            return thing
        held = [thing]
        dist.broadcast_object_list(held, src=0, device=self.device if self.device.type == "cuda" else None)
        return held[0]

    def any(self, flag: bool) -> bool:
        """Whether it is so in one of them."""
        if self.count == 1:
            return flag
        held = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(held, op=dist.ReduceOp.MAX)
        return bool(held)

    def gather(self, thing: Any) -> list[Any]:
        """What each of them has, in order."""
        if self.count == 1:
            return [thing]
        held: list[Any] = [None] * self.count
        dist.all_gather_object(held, thing)
        return held


def sharded(model: nn.Module) -> nn.Module:
    """FSDP2: each layer's weights, gradients and optimizer state lie in parts on all processes."""
    from torch.distributed.fsdp import fully_shard

    for name, module in model.named_children():
        if name.endswith("layers"):
            for layer in module.children():
                fully_shard(layer)
    fully_shard(model)
    return model


def whole(tensor: Tensor) -> Tensor:
    """A tensor of a sharded model in one piece; every process must ask."""
    gathered = getattr(tensor, "full_tensor", None)
    return tensor if gathered is None else gathered()


@torch.no_grad()
def put(tensor: Tensor, content: Tensor) -> None:
    """Copy a whole tensor into one that may lie in parts on several processes."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        tensor.copy_(content)
        return
    from torch.distributed.tensor import distribute_tensor

    tensor.copy_(distribute_tensor(content.to(tensor.device), mesh, tensor.placements))  # type: ignore[attr-defined]


def join_group(device: torch.device, *, minutes: float = 10.0) -> bool:
    """Join the processes that `torchrun` started; False where it started none."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or dist.is_initialized():
        return False
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=minutes))
    return True


def on_all(look: Callable[[], Result]) -> Result:
    """What ``look`` gives; where it raises ValueError in one process, all of them raise, and none waits for it."""
    found, problem = None, None
    try:
        found = look()
    except ValueError as error:
        problem = str(error)
    if in_group():
        problems: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        problem = next((each for each in problems if each is not None), None)
    if problem is not None:
        raise ValueError(problem)
    return found  # type: ignore[return-value]


def leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def in_group() -> bool:
    """Whether this process trains with others."""
    return dist.is_initialized() and dist.get_world_size() > 1
