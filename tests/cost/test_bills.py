"""Bills equal what is built and measured: parameters, FLOPs, and bytes kept for the backward pass."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from rich.cells import cell_len
from tests.cost.small_bills import (
    CASES,
    GPT,
    MLA,
    OFF,
    SIZES,
    WORDS,
    attention_by,
    bill,
    counted_flops,
    kept_bytes,
    loss_of,
    words,
)
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard import cost, masks, models

# what has no fused kernel on CPU runs in tiles, whose products torch counts as they are
ONE_KERNEL = [name for name in CASES if not any(word in name for word in ("latent", "window", "wide values", "gemma"))]


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return models.build(CASES[name].config, dtype=dtype).train()


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", models.names())
def test_parameters_of_every_named_configuration_are_those_of_the_model(name: str) -> None:
    assert cost.of(name).parameters == count(models.build(name, device="meta"))


@pytest.mark.parametrize("name", CASES)
def test_parameters_by_part_add_up_to_those_of_the_model(name: str) -> None:
    found = bill(CASES[name], 1)
    assert found.parameters == sum(part.parameters for part in found.parts) == count(build(name))


@pytest.mark.parametrize("biases", [False, True])
def test_a_layers_projections_have_four_times_the_width_squared_whatever_the_heads(biases: bool) -> None:
    for heads in (1, 3, 33):
        config = models.config("gpt2", **GPT | {"embed_dim": 99, "num_heads": heads}, qkv_bias=biases, out_bias=biases)
        (layer,) = cost.of(config).layers.values()
        projections = next(part for part in layer if part.name == "attention projections")
        assert projections.parameters == 4 * 99**2 + 4 * 99 * biases


@pytest.mark.parametrize("name", CASES)
def test_flops_equal_what_torch_counts_with_eager_attention(name: str) -> None:
    model, found = build(name), bill(CASES[name], 2)
    with attention_by("eager"):
        assert counted_flops(lambda: loss_of(CASES[name].run(model, 2))) == (
            found.flops.forward,
            found.flops.backward_eager,
        )


@pytest.mark.parametrize("name", ONE_KERNEL)
@pytest.mark.parametrize("again", [False, True])
def test_flops_equal_what_torch_counts_with_fused_attention(name: str, again: bool) -> None:
    model, found = build(name), bill(CASES[name], 2)
    model.checkpoint_layers = again
    with attention_by("sdpa"):
        forward, backward = counted_flops(lambda: loss_of(CASES[name].run(model, 2)))
    assert forward == found.flops.forward
    assert backward == found.flops.backward + (found.flops.recomputed if again else 0)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", ["eager", "fused", "recomputed"])
def test_activations_are_within_1_percent_of_what_autograd_keeps(name: str, mode: str, batch: int) -> None:
    model, found = build(name), bill(CASES[name], batch)
    model.checkpoint_layers = mode == "recomputed"
    with attention_by("eager") if mode == "eager" else contextlib.nullcontext():
        kept = kept_bytes(model, lambda: loss_of(CASES[name].run(model, batch)))
    assert getattr(found.activations, mode) == pytest.approx(kept, rel=0.01)


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "latent attention", "qwen", "gemma"])
@pytest.mark.parametrize("mode", ["eager", "fused"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_activations_in_other_precisions_are_within_1_percent_too(name: str, mode: str, dtype: torch.dtype) -> None:
    model, found = build(name, dtype), bill(CASES[name], 3, dtype=str(dtype).removeprefix("torch."))
    with attention_by("eager") if mode == "eager" else contextlib.nullcontext():
        kept = kept_bytes(model, lambda: loss_of(CASES[name].run(model, 3)))
    assert getattr(found.activations, mode) == pytest.approx(kept, rel=0.01)


def test_activations_by_part_add_up() -> None:
    found = bill(CASES["llama"], 3)
    assert sum(part.fused for part in found.parts) == found.activations.fused
    assert sum(part.eager for part in found.parts) == found.activations.eager
    (layer,) = found.layers.values()
    assert found.activations.peak - found.activations.recomputed == sum(part.fused for part in layer) - 3 * 63 * 60 * 4


def test_eager_activations_grow_with_the_square_of_the_length_and_fused_ones_with_the_length() -> None:
    long, longer = (cost.of("llama-2-7b", length=length).part("attention") for length in (1 << 16, 1 << 17))
    assert longer.eager / long.eager == pytest.approx(4, rel=0.02)
    assert longer.fused == 2 * long.fused


def test_the_number_of_heads_changes_no_flops() -> None:
    flops = {cost.of(models.config("gpt2", num_heads=heads)).flops.forward for heads in (1, 3, 12, 48)}
    assert len(flops) == 1


def test_windows_of_some_layers_keep_the_pairs_of_those() -> None:
    sizes = GPT | {"num_kv_heads": 1, "window": 11}
    mixed, wide, narrow = (
        cost.of(models.config("llama-3-8b", **sizes | changes), length=63)
        for changes in ({"windowed": (False, True, True)}, {"window": None}, {})
    )
    kept = [found.part("attention").kept_flops.forward for found in (mixed, wide, narrow)]
    assert kept[0] == kept[1] // 3 + kept[2] // 3 * 2
    assert list(mixed.layers) == ["layer", "windowed layer"] and "带窗口的层" in mixed.table("zh")
    assert mixed.cache is not None and mixed.cache.total == wide.cache.total  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="a window in every layer"):
        cost.of(mixed.config, rolling=True)


@pytest.mark.parametrize("head", [True, False])
def test_a_t5_is_billed_but_for_what_its_biases_keep(head: bool) -> None:
    sizes = {**SIZES, "vocab_size": WORDS, "head_dim": 14, "gated": True, "decoder_layers": 2, **OFF}
    config = models.T5Config(**sizes, tied=False, head=head)
    model, found = models.build(config), cost.of(config, length=35, source_length=63, batch=2, dtype="float32")
    assert found.parameters == count(model)
    with attention_by("eager"):
        flops = counted_flops(lambda: loss_of([model(words(2, 63), words(2, 35))]))
    assert flops == (found.flops.forward, found.flops.backward_eager)
    assert "without the learned biases" in str(found)
    assert found.cache is not None and found.cache.layer == 2 * (35 + 63) * 2 * 5 * 14 * 4


@pytest.mark.parametrize("window", [None, 1, 11, 62, 99])
@pytest.mark.parametrize("length", [1, 12, 63])
def test_kept_pairs_are_those_of_the_mask(window: int | None, length: int) -> None:
    config = models.config("llama-3-8b", **GPT | {"num_kv_heads": 1, "window": window})
    mask = masks.causal() if window is None else masks.causal() & masks.window(left=window)
    tokens = torch.zeros(3, 5, length, 12)
    pairs = regard.explain(tokens, tokens, tokens, mask=mask).cost.kept_pairs
    attention = cost.of(config, length=length, batch=3).part("attention")
    assert attention.kept_flops.forward == 3 * 2 * 2 * 12 * pairs
    assert attention.flops.forward == 3 * 3 * 5 * length**2 * 2 * 2 * 12


def test_latent_attention_takes_the_place_of_a_decoders_own() -> None:
    config = models.config("llama-3-8b", **GPT | {"num_kv_heads": 1})
    latent = models.LatentConfig(**MLA)
    module = models.build(latent)
    plain, found = cost.of(config), cost.of(config, latent=latent)
    own = models.build(config).layers[0].attention  # type: ignore[union-attr, index]
    assert found.parameters == plain.parameters + 3 * (count(module) - count(own))  # type: ignore[arg-type]
    alone = cost.of(latent, length=700)
    norms = plain.part("norms").parameters + 3 * alone.part("norms").parameters
    assert found.part("norms").parameters == norms
    assert found.part("attention").flops.forward == 3 * alone.part("attention").flops.forward


def test_the_textbook_formula_stands_next_to_what_our_eager_attention_keeps() -> None:
    found = cost.of("gpt3-175b")
    assert found.activations.textbook == 96 * (34 * 2048 * 12288 + 5 * 2048**2 * 96)
    assert found.activations.textbook / 2**30 == pytest.approx(256.5, abs=0.05)
    assert "256.5 GiB" in str(found) and 'backend="eager"' in str(found) and "410.3 GiB" in str(found)
    assert cost.of("transformer-base").activations.textbook is None


def test_the_counter_of_torch_counts_nothing_for_fused_attention_on_a_cpu() -> None:
    """What the manual says about it; where the counter sees the products, it counts as we do."""
    q = torch.randn(1, 2, 63, 16)
    counts = []
    for given in (q, q.to("meta")):
        with FlopCounterMode(display=False) as counter:
            torch.nn.functional.scaled_dot_product_attention(given, given, given)
        counts.append(counter.get_total_flops())
    assert counts == [0, 2 * 2 * 2 * 63**2 * 16]


def test_experts_multiply_the_parameters_and_a_token_meets_some_of_them() -> None:
    config = models.DecoderConfig(
        vocab_size=37, max_tokens=64, embed_dim=24, num_layers=3, num_heads=4, ff_dim=40, gated=True, ff_bias=True
    )
    plain, mixed = cost.of(config), cost.of(config, experts=(5, 2))
    one = 2 * (24 * 40 + 40) + 40 * 24 + 24
    router = 24 * 5
    assert mixed.parameters == plain.parameters + 3 * (4 * one + router)
    assert (
        mixed.active_parameters == plain.parameters + 3 * (one + router) and plain.active_parameters == plain.parameters
    )
    ff, router_flops = plain.part("feed-forward").flops.forward, 3 * 2 * 64 * router
    assert mixed.part("feed-forward").flops.forward == 2 * ff + router_flops
    assert mixed.at(32).experts == (5, 2) and "2 of 5 experts" in str(mixed)
    assert mixed.activations.textbook is None
    assert cost.of(config, experts=(1, 1)).part("feed-forward").flops.forward == ff + 3 * 2 * 64 * 24
    for wrong, match in (((2, 3), "of 2 not 3"), ((0, 1), "experts must be"), (5, "how many a token goes through")):
        with pytest.raises((ValueError, TypeError), match=match):
            cost.of(config, experts=wrong)
    with pytest.raises(ValueError, match="experts is for decoders"):
        cost.of("bert-base", experts=(4, 2))


def test_the_bill_in_chinese_has_the_same_numbers_and_lines_up() -> None:
    found = cost.of("gpt2")
    chinese = found.table("zh").splitlines()
    assert "注意力投影" in found.table("zh") and "前馈" in found.table("zh")
    assert max(map(cell_len, chinese)) <= 80
    start = next(n for n, line in enumerate(chinese) if line.startswith("---"))
    assert len({cell_len(line) for line in chinese[start - 1 : start + 3]}) == 1
    for number in ("124 439 808", "237.4 MiB"):
        assert number in found.table("zh") and number in str(found)
