"""`regard.watch` on Hugging Face models with random weights: every implementation, generation, encoder and decoder."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.watching.models import check_statistics
from transformers import (
    AlbertConfig,
    AlbertModel,
    BertConfig,
    BertModel,
    BloomConfig,
    BloomModel,
    Gemma2Config,
    Gemma2Model,
    GPT2Config,
    GPT2Model,
    GptOssConfig,
    GptOssModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5Model,
    WhisperConfig,
    WhisperModel,
)
from transformers.modeling_utils import AttentionInterface

import regard

transformers.utils.logging.set_verbosity_error()
IDS = torch.randint(5, 90, (2, 37), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(IDS)
PADDED[1, 31:] = 0
LEFT = PADDED.flip(1)
SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
INTERFACE = AttentionInterface.get_interface


def llama(**more: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {**SMALL, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    return LlamaForCausalLM(LlamaConfig(**sizes, **TOKENS, **more)).eval()


def gpt2() -> GPT2Model:
    return GPT2Model(GPT2Config(vocab_size=99, n_embd=24, n_layer=2, n_head=3, **TOKENS)).eval()


def whisper() -> WhisperModel:
    config = WhisperConfig(
        vocab_size=99,
        d_model=24,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=3,
        decoder_attention_heads=3,
        encoder_ffn_dim=31,
        decoder_ffn_dim=31,
        max_source_positions=50,
        decoder_start_token_id=1,
        **TOKENS,
    )
    return WhisperModel(config).eval()


def t5() -> T5Model:
    sizes = {"d_model": 24, "d_kv": 8, "num_heads": 3, "d_ff": 31, "num_layers": 2}
    return T5Model(T5Config(vocab_size=99, **sizes)).eval()


def models() -> dict[str, tuple[Any, dict[str, Any]]]:
    text = {"input_ids": IDS, "attention_mask": PADDED}
    capped = {**SMALL, "head_dim": 16, "num_key_value_heads": 1, "sliding_window": 9}
    return {
        "llama": (llama(), text),
        "gpt2": (gpt2(), {"input_ids": IDS}),
        "bert": (BertModel(BertConfig(**SMALL)).eval(), text),
        "t5": (t5(), {**text, "decoder_input_ids": IDS[:, :11]}),
        "whisper": (whisper(), {"input_features": torch.randn(2, 80, 100), "decoder_input_ids": IDS[:, :11]}),
        "softcap and window": (Gemma2Model(Gemma2Config(**capped)).eval(), {"input_ids": IDS}),
        "sinks": (GptOssModel(GptOssConfig(**capped, num_local_experts=2, num_experts_per_tok=1)).eval(), text),
        "shared layers": (AlbertModel(AlbertConfig(**SMALL, embedding_size=8)).eval(), text),
    }


@pytest.mark.parametrize("name", list(models()))
def test_an_eager_model_keeps_its_bits_and_its_statistics_are_those_of_its_weights(name: str) -> None:
    model, inputs = models()[name]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True)
        with regard.watch(model, count_padding=True) as recording:
            out = model(**inputs, output_attentions=True)
    assert torch.equal(out[0], expected[0])
    assert recording.missed == []
    names = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    weights = [layer for key in names for layer in getattr(expected, key, None) or ()]
    calls = sorted(recording, key=lambda call: (call.kind == "cross", call.layer))
    assert len(calls) == len(weights)
    for call, layer in zip(calls, weights, strict=True):
        check_statistics(call, layer, tolerance=1e-5)
    assert AttentionInterface.get_interface is INTERFACE


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("mask", [PADDED, LEFT], ids=["right", "left"])
@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_queries_that_are_padding_are_missing_and_in_no_sum(name: str, mask: torch.Tensor, implementation: str) -> None:
    model, inputs = models()[name]
    inputs = {**inputs, "attention_mask": mask}
    decoder = torch.ones(2, 11, dtype=torch.bool)
    decoder[0, 9:] = False
    if name == "t5":
        inputs["decoder_attention_mask"] = decoder
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(**inputs, output_attentions=True)
        model.set_attn_implementation(implementation)
        with regard.watch(model) as recording:
            model(**inputs)
    assert recording.missed == []
    if name == "t5":
        weights = (*expected.encoder_attentions, *expected.decoder_attentions, *expected.cross_attentions)
    else:
        weights = expected.attentions
    calls = sorted(recording, key=lambda call: (call.kind == "cross", call.layer))
    for call, layer in zip(calls, weights, strict=True):
        check_statistics(call, layer, tolerance=1e-5, real=mask.bool() if call.queries == 37 else decoder)
        assert all(row["entropy"] is not None for row in recording.described(call))


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "whisper", "shared layers"])
def test_sdpa_keeps_its_bits_and_agrees_with_eager(name: str) -> None:
    model, inputs = models()[name]
    with torch.no_grad():
        model.set_attn_implementation("eager")
        with regard.watch(model) as eager:
            model(**inputs)
        model.set_attn_implementation("sdpa")
        expected = model(**inputs)[0]
        with regard.watch(model) as sdpa:
            out = model(**inputs)[0]
    assert torch.equal(out, expected)
    assert [(call.path, call.kind) for call in sdpa] == [(call.path, call.kind) for call in eager]
    for one, other in zip(sdpa, eager, strict=True):
        torch.testing.assert_close(one.entropy, other.entropy, rtol=1e-4, atol=1e-4, equal_nan=True)
        torch.testing.assert_close(one.key_mass, other.key_mass, rtol=1e-4, atol=1e-4)


def test_an_implementation_of_ones_own_is_seen_and_still_runs() -> None:
    ran = []

    def mine(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float = 1.0, **rest: Any) -> Any:
        ran.append(query.shape)
        group = query.shape[1] // key.shape[1]
        weights = (query @ key.repeat_interleave(group, 1).mT * scaling + mask).softmax(-1)
        return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2), weights

    transformers.AttentionInterface.register("mine", mine)
    transformers.AttentionMaskInterface.register("mine", transformers.masking_utils.eager_mask)
    try:
        model = llama()
        model.set_attn_implementation("mine")
        with torch.no_grad(), regard.watch(model) as recording:
            model(input_ids=IDS)
    finally:
        del AttentionInterface._global_mapping["mine"]
        del transformers.AttentionMaskInterface._global_mapping["mine"]
    assert len(ran) == len(recording) == 2
    assert recording.missed == []


def slanted(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float = 1.0, **rest: Any) -> Any:
    """Does more than its arguments say."""
    weights = (query @ key.mT * scaling + torch.arange(float(key.shape[2]))).softmax(-1)
    return (weights @ value).transpose(1, 2), weights


def test_an_implementation_that_does_more_than_its_arguments_say_is_not_reported_wrongly() -> None:
    transformers.AttentionInterface.register("slanted", slanted)
    try:
        model = gpt2()
        model.set_attn_implementation("slanted")
        with torch.no_grad(), regard.watch(model) as recording:
            weights = model(input_ids=IDS, output_attentions=True).attentions
    finally:
        del AttentionInterface._global_mapping["slanted"]
    assert recording.missed == [] and all(call.written_out for call in recording)
    for call, layer in zip(recording, weights, strict=True):
        check_statistics(call, layer)


@pytest.mark.parametrize("honest", [True, False])
def test_a_kernel_that_shows_no_operators_is_taken_at_its_word_only_if_its_output_agrees(honest: bool) -> None:
    def foreign(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float = 1.0, **rest: Any) -> Any:
        q, k, v = (x.double().numpy() for x in (query, key, value))
        logits = np.einsum("bhld,bhsd->bhls", q, k) * scaling + (0.0 if honest else np.arange(k.shape[2]))
        logits = np.where(np.tri(*logits.shape[2:], dtype=bool), logits, -np.inf)
        p = np.exp(logits - logits.max(-1, keepdims=True))
        out = np.einsum("bhls,bhsd->blhd", p / p.sum(-1, keepdims=True), v)
        return torch.from_numpy(out).to(query.dtype), None

    transformers.AttentionInterface.register("foreign", foreign)
    try:
        model = gpt2()
        model.set_attn_implementation("foreign")
        unseen = contextlib.nullcontext() if honest else pytest.warns(UserWarning, match="does more than its arguments")
        with torch.no_grad(), unseen, regard.watch(model) as recording:
            model(input_ids=IDS)
    finally:
        del AttentionInterface._global_mapping["foreign"]
    assert (len(recording), len(recording.missed)) == ((2, 0) if honest else (0, 2))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_has_one_prefill_and_then_decode_steps_at_their_positions(cache: str) -> None:
    model = llama()
    keywords = {} if cache == "dynamic" else {"cache_implementation": "static", "disable_compile": True}
    with torch.no_grad(), regard.watch(model) as recording:
        model.generate(IDS[:1], max_new_tokens=4, min_new_tokens=4, do_sample=False, **keywords)
    for layer in (0, 1):
        calls = recording.at(layer)
        assert [call.phase for call in calls] == ["prefill", "decode", "decode", "decode"]
        assert [call.number for call in calls] == [0, 1, 2, 3]
        assert [int(call.positions[0]) for call in calls] == [0, 37, 38, 39]
        assert [int(call.counts()[0, 0, -1]) for call in calls] == [37, 38, 39, 40]


def test_a_batch_padded_on_the_left_is_placed_and_its_first_key_is_the_first_that_counts() -> None:
    model = llama()
    with torch.no_grad(), regard.watch(model) as recording:
        model.generate(IDS, attention_mask=LEFT, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    last = recording.at(0)[-1]
    assert last.positions.tolist() in ([38], [38, 38])
    assert (last.key_mass[1, :, :6] == 0).all()
    rows = recording.described(last)
    assert all(row["first"] > 0 for row in rows)


def test_cross_attention_of_an_encoder_decoder_is_named_and_decodes_with_its_pass() -> None:
    model = whisper()
    features = torch.randn(1, 80, 100)
    with torch.no_grad(), regard.watch(model) as recording:
        first = model(input_features=features, decoder_input_ids=IDS[:1, :5], use_cache=True)
        model(
            encoder_outputs=(first.encoder_last_hidden_state,),
            decoder_input_ids=IDS[:1, 5:6],
            past_key_values=first.past_key_values,
        )
    cross = recording.at("decoder.layers.0.encoder_attn")
    assert [(call.kind, call.phase, call.queries, call.keys) for call in cross] == [
        ("cross", "prefill", 5, 50),
        ("cross", "decode", 1, 50),
    ]


def test_tokens_come_from_the_tokenizer_also_those_that_are_generated() -> None:
    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return f"<{ids[0]}>"

    model = llama()
    with torch.no_grad(), regard.watch(model, tokenizer=Tokenizer()) as recording:
        ids = model.generate(IDS[:1], max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert recording.tokens == [[f"<{n}>" for n in ids[0, :-1].tolist()]]
    assert recording[0, 0, 2].query_tokens == [f"<{int(ids[0, 38])}>"]


def test_a_model_that_multiplies_matrices_by_itself_is_seen_and_marked() -> None:
    model = BloomModel(BloomConfig(vocab_size=99, hidden_size=24, n_layer=2, n_head=3)).eval()
    with torch.no_grad():
        expected = model(input_ids=IDS, output_attentions=True)
        with regard.watch(model) as recording:
            out = model(input_ids=IDS)
    assert torch.equal(out[0], expected[0])
    assert recording.missed == [] and all(call.written_out for call in recording)
    assert [call.path for call in recording] == ["h.0.self_attention", "h.1.self_attention"]
    for call, layer in zip(recording, expected.attentions, strict=True):
        check_statistics(call, layer)
