"""On CUDA: activations are what autograd keeps there, and this machine can be measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cost.small_bills import kept_bytes

from regard import cost, models

pytestmark = pytest.mark.gpu

# heads of 32, which every kernel takes
SIZES: dict[str, Any] = {"embed_dim": 128, "num_layers": 3, "num_heads": 4, "ff_dim": 333, "max_tokens": 511}
CONFIGS = {
    "gpt2": models.config("gpt2", vocab_size=111, dropout=0.0, attention_dropout=0.0, **SIZES),
    "llama-3-8b": models.config("llama-3-8b", vocab_size=111, num_kv_heads=2, **SIZES),
    "llama-3-8b, window": models.config("llama-3-8b", vocab_size=111, num_kv_heads=2, window=33, **SIZES),
    "bert-base": models.config("bert-base", vocab_size=111, dropout=0.0, attention_dropout=0.0, **SIZES),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("mode", ["fused", "recomputed"])
def test_activations_in_bfloat16_are_within_5_percent_of_what_autograd_keeps(name: str, mode: str) -> None:
    model: Any = models.build(CONFIGS[name], dtype=torch.bfloat16, device="cuda").train()
    model.checkpoint_layers = mode == "recomputed"
    tokens = torch.randint(0, 111, (3, 511), device="cuda")
    found = cost.of(CONFIGS[name], length=511, batch=3, dtype="bf16", device="cuda")
    if name == "bert-base":
        kept = kept_bytes(model, lambda: model(tokens, head="pooled").sum())
    else:
        kept = kept_bytes(model, lambda: model(tokens).sum())
    without_loss = sum(part.fused for part in found.parts if part.name == "loss")
    assert getattr(found.activations, mode) - without_loss == pytest.approx(kept, rel=0.05)


def test_a_gpu_is_measured_in_every_dtype() -> None:
    device = cost.measure("cuda", seconds=1.0)
    assert set(device.flops) == {"float64", "float32", "bfloat16", "float16"}
    assert device.overlaps and device.exponentials is None
    assert min(device.flops.values()) > 0 and device.bandwidth > 0
