"""`attn_implementation="regard"`: equal to the model's own implementation, in value and gradient, whatever the mask."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from tests.interop.hub import (
    IDS,
    LEFT,
    MODELS,
    PEER,
    RIGHT,
    Unrounded,
    check_as_good_as,
    exactly,
    gpt2,
    in_double,
    inputs,
    llama,
    t5,
    vit,
    whisper,
)
from torch import Tensor

import regard
from regard import masks

regard.interop.register_hf()
WORDS = ["bert", "gpt2", "llama", "mistral", "gemma2", "gpt_oss"]
PADDING = {"none": None, "right": RIGHT, "left": LEFT}


def run(model: Any, how: str, given: dict[str, Tensor], real: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """The output at real tokens, and the gradients of a sum over it with fixed random weights."""
    model.set_attn_implementation(how)
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    given = {name: part.to(dtype) if part.is_floating_point() else part for name, part in given.items()}
    out = model(**given)[0]
    out = out if real is None else out[real]
    out.mul(torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(dtype)).sum().backward()
    assert model.config._attn_implementation == how
    return out.detach(), [torch.zeros(1, dtype=dtype) if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_the_models_own_implementation(name: str, padding: str) -> None:
    real = PADDING[padding]
    if real is not None and name not in WORDS:
        real = None
    given = inputs(name) if real is None else {**inputs(name), "attention_mask": real.long()}
    model = MODELS[name]()
    peer = PEER.get(name, "sdpa")
    with Unrounded():
        exact, exact_grads = run(in_double(model), peer, given, real)
    theirs, their_grads = run(model, peer, given, real)
    ours, our_grads = run(model, "regard", given, real)
    assert float(exact.abs().max()) > 0.1
    check_as_good_as([ours], [theirs], [exact], times=2)
    check_as_good_as(our_grads, their_grads, exact_grads, times=3)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_half_precision_is_as_far_from_float64_as_the_models_own_implementation(name: str) -> None:
    # where experts are chosen, a rounding can choose another: here all of them are used
    model = MODELS[name](**({"num_experts_per_tok": 3} if name == "gpt_oss" else {}))
    peer = PEER.get(name, "sdpa")
    model.set_attn_implementation(peer)
    exact, half = exactly(model, inputs(name))[0], copy.deepcopy(model).bfloat16()
    given = {key: part.bfloat16() if part.is_floating_point() else part for key, part in inputs(name).items()}
    found = []
    for how in ("regard", peer):
        half.set_attn_implementation(how)
        found.append(half(**given)[0])
    assert found[0].dtype == torch.bfloat16
    check_as_good_as(found[:1], found[1:], [exact], times=2)


STATIC, SLIDING = {"cache_implementation": "static"}, {"cache_implementation": "sliding_window"}
GENERATION: dict[str, list[dict[str, Any]]] = {
    "gpt2": [{}, {"num_beams": 3}, STATIC],
    "llama": [{}, STATIC],
    "mistral": [{}, STATIC, SLIDING],
    "gemma2": [{}, STATIC, SLIDING],
    "gpt_oss": [{}, STATIC, SLIDING, {"num_beams": 3, **STATIC}],
    "t5": [{}, {"num_beams": 3}, STATIC],
    "whisper": [{}, STATIC, {"num_beams": 3, **STATIC}],
}


@pytest.mark.parametrize("name", GENERATION)
def test_generation_gives_the_same_tokens_with_every_cache(name: str) -> None:
    model = MODELS[name]()
    given = inputs(name)
    given.pop("decoder_input_ids", None)
    if name in WORDS:
        given["attention_mask"] = LEFT.long()
    for more in GENERATION[name]:
        found = []
        for how in (PEER.get(name, "sdpa"), "regard"):
            model.set_attn_implementation(how)
            with torch.no_grad():
                made = model.generate(**given, max_new_tokens=9, min_new_tokens=9, do_sample=False, **more)
            found.append(made)
        assert found[0].shape[1] >= 9
        assert torch.equal(*found), (name, more)


KINDS_OF_WEIGHTS = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_returned_without_another_implementation(name: str) -> None:
    model = MODELS[name]()
    given = {**inputs(name), **({"attention_mask": LEFT.long()} if name in WORDS else {})}
    with torch.no_grad():
        model.set_attn_implementation("regard")
        with regard.watch(model) as recording:
            plain = model(**given)
        out = model(**given, output_attentions=True)
        assert model.config._attn_implementation == "regard"
        model.set_attn_implementation("eager")
        expected, exact = model(**given, output_attentions=True), exactly(model, given, output_attentions=True)
    assert torch.equal(out[0], plain[0])
    assert plain.get("attentions") is None
    groups = [[layer for key in KINDS_OF_WEIGHTS for layer in found.get(key) or ()] for found in (out, expected, exact)]
    if name in WORDS:  # eager attends evenly to everything from padding
        groups = [[layer.transpose(1, 2)[LEFT] for layer in group] for group in groups]
    assert len(groups[0]) >= 3
    # what rounds here are the logits, which are larger than any weight
    largest = max(float(call.lse[call.lse.isfinite()].abs().max()) for call in recording)
    check_as_good_as(*groups, times=2, largest=largest)


def test_generation_returns_the_weights_of_every_step() -> None:
    model = llama()
    model.set_attn_implementation("regard")
    keywords = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    out = model.generate(IDS[:1], output_attentions=True, return_dict_in_generate=True, **keywords)
    shapes = [[tuple(layer.shape) for layer in step] for step in out.attentions]
    assert shapes == [[(1, 6, 23, 23)] * 3, *([(1, 6, 1, 23 + step)] * 3 for step in (1, 2, 3))]
    assert all(torch.allclose(layer.sum(-1), torch.ones(())) for step in out.attentions for layer in step)


def test_a_long_output_of_weights_is_announced_with_its_size() -> None:
    module = torch.nn.Module()
    module.is_causal, module.config = True, transformers.LlamaConfig(num_hidden_layers=5)
    query = torch.randn(1, 2, 4099, 3)
    function = transformers.AttentionInterface()["regard"]
    with pytest.warns(UserWarning, match=r"0\.1 GiB .* 4099 queries and 4099 keys, 0\.6 GiB in its 5 layers.*watch"):
        out, weights = function(module, query, query, query, None, output_attentions=True)
    assert weights.shape == (1, 2, 4099, 4099)
    assert function(module, query[:, :, :5], query, query, None, output_attentions=True)[1].shape == (1, 2, 5, 4099)


def masks_of(model: Any, given: dict[str, Any]) -> list[Any]:
    """What the model hands to its attention modules."""
    seen: list[Any] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs.get("attention_mask"))

    handles = [
        part.register_forward_pre_hook(note, with_kwargs=True)
        for part in model.modules()
        if type(part).__name__.endswith("Attention")
    ]
    model.set_attn_implementation("regard")
    with torch.no_grad():
        model(**given)
    for handle in handles:
        handle.remove()
    return seen


def test_masks_stay_rules() -> None:
    lengths = torch.tensor([23, 17, 9])
    found = masks_of(MODELS["mistral"](), {"input_ids": IDS, "attention_mask": LEFT.long()})
    assert [mask.rule for mask in found] == [masks.window(left=6) & masks.padding(lengths, side="left")] * 3
    found = masks_of(MODELS["gemma2"](), {"input_ids": IDS})
    assert [mask.rule for mask in found] == [masks.window(left=6), masks.causal(), masks.window(left=6)]
    found = masks_of(llama(), {"input_ids": IDS, "attention_mask": RIGHT.long()})
    assert found[0].rule == masks.causal() & masks.padding(lengths)
    starts = torch.tensor([[*range(9), *range(14)]]).expand(3, -1)
    found = masks_of(llama(use_cache=False), {"input_ids": IDS, "position_ids": starts})
    ids = (torch.arange(23) >= 9).long().expand(3, -1)
    assert found[0].rule == masks.documents(ids=ids) & masks.causal()


HOLED = RIGHT & (torch.arange(23) != 3)


@pytest.mark.parametrize("padding", [None, RIGHT, LEFT, HOLED, torch.ones_like(RIGHT)])
@pytest.mark.parametrize("kind", ["causal", "window", "bidirectional", "both sides", "chunks", "union"])
def test_a_mask_means_what_hugging_faces_own_means(kind: str, padding: Tensor | None) -> None:
    m = transformers.masking_utils
    function = {
        "causal": m.causal_mask_function,
        "window": m.sliding_window_causal_mask_function(5),
        "bidirectional": m.bidirectional_mask_function,
        "both sides": m.sliding_window_bidirectional_mask_function(4),
        "chunks": m.chunked_causal_mask_function(5, torch.tensor([0, 2, 4])),
        "union": m.or_masks(m.sliding_window_causal_mask_function(2), lambda b, h, q, k: k < 3),
    }[kind]
    for queries, keys, first, start in ((23, 23, 0, 0), (1, 12, 11, 0), (4, 9, 13, 8), (7, 30, 0, 0), (3, 5, 0, 0)):
        sizes = {"batch_size": 3, "q_length": queries, "kv_length": keys, "q_offset": first, "kv_offset": start}
        given = {**sizes, "mask_function": function, "attention_mask": padding}
        found = transformers.AttentionMaskInterface()["regard"](**given)
        expected = m.sdpa_mask(**given, allow_is_causal_skip=False)
        assert (type(found) is not Tensor) == (kind not in ("chunks", "union"))  # it carries the rule
        assert found.shape == expected.shape and found.dtype == torch.bool
        assert torch.equal(found & True, expected)  # any operation makes the dense one
        assert torch.equal(found[:, :, -1:], expected[:, :, -1:])


def test_a_mask_of_ones_own_is_split_into_what_hides_and_what_is_added() -> None:
    model, peer = llama(), llama()
    slope = -0.1 * (torch.arange(23.0)[:, None] - torch.arange(23.0)).abs().expand(3, 1, 23, 23)
    hidden = torch.ones(23, 23, dtype=torch.bool).triu(1)
    given = {
        "hiding and adding": slope.masked_fill(hidden, torch.finfo(torch.float32).min),
        "hiding": torch.zeros(3, 1, 23, 23).masked_fill(hidden, -torch.inf),
        "true or false": ~hidden[None, None],
    }
    for mask in given.values():
        found, call = [], {"input_ids": IDS, "attention_mask": mask}
        for how in ("sdpa", "regard"):
            model.set_attn_implementation(how)
            found.append(model(**call).logits.detach())
        check_as_good_as(found[1:], found[:1], [exactly(peer, call).logits], times=2)
    with pytest.raises(TypeError, match="int64.*does not say whether 1 means"):
        model(input_ids=IDS, attention_mask=torch.ones(3, 1, 23, 23, dtype=torch.int64))


def test_training_with_checkpointed_layers_gives_the_same_gradients() -> None:
    model = llama()
    _, expected = run(model, "regard", {"input_ids": IDS})
    # newer versions of transformers have another name for it
    getattr(model.train(), "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    _, found = run(model, "regard", {"input_ids": IDS})
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_dropout_is_applied_in_training_only() -> None:
    model = t5(dropout_rate=0.0)
    model.set_attn_implementation("regard")
    given = inputs("t5")
    plain = model(**given).logits
    for part in model.modules():
        if type(part).__name__ == "T5Attention":
            part.dropout = 0.5
    assert torch.equal(model(**given).logits, plain)
    assert not torch.allclose(model.train()(**given).logits, plain)


def test_a_compiled_model_gives_the_same() -> None:
    model = llama(num_hidden_layers=1)
    model.set_attn_implementation("regard")
    given = {"input_ids": IDS, "attention_mask": LEFT.long()}
    with torch.no_grad():
        found = torch.compile(model, backend="eager")(**given).logits
        model.set_attn_implementation("sdpa")
        peer, exact = model(**given).logits, exactly(model, given).logits
        check_as_good_as([found[LEFT]], [peer[LEFT]], [exact[LEFT]], times=2)


def test_watching_sees_the_calls_as_they_are() -> None:
    model = whisper()
    model.set_attn_implementation("regard")
    given = inputs("whisper")
    with torch.no_grad(), regard.watch(model) as recording:
        out = model(**given, output_attentions=True)
    assert recording.missed == []
    assert [call.kind for call in recording] == ["self"] * 2 + ["self", "cross"] * 3
    torch.testing.assert_close(recording.calls[-1].key_mass, out.cross_attentions[-1].sum(2))


def test_registering_again_changes_nothing() -> None:
    def registered() -> list[Any]:
        kept = transformers.PreTrainedModel
        return [
            transformers.AttentionInterface()["regard"],
            transformers.AttentionMaskInterface()["regard"],
            kept.set_attn_implementation,
            kept.get_correct_attn_implementation,
        ]

    before = registered()
    regard.interop.register_hf()
    assert registered() == before


def test_a_model_that_cannot_be_served_says_why() -> None:
    config = transformers.BloomConfig(vocab_size=97, hidden_size=24, n_layer=1, n_head=3)
    model = transformers.BloomModel(config)
    with pytest.raises(ValueError, match="BloomModel cannot run .*calls no attention function"):
        model.set_attn_implementation("regard")
    with pytest.raises(ValueError, match="BloomModel cannot run"):
        transformers.AutoModel.from_config(config, attn_implementation="regard")
    splinter = transformers.SplinterConfig(vocab_size=97, hidden_size=24, num_hidden_layers=1, num_attention_heads=3)
    with pytest.raises(ValueError, match="SplinterModel cannot run .*declares that no attention function"):
        transformers.AutoModel.from_config(splinter, attn_implementation="regard")
    for given in ({"": "regard"}, "regard"):
        with pytest.raises(ValueError, match="BloomModel cannot run"):
            model.set_attn_implementation(given)
    model.set_attn_implementation("eager")


def test_a_model_inside_a_model_that_cannot_be_served_says_why() -> None:
    text = transformers.BloomConfig(vocab_size=97, hidden_size=24, n_layer=1, n_head=3)
    both = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(vit().config, text)
    model = transformers.VisionTextDualEncoderModel(both)
    for given in ("regard", {"text_config": "regard"}):
        with pytest.raises(ValueError, match="BloomModel cannot run .*calls no attention function"):
            model.set_attn_implementation(given)
    assert model.vision_model.config._attn_implementation != "regard"
    model.set_attn_implementation({"vision_config": "regard"})
    assert model.vision_model.config._attn_implementation == "regard"
    assert model.text_model.config._attn_implementation == "eager"
    image = inputs("vit")["pixel_values"]
    with regard.watch(model) as recording, torch.no_grad():
        model.vision_model(image)
    assert [call.queries for call in recording] == [10] * 3


def test_what_only_the_models_own_function_follows_is_refused_by_name() -> None:
    module = gpt2().transformer.h[0].attn
    query = torch.randn(1, 6, 5, 7)
    function = transformers.AttentionInterface()["regard"]
    with pytest.raises(ValueError, match="GPT2Attention hands its attention function indices="):
        function(module, query, query, query, None, indices=torch.zeros(1, 5, 2))
    with pytest.raises(ValueError, match="paged caches"):
        function(module, query, query, query, None, cache=object())
    with pytest.raises(TypeError, match=r"a tensor \[1, 5\].*another implementation"):
        function(module, query, query, query, torch.ones(1, 5))
    with pytest.raises(TypeError, match=r"got BlockMask"):
        function(module, query, query, query, type("BlockMask", (), {})())


def test_a_window_of_no_keys_that_no_layer_uses_hinders_nothing() -> None:
    experts = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4}
    sizes = {"vocab_size": 99, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = transformers.Qwen2MoeConfig(**sizes, **experts, num_key_value_heads=1)
    assert config.sliding_window == 0
    torch.manual_seed(0)
    model = transformers.Qwen2MoeModel(config).eval()
    ids = torch.randint(5, 90, (2, 9))
    with torch.no_grad():
        expected = model(ids)[0]
        model.set_attn_implementation("regard")
        torch.testing.assert_close(model(ids)[0], expected, rtol=1e-5, atol=1e-5)


def test_a_convolutional_part_is_no_reason_to_refuse_a_model() -> None:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage1", "stage2"]
    )
    head = {"hidden_size": 16, "pool_scales": [1], "use_auxiliary_head": False}
    config = transformers.UperNetConfig(backbone_config=backbone, **head)
    transformers.UperNetForSemanticSegmentation(config).set_attn_implementation("regard")
    transformers.AutoModel.from_config(backbone, attn_implementation="regard")
