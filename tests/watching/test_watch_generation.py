"""Decoding with caches: each step is recorded with the heads, weights and tokens that it has, by whatever function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, MistralConfig, MistralForCausalLM, StaticCache

import regard

regard.interop.register_hf()

PROMPT, STEPS = 10, (5, 7, 11)
IDS = torch.randint(2, 63, (2, PROMPT), generator=torch.Generator().manual_seed(5))
LEFT = torch.ones(2, PROMPT, dtype=torch.long)
LEFT[0, :3] = 0


def mistral(implementation: str, window: int | None) -> Any:
    """6 heads, which share 2 heads of keys; a window makes its cache forget."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=64, hidden_size=24, intermediate_size=16, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=32, sliding_window=window, attn_implementation=implementation,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4)
    return model


def decoded(model: Any, cache: str, **more: Any) -> list[Any]:
    """A prompt and three single tokens."""
    held: Any = DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=17)
    mask, outs = LEFT, []
    with torch.no_grad():
        for ids in (IDS, *(torch.full((2, 1), token) for token in STEPS)):
            outs.append(model(ids, attention_mask=mask, past_key_values=held, **more))
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    return outs


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "regard"])
def test_every_step_has_the_heads_and_weights_of_eager_and_the_tokens_that_the_cache_holds(
    implementation: str, window: int | None, cache: str
) -> None:
    weights = [out.attentions for out in decoded(mistral("eager", window), cache, output_attentions=True)]
    model = mistral(implementation, window)
    expected = decoded(model, cache)
    with regard.watch(model, want=regard.Want(weights="all")) as recording:
        outs = decoded(model, cache)
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(outs, expected, strict=True))
    assert not recording.missed
    for layer in (0, 1):
        calls = recording.at(layer)
        assert [call.phase for call in calls] == ["prefill", "decode", "decode", "decode"]
        for step, call in enumerate(calls):
            check_weights(call.weights, weights[step][layer], padded=3 if step == 0 else 0)
            last = call.first_key + call.positions + call.queries - 1
            assert (last == PROMPT - 1 + step).all()  # the token that the last query is


def check_weights(found: Tensor, eager: Tensor, padded: int) -> None:
    assert found.shape[:3] == eager.shape[:3]
    keys = min(found.shape[3], eager.shape[3])  # memory of a static cache that is not filled may be handed over or not
    assert not eager[..., keys:].any()
    assert not found[..., keys:].any()
    found, eager = found[..., :keys].clone(), eager[..., :keys].clone()
    eager[0, :, :padded] = 0  # queries that are padding are left out
    torch.testing.assert_close(found, eager, atol=2e-6, rtol=0)


def test_a_cache_that_was_cut_back_is_not_taken_for_one_that_forgets() -> None:
    model, held = mistral("sdpa", None), DynamicCache()
    with torch.no_grad(), regard.watch(model) as recording:
        model(IDS, past_key_values=held)
        held.crop(-5)
        model(IDS[:, 5:6], past_key_values=held)
    call = recording.at(0)[-1]
    assert (call.first_key, call.positions.tolist(), call.keys) == (0, [5], 6)
