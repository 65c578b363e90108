"""`from_hf` and `to_hf` for the families next to BERT, GPT-2 and Llama: logits as theirs, and back bitwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.interop.hub import (
    IDS,
    LEFT,
    LENGTHS,
    RIGHT,
    bert,
    check_as_good_as,
    distilbert,
    exactly,
    gemma,
    gemma2,
    gpt2,
    llama,
    mistral,
    qwen2,
    qwen3,
    roberta,
)

from regard import interop, models
from regard.interop import from_hf, to_hf

SLIDES = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
DECODERS: dict[str, Any] = {
    "mistral": mistral,
    "mistral without a window": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**{**mistral().config.to_dict(), "sliding_window": None})
    ).eval(),
    "qwen2": qwen2,
    "qwen2, some layers slide": lambda: qwen2(**SLIDES),
    "qwen3": qwen3,
    "qwen3, some layers slide": lambda: qwen3(**SLIDES),
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma2 with another scale": lambda: gemma2(query_pre_attn_scalar=12, final_logit_softcapping=None),
    "llama, bare": lambda: transformers.LlamaModel(llama().config).eval(),
    "gpt2, bare": lambda: transformers.GPT2Model(gpt2().config).eval(),
    "gemma2, bare": lambda: transformers.Gemma2Model(gemma2().config).eval(),
    "qwen3, bare": lambda: transformers.Qwen3Model(qwen3().config).eval(),
}


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_give_their_logits_and_go_back_bitwise(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = DECODERS[name]()
    found = from_hf(model)
    assert isinstance(found, models.Decoder) and found.config.head == ("bare" not in name)
    positions = (LEFT.long().cumsum(-1) - 1).clamp_min(0)
    for theirs, mine, real in (
        ({}, {}, torch.ones_like(RIGHT)),
        ({"attention_mask": RIGHT.long()}, {"lengths": LENGTHS}, RIGHT),
        ({"attention_mask": LEFT.long(), "position_ids": positions}, {"lengths": LENGTHS, "side": "left"}, LEFT),
    ):
        given = {"input_ids": IDS, **theirs}
        with torch.no_grad():
            peer, exact, ours = model(**given)[0], exactly(model, given)[0], found(IDS, **mine)
        check_as_good_as([ours[real]], [peer[real]], [exact[real]], times=2)
    back = to_hf(found)
    expected = "Llama" if "without a window" in name else type(model).__name__[:4]  # the simplest class that has it all
    assert type(back).__name__.startswith(expected)
    theirs, again = model.state_dict(), back.state_dict()
    assert theirs.keys() == again.keys() and all(torch.equal(theirs[key], again[key]) for key in theirs)
    with torch.no_grad():
        assert torch.equal(back(input_ids=IDS)[0], model(input_ids=IDS)[0])
    for folder, save in (
        ("theirs", lambda to: model.save_pretrained(to)),
        ("ours", lambda to: interop.save(found, to)),
    ):
        save(tmp_path / folder)
        same = (from_hf if folder == "theirs" else interop.load)(tmp_path / folder)
        assert same.config == found.config
        assert all(torch.equal(weight, same.state_dict()[key]) for key, weight in found.state_dict().items())


@pytest.mark.parametrize("name", ["mistral", "qwen2, some layers slide", "gemma2", "qwen3"])
def test_they_generate_with_a_cache_what_they_generate_without(name: str) -> None:
    model = DECODERS[name]()
    found = from_hf(model)
    prompt = IDS[:1, :11]
    with torch.no_grad():
        theirs = model.generate(prompt, max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = theirs[0, 11:].tolist()
    assert found.generate(prompt, max_new_tokens=9) == [expected]
    assert found.generate(prompt, max_new_tokens=9, use_cache=False) == [expected]


def test_a_model_without_an_output_layer_says_so() -> None:
    found = from_hf(transformers.LlamaModel(llama().config))
    assert torch.equal(found(IDS), found.states(IDS))
    with pytest.raises(ValueError, match="head=False: it has states, and no logits"):
        found.generate(IDS[:1], max_new_tokens=1)


ENCODERS: dict[str, tuple[Any, str | None]] = {
    "roberta": (roberta, "masked-lm"),
    "distilbert": (distilbert, "masked-lm"),
    "roberta, bare": (lambda: transformers.RobertaModel(roberta().config), None),
    "roberta, pooled": (lambda: transformers.RobertaModel(roberta().config), "pooled"),
    "distilbert, bare": (lambda: transformers.DistilBertModel(distilbert().config), None),
    "roberta, classes": (
        lambda: transformers.RobertaForSequenceClassification(roberta(num_labels=5).config),
        "classes",
    ),
    "distilbert, classes": (
        lambda: transformers.DistilBertForSequenceClassification(distilbert(num_labels=5).config),
        "classes",
    ),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_give_their_outputs_and_go_back_bitwise(name: str, tmp_path: Path) -> None:
    make, head = ENCODERS[name]
    torch.manual_seed(0)
    model = make().eval()
    found = from_hf(model)
    ids = IDS.where(
        RIGHT, torch.tensor(1 if "roberta" in name else 0)
    )  # RoBERTa finds its positions by padding's number
    for theirs, mine, real in (({}, {}, ids == ids), ({"attention_mask": RIGHT.long()}, {"lengths": LENGTHS}, RIGHT)):
        given = {"input_ids": IDS if not mine else ids, **theirs}
        with torch.no_grad():
            at = "pooler_output" if head == "pooled" else 0
            peer, exact, ours = (
                model(**given)[at],
                exactly(model, given)[at],
                found(given["input_ids"], head=head, **mine),
            )
        if head in ("classes", "pooled"):
            check_as_good_as([ours], [peer], [exact], times=2)
        else:
            check_as_good_as([ours[real]], [peer[real]], [exact[real]], times=2)
    back = to_hf(found)
    assert type(back) is type(model)
    theirs, again = model.state_dict(), back.state_dict()
    assert theirs.keys() == again.keys() and all(torch.equal(theirs[key], again[key]) for key in theirs)
    with torch.no_grad():
        assert torch.equal(back(input_ids=IDS)[0], model(input_ids=IDS)[0])
    model.save_pretrained(tmp_path)
    assert from_hf(tmp_path).config == found.config


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (mistral, "sliding_window", 1),
        (qwen2, "layer_types", ["full_attention", "odd", "full_attention"]),
        (qwen2, "max_window_layers", "all"),
        (qwen3, "layer_types", ["sliding_attention"] * 3),
        (gemma, "use_bidirectional_attention", True),
        (gemma, "hidden_activation", "relu"),
        (gemma2, "attn_logit_softcapping", "much"),
        (gemma2, "layer_types", ["full_attention"]),
        (gemma2, "query_pre_attn_scalar", 0),
        (gemma2, "query_pre_attn_scalar", -1),
        (gemma2, "hidden_activation", "relu6"),
        (roberta, "is_decoder", True),
        (roberta, "hidden_act", "relu"),
        (roberta, "pad_token_id", None),
        (roberta, "pad_token_id", "x"),
        (lambda: transformers.BertForSequenceClassification(bert().config), "id2label", -1),
        (distilbert, "activation", "gelu_fast"),
    ],
)
def test_a_field_that_changes_the_mathematics_is_refused_by_name(
    make: Any, field: str, value: Any, tmp_path: Path
) -> None:
    make().save_pretrained(tmp_path)
    given = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**given, field: value}))
    with pytest.raises(ValueError, match=field):
        from_hf(tmp_path)


def test_what_none_of_them_has_is_refused_by_name() -> None:
    small = {"vocab_size": 31, "embed_dim": 12, "num_layers": 2, "num_heads": 3, "ff_dim": 7, "max_tokens": 11}
    llama_like = {**small, "num_kv_heads": 3}
    cases = [
        (models.config("llama-2-7b", **llama_like, attention_softcap=3.0), "attention_softcap=3.0"),
        (models.config("llama-2-7b", **llama_like, scaled_embedding=True), "scaled_embedding=True"),
        (models.config("llama-2-7b", **llama_like, window=3, windowed=(True, False)), "windowed for some layers"),
        (models.config("llama-2-7b", **llama_like, norm_plus_one=True), "scaled_embedding=False"),
        (models.config("gpt2", **small, logit_softcap=2.0), "logit_softcap=2.0"),
        (models.config("bert-base", **small, pooler_activation="relu"), "pooler_activation='relu'"),
        (models.config("bert-base", **small, position_offset=2, norm="pre"), "norm='pre', which RoBERTa"),
    ]
    for config, complaint in cases:
        with pytest.raises(ValueError, match=complaint):
            to_hf(models.build(config))


def test_configurations_that_cannot_be_are_refused() -> None:
    small = {"vocab_size": 31, "embed_dim": 12, "num_layers": 2, "num_heads": 3, "ff_dim": 7, "max_tokens": 11}
    for name, changes, complaint in (
        ("gpt2", {"windowed": (True,), "window": 2}, "2 flags, one for each layer"),
        ("gpt2", {"windowed": (True, False)}, "window is None"),
        ("gpt2", {"norm_plus_one": True}, "norm_plus_one is for norm='rms'"),
        ("gpt2", {"head": False, "logit_softcap": 3.0}, "logit_softcap is for the output layer"),
        ("gpt2", {"attention_softcap": -1.0}, "attention_softcap must be finite and above 0"),
        ("bert-base", {"pooler_activation": "sigmoid"}, "pooler_activation must be one of tanh, relu"),
        ("bert-base", {"position_offset": -1}, "position_offset must be at least 0"),
        ("gpt2", {"attention_scale": float("nan")}, "attention_scale must be finite"),
    ):
        with pytest.raises(ValueError, match=complaint):
            models.config(name, **small, **changes)
    for field in ("rotary_base", "attention_scale", "init_std"):
        with pytest.raises(TypeError, match=f"{field} must be a number, got 'x'"):
            models.config("gpt2", **small, **{field: "x"})
