"""Rollout of whole models against Abnar and Zuidema's product of dense matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import regard


def bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=13, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, intermediate_size=17
    )
    return transformers.BertModel(config).eval().double()


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=13, hidden_size=24, intermediate_size=17, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, max_position_embeddings=128,
    )  # fmt: skip
    return transformers.LlamaModel(config).eval().double()


def dense(weights: tuple[Tensor, ...], residual: float = 0.5) -> Tensor:
    """The product of whole matrices, first layer rightmost."""
    length = weights[0].shape[-1]
    found = torch.eye(length, dtype=torch.float64)
    for layer in weights:
        mixed = residual * torch.eye(length, dtype=torch.float64) + (1 - residual) * layer.mean(1)
        found = mixed @ found
    return found


def inputs_of(padded: bool) -> dict[str, Tensor]:
    ids = torch.randint(0, 13, (2, 37), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, 30:] = 0
    return {"input_ids": ids, "attention_mask": mask} if padded else {"input_ids": ids}


def eager_weights(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found: tuple[Tensor, ...] = model(**inputs, output_attentions=True).attentions
    real = inputs.get("attention_mask")
    if real is not None:  # queries that are padding look at nothing here
        found = tuple(weights * real[:, None, :, None] for weights in found)
    return found


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("make", [bert, llama])
def test_a_row_and_a_map_are_those_of_the_dense_product(make: Any, padded: bool, implementation: str) -> None:
    model, inputs = make(), inputs_of(padded)
    expected = dense(eager_weights(model, inputs))
    exact = {
        "rtol": 0.0,
        "atol": 1e-12 if make is bert else 1e-6,
        "check_dtype": False,
    }  # Llama's eager softmax is one of float32
    model.set_attn_implementation(implementation)
    row = regard.rollout(model, inputs, token=5)
    torch.testing.assert_close(row, expected[:, 5], **exact)
    rows = regard.rollout(model, inputs, token=[-9, 0, 17])
    torch.testing.assert_close(rows, expected[:, [28, 0, 17]], **exact)
    pooled = regard.rollout(model, inputs, map=(5, 7))
    down, across = ([c * 37 // n for c in range(n + 1)] for n in (5, 7))
    for r in range(5):
        for c in range(7):
            cell = expected[:, down[r] : down[r + 1], across[c] : across[c + 1]].mean((-2, -1))
            torch.testing.assert_close(pooled[:, r, c], cell, **exact)
    whole = regard.rollout(model, inputs, map=(64, 64))
    torch.testing.assert_close(whole, expected, **exact)


def test_the_residual_share_and_the_layers_can_be_chosen() -> None:
    model, inputs = bert(), inputs_of(False)
    weights = eager_weights(model, inputs)
    model.set_attn_implementation("sdpa")
    found = regard.rollout(model, inputs, token=3, residual=0.2)
    torch.testing.assert_close(found, dense(weights, 0.2)[:, 3], rtol=0, atol=1e-12)
    found = regard.rollout(model, inputs, token=3, layers=[0, 1])
    torch.testing.assert_close(found, dense(weights[:2])[:, 3], rtol=0, atol=1e-12)
    assert float(found.sum(-1)[0]) == pytest.approx(1.0)


def test_the_model_and_its_gradients_are_left_as_they_were() -> None:
    model, inputs = bert(), inputs_of(False)
    with torch.no_grad():
        before = model(**inputs).last_hidden_state
    regard.rollout(model, inputs, token=0)
    with torch.no_grad():
        assert torch.equal(model(**inputs).last_hidden_state, before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "one of the two"),
        ({"token": 1, "map": (2, 2)}, "one of the two"),
        ({"token": 37}, "a position among 37 tokens"),
        ({"token": []}, "a position among 37 tokens"),
        ({"map": (0, 2)}, "rows, columns"),
        ({"token": 0, "residual": 2.0}, "residual must be between 0 and 1"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        regard.rollout(bert(), inputs_of(False), **given)


def test_layers_that_do_not_belong_together_are_refused() -> None:
    model = nn.Transformer(12, 2, 1, 1, 11, batch_first=True).eval()
    inputs = (torch.randn(1, 7, 12), torch.randn(1, 5, 12))
    with pytest.raises(ValueError, match=r"rollout needs self attention over one text in every layer.*layers="):
        regard.rollout(model, inputs, token=0)
    assert regard.rollout(model, inputs, token=0, layers=[0]).shape == (1, 7)
    with pytest.raises(ValueError, match="no attention call was seen in Linear"):
        regard.rollout(nn.Linear(3, 3), torch.ones(3), token=0)
