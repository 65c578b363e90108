"""The effect of cutting each edge of attention on a scalar of a model's output."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.attributing._collect import Collected, collecting, run
from regard.observation._effects import edge_effects, edge_effects_of_weights
from regard.statistics import Want
from regard.watching._in_memory import InMemory


class Edge(NamedTuple):
    """One edge: query and key are rows and columns of the call, ``effect`` the change of the scalar if it is cut."""

    layer: int
    head: int
    item: int
    query: int
    key: int
    weight: float
    effect: float


class LayerEffects:
    """Effects in one attention call, each a tensor [batch, head, …].

    - ``key_effect`` [B, H, S]: the effects of cutting each key for each query, added over the queries.
    - ``map`` [B, H, rows, columns]: mean effect of the pairs in each cell, as ``Want(map=...)`` pools.
    - ``top_queries``, ``top_keys``, ``top_effects``, ``top_weights`` [B, H, k]: the edges with the largest effects, in
      size; −1 and 0 where a head has fewer.
    - ``key_gradient``, ``gradient_map``: gradient × attention in place of the effect, its positive part.
    """

    key_effect: Tensor
    map: Tensor
    top_queries: Tensor
    top_keys: Tensor
    top_effects: Tensor
    top_weights: Tensor
    key_gradient: Tensor
    gradient_map: Tensor

    def __init__(self, layer: int, path: str, kind: str, parts: dict[str, Tensor]) -> None:
        self.layer, self.path, self.kind, self.parts = layer, path, kind, parts
        self.__dict__.update(parts)

    def edges(self) -> Iterator[Edge]:
        """The top edges of each head, largest effect first."""
        batch, heads, count = self.top_effects.shape
        lists = [self.parts[f"top_{name}"].tolist() for name in ("queries", "keys", "weights", "effects")]
        for item in range(batch):
            for head in range(heads):
                for at in range(count):
                    query, key, weight, effect = (found[item][head][at] for found in lists)
                    if key >= 0:
                        yield Edge(self.layer, head, item, query, key, weight, effect)

    def __repr__(self) -> str:
        batch, heads, keys = self.key_effect.shape
        return f"<effects in layer {self.layer} ({self.path}): batch {batch}, {heads} heads, {keys} keys>"


class Attribution:
    """What ``attribute`` found: ``value``, the scalar; ``layers``, the effects in each attention call in order."""

    def __init__(self, value: float, layers: list[LayerEffects]) -> None:
        self.value, self.layers = value, layers

    def top(self, count: int = 20) -> list[Edge]:
        """The edges of the whole model with the largest effects, in size."""
        edges = (edge for layer in self.layers for edge in layer.edges())
        return sorted(edges, key=lambda edge: -abs(edge.effect))[:count]

    def by_head(self) -> list[dict[str, Any]]:
        """One dict for each head: the sum of its effects, and of their sizes by key."""
        return [
            {
                "layer": layer.layer,
                "module": layer.path,
                "head": head,
                "effect": float(layer.key_effect[:, head].sum()),
                "size": float(layer.key_effect[:, head].abs().sum()),
                "gradient": float(layer.key_gradient[:, head].sum()),
            }
            for layer in self.layers
            for head in range(layer.key_effect.shape[1])
        ]

    def __repr__(self) -> str:
        return f"<Attribution of {self.value:.6g} to {len(self.layers)} layers>"


def attribute(
    model: nn.Module,
    inputs: Any,
    *,
    loss: Callable[[Any], Tensor],
    top_k: int = 20,
    map: tuple[int, int] = (64, 64),
    layers: Sequence[int | str] | None = None,
) -> Attribution:
    """How a scalar of the model's output would change if single edges of attention were cut: all of them at once, from
    one forward and one backward pass, in memory O(L).

        found = regard.attribute(model, inputs, loss=lambda out: out.logits[0, -1, 42])
        found.top(10)                       # the edges that matter most
        found.layers[3].key_effect          # [batch, head, key]

    To cut an edge is to forbid the pair: its weight goes to the other keys of the query. The effect is exact as far as
    the scalar is linear in the output of that layer's attention, and its first-order estimate beyond: layers that
    follow bend it. Cut the best edges for real before you believe it.

    Args:
        inputs: what the model is called with: a mapping of keywords, a tuple, or one argument.
        loss: makes the scalar of what the model returns; any real number will do, no loss in the strict sense.
        top_k: how many edges to keep for each head and item.
        map: rows and columns of the maps.
        layers: numbers or module paths; all when None.

    Raises:
        TypeError, ValueError: ``loss`` gives no scalar that depends on the attention, or a call could not be followed.
    """
    grid = Want(map=map, top_k=top_k).map
    if grid is None:
        raise ValueError("map must be (rows, columns), got None")
    if not callable(loss):
        raise TypeError(f"loss must be a function of the model's output that gives a scalar, got {type(loss).__name__}")
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "attribute takes a backward pass, and torch.inference_mode() is on: call it outside of that block "
            "(torch.no_grad() does not matter)"
        )
    kept: list[Collected] = []
    with _learning(model), torch.enable_grad():
        with collecting(model, layers, kept.append) as collector:
            collector.tracker.kept = {}
            output = run(model, inputs)
            collector.tracker.kept = None
        scalar = loss(output)
        _check_scalar(scalar)
        grads = _gradients(model, scalar, kept)
    found = []
    for call in kept:
        parts = _effects(call, grads.pop(0), grid, top_k)
        found.append(LayerEffects(call.layer, str(call.site), call.kind, parts))
    return Attribution(float(scalar.detach()), found)


@contextlib.contextmanager
def _learning(model: nn.Module) -> Iterator[None]:
    """A graph needs something to learn, before every attention call: parameters that are frozen, be it all of them or
    some (as with adapters), are thawed for the pass."""
    frozen = [p for p in model.parameters() if p.is_floating_point() and not p.requires_grad]
    if any(p.is_inference() for p in frozen):
        raise ValueError(
            "the model's parameters were made in torch.inference_mode(), and can never take a gradient: make or load "
            "the model outside of it"
        )
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _check_scalar(scalar: object) -> None:
    if not isinstance(scalar, Tensor) or scalar.numel() != 1 or not scalar.is_floating_point():
        what = f"a tensor {list(scalar.shape)}" if isinstance(scalar, Tensor) else type(scalar).__name__
        raise TypeError(f"loss must give one real number as a tensor, such as out.logits[0, -1, 42], got {what}")


def _gradients(model: nn.Module, scalar: Tensor, kept: list[Collected]) -> list[Tensor | None]:
    """The gradient of the scalar by what each call gave; None where it does not reach."""
    outputs: list[Tensor] = []
    for call in kept:
        live = call.seen.live if isinstance(call.seen, InMemory) else call.seen.result
        if live is None or not live.requires_grad:
            raise ValueError(f"{call.site}: {_why_no_gradient(model, live)}")
        outputs.append(live)
    if not scalar.requires_grad:
        raise ValueError("loss gives a number that does not depend on the model: it must not detach it")
    found: list[Tensor | None] = list(torch.autograd.grad(scalar, outputs, allow_unused=True))
    if all(grad is None for grad in found):
        raise ValueError("loss gives a number that does not depend on any attention call")
    return found


def _why_no_gradient(model: nn.Module, live: Tensor | None) -> str:
    if live is None:
        why = (
            "its code takes the softmax with other functions than torch's softmax (exp and sum, say), or lays the "
            "weights out anew before they meet the values, so the gradient by the weights is not known"
        )
        if getattr(model, "_supports_sdpa", False):
            return f"{why}; model.set_attn_implementation('sdpa') runs torch's attention function instead"
        return f"{why}; name the other layers with layers=[…]"
    if live.is_inference():
        return (
            "it runs in torch.inference_mode(), where there are no gradients: take that block out of the model's code"
        )
    return (
        "no gradient reaches its attention: it runs in a block without autograd (torch.no_grad()), on detached "
        "tensors, or before any parameter of the model; for the last, give inputs that require a gradient"
    )


def _effects(call: Collected, grad: Tensor | None, grid: tuple[int, int], top_k: int) -> dict[str, Tensor]:
    seen = call.seen
    if isinstance(seen, InMemory):
        assert seen.arrange is not None and seen.live is not None
        by_weights = seen.arrange(torch.zeros_like(seen.live) if grad is None else grad)
        return edge_effects_of_weights(seen.weights, by_weights, grid, top_k)
    lse = seen.lse if seen.lse is not None else seen.observe(Want.none()).lse
    if seen.mask is not None or seen.bias is not None:
        lse = lse.masked_fill(seen.permitted().to(lse.device) == 0, -torch.inf)
    assert seen.result is not None
    if grad is None:
        grad = torch.zeros_like(seen.result)
    grad = grad.transpose(1, 2) if seen.by_token else grad
    work = torch.float64 if seen.query.dtype == torch.float64 else torch.float32
    return edge_effects(seen.call(), lse.to(work), grad, grid, top_k)
