"""The shapes of the public calls, written once as annotations and checked by jaxtyping and beartype on real calls."""

from __future__ import annotations

import pytest
import torch
from beartype import beartype
from jaxtyping import Float, Int64, TypeCheckError, jaxtyped
from torch import Tensor

import regard
from regard import masks, nn

B, H, G, L, S, D, V = 3, 6, 2, 5, 7, 11, 13


@jaxtyped(typechecker=beartype)
def attention(
    query: Float[Tensor, "batch head query dim"],
    key: Float[Tensor, "batch kv_head key dim"],
    value: Float[Tensor, "batch kv_head key value_dim"],
    **keywords: object,
) -> Float[Tensor, "batch head query value_dim"]:
    return regard.attention(query, key, value, **keywords)


@jaxtyped(typechecker=beartype)
def check_observation(
    query: Float[Tensor, "batch head query dim"],
    key: Float[Tensor, "batch kv_head key dim"],
    *,
    out: Float[Tensor, "batch head query value_dim"],
    lse: Float[Tensor, "batch head query"],
    entropy: Float[Tensor, "batch head query"],
    max_weight: Float[Tensor, "batch head query"],
    first_mass: Float[Tensor, "batch head query"],
    key_mass: Float[Tensor, "batch head key"],
    map: Float[Tensor, "batch head 3 4"],
    top_keys: Int64[Tensor, "batch head query 2"],
    top_weights: Float[Tensor, "batch head query 2"],
    distance: Float[Tensor, "batch head 32"],
    weights: Float[Tensor, "batch head 2 6"],
) -> None:
    pass


@jaxtyped(typechecker=beartype)
def layer(
    module: nn.MultiHeadAttention,
    query: Float[Tensor, "batch query {module.embed_dim}"],
    memory: Float[Tensor, "batch key width"],
    **keywords: object,
) -> Float[Tensor, "batch query {module.embed_dim}"]:
    return module(query, memory, **keywords)


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, H, L, D), torch.randn(B, G, S, D), torch.randn(B, G, S, V)


@pytest.mark.parametrize("backend", ["auto", "reference", "eager", "blockwise"])
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.padding([7, 0, 3])], ids=str)
def test_attention_has_the_shapes_its_page_gives(backend: str, mask: masks.Mask | None) -> None:
    attention(*tensors(), mask=mask, backend=backend)


def test_an_observation_has_the_shapes_its_page_gives() -> None:
    query, key, value = tensors()
    want = regard.Want(map=(3, 4), top_k=2, first=2, weights=(slice(1, 3), slice(0, 6)))
    seen = regard.observe(query, key, value, mask=masks.causal(), want=want)
    names = set(check_observation.__annotations__) - {"query", "key", "return"}
    check_observation(query, key, **{name: getattr(seen, name) for name in names})


def test_the_layer_keeps_its_width_whatever_the_width_of_the_memory() -> None:
    module = nn.MultiHeadAttention(12, 3, key_dim=11, value_dim=11, head_dim=5)
    layer(module, torch.randn(B, L, 12), torch.randn(B, S, 11))


def test_the_functions_behind_the_calls_check_their_annotations_here() -> None:
    from regard.backends import _base, _guard

    with pytest.raises(TypeCheckError):
        _guard.check_bias(3)
    with pytest.raises(TypeCheckError):
        _base.accumulation("float32")


def test_a_wrong_shape_would_be_seen() -> None:
    @jaxtyped(typechecker=beartype)
    def wrong(query: Float[Tensor, "b h l d"]) -> Float[Tensor, "b l h d"]:
        return regard.attention(query, query, query)

    with pytest.raises(TypeCheckError):
        wrong(torch.randn(B, H, L, D))
