"""The cost view: the numbers of `regard.cost`, for every setting of the sliders."""

from __future__ import annotations

import pytest
from tests.browser.recordings import sentence

from regard import cost, models


def shown(opened) -> dict[str, float]:
    rows = opened.page.eval_on_selector_all(
        "[data-cost]", "all => all.map(one => [one.dataset.cost, Number(one.dataset.v)])"
    )
    return dict(rows)


NAMES = {
    "embeddings": "embeddings",
    "norms": "norms",
    "attention projections": "projections",
    "attention": "attention",
    "feed-forward": "feedForward",
    "head": "head",
}


def same(found: dict[str, float], expected: cost.Cost) -> None:
    for part in expected.parts:
        if part.name in NAMES:
            assert found[f"parameters.{NAMES[part.name]}"] == part.parameters, part.name
            assert found[f"forward.{NAMES[part.name]}"] == part.flops.forward, part.name
    assert found["parameters"] == expected.parameters
    assert found["forward"] == expected.flops.forward
    assert found["kept"] == expected.kept_flops.forward
    assert found["weights"] == expected.weight_bytes
    assert expected.cache is not None and found["cache"] == expected.cache.total


def slide(opened, name: str, value: float) -> None:
    opened.page.eval_on_selector(
        f'[data-slider="{name}"]',
        f"one => {{ one.value = {value}; one.dispatchEvent(new Event('input', {{ bubbles: true }})) }}",
    )


@pytest.mark.parametrize("name", ["gpt2", "llama-2-7b", "llama-3-8b"])
def test_a_named_model_costs_what_the_library_says(open_page, name: str) -> None:
    opened = open_page(sentence())
    opened.view("cost")
    opened.page.click(f'[data-preset="{name}"]')
    for length, batch in [(10, 0), (7, 2)]:
        slide(opened, "length", length)
        slide(opened, "batch", batch)
        same(shown(opened), cost.of(name, length=2**length, batch=2**batch, dtype="bfloat16"))


def test_sliders_change_the_configuration(open_page) -> None:
    opened = open_page(sentence())
    opened.view("cost")
    opened.page.click('[data-preset="llama-3-8b"]')
    before = opened.pixels(".cost-view canvas >> nth=0")
    for name, value in [
        ("layers", 5),
        ("heads", 4),
        ("kvHeads", 1),
        ("headDim", 48),
        ("ff", 1024),
        ("length", 9),
        ("bytes", 4),
    ]:
        slide(opened, name, value)
    config = models.DecoderConfig(
        vocab_size=128256, embed_dim=768, num_layers=5, num_heads=16, num_kv_heads=2, ff_dim=1024, max_tokens=8192,
        positions="rotary", norm="rms", activation="silu", gated=True, qkv_bias=False, out_bias=False, ff_bias=False,
        tied=False,
    )  # fmt: skip
    same(shown(opened), cost.of(config, length=512, dtype="float32"))
    assert opened.pixels(".cost-view canvas >> nth=0") != before


def test_no_more_key_heads_than_heads_and_the_page_says_how_many(open_page) -> None:
    opened = open_page(sentence())
    opened.view("cost")
    slide(opened, "heads", 1)
    said = '[data-slider="kvHeads"]'
    assert opened.page.get_attribute(said, "max") == "1"
    assert opened.page.eval_on_selector(said, "one => one.previousSibling.textContent") == "2"
    slide(opened, "kvHeads", 0)
    assert opened.page.eval_on_selector(said, "one => one.previousSibling.textContent") == "1"
