from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from tests.nn.helpers import build, close, random
from transformers import DeepseekV3Config, GPTNeoXConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

import regard
from regard import masks, positions
from regard.positions import Rotary

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 63}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 111,
}
# (base, Hugging Face's parameters, ours); a model that was trained on 63 tokens
SCALINGS = {
    "linear": (10_000.0, {"rope_type": "linear", "factor": 3.5}, positions.Linear(3.5)),
    "dynamic": (10_000.0, {"rope_type": "dynamic", "factor": 3.0}, positions.DynamicNTK(3.0, 63)),
    "yarn": (10_000.0, YARN, positions.YaRN(8.0, 63)),
    "yarn, its factor given": (
        50_000.0,
        YARN | {"attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0},
        positions.YaRN(8.0, 63, attention_factor=1.25, beta_fast=16.0, beta_slow=2.0),
    ),
    "yarn, DeepSeek's": (
        10_000.0,
        YARN | {"factor": 40.0, "mscale": 1.5, "mscale_all_dim": 0.75},
        positions.YaRN(40.0, 63, mscale=1.5, mscale_all_dim=0.75),
    ),
    "yarn, not truncated": (10_000.0, YARN | {"truncate": False}, positions.YaRN(8.0, 63, truncate=False)),
    "llama3": (500_000.0, LLAMA3, positions.Llama3(8.0, 111)),
    "llama3, all wavelengths": (
        500.0,
        LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 5.0},
        positions.Llama3(8.0, 111, low_freq_factor=2.0, high_freq_factor=5.0),
    ),
}


def llama_config(base, parameters, head_dim=22):
    return LlamaConfig(
        hidden_size=3 * head_dim,
        num_attention_heads=3,
        head_dim=head_dim,
        max_position_embeddings=63,
        rope_parameters={"rope_theta": base, **parameters},
    )


@pytest.mark.parametrize("case", SCALINGS)
@pytest.mark.parametrize("length", [None, 40, 63, 64, 250])
def test_frequencies_equal_hugging_faces_bit_for_bit(case, length):
    base, parameters, scaling = SCALINGS[case]
    theirs, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](llama_config(base, parameters), None, length)
    assert torch.equal(scaling.frequencies(22, base, length), theirs)
    assert scaling.magnitude == factor
    if length is None:
        assert torch.equal(Rotary(22, base=base, scaling=scaling).frequencies, theirs)


@pytest.mark.parametrize("case", [None, *SCALINGS])
@pytest.mark.parametrize("length", [40, 111])
def test_tables_equal_those_of_hugging_faces_llama(case, length):
    base, parameters, scaling = SCALINGS[case] if case else (10_000.0, {"rope_type": "default"}, None)
    theirs = modeling_llama.LlamaRotaryEmbedding(llama_config(base, parameters))
    ids = torch.stack([torch.arange(length), torch.arange(length).flip(0)])
    cos, sin = theirs(torch.zeros(1), ids)
    ours = Rotary(22, base=base, scaling=scaling).tables(ids)
    for table, wanted in zip(ours, (cos, sin), strict=True):
        # dynamic: they take the power of the base in float32, on a tensor; the angle's rounding grows with the position
        exact = case != "dynamic" or length <= 63
        assert table.dtype == torch.float32 and table.shape == (2, length, 11)
        assert torch.equal(table, wanted[..., :11]) if exact else close(table, wanted[..., :11], length * 2e-6)


def test_the_half_rotated_layout_equals_hugging_faces_llama():
    rotary, theirs = Rotary(22), modeling_llama.LlamaRotaryEmbedding(llama_config(10_000.0, {"rope_type": "default"}))
    query, key = torch.randn(2, 6, 11, 22), torch.randn(2, 3, 11, 22)
    cos, sin = theirs(query, torch.arange(5, 16)[None])
    for ours, wanted in zip(
        rotary(query, key, query_offset=5), modeling_llama.apply_rotary_pos_emb(query, key, cos, sin), strict=True
    ):
        assert torch.equal(ours, wanted)


def test_a_part_of_each_head_is_turned_as_in_gpt_neox():
    config = GPTNeoXConfig(
        hidden_size=3 * 24,
        num_attention_heads=3,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    )
    theirs = modeling_gpt_neox.GPTNeoXRotaryEmbedding(config)
    query, key = torch.randn(2, 3, 7, 24), torch.randn(2, 3, 7, 24)
    cos, sin = theirs(query, torch.arange(7)[None])
    wanted = modeling_gpt_neox.apply_rotary_pos_emb(query, key, cos, sin)
    ours = Rotary(cos.shape[-1])(query, key, query_offset=0)
    assert cos.shape[-1] == 12
    assert torch.equal(ours[0], wanted[0]) and torch.equal(ours[1], wanted[1])
    assert torch.equal(ours[0][..., 12:], query[..., 12:])


def test_the_interleaved_layout_and_yarn_give_deepseeks_logits():
    parameters = {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5, "rope_theta": 10_000.0}
    config = DeepseekV3Config(
        qk_rope_head_dim=22, num_attention_heads=3, num_key_value_heads=3, rope_parameters=parameters
    )
    theirs = modeling_deepseek_v3.DeepseekV3RotaryEmbedding(config)
    scaling = positions.YaRN(40.0, 63, mscale=1.0, mscale_all_dim=0.5)
    rotary = Rotary(22, interleaved=True, scaling=scaling)
    query, key = torch.randn(2, 3, 7, 22), torch.randn(2, 1, 7, 22)
    cos, sin = theirs(query, torch.arange(7)[None])
    query_theirs, key_theirs = modeling_deepseek_v3.apply_rotary_pos_emb_interleave(query, key, cos, sin)
    ours = rotary.turn(query) @ rotary.turn(key).mT
    # they leave the turned pairs in the other order, which no logit sees
    torch.testing.assert_close(ours, query_theirs @ key_theirs.mT)
    wanted = modeling_deepseek_v3.yarn_apply_mscale(parameters, 1.0)
    assert scaling.logit_factor == pytest.approx(wanted, rel=1e-15) and wanted > 1.3


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_pair_turns_as_a_complex_number_does(interleaved):
    rotary = Rotary(10, base=100.0, interleaved=interleaved)
    x = random(2, 3, 7, 14)
    pairs = x[..., :10].unflatten(-1, (5, 2)) if interleaved else x[..., :10].unflatten(-1, (2, 5)).mT
    angle = torch.arange(4, 11).float()[:, None] * rotary.frequencies
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle).to(torch.complex128)
    turned = torch.view_as_real(turned)
    wanted = torch.cat([(turned if interleaved else turned.mT).flatten(-2), x[..., 10:]], -1)
    assert close(rotary.turn(x, 4), wanted, 1e-6)  # cosines and sines are float32


@pytest.mark.parametrize("queries", [1, 7, 11])
@pytest.mark.parametrize("offset", [3, torch.tensor(3), torch.tensor([3, 0, 40])], ids=["int", "scalar", "per item"])
def test_the_last_key_stands_level_with_the_last_query(queries, offset):
    rotary = Rotary(6, interleaved=True)
    query, key = random(3, 4, queries, 10), random(3, 2, 7, 10)
    turned_query, turned_key = rotary(query, key, query_offset=offset)
    assert torch.equal(turned_query, rotary.turn(query, offset))
    assert torch.equal(turned_key, rotary.turn(key, offset + queries - 7))
    if isinstance(offset, torch.Tensor) and offset.dim():
        for item, start in enumerate(offset.tolist()):
            assert torch.equal(turned_query[item : item + 1], rotary.turn(query[item : item + 1], start))


@pytest.mark.parametrize("scaling", [None, positions.YaRN(4.0, 5), positions.DynamicNTK(3.0, 5)])
def test_attention_depends_on_distance_only(scaling):
    # dynamic frequencies follow the length, so both calls are given one
    rotary = Rotary(22, scaling=scaling)
    query, key = random(1, 3, 7, 22), random(1, 3, 7, 22)
    logits = []
    for start in (0, 23):
        cos, sin = rotary.tables(torch.arange(start, start + 7), length=30)
        logits.append(positions.rotate(query, cos, sin) @ positions.rotate(key, cos, sin).mT)
    assert close(*logits, 2e-5) and not close(logits[0], query @ key.mT, 0.1)


def test_dynamic_frequencies_follow_the_longest_item_of_the_batch():
    rotary = Rotary(22, scaling=positions.DynamicNTK(3.0, 5))
    x = random(2, 3, 7, 22)
    whole = Rotary(22, scaling=positions.DynamicNTK(3.0, 5)).tables(torch.arange(17))
    by_item = rotary.turn(x, torch.tensor([0, 10]))
    for item, start in enumerate((0, 10)):
        wanted = positions.rotate(x[item], *(table[start : start + 7] for table in whole))
        assert close(by_item[item], wanted, 1e-5)
    assert not close(rotary.turn(x, 0), rotary.turn(x, torch.tensor([0, 10])), 1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_turned_in_float32(dtype):
    rotary = Rotary(22)
    x = torch.randn(2, 3, 7, 24).to(dtype)
    ours = rotary.turn(x, 5_000)
    assert ours.dtype == dtype
    assert torch.equal(ours, rotary.turn(x.float(), 5_000).to(dtype))


def test_a_module_moved_to_half_precision_or_off_the_meta_device_keeps_its_frequencies():
    wanted = Rotary(22).frequencies
    assert torch.equal(Rotary(22).half().frequencies, wanted)
    assert torch.equal(torch.nn.Sequential(Rotary(22)).to(torch.bfloat16)[0].frequencies, wanted)
    empty = Rotary(22, device="meta")
    assert empty.frequencies.device.type == "meta"
    assert torch.equal(empty.to_empty(device="cpu").frequencies, wanted)
    with torch.device("meta"):
        module = build(48, 4, positions=Rotary(12))
    assert torch.equal(module.to_empty(device="cpu").positions.frequencies, Rotary(12).frequencies)


def test_copies_and_files_work_and_the_state_dict_stays_empty():
    rotary = Rotary(22, interleaved=True, scaling=positions.YaRN(4.0, 63))
    x = random(2, 3, 7, 22)
    saved = io.BytesIO()
    torch.save(rotary, saved)
    saved.seek(0)
    copies = [copy.deepcopy(rotary), pickle.loads(pickle.dumps(rotary)), torch.load(saved, weights_only=False)]
    assert all(torch.equal(other.turn(x), rotary.turn(x)) for other in copies)
    assert rotary.state_dict() == {}
    assert repr(rotary).startswith("Rotary(22, base=10000, interleaved=True, scaling=YaRN(factor=4.0, ")


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_turn_back(interleaved):
    rotary = Rotary(6, interleaved=interleaved, scaling=positions.YaRN(4.0, 63))
    x = random(2, 3, 5, 10).requires_grad_()
    torch.autograd.gradcheck(lambda x: rotary.turn(x, 3), x)
    torch.autograd.gradgradcheck(lambda x: rotary.turn(x, 3), x)
    given = random(2, 3, 5, 10)
    (grad,) = torch.autograd.grad(rotary.turn(x, 3), x, given)
    # turning is linear and, but for the magnitude, orthogonal: the gradient is the turn in the other direction
    cos, sin = rotary.tables(torch.arange(3, 8), dtype=given.dtype)
    assert close(grad, positions.rotate(given, cos, -sin, interleaved=interleaved))


@pytest.mark.parametrize(
    "scaling", [None, positions.YaRN(4.0, 5), positions.DynamicNTK(3.0, 5)], ids=["none", "yarn", "dynamic"]
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_one_graph(scaling, dynamic):
    rotary = Rotary(6, scaling=scaling)
    compiled = torch.compile(rotary, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens, offset in ((7, 3), (11, 0), (5, torch.tensor([4, 9]))):
        query, key = random(2, 4, tokens, 10), random(2, 2, tokens + 2, 10)
        for ours, wanted in zip(
            compiled(query, key, query_offset=offset), rotary(query, key, query_offset=offset), strict=True
        ):
            assert close(ours, wanted, 1e-5)


def test_the_module_turns_queries_and_keys_and_keeps_a_split_exact():
    module = build(48, 4, num_kv_heads=2, positions=Rotary(8, interleaved=True)).eval()
    x = random(3, 7, 48)
    q = module.positions.turn(module.q_proj(x).unflatten(-1, (4, 12)).transpose(1, 2))
    k = module.positions.turn(module.k_proj(x).unflatten(-1, (2, 12)).transpose(1, 2))
    v = module.v_proj(x).unflatten(-1, (2, 12)).transpose(1, 2)
    heads = (q @ k.repeat_interleave(2, 1).mT / 12**0.5).softmax(-1) @ v.repeat_interleave(2, 1)
    assert close(module(x), module.out_proj(heads.transpose(1, 2).flatten(2)), 1e-5)
    nested = torch.nested.nested_tensor([x[0, :5], x[1]], layout=torch.jagged)
    parts = module(nested, mask=masks.causal()).unbind()
    assert close(parts[0], module(x[:1, :5], mask=masks.causal())[0], 1e-5)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Rotary(7), ValueError, r"dim must be even \(entries are turned in pairs\), got 7"),
        (lambda: Rotary(8.0), TypeError, r"dim must be an int, got 8.0 \(float\)"),
        (lambda: Rotary(8, base=1.0), ValueError, "base must be finite and above 1, got 1.0"),
        (lambda: Rotary(8, scaling={"factor": 2}), TypeError, "scaling must be positions.Linear, DynamicNTK, YaRN or"),
        (lambda: positions.Linear(0.5), ValueError, "factor must be at least 1, got 0.5"),
        (lambda: positions.YaRN(2.0, 0), ValueError, "original_length must be at least 1, got 0"),
        (lambda: positions.YaRN(2.0, 5, beta_fast=0.5), ValueError, "beta_fast must be finite and above 1, got 0.5"),
        (
            lambda: positions.Llama3(2.0, 5, high_freq_factor=1),
            ValueError,
            "high_freq_factor must be .* above 1, got 1",
        ),
        (lambda: Rotary(2, scaling=positions.DynamicNTK(2.0, 5)), ValueError, "DynamicNTK needs dim of at least 4"),
        (lambda: Rotary(8).turn(random(2, 3, 5, 6)), ValueError, r"x has heads of 6; Rotary\(dim=8\) turns 8 entries"),
        (lambda: Rotary(8).turn(random(3, 5, 8)), ValueError, r"x must be \[batch, head, token, dim\], got shape"),
        (lambda: Rotary(4).turn(random(2, 3, 5, 6), 0.5), TypeError, "start must be an int or an integer tensor"),
        (
            lambda: Rotary(4).turn(random(2, 3, 5, 6), torch.tensor([1, 2, 3])),
            ValueError,
            r"start must be an int or a tensor \[2\], one position for each batch item; got shape \[3\]",
        ),
        (
            lambda: Rotary(4).turn(torch.zeros(2, 3, 5, 6, dtype=torch.long)),
            TypeError,
            "floating dtype, got torch.int64",
        ),
        (
            lambda: positions.rotate(random(5, 6), random(5, 4), random(5, 4)),
            ValueError,
            "tables of 4 pairs turn 8 entries; x has 6",
        ),
    ],
)
def test_refusals_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_in_float64_a_left_padded_sequence_equals_itself_alone(grad: bool, interleaved: bool) -> None:
    torch.manual_seed(7)
    rotary = Rotary(10, interleaved=interleaved)
    mha = regard.nn.MultiHeadAttention(30, 3, positions=rotary, dtype=torch.float64)
    tokens = torch.randn(2, 41, 30, dtype=torch.float64)
    mask = masks.causal() & masks.padding([41, 12], side="left")
    with torch.set_grad_enabled(grad):
        padded = mha(tokens, mask=mask)
        alone = mha(tokens[1:, 29:], mask=masks.causal())
    assert (padded[1:, 29:] - alone).abs().max() < 1e-14
    cos, sin = rotary.tables(torch.arange(5), dtype=torch.float64)
    assert (cos.dtype, sin.dtype, rotary.tables(torch.arange(5))[0].dtype) == (*[torch.float64] * 2, torch.float32)
