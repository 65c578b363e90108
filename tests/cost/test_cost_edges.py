"""Crossings, text, JSON, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.cost.small_bills import GPT, MLA

from regard import cost, models


def test_gpt3s_attention_overtakes_its_feed_forward_at_four_times_its_width() -> None:
    found = cost.of("gpt3-175b").crossings
    assert found.attention_over_feed_forward == 4 * 12288 + 1
    assert found.kept_attention_over_feed_forward == 8 * 12288


@pytest.mark.parametrize("name", ["gpt2", "bert-large", "llama-3-8b", "transformer-base", "deepseek-v3-attention"])
def test_a_crossing_is_where_the_bill_itself_crosses(name: str) -> None:
    plain = cost.of(name, batch=3)
    for field in ("feed_forward", "rest"):
        for kept in ("", "kept_"):
            length = getattr(plain.crossings, f"{kept}attention_over_{field}")
            if length is not None:
                assert not _attention_is_larger(plain.at(length - 1), field, kept)
                assert _attention_is_larger(plain.at(length), field, kept)
    length = plain.crossings.cache_over_weights
    if length is not None:
        for at, larger in ((length - 1, False), (length, True)):
            bill = plain.at(at)
            assert bill.cache is not None and (bill.cache.total > bill.weight_bytes) is larger
    assert (length is None) == (plain.cache is None)


def _attention_is_larger(bill: cost.Cost, field: str, kept: str) -> bool:
    flops = {part.name: (part.kept_flops if kept else part.flops).forward for part in bill.parts}
    attention = flops.pop("attention")
    return attention > (flops["feed-forward"] if field == "feed_forward" else sum(flops.values()))


def test_what_saturates_never_crosses() -> None:
    found = cost.of(models.config("llama-3-8b", window=100)).crossings
    assert found.attention_over_feed_forward is not None and found.kept_attention_over_feed_forward is None


@pytest.mark.parametrize("name", models.names())
def test_the_table_fits_80_columns_and_names_every_part(name: str) -> None:
    bill = cost.of(name, batch=1000)
    text = str(bill)
    assert max(map(len, text.splitlines())) <= 80
    for part in bill.parts:
        assert f"\n{part.name} " in text
    assert f"{bill.parameters:,}".replace(",", " ") in text


@pytest.mark.parametrize("name", models.names())
def test_a_bill_is_json_and_back(name: str) -> None:
    bill = cost.of(name, batch=3)
    found = json.loads(json.dumps(bill.to_dict()))
    assert found["parameters"] == bill.parameters and found["flops"]["forward"] == bill.flops.forward
    assert found["config"]["embed_dim"] == bill.config.embed_dim
    assert [part["name"] for part in found["parts"]] == [part.name for part in bill.parts]
    assert found["crossings"]["cache_over_weights"] == bill.crossings.cache_over_weights


def test_huge_numbers_have_their_text() -> None:
    text = str(cost.of("llama-3-8b", length=2**62, batch=2**62))
    assert max(map(len, text.splitlines())) <= 80
    assert "e+" in text and "14.96 GiB" in text


@pytest.mark.parametrize("name", ["gpt2", "bert-base", "whisper-tiny", "deepseek-v3-attention", "transformer-base"])
def test_a_plot_has_a_panel_for_each_kind_of_cost_and_marks_the_crossings(name: str) -> None:
    bill = cost.of(name)
    figure = bill.plot()
    assert len(figure.axes) == (2 if bill.cache is None else 3)
    marks = [text.get_text() for axes in figure.axes for text in axes.texts]
    found = bill.crossings
    wanted = (found.attention_over_feed_forward, found.kept_attention_over_feed_forward, found.cache_over_weights)
    assert marks == [f"{length:,}".replace(",", " ") for length in wanted if length is not None]


def test_a_plot_of_images_is_refused() -> None:
    with pytest.raises(ValueError, match="images have one length"):
        cost.of("vit-base").plot()


def test_a_length_beyond_the_models_own_is_noted() -> None:
    assert "beyond max_tokens=1024: the model has learned no positions" in cost.of("gpt2", length=2000).notes[0]
    assert "beyond max_tokens=8192" in cost.of("llama-3-8b", length=9000).notes[0]
    assert "beyond max_frames=1500" in cost.of("whisper-tiny", source_length=3000).notes[0]


def test_a_part_is_had_by_name() -> None:
    assert cost.of("gpt2").part("feed-forward").parameters == 12 * (2 * 4 * 768**2 + 5 * 768)
    with pytest.raises(ValueError, match="name must be one of embeddings, norms"):
        cost.of("gpt2").part("ffn")


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        ("gpt5", {}, "name must be one of bert-base"),
        ({"embed_dim": 3}, {}, "config must be a name or a configuration of regard.models, got dict"),
        ("gpt2", {"length": 0}, "length must be at least 1, got 0"),
        ("gpt2", {"length": 3.5}, "length must be an int, got 3.5"),
        ("gpt2", {"length": 2**63}, "length must be at most 2\\*\\*62"),
        ("gpt2", {"batch": 0}, "batch must be at least 1, got 0"),
        ("gpt2", {"batch": True}, "batch must be an int, got True"),
        ("gpt2", {"dtype": "int4"}, "dtype must be one of float64, .*, got 'int4'"),
        ("gpt2", {"dtype": None}, "dtype must be one of float64, .*, got None"),
        ("gpt2", {"device": "tpu"}, "device must be one of cuda, cpu, got 'tpu'"),
        ("gpt2", {"source_length": 3}, "source_length is for encoder-decoders"),
        ("whisper-tiny", {"source_length": 0}, "source_length must be at least 1"),
        ("vit-base", {"length": 63}, "has 197 tokens: leave it out"),
        ("gpt2", {"rolling": True}, "rolling needs a decoder with a window"),
        ("bert-base", {"rolling": True}, "rolling needs a decoder with a window"),
        ("bert-base", {"int8": True}, "int8 is of a cache, and an encoder keeps none"),
        ("gpt2", {"sinks": 3}, "sinks=3 stay in a rolling cache"),
        ("gpt2", {"sinks": -1}, "sinks must be at least 0"),
        ("gpt2", {"latent": 512}, "latent must be a regard.models.LatentConfig, got int"),
        ("gpt2", {"latent": models.LatentConfig(**MLA)}, "latent has embed_dim=60, and the configuration has 768"),
        ("bert-base", {"latent": models.LatentConfig(**MLA)}, "and this is a EncoderConfig"),
        (models.config("gpt2", num_heads=7), {}, "num_heads=7 must divide embed_dim=768; give head_dim otherwise"),
        (models.config("bert-base", num_heads=7), {}, "num_heads=7 must divide embed_dim=768$"),
        (models.config("gpt2", num_kv_heads=24), {}, "num_kv_heads=24 must divide num_heads=12"),
        (models.config("gpt2", num_kv_heads=5), {}, "num_kv_heads=5 must divide num_heads=12"),
        (models.LatentConfig(**MLA | {"rope_dim": 7}), {}, "rope_dim must be even, got 7"),
        (models.config("llama-2-7b", head_dim=33), {}, "heads must have an even width, got 33"),
    ],
)
def test_what_makes_no_sense_is_refused(config: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        cost.of(config, **given)


def test_latent_attention_has_no_window() -> None:
    config = models.config("llama-3-8b", **GPT | {"num_kv_heads": 1, "window": 11})
    with pytest.raises(ValueError, match="latent attention has no window"):
        cost.of(config, latent=models.LatentConfig(**MLA))
