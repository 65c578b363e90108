"""`from_hf`: hidden states, logits and gradients are Hugging Face's, within the rounding of float32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from tests.interop.hub import (
    IDS,
    LEFT,
    LENGTHS,
    RIGHT,
    ROPES,
    Unrounded,
    bert,
    check_as_good_as,
    exactly,
    gpt2,
    in_double,
    inputs,
    llama,
    vit,
    whisper,
)
from torch import Tensor
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

from regard import masks
from regard.cache import LatentCache
from regard.interop import from_hf
from regard.models import Decoder, Encoder, Whisper

POSITIONS = (LEFT.long().cumsum(-1) - 1).clamp_min(0)  # counting real tokens, as ours do


def padded(side: str) -> tuple[dict[str, Any], dict[str, Any], Tensor]:
    """The keywords of theirs, of ours, and which tokens are real."""
    if side == "none":
        return {}, {}, torch.ones_like(RIGHT)
    mask = RIGHT if side == "right" else LEFT
    theirs = {"attention_mask": mask.long(), **({"position_ids": POSITIONS} if side == "left" else {})}
    return theirs, {"lengths": LENGTHS, "side": side}, mask


def hidden_of(model: Any, *, last_normed: bool, **given: Any) -> list[Tensor]:
    """Input of the first layer, output of every layer; the last one is normed where theirs is."""
    result, states = model(**given, hidden_states=True)
    return [*states[:-1], model.norm(states[-1]) if last_normed else states[-1], result]


def check_layers(theirs: Any, ours: Any, given: dict[str, Any], mine: dict[str, Any], real: Tensor) -> None:
    words = isinstance(ours, Decoder)
    with torch.no_grad():
        outs = [exactly(theirs, given, output_hidden_states=True), theirs(**given, output_hidden_states=True)]
        found = [part[real] for part in hidden_of(ours, last_normed=words, **mine)]
    exact, peer = ([part[real] for part in (*out.hidden_states, out[0])] for out in outs)
    assert min(float(part.abs().max()) for part in exact) > 0.5
    check_as_good_as(found, peer, exact, times=2)


@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_bert(side: str) -> None:
    theirs, mine, real = padded(side)
    model = bert()
    found = from_hf(model)
    assert isinstance(found, Encoder) and not found.training
    types = torch.arange(23).ge(8).long().expand(3, -1)
    check_layers(
        model,
        found,
        {"input_ids": IDS, "token_type_ids": types, **theirs},
        {"inputs": IDS, "token_types": types, "head": "masked-lm", **mine},
        real,
    )


@torch.no_grad()
def test_bert_pools_and_classifies() -> None:
    for kind, head in (
        (transformers.BertModel, "pooled"),
        (transformers.BertForSequenceClassification, "classes"),
    ):
        torch.manual_seed(0)
        model = kind(bert(num_labels=5).config).eval()
        exact, peer = (
            out.pooler_output if head == "pooled" else out.logits
            for out in (exactly(model, {"input_ids": IDS}), model(input_ids=IDS))
        )
        check_as_good_as([from_hf(model)(IDS, head=head)], [peer], [exact], times=2)


@torch.no_grad()
def test_vit() -> None:
    model, given = vit(qkv_bias=False), inputs("vit")
    found = from_hf(model)
    exact, peer = exactly(model, given, output_hidden_states=True), model(**given, output_hidden_states=True)
    result, states = found(given["pixel_values"], hidden_states=True)
    mine = [*states, result, found(given["pixel_values"], head="pooled")]
    groups = [[*out.hidden_states, out.last_hidden_state, out.pooler_output] for out in (peer, exact)]
    check_as_good_as(mine, *groups, times=2)
    torch.manual_seed(0)
    classifier = transformers.ViTForImageClassification(vit(num_labels=7).config).eval()
    logits = from_hf(classifier)(given["pixel_values"], head="classes")
    check_as_good_as([logits], [classifier(**given).logits], [exactly(classifier, given).logits], times=2)


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_gpt2_and_llama(make: Any, side: str) -> None:
    theirs, mine, real = padded(side)
    model = make()
    found = from_hf(model)
    assert isinstance(found, Decoder)
    check_layers(model, found, {"input_ids": IDS, **theirs}, {"tokens": IDS, **mine}, real)


@pytest.mark.parametrize("rope", ROPES)
def test_llama_with_scaled_rotary_positions(rope: str) -> None:
    model = llama(rope_parameters=ROPES[rope], max_position_embeddings=12)
    check_layers(model, from_hf(model), {"input_ids": IDS}, {"tokens": IDS}, torch.ones_like(RIGHT))


@pytest.mark.parametrize(
    "changes", [{"attention_bias": True}, {"mlp_bias": True, "tie_word_embeddings": True}, {"num_key_value_heads": 6}]
)
def test_llama_with_biases_and_tied_or_all_heads(changes: dict[str, Any]) -> None:
    model = llama(**changes)
    check_layers(model, from_hf(model), {"input_ids": IDS}, {"tokens": IDS}, torch.ones_like(RIGHT))


DRY = {
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "whisper": {"encoder_attention_heads": 6, "encoder_ffn_dim": 51},
}
MAKERS = {"bert": bert, "gpt2": gpt2, "llama": llama, "vit": vit, "whisper": whisper}


def calls(family: str, side: str) -> tuple[dict[str, Any], tuple[Tensor, ...], dict[str, Any], Tensor]:
    """What theirs takes, what ours takes, and which of the output is real."""
    given = inputs(family)
    if family == "vit":
        return given, (given["pixel_values"],), {}, torch.ones(3, 10, dtype=torch.bool)
    if family == "whisper":
        return given, (given["input_features"], IDS), {}, torch.ones_like(RIGHT)
    theirs, mine, real = padded(side)
    return {**given, **theirs}, (IDS,), mine | ({"head": "masked-lm"} if family == "bert" else {}), real


def gradients(model: Any, out: Tensor, real: Tensor) -> dict[str, Tensor]:
    """Of a sum over the real outputs with fixed random weights."""
    weight = torch.randn(*out[real].shape, generator=torch.Generator().manual_seed(3))
    (out[real] * weight).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def under_our_names(model: Any, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of theirs as `from_hf` would name and lay out weights of the same numbers."""
    holder = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in holder.named_parameters():
            parameter.copy_(grads.get(name, torch.zeros_like(parameter)))
    return {name: each.detach() for name, each in from_hf(holder).named_parameters()}


@pytest.mark.parametrize(
    ("family", "side"),
    [(family, side) for family in ("bert", "gpt2", "llama") for side in ("right", "left")]
    + [("vit", "none"), ("whisper", "none")],
)
def test_gradients_of_every_weight_in_training(family: str, side: str) -> None:
    model = MAKERS[family](**DRY.get(family, {})).train()
    found, exact = from_hf(model), in_double(model)
    assert found.training
    given, args, mine, real = calls(family, side)
    ours = gradients(found, found(*args, **mine), real)
    peer = gradients(model, model(**given)[0], real)
    with Unrounded():
        doubles = gradients(exact, exact(**in_double(given))[0], real)
    trained = [name for name, each in found.named_parameters() if each.requires_grad and "pooler." not in name]
    assert len(trained) == len(ours) > 20
    named = (ours, under_our_names(model, peer), under_our_names(exact, doubles))
    check_as_good_as(*([of[name] for name in trained] for of in named), times=3)


@pytest.mark.parametrize("family", MAKERS)
@torch.no_grad()
def test_half_precision_is_as_far_from_float64_as_theirs(family: str) -> None:
    model = MAKERS[family](**DRY.get(family, {}))
    given, args, mine, real = calls(family, "right")
    exact = exactly(model, given)[0][real]
    found = from_hf(model, dtype=torch.bfloat16)
    ours = found(*(x.bfloat16() if x.is_floating_point() else x for x in args), **mine)
    halves = {name: part.bfloat16() if part.is_floating_point() else part for name, part in given.items()}
    peer = copy.deepcopy(model).bfloat16()(**halves)[0]
    assert ours.dtype == torch.bfloat16
    check_as_good_as([ours[real]], [peer[real]], [exact], times=2)


@pytest.mark.parametrize("family", MAKERS)
@torch.no_grad()
def test_in_float64_it_is_the_same_function(family: str) -> None:
    """Rounding is all that float32 adds: 29 bits more leave 2⁻²⁹ of the distance."""
    model = MAKERS[family](**DRY.get(family, {}))
    twin = from_hf(in_double(model))
    for side in ("none", "left"):
        given, args, mine, real = calls(family, side)
        exact = exactly(model, given)[0][real]
        single = (model(**given)[0][real] - exact).abs().max()
        with Unrounded():
            found = twin(*(x.double() if x.is_floating_point() else x for x in args), **mine)
        assert (found[real] - exact).abs().max() <= 3 * single * 2.0**-29


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_cache_changes_nothing_and_generation_gives_the_same_tokens(make: Any) -> None:
    model = make()
    found = from_hf(model)
    with torch.no_grad():
        caches = found.caches(23)
        parts = [found(IDS[:, start:stop], caches=caches) for start, stop in ((0, 9), (9, 10), (10, 23))]
        given = {"input_ids": IDS}
        peer, exact = model(**given).logits, exactly(model, given).logits
        check_as_good_as([torch.cat(parts, 1), found(IDS)], [peer] * 2, [exact] * 2, times=2)
        how = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
        expected = model.generate(IDS, attention_mask=LEFT.long(), **how)[:, 23:]
        prompts = [ids[some].tolist() for ids, some in zip(IDS, LEFT, strict=True)]
        assert found.generate(prompts, max_new_tokens=9) == expected.tolist()


@torch.no_grad()
def test_whisper() -> None:
    model, given = whisper(encoder_attention_heads=6, encoder_ffn_dim=51), inputs("whisper")
    found = from_hf(model)
    assert isinstance(found, Whisper)
    exact, peer = exactly(model, given, output_hidden_states=True), model(**given, output_hidden_states=True)
    logits, encoder, decoder = found(given["input_features"], IDS, hidden_states=True)
    encoder = [*encoder[:-1], found.encoder_norm(encoder[-1])]
    decoder = [*decoder[:-1], found.decoder_norm(decoder[-1])]
    groups = [[*out.encoder_hidden_states, *out.decoder_hidden_states, out.logits] for out in (peer, exact)]
    check_as_good_as([*encoder, *decoder, logits], *groups, times=2)

    tokens = torch.full((3, 1), 1)
    for _ in range(9):
        step = model(input_features=given["input_features"], decoder_input_ids=tokens).logits[:, -1:]
        tokens = torch.cat([tokens, step.argmax(-1)], 1)
    best = found.generate(given["input_features"], start=1, stop=96, max_new_tokens=9)
    assert 96 not in tokens
    assert [hypotheses[0].tokens for hypotheses in best] == tokens[:, 1:].tolist()


SIZES = {
    "hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": 22, "kv_lora_rank": 13,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 7, "num_hidden_layers": 1, "vocab_size": 31,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("rope", "scale"), [({"rope_type": "default", "rope_theta": 10000.0}, 0.07217), (YARN, 0.13523)]
)
@pytest.mark.parametrize("interleaved", [True, False])
def test_attention_of_deepseek_v3(rope: dict[str, Any], scale: float, interleaved: bool) -> None:
    config = transformers.DeepseekV3Config(
        **SIZES, rope_parameters=rope, rope_interleave=interleaved, attn_implementation="sdpa"
    )
    torch.manual_seed(0)
    block = deepseek.DeepseekV3Attention(config, layer_idx=0).eval()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    found = from_hf(block)
    assert found.scale == pytest.approx(scale, abs=5e-6)
    x = torch.randn(2, 23, 36)
    hidden = torch.ones(23, 23, dtype=torch.bool).tril()[None, None]

    def run(layer: Any, x: Tensor) -> Tensor:
        tables = deepseek.DeepseekV3RotaryEmbedding(config)(x, torch.arange(23)[None])
        return layer(x, tables, hidden)[0]

    exact, double = in_double(block), x.double()
    with torch.no_grad():
        cache = LatentCache(23)
        steps = [found(x[:, a:b], mask=masks.causal(), cache=cache) for a, b in ((0, 11), (11, 12), (12, 23))]
    everywhere = torch.ones(2, 23, dtype=torch.bool)
    outs = [found(x, mask=masks.causal()), run(block, x)]
    grads = [gradients(layer, out, everywhere) for layer, out in zip((found, block), outs, strict=True)]
    with Unrounded():
        outs.append(run(exact, double))
        grads.append(gradients(exact, outs[2], everywhere))
        twin = from_hf(exact)(double, mask=masks.causal())
    mine, peer, exact_out = (out.detach() for out in outs)
    check_as_good_as([mine, torch.cat(steps, 1)], [peer, peer], [exact_out, exact_out], times=2)
    assert (twin - exact_out).abs().max() <= 3 * (peer - exact_out).abs().max() * 2.0**-29
    names = dict(found.named_parameters()).keys()
    assert names == grads[0].keys()
    named = (grads[0], under_our_names(block, grads[1]), under_our_names(exact, grads[2]))
    check_as_good_as(*([of[name] for name in names] for of in named), times=3)


def test_attention_of_one_layer_of_a_whole_deepseek_v3() -> None:
    more = {"moe_intermediate_size": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    config = transformers.DeepseekV3Config(**{**SIZES, "num_hidden_layers": 2}, **more, intermediate_size=21)
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    found, alone = from_hf(model, layer=1), from_hf(model.model.layers[1].self_attn)
    assert all(torch.equal(one, other) for one, other in zip(found.parameters(), alone.parameters(), strict=True))
    whole = from_hf(model)  # all of its layers are dense here
    same = zip(found.parameters(), whole.layers[1].attention.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in same)
    with pytest.raises(ValueError, match=r"layer 2 has no attention weights"):
        from_hf(model, layer=2)
    with pytest.raises(ValueError, match="layer is for deepseek_v3.*this is gpt2"):
        from_hf(gpt2(), layer=1)


def test_the_copy_is_a_copy_and_goes_where_it_is_told() -> None:
    model = llama()
    found = from_hf(model, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in found.parameters()} == {torch.bfloat16}
    assert found.layers[0].attention.positions.frequencies.dtype == torch.float32
    same = from_hf(model)
    with torch.no_grad():
        for parameter in same.parameters():
            parameter.zero_()
        assert float(model(input_ids=IDS).logits.abs().max()) > 0.5
    assert all(parameter.requires_grad for parameter in same.parameters())
