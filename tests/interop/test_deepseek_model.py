"""DeepSeek-V3 whole: the same numbers as Hugging Face's, and back, with random weights of a small configuration."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from regard import cost, interop, models
from regard.cache import LatentCache
from regard.models import DeepSeek

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "as published": {"rope_parameters": YARN},
    "other switches": {
        "rope_parameters": PLAIN, "q_lora_rank": None, "attention_bias": True, "norm_topk_prob": False,
        "rope_interleave": False, "tie_word_embeddings": True, "first_k_dense_replace": 0, "n_shared_experts": 2,
    },
}  # fmt: skip


def theirs(kind: str = "DeepseekV3ForCausalLM", **changes: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": 61, "hidden_size": 36, "intermediate_size": 23, "moe_intermediate_size": 11,
        "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3, "n_shared_experts": 1,
        "n_routed_experts": 12, "kv_lora_rank": 13, "q_lora_rank": 22, "qk_rope_head_dim": 6, "v_head_dim": 7,
        "qk_nope_head_dim": 10, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "first_k_dense_replace": 1,
        "max_position_embeddings": 64, "num_mtp_layers": 0, "attn_implementation": "eager",
        "experts_implementation": "eager", "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(5)
    model = getattr(transformers, kind)(transformers.DeepseekV3Config(**{**sizes, **changes})).eval()
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            weight.normal_(std=0.3 if weight.dim() > 1 else 0.2)
            if "norm" in name:
                weight.add_(1)
    return model


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(61, (2, 19), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", CASES)
def test_a_whole_model_gives_the_same_logits_and_goes_back(case: str, ids: torch.Tensor) -> None:
    model = theirs(**CASES[case])
    ours = interop.from_hf(model)
    assert type(ours) is DeepSeek and not ours.training
    with torch.no_grad():
        logits = model(ids).logits
        torch.testing.assert_close(ours(ids), logits, rtol=0, atol=2e-5)
        # token by token, from latents
        caches = ours.caches(19)
        assert all(isinstance(cache, LatentCache) for cache in caches)
        steps = [ours(ids[:, a:b], caches=caches) for a, b in ((0, 11), (11, 12), (12, 19))]
        torch.testing.assert_close(torch.cat(steps, 1), logits, rtol=0, atol=5e-5)
    back = interop.to_hf(ours)
    for name, weight in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], weight), name
    again = interop.from_hf(back)
    assert again.config == ours.config
    assert all(torch.equal(again.state_dict()[name], weight) for name, weight in ours.state_dict().items())


def test_gradients_reach_the_experts_that_tokens_went_through(ids: torch.Tensor) -> None:
    model = theirs(rope_parameters=PLAIN)
    ours = interop.from_hf(model)
    for one in (model, ours):
        out = one(ids)
        (out if isinstance(out, torch.Tensor) else out.logits).square().sum().backward()
    together = model.model.layers[1].mlp.experts.down_proj.grad
    apart = [expert.down.weight.grad for expert in ours.layers[1].feed_forward.experts]
    for at, grad in enumerate(apart):
        if grad is None:
            assert not together[at].any()
        else:
            torch.testing.assert_close(grad, together[at], rtol=1e-3, atol=1e-3)
    assert any(grad is not None for grad in apart)


def test_folders_of_theirs_and_of_ours_load(tmp_path: Path, ids: torch.Tensor) -> None:
    model = theirs("DeepseekV3Model", rope_parameters=PLAIN)
    model.save_pretrained(tmp_path / "theirs")
    ours = interop.from_hf(tmp_path / "theirs")
    assert ours.head is None
    with torch.no_grad():
        states = model(ids).last_hidden_state
        torch.testing.assert_close(ours(ids), states, rtol=0, atol=2e-5)
        interop.save(ours, tmp_path / "ours")
        assert torch.equal(interop.load(tmp_path / "ours")(ids), ours(ids))
    attention = interop.from_hf(tmp_path / "theirs", layer=2)
    assert torch.equal(attention.kv_down_proj.weight, ours.layers[2].attention.kv_down_proj.weight)


def test_it_generates_as_theirs_does(ids: torch.Tensor) -> None:
    model = theirs(rope_parameters=YARN)
    ours = interop.from_hf(model)
    given = ids[:1, :5]
    new = ours.generate(given, max_new_tokens=7)
    expected = model.generate(given, max_new_tokens=7, do_sample=False, pad_token_id=0)[0, 5:]
    assert torch.as_tensor(new[0])[-7:].tolist() == expected.tolist()


def test_experts_start_smaller_where_a_residual_is_scaled() -> None:
    config = interop.from_hf(theirs(rope_parameters=PLAIN)).config
    model = DeepSeek(dataclasses.replace(config, scaled_residual=True, num_layers=8, embed_dim=111, expert_dim=63))
    mixture: Any = model.layers[1].feed_forward
    for matrix in (mixture.experts[11].down, mixture.shared.down, model.layers[1].attention.out_proj):
        assert matrix.weight.std().item() == pytest.approx(config.init_std / 4, rel=0.1)  # √(2 · 8 layers)
    assert mixture.experts[11].up.weight.std().item() == pytest.approx(config.init_std, rel=0.1)


def test_what_does_not_fit_is_refused() -> None:
    config = interop.from_hf(theirs(rope_parameters=PLAIN)).config
    for change, complaint in (
        ({"expert_groups": 5}, "12 experts cannot be 5 groups"),
        ({"active_experts": 7}, "active_experts=7 are more than the 6 experts"),
        ({"dense_layers": 4}, "dense_layers must be 0 to num_layers=3"),
        ({"num_kv_heads": 1}, "num_kv_heads must be None"),
    ):
        with pytest.raises(ValueError, match=complaint):
            models.build(models.DeepSeekConfig(**{**vars(config), **change}))
    with pytest.raises(ValueError, match="config is a DeepSeekConfig"):
        cost.of(config)
    with pytest.raises(ValueError, match="scoring_func is 'softmax'"):
        broken = theirs(rope_parameters=PLAIN)
        broken.config.scoring_func = "softmax"
        interop.from_hf(broken)


def test_post_norms_are_in_the_layers_of_a_deepseek_too() -> None:
    model = DeepSeek(dataclasses.replace(interop.from_hf(theirs()).config, post_norms=True, norm_plus_one=True)).eval()
    tokens = torch.arange(5)[None]
    before = model(tokens)
    for layer in model.layers:
        assert type(layer.attention_norm) is type(layer.attention_post_norm) is type(model.norm)
        torch.nn.init.constant_(layer.feed_forward_post_norm.weight, 1.0)
    assert not torch.allclose(before, model(tokens))


def test_experts_of_a_float64_model_have_shares_in_float64(ids: torch.Tensor) -> None:
    """Where they are rounded to float32, a token alone and in a batch differ by more than float64 does."""
    model = interop.from_hf(theirs()).double()
    mixture, tokens = model.layers[-1].feed_forward, torch.randn(7, 36, dtype=torch.float64)
    shares, chosen = mixture.route(tokens)
    scores = torch.sigmoid(tokens @ mixture.router.weight.T).gather(1, chosen)
    expected = scores / scores.sum(-1, keepdim=True) * model.config.expert_scale
    assert shares.dtype == torch.float64 and (shares - expected).abs().max() < 1e-14
