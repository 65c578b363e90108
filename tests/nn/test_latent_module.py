"""Latent attention as a module: DeepSeek-V3's sizes and numbers, caches, padding, what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.nn.helpers import close, gradients, random

import regard
from regard import masks
from regard.cache import BlockPool, KVCache, LatentCache, PagedCache, RollingCache
from regard.nn import LatentAttention, MultiHeadAttention
from regard.positions import Rotary, YaRN

CAUSAL = masks.causal()
V3 = {"q_lora_rank": 1536, "kv_lora_rank": 512, "nope_dim": 128, "rope_dim": 64, "value_head_dim": 128}
SMALL = {"kv_lora_rank": 13, "nope_dim": 10, "rope_dim": 6, "value_head_dim": 7}


def build(**keywords):
    module = LatentAttention(40, 6, **{**SMALL, "q_lora_rank": 22, "dtype": torch.float64, **keywords}).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.normal_()
    return module


CACHES = {
    "latent": (lambda: LatentCache(131), CAUSAL),
    "kv": (lambda: KVCache(131), CAUSAL),
    "paged": (lambda: PagedCache(BlockPool(101, 7)), CAUSAL),
    "rolling": (lambda: RollingCache(7, sinks=3), masks.causal() & (masks.window(left=7) | masks.columns(3))),
}


def by_hand(mla, x):
    """DeepSeek's formulas with loops over heads, causal, without a cache."""
    n, p, r = mla.nope_dim, mla.rope_dim, mla.kv_lora_rank
    q = mla.q_up_proj(mla.q_norm(mla.q_down_proj(x))) if mla.q_lora_rank else mla.q_proj(x)
    down = mla.kv_down_proj(x)
    up = mla.kv_up_proj(mla.kv_norm(down[..., :r])).unflatten(-1, (6, n + mla.value_head_dim))
    q = q.unflatten(-1, (6, n + p))
    frequencies = 1.0 / 10_000.0 ** (torch.arange(0, p, 2, dtype=torch.float32) / p)
    angle = torch.arange(x.shape[1])[:, None] * frequencies.double()
    cos, sin = angle.cos(), angle.sin()

    def turn(y):
        even, odd = y[..., 0::2], y[..., 1::2]
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)

    k_rope, heads = turn(down[..., r:]), []
    for h in range(6):
        logits = q[:, :, h, :n] @ up[:, :, h, :n].transpose(1, 2) + turn(q[:, :, h, n:]) @ k_rope.transpose(1, 2)
        logits = logits / (n + p) ** 0.5
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        heads.append(logits.masked_fill(hidden, -torch.inf).softmax(-1) @ up[:, :, h, n:])
    return mla.out_proj(torch.cat(heads, -1))


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}, {"bias": True}], ids=["low rank", "full rank", "bias"])
def test_forward_is_the_paper_s_formula_values_and_gradients(changes):
    mla, x = build(**changes), random(3, 11, 40, grad=True)
    out, exact = mla(x, mask=CAUSAL), by_hand(mla, x)
    assert close(out, exact, 1e-11)
    ours, theirs = gradients(mla, out, x), gradients(mla, exact, x)
    assert all(close(ours[name], theirs[name], 1e-10) for name in theirs)


def test_a_layer_of_deepseek_v3_has_as_many_parameters_as_theirs():
    layer = LatentAttention(7168, 128, **V3, device="meta")
    assert sum(parameter.numel() for parameter in layer.parameters()) == 187_107_328


def test_the_cache_of_deepseek_v3_is_576_numbers_a_token_against_40960():
    latent, plain = LatentCache(3), KVCache(3)
    latent.update(torch.zeros(1, 1, 2, 512 + 64))
    plain.update(torch.zeros(1, 128, 2, 128 + 64), torch.zeros(1, 128, 2, 128))
    assert latent.bytes // (3 * 4) == 576
    assert plain.bytes // (3 * 4) == 40_960
    module, cache = build(), LatentCache(7)
    module(random(3, 5, 40), mask=CAUSAL, cache=cache)
    assert cache.bytes == 3 * 7 * (13 + 6) * 8


@pytest.mark.parametrize("split", [[111], [5, 106], [63, *[1] * 48], [3, 91, 7, 10]], ids=str)
@pytest.mark.parametrize("kind", CACHES)
def test_every_split_equals_one_forward(kind, split):
    make, mask = CACHES[kind]
    mla, x, cache = build(), random(3, 111, 40), make()
    with torch.no_grad():
        parts = []
        for part in x.split(split, 1):
            parts.append(mla(part, mask=mask, cache=cache))
            cache.fill_unused(torch.nan)
        assert close(torch.cat(parts, 1), mla(x, mask=mask), 1e-10)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", CACHES)
def test_a_padded_batch_equals_each_sequence_alone(kind, side):
    make, mask = CACHES[kind]
    mla, lengths, x, y = build(), [17, 3, 11], random(3, 17, 40), random(3, 9, 40)
    given = x if side == "right" else torch.stack([row.roll(17 - n, 0) for row, n in zip(x, lengths, strict=True)])
    cache = make()
    with torch.no_grad():
        first = mla(given, mask=mask, cache=cache.padded(lengths, side=side))
        cache.fill_unused(torch.nan)
        later = torch.cat([mla(part, mask=mask, cache=cache) for part in y.split([4, 1, 1, 3], 1)], 1)
        for item, n in enumerate(lengths):
            whole = mla(torch.cat([x[item, :n], y[item]])[None], mask=mask)[0]
            rows, pads = (
                (first[item, 17 - n :], first[item, : 17 - n]) if side == "left" else first[item].split((n, 17 - n))
            )
            assert close(rows, whole[:n], 1e-10) and not pads.any()
            assert close(later[item], whole[n:], 1e-10)


def test_int8_latents_stay_within_one_percent():
    torch.manual_seed(1)
    query, latent = torch.randn(2, 8, 64, 80), torch.randn(2, 1, 64, 80)
    outs = [LatentCache(64, int8=int8).attend(query, latent, mask=CAUSAL, value_dim=64) for int8 in (False, True)]
    assert (outs[1] - outs[0]).norm() <= 0.01 * outs[0].norm()


@pytest.mark.parametrize("kind", CACHES)
def test_observe_and_explain_show_expanding_first_and_absorbing_then(kind):
    make, mask = CACHES[kind]
    mla, x, cache = build(), random(3, 12, 40), make()
    with torch.no_grad():
        plan = mla.explain(x[:, :11], mask=mask, cache=cache)
        assert (plan.spec.kv_heads, plan.spec.head_dim, plan.spec.value_dim) == (6, 16, 7)
        first = mla.observe(x[:, :11], mask=mask, cache=cache)
        plan = mla.explain(x[:, 11:], mask=mask, cache=cache)
        assert (plan.spec.kv_heads, plan.spec.keys, plan.spec.head_dim, plan.spec.value_dim) == (1, 12, 19, 13)
        seen = mla.observe(x[:, 11:], mask=mask, cache=cache)
        whole = mla.observe(x, mask=mask)
    assert close(torch.cat([first.out, seen.out], 1), whole.out, 1e-10)
    assert close(torch.cat([first.entropy, seen.entropy], 2), whole.entropy, 1e-10)
    assert cache.lengths == [12] * 3


def test_gradients_flow_through_an_absorbed_step():
    mla, x = build(), random(3, 6, 40)
    new = random(3, 5, 40, grad=True)
    cache = LatentCache(13)
    with torch.no_grad():
        mla(x, mask=CAUSAL, cache=cache)
    out = mla(new, mask=CAUSAL, cache=cache)
    whole = mla(torch.cat([x, new], 1), mask=CAUSAL)[:, 6:]
    assert close(out, whole, 1e-10)
    pull = random(*out.shape)
    ours, theirs = (torch.autograd.grad((y * pull).sum(), new)[0] for y in (out, whole))
    assert close(ours, theirs, 1e-10)


def test_cross_attention_and_padding_masks_and_nested_input():
    mla, x, memory = build(), random(3, 5, 40), random(3, 9, 40)
    assert mla(x, memory).shape == (3, 5, 40)
    assert close(mla(x, memory, memory), mla(x, memory))
    padded = mla(memory, mask=CAUSAL & masks.padding([9, 2, 5]))
    assert close(padded[1, :2], mla(memory[1:2, :2], mask=CAUSAL)[0], 1e-11) and not padded[1, 2:].any()
    nested = torch.nested.nested_tensor([memory[0], memory[1, :2]], layout=torch.jagged)
    for out, item in zip(mla(nested, mask=CAUSAL).unbind(), (memory[0], memory[1, :2]), strict=True):
        assert close(out, mla(item[None], mask=CAUSAL)[0], 1e-11)


def test_dropout_only_in_training():
    mla, x = build(dropout=0.5, out_dropout=0.5), random(3, 5, 40)
    assert torch.equal(mla(x), mla(x))
    mla.train()
    assert not torch.equal(mla(x), mla(x))
    cache = LatentCache(13)
    mla(x, mask=CAUSAL, cache=cache)
    assert mla(x, mask=CAUSAL, cache=cache).shape == (3, 5, 40)


def test_the_module_copies_saves_and_loads():
    mla, x = build(), random(3, 5, 40)
    other = build()
    other.load_state_dict(mla.state_dict())
    assert torch.equal(other(x), mla(x)) and torch.equal(copy.deepcopy(mla)(x), mla(x))
    half = build().to(torch.bfloat16)
    assert half(x.bfloat16()).dtype == torch.bfloat16
    assert "kv_lora_rank=13" in repr(mla)


@pytest.mark.parametrize("how", [{"softcap": 0.7}, {"scale": 0.2}, {"sinks": True}, {"backend": "eager"}])
def test_a_call_says_how_to_attend_with_and_without_a_cache(how):
    mla, x, cache = build(), random(2, 9, 40), LatentCache(20)
    given = {**how, "sinks": random(6)} if "sinks" in how else how
    with torch.no_grad():
        plain, turned, latent = mla._project(
            mla._prepare(x, None, None, CAUSAL, None, None, {}).inputs, mla.positions, 0
        )
        latents, rotary = latent[:, 0, :, :13], latent[:, 0, :, 13:]
        given_heads = {"mask": CAUSAL, "scale": mla.scale, **given, "form": "expand"}
        heads = regard.latent_attention(plain, turned, latents, rotary, *mla.up_projections, **given_heads)
        expected = mla.out_proj(heads.transpose(1, 2).flatten(2))
        parts = [mla(x[:, a:b], mask=CAUSAL, cache=cache, **given) for a, b in ((0, 6), (6, 8), (8, 9))]
        assert close(mla(x, mask=CAUSAL, **given), expected, 1e-11)
        assert close(torch.cat(parts, 1), expected, 1e-11)
        assert close(mla.observe(x, mask=CAUSAL, **given).out, expected, 1e-11)
        assert ("backend" in how) == close(mla(x, mask=CAUSAL), expected, 1e-4)
    assert mla.explain(x, mask=CAUSAL, backend="eager").backend == "eager"
    with pytest.raises(TypeError, match="softcup: no such keyword"):
        mla(x, softcup=3.0)


def test_what_has_no_meaning_is_refused():
    mla, x = build(), random(3, 5, 40)
    wrong = [
        (lambda: mla(x, x, random(3, 5, 40)), "value must be key"),
        (lambda: mla(random(3, 5, 39)), "query has width 39; the module was built with embed_dim=40"),
        (lambda: mla(x, random(3, 5, 41)), "key has width 41"),
        (lambda: mla(x.float()), "query is float32 but the module's weights are float64"),
        (lambda: mla(x, random(2, 5, 40)), "one batch size"),
        (
            lambda: mla(x, cache={}),
            "cache must be one of regard.cache that holds one tensor per token, such as LatentCache",
        ),
        (lambda: mla(x, mask=CAUSAL, cache=RollingCache(3)), "mask=cache.mask"),
        (lambda: LatentAttention(40, 6, **{**SMALL, "rope_dim": 0}), "rope_dim must be at least 1"),
        (lambda: LatentAttention(40, 6, **SMALL, q_lora_rank=2.5), "q_lora_rank must be an int"),
        (lambda: LatentAttention(40, 6, **SMALL, dropout=2), "dropout must be in"),
        (lambda: LatentAttention(40, 6, **SMALL, positions=3), "positions must be called as"),
    ]
    for call, words in wrong:
        with pytest.raises((TypeError, ValueError)) as error:
            call()
        assert words in str(error.value)
    cache = KVCache(9)
    MultiHeadAttention(40, 5, dtype=torch.float64)(x, mask=CAUSAL, cache=cache)
    with pytest.raises(ValueError, match="value is None, but this cache holds keys and values"):
        mla(x, mask=CAUSAL, cache=cache)
    items = torch.nested.nested_tensor([x[0]], layout=torch.jagged)
    with pytest.raises(ValueError, match="cache takes padded"):
        mla(items, cache=LatentCache(9))


def test_the_softmax_scale_is_deepseek_s():
    yarn = YaRN(40.0, original_length=4096, mscale=1.0, mscale_all_dim=1.0)
    for positions, scale in ((None, 0.07217), (Rotary(64, interleaved=True, scaling=yarn), 0.13523)):
        layer = LatentAttention(7168, 128, **V3, positions=positions, device="meta")
        assert abs(layer.scale - scale) < 5e-6
    assert LatentAttention(40, 6, **SMALL, scale=0.5).scale == 0.5
    assert regard.nn.LatentAttention is LatentAttention


def test_values_are_as_long_in_latents_as_they_are_expanded() -> None:
    module = build()
    x = torch.randn(2, 7, 40, dtype=torch.float64)
    want = regard.Want(value_mass=True)
    whole = module.observe(x, mask=masks.causal(), want=want)
    store = LatentCache(16)
    with torch.no_grad():
        module(x[:, :5], mask=masks.causal(), cache=store)
        rest = module.observe(x[:, 5:], mask=masks.causal(), cache=store, want=want)
    torch.testing.assert_close(rest.value_length, whole.value_length, rtol=0, atol=1e-12)
    torch.testing.assert_close(rest.value_sum, whole.value_sum[:, :, 5:], rtol=0, atol=1e-12)
