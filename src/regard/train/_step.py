"""One step of training: forward, backward, clip, update. On a CUDA device, replayed as a graph per shape of batch."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from regard.train._batches import Batch
from regard.train._loss import Loss, loss_of
from regard.train._processes import whole
from regard.train._settings import Settings

# graphs that are kept; a batch of a further shape runs kernel by kernel
MOST_GRAPHS = 160


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """A `Transformer` reads a source as well; a `Decoder` only what came before."""
    if batch.source is None:
        return cast(Tensor, model(batch.inputs))
    return cast(Tensor, model(batch.source, batch.inputs, source_lengths=batch.source_lengths))


def precision_of(settings: Settings, device: torch.device) -> torch.dtype:
    if settings.precision == "auto":
        half = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if half else torch.float32
    return torch.bfloat16 if settings.precision == "bfloat16" else torch.float32


def optimizer_of(model: nn.Module, settings: Settings, device: torch.device) -> torch.optim.Optimizer:
    """AdamW; only matrices decay."""
    matrices = [each for each in model.parameters() if each.requires_grad and each.dim() > 1]
    others = [each for each in model.parameters() if each.requires_grad and each.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    graphs = device.type == "cuda"
    mixed = len({hasattr(each, "device_mesh") for each in model.parameters()}) > 1  # some lie in parts, some are whole
    # a graph reads the learning rate from memory
    rate: Any = torch.tensor(settings.peak_lr, device=device) if graphs else settings.peak_lr
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=rate,
        betas=(settings.beta1, settings.beta2),
        eps=1e-9,
        fused=device.type in ("cuda", "cpu") and not mixed,
        foreach=False if mixed else None,
        capturable=graphs,
    )


def clip(parameters: Sequence[Tensor], most: float) -> None:
    """`torch.nn.utils.clip_grad_norm_`, also where some weights lie in parts on several processes and others do not."""
    if len({hasattr(each, "device_mesh") for each in parameters}) == 1:
        nn.utils.clip_grad_norm_(parameters, most)
        return
    grads = [each.grad for each in parameters if each.grad is not None]
    total = torch.stack([whole(grad.norm()) for grad in grads]).norm()
    scale = (most / (total + 1e-6)).clamp_max(1.0)
    for grad in grads:
        grad.mul_(scale)


class Stepper:
    """Runs steps of one model. The first batch of a shape runs kernel by kernel, the second is captured."""

    def __init__(
        self, model: nn.Module, settings: Settings, device: torch.device, *, graphs: bool, processes: int = 1
    ) -> None:
        self.model, self.settings, self.device, self.processes = model, settings, device, processes
        self.optimizer = optimizer_of(model, settings, device)
        self.parameters = [each for each in model.parameters() if each.requires_grad]
        self.dtype = precision_of(settings, device)
        self.graphs = graphs and device.type == "cuda" and processes == 1
        self._seen: dict[tuple[int, ...], int] = {}
        self._captured: dict[tuple[int, ...], tuple[Any, Batch, Loss]] = {}
        self._pool: Any = None
        self._side = torch.cuda.Stream(device) if self.graphs else None  # type: ignore[no-untyped-call]

    def __call__(self, batch: Batch, rate: float, tokens: int | None = None) -> Loss:
        """Update the weights. The result may be overwritten by the next step.

        `tokens` are those of the whole batch where several processes have a part of it each.
        """
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if not self.graphs:
            return self._run(batch, tokens)
        shape = batch.shape
        if shape in self._captured:
            return self._replay(shape, batch)
        seen = self._seen[shape] = self._seen.get(shape, 0) + 1
        if seen == 1 or len(self._captured) >= MOST_GRAPHS:
            return self._aside(batch)
        self._capture(shape, batch)
        return self._replay(shape, batch)

    def _run(self, batch: Batch, tokens: int | None = None) -> Loss:
        settings = self.settings
        self.optimizer.zero_grad(set_to_none=True)
        twice = settings.r_drop > 0 and self.model.training
        # weights are cast anew in each step: a cast that a graph remembers would go stale
        with torch.autocast(self.device.type, self.dtype, self.dtype != torch.float32, cache_enabled=not self.graphs):
            logits = logits_of(self.model, _doubled(batch) if twice else batch)
            loss = loss_of(
                logits,
                batch.outputs,
                smoothing=settings.smoothing,
                r_drop=settings.r_drop,
                soft=batch.soft,
                distill=settings.distill,
                tokens=tokens,
            )
        # processes take the mean of their gradients; with a mean over all tokens, the sum is meant
        (loss.total * self.processes).backward()  # type: ignore[no-untyped-call]
        if settings.clip:
            clip(self.parameters, settings.clip)
        self.optimizer.step()
        return Loss(loss.total.detach(), loss.nll, loss.tokens)

    def _aside(self, batch: Batch) -> Loss:
        """A first step of a shape: what it allocates and keeps must not belong to a graph."""
        assert self._side is not None
        here = torch.cuda.current_stream(self.device)
        self._side.wait_stream(here)
        with torch.cuda.stream(self._side):
            loss = self._run(batch)
        here.wait_stream(self._side)
        return loss

    def _capture(self, shape: tuple[int, ...], batch: Batch) -> None:
        assert self._side is not None
        held = tree_map_only(Tensor, torch.clone, batch)
        self.optimizer.zero_grad(set_to_none=True)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            gc.collect()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        # as torch.cuda.graph does it, without collecting garbage and emptying the allocator's cache for each shape
        gc.disable()
        try:
            with torch.cuda.stream(self._side):
                graph.capture_begin(pool=self._pool)
                try:
                    loss = self._run(held)
                finally:
                    graph.capture_end()
        finally:
            gc.enable()
        self._captured[shape] = graph, held, loss

    def _replay(self, shape: tuple[int, ...], batch: Batch) -> Loss:
        graph, held, loss = self._captured[shape]
        for own, new in zip(tree_leaves(held), tree_leaves(batch), strict=True):
            if own is not None:
                own.copy_(new)
        graph.replay()
        return loss


def _doubled(batch: Batch) -> Batch:
    """For a model, which reads no soft targets."""
    doubled: Batch = tree_map_only(Tensor, lambda x: torch.cat([x, x]), batch._replace(soft=None))
    return doubled
