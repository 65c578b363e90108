"""One recording from those of processes that share a model: by items (DDP, FSDP2), by heads (tensor parallelism)."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard.recording import Recorded, Recording, Site
from regard.watching._modules import paths

Part = tuple[list[Recorded], list[Site], list[tuple[str, str]], list[list[str]]]


class Layout(NamedTuple):
    """Who has what of a model that several processes run."""

    items: list[Any]  # groups of processes that read different items
    heads: Any  # the group whose members have different heads, or None
    split: dict[str, bool]  # of each module with weights: whether they are shared out with the heads


def layout_of(model: nn.Module) -> Layout | None:
    """How processes share the model; None where it is one process's own. Asked before it runs: FSDP2 then has whole
    weights for a while."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    copies = [each.process_group for each in model.modules() if isinstance(each, DistributedDataParallel)]
    sharded = any(isinstance(each, FSDPModule) for each in model.modules())
    weights = [each for each in model.parameters() if isinstance(each, DTensor)]
    dims = _item_dims(weights, sharded)
    mesh = max((each.device_mesh for each in weights), key=lambda each: each.ndim, default=None)
    items = [*copies[:1], *(mesh.get_group(dim) for dim in dims if mesh is not None)]
    if mesh is None or mesh.ndim == len(dims):
        return Layout(items, None, {}) if items else None
    by_heads = mesh.ndim - 1

    def is_split(weight: Any) -> bool:
        inside = isinstance(weight, DTensor) and weight.device_mesh.ndim > by_heads
        return inside and bool(weight.placements[by_heads].is_shard())

    modules = {path: list(module.parameters()) for path, module in paths(model).items()}
    return Layout(
        items, mesh.get_group(by_heads), {path: any(map(is_split, held)) for path, held in modules.items() if held}
    )


def _item_dims(weights: list[Any], sharded: bool) -> list[int]:
    """The mesh dims over which FSDP2 spreads weights, and so items: the first; two of them where it also copies."""
    if not sharded:
        return []
    copied = any(each.device_mesh.ndim > 1 and each.placements[0].is_replicate() for each in weights)
    return [0, 1] if copied else [0]


def gather(recording: Recording, layout: Layout, heads: list[int] | None) -> int:
    """Put what all processes saw into the recording of each; all of them must ask. The most heads that a call has."""
    device = recording.calls[0].lse.device if recording.calls else torch.device("cpu")
    own = recording.cpu()
    part: Part = own.calls, own.sites, own.missed, own.tokens
    if layout.heads is not None:
        part = _joined_heads(_all(part, layout.heads), layout.split)
    most = max((len(call.heads) for call in part[0]), default=0)
    if layout.heads is not None and heads is not None:
        part = [_only(call, heads) for call in part[0]], *part[1:]
    for group in layout.items:
        part = _joined_items(_all(part, group))
    calls, recording.sites, recording.missed, recording._tokens = part
    for call in calls:
        call.parts = {name: each.to(device) for name, each in call.parts.items()}
    recording.calls = calls
    return most


def _all(part: Part, group: Any) -> list[Part]:
    held: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(held, part, group=group)
    return held


def _joined_heads(parts: list[Part], split: dict[str, bool]) -> Part:
    """Every process saw the same calls, each with its heads; where heads are not shared out, all saw all of them."""
    first = parts[0]
    missed = list(dict.fromkeys(each for part in parts for each in part[2]))
    if len({tuple((call.site, call.number) for call in part[0]) for part in parts}) > 1:
        missed.append(("(root)", "processes that share its heads recorded different calls; these are the first one's"))
        return first[0], first[1], missed, first[3]
    calls = []
    for same in zip(*(part[0] for part in parts), strict=True):
        path = same[0].site.path
        while path and path not in split:  # a module without weights attends for the one above it
            path = path.rpartition(".")[0]
        calls.append(_cat(same, 1) if split.get(path) else same[0])
    return calls, first[1], missed, first[3]


def _joined_items(parts: list[Part]) -> Part:
    """Calls of equal shape become one with the items of all; else the passes stand one after another."""
    sites = list(dict.fromkeys(site for part in parts for site in part[1]))
    missed = [each for part in parts for each in part[2]]
    tokens = [item for part in parts for item in part[3]]
    if len({tuple(_shape(call) for call in part[0]) for part in parts}) == 1:
        calls = [_cat(same, 0) for same in zip(*(part[0] for part in parts), strict=True)]
        return _numbered(calls, sites), sites, missed, tokens if all(part[3] for part in parts) else []
    calls, passes = [], 0
    for part in parts:
        for call in part[0]:
            moved = copy.copy(call)
            moved.number += passes
            calls.append(moved)
        passes = 1 + max((call.number for call in calls), default=-1)
    return _numbered(calls, sites), sites, missed, parts[0][3]


def _numbered(calls: list[Recorded], sites: list[Site]) -> list[Recorded]:
    for call in calls:
        call.layer = sites.index(call.site)
    return calls


def _shape(call: Recorded) -> tuple[Any, ...]:
    """All that calls must have in common to stand in one tensor."""
    parts = tuple((name, tuple(part.shape[1:])) for name, part in call.parts.items())
    return call.site, call.number, call.kind, call.phase, call.keys, call.heads, call.first_key, parts


def _cat(calls: tuple[Recorded, ...], dim: int) -> Recorded:
    """Calls next to each other by item (0) or by head (1)."""
    first = calls[0]
    made = copy.copy(first)
    made.parts = {name: torch.cat([call.parts[name] for call in calls], dim) for name in first.parts}
    sizes = [call.parts["lse"].shape[dim] for call in calls]
    made.permitted = _whole([call.permitted for call in calls], dim, sizes)
    if dim == 0:
        made.positions = _whole([call.positions for call in calls], 0, sizes)
    else:
        made.heads = tuple(range(sum(sizes)))
    return made


def _whole(parts: list[Tensor], dim: int, sizes: list[int]) -> Tensor:
    """Side by side, each as large as its call; as it is where all are alike for every item and head."""
    if all(part.shape[dim] == 1 and torch.equal(part, parts[0]) for part in parts):
        return parts[0]
    others = [max(part.shape[at] for part in parts) for at in range(parts[0].dim())]
    shapes = [[*others[:dim], size, *others[dim + 1 :]] for size in sizes]
    return torch.cat([part.expand(shape) for part, shape in zip(parts, shapes, strict=True)], dim)


def _only(call: Recorded, heads: list[int]) -> Recorded:
    """The call with some of its heads; those that it does not have are left out."""
    count = len(call.heads)
    kept = [head % count for head in heads if -count <= head < count]
    made = copy.copy(call)
    made.parts = {name: part[:, kept] for name, part in call.parts.items()}
    made.permitted = call.permitted if call.permitted.shape[1] == 1 else call.permitted[:, kept]
    made.heads = tuple(kept)
    return made
