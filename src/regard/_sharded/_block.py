"""Inside `torch.distributed.tensor.experimental.context_parallel` plain tensors are parts of a sequence.

Torch's block keeps a part of each buffer in each process, and puts a function of its own in the place of
`scaled_dot_product_attention`: by that the block is known, and its mesh. A call there is made of DTensors, and what it
gives lies as the parts do.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from regard._sharded._moving import exchange
from regard.observation import Observation

if TYPE_CHECKING:
    from regard.plan import Plan

_TORCH = "torch.distributed.tensor.experimental._context_parallel._attention"
_computing = threading.local()  # a process's own share is an ordinary call, also inside a block


class Block(NamedTuple):
    mesh: Any
    balanced: bool  # of 2n pieces, process r has pieces r and 2n − 1 − r; else of n, piece r

    def attention(self, call: Callable[..., Tensor], tensors: tuple[Tensor, ...], how: dict[str, Any]) -> Tensor:
        with alone():
            return self._part(call(*map(self._placed, tensors), **how))

    def observe(
        self, call: Callable[..., Observation], tensors: tuple[Tensor, ...], how: dict[str, Any]
    ) -> Observation:
        """Statistics of rows and keys lie as those do; sums are whole in each process."""
        with alone():
            seen = call(*map(self._placed, tensors), **how)
            found = {name: self._part(each) for name, each in vars(seen).items() if isinstance(each, Tensor)}
        return Observation(found.pop("out"), found.pop("lse"), seen.plan, seen.want, found)

    def explain(self, call: Callable[..., Plan], tensors: tuple[Tensor, ...], how: dict[str, Any]) -> Plan:
        """Nothing is sent: only sizes matter."""
        with alone():
            return call(*map(self._dtensor, tensors), **how)

    def _placed(self, x: Tensor) -> Any:
        """The whole sequence in order, as `Shard(2)` cuts it."""
        parts, pieces = self._pieces()
        return self._dtensor(exchange(x, parts, pieces, self.mesh.get_group()) if self.balanced else x)

    def _part(self, x: Any) -> Tensor:
        """This process's part of a result."""
        local: Tensor = x.to_local()
        if x.placements[0].is_replicate() or not self.balanced:
            return local
        parts, pieces = self._pieces()
        return exchange(local, pieces, parts, self.mesh.get_group())

    def _dtensor(self, x: Tensor) -> Any:
        from torch.distributed.tensor import DTensor, Shard

        return DTensor.from_local(x, self.mesh, [Shard(2)], run_check=False)

    def _pieces(self) -> tuple[list[list[int]], list[list[int]]]:
        """Which of 2n pieces each process has in the block, and in order."""
        count = dist.get_world_size(self.mesh.get_group())
        return [[r, 2 * count - 1 - r] for r in range(count)], [[2 * r, 2 * r + 1] for r in range(count)]


def current() -> Block | None:
    """The block that this call is made in."""
    torchs = sys.modules.get(_TORCH)
    patched: Any = F.scaled_dot_product_attention
    if torchs is None or getattr(_computing, "alone", False) or patched not in torchs._replaced_functions:
        return None
    held = dict(zip(patched.__code__.co_freevars, patched.__closure__, strict=True))
    if "device_mesh" not in held:
        raise RuntimeError(
            f"torch {torch.__version__} does not say which mesh this context_parallel block is for; give DTensors, "
            "[Shard(2)], outside of it"
        )
    return Block(held["device_mesh"].cell_contents, torchs._cp_options.enable_load_balance)


class alone:
    """While inside, calls of this thread are what they are outside of a block."""

    def __enter__(self) -> None:
        self.before = getattr(_computing, "alone", False)
        _computing.alone = True

    def __exit__(self, *_: object) -> None:
        _computing.alone = self.before
