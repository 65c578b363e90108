"""Edits of a model that decodes: positions are those of the tokens, whatever cache holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.editing.by_hand import model_of

import regard
from regard import edits, masks
from regard.cache import BlockPool, KVCache, LatentCache, PagedCache, RollingCache

regard.interop.register_hf()
IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 3]])
EDITS = [edits.cut(queries=slice(5, None), keys=[1, 6]), edits.steer([2, 8], 1.3, queries=slice(4, None))]


def paged() -> PagedCache:
    return PagedCache(BlockPool(16, block_size=4))


@torch.no_grad()
@pytest.mark.parametrize(
    "make", [lambda: KVCache(12), paged, lambda: KVCache(12, int8=True)], ids=["kv", "paged", "int8"]
)
@pytest.mark.parametrize("steps", [[12], [7, 1, 1, 3]])
def test_decoding_with_a_cache_is_edited_as_one_pass_is(make: Callable[[], Any], steps: list[int]) -> None:
    model = regard.interop.from_hf(model_of("llama")).eval()
    with regard.edit(model, EDITS, heads=[1, 2]):
        expected = model(IDS)
    caches, start, parts = [make() for _ in model.layers], 0, []
    with regard.edit(model, EDITS, heads=[1, 2]), regard.edit(model, edits.ablate("zero"), heads={1: [0]}) as report:
        for count in steps:
            parts.append(model(IDS[:, start : start + count], caches=caches))
            start += count
    assert len(report) == len(steps)
    with regard.edit(model, EDITS, heads=[1, 2]), regard.edit(model, edits.ablate("zero"), heads={1: [0]}):
        both = model(IDS)
    rough = isinstance(caches[0], KVCache) and caches[0].int8
    torch.testing.assert_close(
        torch.cat(parts, 1)[:, : sum(steps)], both[:, : sum(steps)], rtol=1e-9, atol=0.5 if rough else 1e-9
    )
    assert (both - expected).abs().max() > 1e-3


@torch.no_grad()
def test_a_hugging_face_model_that_decodes_with_its_own_cache() -> None:
    model = model_of("llama")
    model.set_attn_implementation("sdpa")
    with regard.edit(model, EDITS):
        expected = model(input_ids=IDS).logits
        step = model(input_ids=IDS[:, :7], use_cache=True)
        parts = [step.logits]
        for n in range(7, 12):
            step = model(input_ids=IDS[:, n : n + 1], past_key_values=step.past_key_values, use_cache=True)
            parts.append(step.logits)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("edit", [edits.ablate("zero"), edits.cut(keys=[6])], ids=["ablate", "cut"])
def test_heads_that_share_keys_are_told_apart_where_a_padded_batch_decodes(edit: Any) -> None:
    """Hugging Face's function hands them to the kernel as if they were queries."""
    ids, mask = IDS.expand(2, -1), torch.ones(2, 12, dtype=torch.long)
    mask[0, :2] = 0
    for implementation in ("sdpa", "regard"):
        model = model_of("llama")
        model.set_attn_implementation(implementation)
        with regard.edit(model, edit, heads=[1]):
            expected = model(input_ids=ids, attention_mask=mask).logits[:, -1:]
            step = model(input_ids=ids[:, :9], attention_mask=mask[:, :9], use_cache=True)
            for n in range(9, 12):
                more = {"attention_mask": mask[:, : n + 1], "past_key_values": step.past_key_values}
                step = model(input_ids=ids[:, n : n + 1], **more)
        torch.testing.assert_close(step.logits, expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("how", ["mean", "resample"])
def test_a_token_that_is_decoded_alone_has_no_mean_but_that_of_another_run(how: str) -> None:
    model = model_of("llama")
    model.set_attn_implementation("sdpa")
    step = model(input_ids=IDS[:1, :5], use_cache=True)
    message = rf"it has one query, so ablate\('{how}'\) would put back what the head wrote there: give reference="
    with pytest.raises(edits.CannotEdit, match=message), regard.edit(model, edits.ablate(how)):
        model(input_ids=IDS[:1, 5:6], past_key_values=step.past_key_values)
    with regard.watch(model, keep=["output"]) as reference:
        model(input_ids=IDS[:1])
    step = model(input_ids=IDS[:1, :5], use_cache=True)
    with regard.edit(model, edits.ablate(how, reference)) as report:
        model(input_ids=IDS[:1, 5:6], past_key_values=step.past_key_values)
    assert len(report) == 2


@torch.no_grad()
def test_positions_in_a_rolling_cache_are_refused_once_keys_are_gone() -> None:
    model = regard.interop.from_hf(model_of("llama")).eval()
    caches = [RollingCache(window=3, sinks=1) for _ in model.layers]
    for _ in range(8):  # it moves its memory together once that is full
        model(IDS, caches=caches)
    kept = edits.keep("recent", 5).caches(model)
    model(IDS, caches=kept)
    for held in (caches, kept):
        with regard.edit(model, edits.ablate("zero"), heads=[0]):  # needs no positions
            model(IDS[:, :1], caches=held)
        with pytest.raises(edits.CannotEdit, match="its cache has forgotten"), regard.edit(model, edits.cut(keys=0)):
            model(IDS[:, :1], caches=held)


@torch.no_grad()
def test_latent_attention_is_edited_in_both_of_its_forms() -> None:
    torch.manual_seed(0)
    module = regard.nn.LatentAttention(24, 3, kv_lora_rank=8, rope_dim=4, nope_dim=6, value_head_dim=5).double()
    x = torch.randn(1, 9, 24, dtype=torch.float64)
    cut = edits.cut(keys=[1, 4], queries=slice(5, None))
    with regard.edit(module, cut, heads=[2]):
        whole = module(x, mask=masks.causal())
    cache = LatentCache(9)
    with regard.edit(module, cut, heads=[2]):
        parts = [module(x[:, :6], mask=masks.causal(), cache=cache)]
        parts += [module(x[:, n : n + 1], mask=masks.causal(), cache=cache) for n in range(6, 9)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)
    assert (whole - module(x, mask=masks.causal())).abs().max() > 1e-4
