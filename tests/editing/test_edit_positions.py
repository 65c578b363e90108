"""Positions are those of tokens: in a cache that slides, in one that is set aside whole, in the cross attention of a
decoder that has a cache. Where nothing says which token a query is, positions are refused."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import regard
from regard import edits, masks, models

IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 3], [8, 9, 7, 9, 3, 2, 38, 4, 6, 2, 6, 4]])
STEPS, CHUNKS = [8, 1, 1, 1, 1], [4, 4, 4]
WAYS = [("sdpa", False, STEPS), ("sdpa", True, STEPS), ("eager", False, CHUNKS)]
SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


@lru_cache(None)
def decoder(how: str, window: int | None) -> Any:
    config = transformers.MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=window, eos_token_id=None)
    return _made(transformers.MistralForCausalLM, config, how)


@lru_cache(None)
def encoder_decoder(how: str) -> Any:
    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return _made(transformers.T5ForConditionalGeneration, config, how)


def _made(kind: Any, config: Any, how: str) -> Any:
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation=how).eval().double()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return model


def in_steps(model: Any, counts: list[int], cache: Any) -> Tensor:
    parts, start = [], 0
    for count in counts:
        parts.append(model(IDS[:, start : start + count], past_key_values=cache, use_cache=True).logits)
        start += count
    return torch.cat(parts, 1)


def same(found: Tensor, expected: Tensor, plain: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)  # generate gives logits in float32
    assert (expected - plain).abs().max() > 1e-2


# A cache that slides


@torch.no_grad()
@pytest.mark.parametrize("how, static, counts", WAYS)
def test_queries_in_a_sliding_cache_are_tokens(how: str, static: bool, counts: list[int]) -> None:
    model = decoder(how, 4)
    plain = model(IDS, use_cache=False).logits
    for queries in (3, 10, slice(4, None)):
        edit = edits.ablate("zero", queries=queries)
        with regard.edit(model, edit):
            expected = model(IDS, use_cache=False).logits
        made = {"config": model.config}
        cache = transformers.StaticCache(**made, max_cache_len=16) if static else transformers.DynamicCache(**made)
        with regard.edit(model, edit):
            same(in_steps(model, counts, cache), expected, plain)


IN_SLIDING_KEYS = [
    edits.cut(keys=[3, 7]),
    edits.cut(queries=slice(6, None), keys=slice(5, 8)),
    edits.cut(masks.columns(8) & ~masks.columns(5)),
    edits.cut(~masks.window(left=2)) & ~edits.cut(keys=6),
    edits.cut(masks.padding(torch.tensor([8, 9]))) & ~edits.cut(keys=slice(0, 7)),
    edits.cut(masks.rule(lambda b, h, i, j: (h == b) & (i + j >= 15) & (j < i))),
    edits.steer([4, 8], 2.0),
    edits.steer(slice(6, 9), -1.5, queries=[7, 9, 10]),
]


@torch.no_grad()
@pytest.mark.parametrize("edit", IN_SLIDING_KEYS, ids=repr)
@pytest.mark.parametrize("how, static, counts", WAYS)
def test_keys_in_a_sliding_cache_are_tokens(how: str, static: bool, counts: list[int], edit: edits.Edit) -> None:
    model = decoder(how, 4)
    with regard.edit(model, edit):
        expected = model(IDS, use_cache=False).logits
    made = {"config": model.config}
    cache = transformers.StaticCache(**made, max_cache_len=16) if static else transformers.DynamicCache(**made)
    with regard.edit(model, edit):
        found = in_steps(model, counts, cache)
    same(found, expected, model(IDS, use_cache=False).logits)


@torch.no_grad()
def test_in_a_sliding_cache_a_mask_of_the_calls_own_columns_is_not_joined_with_one_of_positions() -> None:
    model = decoder("sdpa", 4)
    cache = transformers.DynamicCache(config=model.config)
    model(IDS[:, :9], past_key_values=cache)
    column = masks.keep(torch.tensor([False, True, False, False]))
    with regard.edit(model, edits.cut(column), layers=[0]):  # the second key of the call, wherever it stands
        model(IDS[:, 9:10], past_key_values=cache)
    mixed = edits.cut(column & masks.causal())
    with pytest.raises(edits.CannotEdit, match="has forgotten 7 keys"), regard.edit(model, mixed):
        model(IDS[:, 10:11], past_key_values=cache)


@torch.no_grad()
def test_a_block_that_begins_after_the_prompt_knows_its_tokens() -> None:
    model = decoder("sdpa", 4)
    with regard.edit(model, edits.ablate("zero", queries=10)):
        expected = model(IDS, use_cache=False).logits
    cache = transformers.DynamicCache(config=model.config)
    model(IDS[:, :9], past_key_values=cache)
    with regard.edit(model, edits.ablate("zero", queries=10)) as report:
        parts = [model(IDS[:, n : n + 1], past_key_values=cache).logits for n in range(9, 12)]
    assert len(report) == 2  # both layers, once
    same(torch.cat(parts, 1), expected[:, 9:], model(IDS, use_cache=False).logits[:, 9:])
    gone = "changed nothing in 2 calls: no call had these queries and keys"
    with pytest.raises(edits.CannotEdit, match=gone), regard.edit(model, edits.cut(keys=0)):
        model(IDS[:, :1], past_key_values=cache)


class Rolling(nn.Module):
    """Attention with a cache of its own kind: the last four keys, and nothing that says how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.made = nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        made = self.made(x)[:, None]
        cache[:] = [torch.cat([*cache, made], 2)[:, :, -4:]]
        return F.scaled_dot_product_attention(made, cache[0], cache[0])


@torch.no_grad()
def test_a_cache_that_does_not_say_how_many_it_has_seen_is_refused() -> None:
    model, x, cache = Rolling(), torch.randn(1, 1, 8), []
    with regard.edit(model, edits.ablate("zero")) as report:
        for _ in range(6):
            model(x, cache)
    assert len(report) == 6
    message = "which tokens its queries are is not known"
    cache.clear()
    with pytest.raises(edits.CannotEdit, match=message), regard.edit(model, edits.ablate("zero", queries=3)):
        for _ in range(6):
            model(x, cache)


# Cross attention


def logits(model: Any, **more: Any) -> Tensor:
    given: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    given |= {"output_logits": True, "return_dict_in_generate": True, "attention_mask": torch.ones_like(IDS)}
    return torch.stack(model.generate(input_ids=IDS, **given, **more).logits, 1)


@pytest.mark.parametrize(
    "how, edit",
    [
        ("sdpa", edits.ablate("zero", queries=0)),
        ("eager", edits.cut(queries=2, keys=[0, 1, 2])),
        ("sdpa", edits.cut(masks.window(left=1, right=1))),
        ("eager", edits.steer(-1, 3.0, queries=slice(1, 3))),
    ],
    ids=str,
)
def test_cross_attention_with_a_cache_is_edited_as_without(how: str, edit: Any) -> None:
    model = encoder_decoder(how)
    with regard.edit(model, edit, layers=[3, 5]) as report:
        expected = logits(model, use_cache=False)
    assert {changed.kind for changed in report} == {"cross"}
    with regard.edit(model, edit, layers=[3, 5]):
        found = logits(model)
    same(found, expected, logits(model))


@torch.no_grad()
def test_cross_attention_of_our_own_transformer() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 40, "embed_dim": 24, "num_heads": 4, "num_layers": 2, "ff_dim": 32}
    model = models.Transformer(models.TransformerConfig(**sizes)).eval().double()
    target, memory = IDS[:, :6], model.encode(IDS[:, :9])
    cross = ["decoder_layers.0.cross_attention", "decoder_layers.1.cross_attention"]
    steps = (target[:, :2], target[:, 2:3], target[:, 3:5], target[:, 5:])
    for edit in (edits.ablate("zero", queries=[0, 4]), edits.cut(queries=[1, 5], keys=[0, -1])):
        with regard.edit(model, edit, layers=cross):
            expected = model.decode(target, memory)
        caches = model.caches(6, 9)
        with regard.edit(model, edit, layers=cross) as report:
            found = torch.cat([model.decode(step, memory, caches=caches) for step in steps], 1)
        assert {changed.kind for changed in report} == {"cross"}
        same(found, expected, model.decode(target, memory))
    caches, rule = model.caches(6, 9), edits.cut(masks.window(left=1))
    refused = pytest.raises(edits.CannotEdit, match="in cross attention with a cache")
    with refused, regard.edit(model, rule, layers=cross):
        for step in steps:
            model.decode(step, memory, caches=caches)


class Looks(nn.Module):
    """Cross attention below a module that has a cache of its own kind."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor, cache: Any = None) -> Tensor:
        return self.attention(x, memory, memory, need_weights=False)[0]  # type: ignore[no-any-return]


@torch.no_grad()
def test_cross_attention_below_a_cache_that_says_nothing() -> None:
    model, memory = Looks().eval(), torch.randn(1, 5, 8)
    x, edit = torch.randn(1, 3, 8), edits.ablate("zero", queries=0)
    plain = model(x, memory)
    with regard.edit(model, edit):
        changed = (model(x, memory) - plain).abs().amax(-1)[0] > 1e-4
    assert changed.tolist() == [True, False, False]
    refused = pytest.raises(edits.CannotEdit, match="which tokens its queries are is not known")
    with refused, regard.edit(model, edit):
        model(x[:, :1], memory, cache=[torch.zeros(1)])


# A cache that is set aside whole


@pytest.mark.parametrize(
    "how, edit",
    [
        ("sdpa", edits.cut(keys=-1, queries=slice(3, None))),
        ("eager", edits.cut(keys=slice(-3, None), queries=slice(12, None))),
        ("sdpa", edits.steer(-1, 3.0)),
        ("eager", edits.cut(queries=13, keys=3)),
    ],
    ids=str,
)
def test_keys_from_the_end_of_a_static_cache(how: str, edit: Any) -> None:
    model = decoder(how, None)
    with regard.edit(model, edit):
        expected = logits(model)
    with regard.edit(model, edit):
        found = logits(model, cache_implementation="static")
        again = logits(model, cache_implementation="static")  # another text in the same block
    same(found, expected, logits(model))
    torch.testing.assert_close(again, found, rtol=0, atol=0)


def test_a_static_cache_is_not_kept() -> None:
    model = decoder("sdpa", None)
    refused = pytest.raises(edits.CannotEdit, match="a static cache cannot be followed")
    with refused, regard.edit(model, edits.keep("recent", 4)):
        logits(model, cache_implementation="static")


class Causal(nn.Module):
    """Three queries, the first of them at the first of seven keys."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        if self.own:
            return regard.attention(x[:, :, :3], x, x, mask=masks.causal(), query_offset=0)
        return F.scaled_dot_product_attention(x[:, :, :3], x, x, is_causal=True)


@torch.no_grad()
@pytest.mark.parametrize("own", [False, True])
def test_the_end_of_keys_that_are_not_all_read_is_refused(own: bool) -> None:
    model, x = Causal(own), torch.randn(1, 2, 7, 8)
    plain = model(x)
    with regard.edit(model, edits.cut(keys=1)):
        changed = (model(x) - plain).abs().amax((0, 1, 3)) > 1e-4
    assert changed.tolist() == [False, True, True]
    with pytest.raises(edits.CannotEdit, match="counts from the end"), regard.edit(model, edits.cut(keys=-1)):
        model(x)


class InParts(nn.Module):
    """Attends for three queries after three others, or head by head for the last four."""

    def __init__(self, how: str, by_heads: bool, causal: bool = False) -> None:
        super().__init__()
        self.how, self.by_heads, self.causal = how, by_heads, causal
        self.num_heads, self.qkv, self.out = 3, nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor, hide: Tensor | None = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (3, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        count = x.shape[1]
        seen = torch.ones(count, count, dtype=torch.bool)
        seen = seen.tril() if self.causal else seen
        seen = seen if hide is None else seen & ~hide
        if self.by_heads:
            last = slice(count - 4, None)
            parts = [self.part(q[:, [n], last], k[:, [n]], v[:, [n]], seen[last]) for n in range(3)]
            made = torch.cat(parts, 1)
        else:
            made = torch.cat([self.part(q[:, :, n : n + 3], k, v, seen[n : n + 3]) for n in range(0, count, 3)], 2)
        out: Tensor = self.out(made.transpose(1, 2).flatten(2))
        return out

    def part(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        if self.how == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, None if bool(seen.all()) else seen, scale=1.0)
        return (q @ k.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ v


def hidden(queries: Any, keys: Any) -> Tensor:
    hide = torch.zeros(8, 8, dtype=torch.bool)
    hide[queries, keys] = True
    return hide


@torch.no_grad()
@pytest.mark.parametrize("how", ["sdpa", "written"])
def test_queries_of_a_module_that_attends_for_some_at_a_time_are_refused(how: str) -> None:
    torch.manual_seed(0)
    model, x = InParts(how, by_heads=False).double().eval(), torch.randn(2, 8, 12, dtype=torch.float64)
    queries = [
        edits.cut(queries=5, keys=1),
        ~edits.cut(queries=5) & edits.cut(keys=1),
        edits.cut(~masks.window(2, 2)),
        edits.steer(1, 2.0, queries=[0, 1]),
        edits.ablate("zero", queries=-1),
    ]
    for edit in queries:
        with pytest.raises(edits.CannotEdit, match="some of its queries at a time"), regard.edit(model, edit):
            model(x)
    wanted = model(x, hidden(slice(None), 1))
    with regard.edit(model, edits.cut(keys=1)):
        torch.testing.assert_close(model(x), wanted, rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("how", ["sdpa", "written"])
@pytest.mark.parametrize(("by_heads", "causal"), [(True, False), (False, True)])
def test_heads_one_after_another_and_parts_whose_masks_tell_their_place_are_edited(
    how: str, by_heads: bool, causal: bool
) -> None:
    torch.manual_seed(0)
    model, x = InParts(how, by_heads, causal).double().eval(), torch.randn(2, 8, 12, dtype=torch.float64)
    wanted = model(x, hidden(5, slice(0, 2)))
    with regard.edit(model, edits.cut(queries=5, keys=slice(0, 2))):
        for _ in range(2):
            torch.testing.assert_close(model(x), wanted, rtol=0, atol=1e-12)
