"""Several processes with gloo on this machine, each running the same function; quick, because one import serves all."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def _member(
    rank: int, count: int, store: str, results: Any, function: Callable[..., Any], given: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, count), rank=rank, world_size=count)
    try:
        results.put((rank, pickle.dumps(function(*given))))  # by value: the process ends before it is read
        dist.barrier()  # nobody leaves while another still connects
    except BaseException as error:
        results.put((rank, pickle.dumps(f"{type(error).__name__}: {error}")))
        raise
    finally:
        dist.destroy_process_group()


def together(count: int, function: Callable[..., Any], *given: Any) -> list[Any]:
    """What `function(*given)` returns in each of `count` processes, which form one group."""
    context = multiprocessing.get_context("forkserver")
    engines = ["torch._dynamo", "torch.distributed.tensor.parallel", "torch.distributed.fsdp", "torch.nn.parallel"]
    ours = ["regard.train", "regard.interop", "regard.watching", "regard.reference", "regard._sharded"]
    context.set_forkserver_preload(["pytest", "torch", "torch.distributed", *engines, *ours])
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        members = [
            context.Process(target=_member, args=(rank, count, f"{folder}/store", results, function, given))
            for rank in range(count)
        ]
        for member in members:
            member.start()
        try:
            found = dict(results.get(timeout=120) for _ in members)
        finally:
            for member in members:
                member.join(timeout=30)
                if member.is_alive():
                    member.kill()
    assert [member.exitcode for member in members] == [0] * count, [pickle.loads(each) for each in found.values()]
    return [pickle.loads(found[rank]) for rank in range(count)]
