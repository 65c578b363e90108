"""One model over several processes by its heads and feed-forward widths (tensor parallelism), by DTensor plans."""

from __future__ import annotations

from typing import Any

from torch import nn

from regard.models._parts import FeedForward
from regard.nn import MultiHeadAttention


def tensor_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    """Spread a model of `regard.models` over a device mesh of one dim, in place.

    Each process computes its share of every attention's heads and of every feed-forward's inner width; what comes out
    of a sub-layer is added over the processes. Embeddings, norms and the output layer are whole in each. All processes
    must be given the same inputs and, in training, the same seed.

    Args:
        model: a `Transformer`, `Decoder` or `Encoder`.
        mesh: of `torch.distributed.device_mesh.init_device_mesh`, with one dim.

    Raises:
        ValueError: the heads or a width cannot be shared evenly.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dim, got {mesh.ndim}: take one of its dims, mesh['tp']")
    count = mesh.size()
    attentions = [(name, each) for name, each in model.named_modules() if isinstance(each, MultiHeadAttention)]
    feeds = [(name, each) for name, each in model.named_modules() if isinstance(each, FeedForward)]
    for name, attention in attentions:
        for what, heads in (("num_heads", attention.num_heads), ("num_kv_heads", attention.num_kv_heads)):
            if heads % count:
                raise ValueError(f"{name} has {what}={heads}, which {count} processes cannot share evenly")
        if attention.packed:
            raise ValueError(f"{name} is packed: its one matrix cannot be cut by heads; build it with packed=False")
    for name, feed in feeds:
        if feed.up.out_features % count:
            raise ValueError(f"{name} is {feed.up.out_features} wide, which {count} processes cannot share evenly")
    for _, attention in attentions:
        plan: dict[str, Any] = {each: ColwiseParallel() for each in ("q_proj", "k_proj", "v_proj")}
        parallelize_module(attention, mesh, {**plan, "out_proj": RowwiseParallel()})
        attention.num_heads //= count
        attention.num_kv_heads //= count
    for _, feed in feeds:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(feed, mesh, plan if feed.gate is None else {**plan, "gate": ColwiseParallel()})
    return model
