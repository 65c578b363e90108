"""One model over several processes by its heads and feed-forward widths (tensor parallelism), by DTensor plans."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from regard.bias import T5Bias
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
        ValueError: the heads or a width cannot be shared evenly, or there are sinks or biases that belong to heads.
    """
    import torch.distributed as dist
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
        if attention.sinks is not None:
            raise ValueError(f"{name} has a learned sink for each head, which is not shared; build it with sinks=False")
        if attention.packed:
            raise ValueError(f"{name} is packed: its one matrix cannot be cut by heads; build it with packed=False")
    if biases := [name for name, each in model.named_modules() if isinstance(each, T5Bias)]:
        raise ValueError(f"{' and '.join(biases)} hold a column for each head, which are not shared: a T5 runs whole")
    for name, feed in feeds:
        if feed.up.out_features % count:
            raise ValueError(f"{name} is {feed.up.out_features} wide, which {count} processes cannot share evenly")

    def summed(grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad, group=mesh.get_group())
        return grad

    for _, attention in attentions:
        plan: dict[str, Any] = {each: ColwiseParallel() for each in ("q_proj", "k_proj", "v_proj")}
        parallelize_module(attention, mesh, {**plan, "out_proj": RowwiseParallel()})
        attention.num_heads //= count
        attention.num_kv_heads //= count
        for norm in (attention.q_norm, attention.k_norm):
            if norm is not None:  # one gain for all heads, of which each process has some
                norm.weight.register_hook(summed)  # type: ignore[no-untyped-call]
    for _, feed in feeds:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(feed, mesh, plan if feed.gate is None else {**plan, "gate": ColwiseParallel()})
    return model
