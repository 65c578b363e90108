"""The same numbers as Hugging Face's DeepSeek-V3 attention, with random weights of odd sizes."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import DynamicCache
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from regard import masks
from regard.cache import LatentCache
from regard.nn import LatentAttention
from regard.positions import Rotary, YaRN

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


def theirs(rope, interleave=True, q_lora_rank=22, bias=False):
    config = DeepseekV3Config(
        hidden_size=36, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=q_lora_rank, kv_lora_rank=13,
        qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=7, rope_interleave=interleave, attention_bias=bias,
        max_position_embeddings=2560, rope_parameters=rope, num_hidden_layers=1, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(5)
    layer = DeepseekV3Attention(config, layer_idx=0).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3 if parameter.dim() == 2 else 1.0)
    return layer, DeepseekV3RotaryEmbedding(config)


def ours(layer, scaling=None, interleaved=True):
    positions = Rotary(6, interleaved=interleaved, scaling=scaling)
    sizes = {"kv_lora_rank": 13, "nope_dim": 10, "rope_dim": 6, "value_head_dim": 7, "q_lora_rank": layer.q_lora_rank}
    mla = LatentAttention(36, 3, **sizes, bias=layer.o_proj.bias is not None, positions=positions).eval()
    mla.load_state_dict(layer.state_dict())
    return mla


def run(layer, rotary, x, start=0, cache=None):
    """Their causal forward of tokens that stand at `start` and after."""
    tokens = x.shape[1]
    tables = rotary(x, torch.arange(start, start + tokens)[None])
    hidden = torch.full((tokens, start + tokens), -torch.inf).triu(start + 1)
    return layer(x, tables, hidden[None, None], past_key_values=cache)[0]


CASES = {
    "plain": ({"rope_type": "default", "rope_theta": 10000.0}, None, {}),
    "yarn": (YARN, YaRN(40.0, original_length=64, mscale=1.0, mscale_all_dim=1.0), {}),
    "halves": ({"rope_type": "default", "rope_theta": 10000.0}, None, {"interleave": False}),
    "full rank, bias": ({"rope_type": "default", "rope_theta": 10000.0}, None, {"q_lora_rank": None, "bias": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_same_numbers_as_hugging_face(case):
    rope, scaling, changes = CASES[case]
    layer, rotary = theirs(rope, **changes)
    mla = ours(layer, scaling, changes.get("interleave", True))
    assert mla.scale == pytest.approx(layer.scaling, rel=1e-7)
    x = torch.randn(2, 63, 36)
    with torch.no_grad():
        whole = run(layer, rotary, x)
        assert torch.allclose(mla(x, mask=masks.causal()), whole, rtol=0, atol=1e-5)
        # and with a cache on both sides: they expand what they cached, we absorb
        cache, other = LatentCache(63), DynamicCache()
        for start, stop in ((0, 50), (50, 51), (51, 63)):
            found = mla(x[:, start:stop], mask=masks.causal(), cache=cache)
            assert torch.allclose(found, run(layer, rotary, x[:, start:stop], start, other), rtol=0, atol=1e-5)


def test_a_wrong_pairing_of_rotary_entries_would_show():
    layer, rotary = theirs(CASES["plain"][0])
    x = torch.randn(2, 63, 36)
    with torch.no_grad():
        wrong = ours(layer, interleaved=False)(x, mask=masks.causal())
        assert (wrong - run(layer, rotary, x)).abs().max() > 1e-2
