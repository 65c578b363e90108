"""Caches in the modules: what is observed, explained, and refused because it would mean something else."""

from __future__ import annotations

import pytest
import torch
from tests.cache.kinds import CAUSAL, EXACT, INT8, LONG, ROLLING, decode, module, random
from tests.nn.helpers import close

import regard
from regard import bias, masks
from regard.cache import BlockPool, KVCache, LatentCache, PagedCache, RollingCache
from regard.nn import AttentionSublayer


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("kind", EXACT)
def test_observe_gives_the_same_rows_and_the_weights_behind_them(kind, ragged):
    make, mask = EXACT[kind]
    mha, x, cache = module(), random(3, 21, 48), make()
    counts = [20, 7, 12] if ragged else [20, 20, 20]
    with torch.no_grad():
        mha(x[:, :20], mask=mask, cache=cache.padded(counts))
        cache.fill_unused(torch.nan)
        other = cache.fork()
        out = mha(x[:, 20:], mask=mask, cache=cache)
        seen = mha.observe(x[:, 20:], mask=mask, cache=other, want=regard.Want(top_k=0))
        assert close(seen.out, out)
        for item, count in enumerate(counts):
            alone = torch.cat([x[item, :count], x[item, 20:]])[None]
            whole = mha.observe(alone, mask=mask, want=regard.Want(top_k=0))
            assert close(seen.entropy[item], whole.entropy[0, :, -1:])
            assert close(seen.lse[item], whole.lse[0, :, -1:])
    assert cache.lengths == other.lengths == [count + 1 for count in counts]


def test_rows_of_padding_count_in_no_statistic():
    mha, x = module(), random(2, 5, 48)
    with torch.no_grad():
        seen = mha.observe(x, mask=CAUSAL, cache=KVCache(7).padded([5, 2]))
        alone = mha.observe(x[1:, :2], mask=CAUSAL)
    assert close(seen.key_mass[1, :, :2], alone.key_mass[0]) and not seen.key_mass[1, :, 2:].any()
    assert seen.entropy[1, :, 2:].isnan().all()


@pytest.mark.parametrize("kind", EXACT)
def test_explain_describes_the_call_over_all_that_is_held_and_changes_nothing(kind):
    make, mask = EXACT[kind]
    mha, x, cache = module(), random(3, 20, 48), make()
    decode(mha, x, [20], mask, cache)
    plan = mha.explain(x[:, :1], mask=mask, cache=cache)
    assert cache.lengths == [20] * 3
    assert (plan.spec.queries, plan.spec.keys, plan.spec.kv_heads) == (1, 21, 2)
    assert plan.cost.kept_pairs <= 3 * 4 * 21
    assert "21" in str(plan)
    ragged = mha.explain(x[:, :5], mask=mask, cache=cache.padded([5, 0, 2]))
    assert ragged.spec.keys == 25


def test_explain_says_in_how_many_pieces_a_cache_is_read():
    mha, cache = module(), PagedCache(BlockPool(300, 16))
    cache.update(random(2, 2, 2100, 12), random(2, 2, 2100, 10))
    assert "in 3 pieces" in mha.explain(random(2, 1, 48), mask=CAUSAL, cache=cache).reason
    plain = KVCache(2200)
    plain.update(random(2, 2, 2100, 12), random(2, 2, 2100, 10))
    assert "pieces" not in mha.explain(random(2, 1, 48), mask=CAUSAL, cache=plain).reason


def test_explain_of_a_rolling_cache_shows_the_bounded_call():
    mha, cache = module(), RollingCache(7, sinks=3)
    decode(mha, random(3, 200, 48), [200], ROLLING, cache)
    assert mha.explain(random(3, 1, 48), mask=ROLLING, cache=cache).spec.keys == 11
    with pytest.raises(TypeError, match="dict has no update|preview"):
        mha.explain(random(3, 1, 48), cache={})


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("kind", EXACT)
def test_the_sublayer_passes_the_cache_on(kind, norm):
    make, mask = EXACT[kind]
    layer = AttentionSublayer(48, 4, num_kv_heads=2, norm=norm, dtype=torch.float64).eval()
    x = random(3, 21, 48)
    assert close(decode(layer, x, [11, *[1] * 10], mask, make()), layer(x, mask=mask), 1e-11)


def test_dropout_in_training_goes_through_the_whole_rows():
    mha = module(dropout=0.5).train()
    x = random(2, 11, 48)
    for cache in (PagedCache(BlockPool(9, 5)), KVCache(13)):
        torch.manual_seed(0)
        out = mha(x, mask=CAUSAL, cache=cache)
        torch.manual_seed(0)
        assert close(out, mha(x, mask=CAUSAL), 1e-11)


def test_left_padding_by_a_mask_works_while_the_mask_is_given():
    mha, x, cache = module(rotary=False), random(3, 7, 48), PagedCache(BlockPool(9, 5))

    def mask_of(tokens):
        return CAUSAL & masks.padding([tokens, tokens - 4, tokens - 2], side="left")

    with torch.no_grad():
        parts = [mha(x[:, a:b], mask=mask_of(b), cache=cache) for a, b in ((0, 5), (5, 6), (6, 7))]
        assert close(torch.cat(parts, 1), mha(x, mask=mask_of(7)))
        with pytest.raises(ValueError, match="earlier calls with this cache had"):
            mha(x[:, :1], mask=CAUSAL, cache=cache)
    assert cache.lengths == [7] * 3


@pytest.mark.parametrize("kind", [*EXACT, *(f"{name}, int8" for name in INT8)])
def test_padding_on_the_right_belongs_to_the_cache_not_to_the_mask(kind):
    make = (INT8[kind.removesuffix(", int8")] if kind.endswith("int8") else EXACT[kind])[0]
    mha, x, cache = module(), random(3, 7, 48), make()
    with pytest.raises(ValueError, match=r"cache.padded\(lengths"):
        mha(x, mask=CAUSAL & masks.padding([7, 3, 5]), cache=cache)
    assert cache.lengths == []


FORGETFUL = {
    "none": None,
    "causal alone": masks.causal(),
    "too wide a window": masks.causal() & masks.window(left=8),
    "too many columns": masks.causal() & (masks.window(left=7) | masks.columns(4)),
    "window or everything": masks.window(left=7) | masks.causal(),
    "the opposite": ~masks.window(left=7),
    "strided": masks.causal() & masks.window(left=7) & masks.strided(2),
    "documents": masks.causal() & masks.window(left=7) & masks.documents(lengths=[3, 4]),
    "keep": masks.causal() & masks.window(left=7) & masks.keep(torch.ones(7, 7, dtype=torch.bool)),
    "a wider window that sees sinks": (masks.window(left=7) | masks.columns(3)) & masks.window(left=90),
}


@pytest.mark.parametrize("case", FORGETFUL)
def test_a_rolling_cache_refuses_masks_that_need_what_it_forgets(case):
    mha, x, cache = module(), random(3, 7, 48), RollingCache(7, sinks=3)
    with pytest.raises(ValueError, match="mask=cache.mask"):
        mha(x, mask=FORGETFUL[case], cache=cache)
    assert cache.lengths == []


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal() & masks.window(left=7),
        masks.causal() & (masks.window(left=5) | masks.columns(2)),
        masks.causal() & masks.window(left=7) & ~masks.window(left=2) | masks.causal() & masks.columns(3),
        masks.causal() & masks.window(left=6) & ~masks.columns(2),
        masks.causal() & (masks.window(left=3) | masks.prefix(3)),
    ],
)
def test_a_rolling_cache_honours_narrower_masks(mask):
    mha, x = module(), random(3, 211, 48)
    out = decode(mha, x, [50, *[1] * 30, 100, *[1] * 31], mask, RollingCache(7, sinks=3))
    assert close(out, mha(x, mask=mask), 1e-11)


def test_a_rolling_cache_refuses_biases_by_position():
    cache, mha = RollingCache(7, sinks=3), module()
    with pytest.raises(ValueError, match="bias goes by the positions of keys"):
        mha(random(3, 5, 48), mask=cache.mask, bias=random(5, 5), cache=cache)
    out = mha(random(3, 5, 48), mask=cache.mask, bias=random(5, 1), cache=cache)
    assert out.shape == (3, 5, 48)


def test_a_bias_over_all_keys_is_cut_as_the_keys_are():
    mha, x, added = module(), random(3, 21, 48), random(4, 21, 21)
    whole = mha(x, mask=CAUSAL, bias=added)
    for cache in (KVCache(31), PagedCache(BlockPool(31, 5))):
        with torch.no_grad():
            parts = [mha(x[:, a:b], mask=CAUSAL, bias=added[:, a:b, :b], cache=cache) for a, b in ((0, 9), (9, 21))]
        assert close(torch.cat(parts, 1), whole, 1e-11)


@pytest.mark.parametrize("kind", ["alibi", "t5"])
@pytest.mark.parametrize("ragged", [False, True])
def test_a_bias_by_distance_keeps_its_distances(kind, ragged):
    first = LONG - 11
    mha, x = module(rotary=False), random(3, LONG, 48)
    rule = bias.alibi(4) if kind == "alibi" else bias.T5Bias(4, bidirectional=False, dtype=torch.float64)
    if kind == "t5":
        torch.nn.init.normal_(next(rule.parameters()))
    counts = [first, 3, 11] if ragged else [first] * 3
    near = masks.causal() & masks.window(left=7)
    for cache, mask in ((KVCache(LONG), CAUSAL), (PagedCache(BlockPool(701, 5)), CAUSAL), (RollingCache(7), near)):
        with torch.no_grad():
            mha(x[:, :first], mask=mask, bias=rule, cache=cache.padded(counts))
            out = torch.cat([mha(part, mask=mask, bias=rule, cache=cache) for part in x[:, first:].split(1, 1)], 1)
            for item, count in enumerate(counts):
                alone = torch.cat([x[item, :count], x[item, first:]])[None]
                assert close(out[item], mha(alone, mask=mask, bias=rule)[0, count:], 1e-11)
    with pytest.raises(ValueError, match="use sinks=0 for a bias that goes by distance alone"):
        mha(x, mask=near, bias=rule, cache=RollingCache(7, sinks=2))


def test_a_learned_bias_gets_its_gradient_through_a_cache():
    rule = bias.T5Bias(2, bidirectional=False, dtype=torch.float64)
    q, k = random(1, 2, 5, 8), random(1, 2, 5, 8)
    grads = []
    for attend in (PagedCache(BlockPool(9, 5)).attend, regard.attention):
        out = attend(q, k, k, mask=CAUSAL, bias=rule)
        grads.append(torch.autograd.grad(out.square().sum(), next(rule.parameters()))[0])
    assert close(*grads) and grads[0].any()


@pytest.mark.parametrize("kind", EXACT)
def test_a_call_that_fails_leaves_the_cache_as_it_was(kind):
    make, mask = EXACT[kind]
    mha, x, cache = module(), random(3, 11, 48), make()
    decode(mha, x[:, :5], [5], mask, cache)
    wrong = [
        {"mask": torch.ones(6, 11, dtype=torch.bool)},
        {"mask": mask & masks.keep(torch.ones(2, 1, 6, 1, dtype=torch.bool))},
        {"mask": mask, "bias": random(5, 1)},
        {"mask": mask, "bias": random(6, 1).float()},
    ]
    for keywords in wrong:
        with pytest.raises((TypeError, ValueError)):
            mha(x[:, 5:], cache=cache, **keywords)
        assert cache.lengths == [5] * 3
    assert close(decode(mha, x[:, 5:], [6], mask, cache), mha(x, mask=mask)[:, 5:], 1e-11)


def test_a_latent_cache_is_for_latent_attention():
    with pytest.raises(ValueError, match="value was given to a LatentCache"):
        module()(random(3, 5, 48), mask=CAUSAL, cache=LatentCache(7))


def test_lengths_that_do_not_fit_the_batch_are_refused_before_anything_is_computed():
    mha, x = module(), random(3, 30, 48)
    for lengths in ([20, 4, 17], [30, 4], [30, 4, 17, 2], [1, 2, 31]):
        with pytest.raises(
            ValueError, match=r"got key \[3, 30, 48\]; give padded\(\) one length per item, and tokens="
        ):
            mha(x, mask=CAUSAL, cache=KVCache(40).padded(lengths))
    cache = KVCache(40)
    with torch.no_grad():
        mha(x, mask=CAUSAL, cache=cache.padded([20, 4, 17], tokens=30))
        with pytest.raises(ValueError, match="key has 2 items, but this cache holds 3"):
            mha(x[:2, :1], mask=CAUSAL, cache=cache)
    assert cache.lengths == [20, 4, 17]
