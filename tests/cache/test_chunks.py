"""Any split into chunks equals one forward (rule 51), and what lies in unused slots is never seen (rule 52)."""

from __future__ import annotations

import pytest
import torch
from tests.cache.kinds import CAUSAL, EXACT, INT8, LONG, decode, module, random
from tests.nn.helpers import build, close

import regard
from regard import masks
from regard.cache import BlockPool, KVCache, PagedCache, RollingCache
from regard.positions import Rotary

SPLITS = [[111], [5, 106], [63, *[1] * 48], [1] * 111, [3, 91, 7, 10]]


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: f"{split[0]}+{len(split) - 1}")
@pytest.mark.parametrize("kind", EXACT)
def test_every_split_equals_one_forward(kind, split):
    make, mask = EXACT[kind]
    mha, x = module(), random(3, 111, 48)
    assert close(decode(mha, x, split, mask, make()), mha(x, mask=mask), 1e-11)


@pytest.mark.parametrize("kind", EXACT)
def test_keys_read_in_many_pieces_equal_one_forward(kind):
    make, mask = EXACT[kind]
    mha, x = module(), random(3, LONG, 48)
    assert close(decode(mha, x, [LONG - 51, 11, *[1] * 40], mask, make()), mha(x, mask=mask), 1e-11)


@pytest.mark.parametrize("kind", EXACT)
def test_unused_slots_may_hold_nan(kind):
    make, mask = EXACT[kind]
    mha, x = module(), random(3, 37, 48)
    cache, parts = make(), []
    with torch.no_grad():
        for part in x.split([11, *[1] * 26], 1):
            parts.append(mha(part, mask=mask, cache=cache))
            cache.fill_unused(torch.nan)
    assert close(torch.cat(parts, 1), mha(x, mask=mask), 1e-11)


@pytest.mark.parametrize(("side", "longest"), [("left", 37), ("right", LONG - 11)])
@pytest.mark.parametrize("kind", EXACT)
def test_a_padded_batch_equals_each_sequence_alone(kind, side, longest):  # rule 54
    make, mask = EXACT[kind]
    mha, lengths = module(), [longest, 3, 21]
    x = random(3, longest, 48)
    for item, count in enumerate(lengths):
        x[item, count:] = torch.nan
    given = x if side == "right" else torch.stack([row.roll(longest - n, 0) for row, n in zip(x, lengths, strict=True)])
    rest = random(3, 40, 48)
    cache = make()
    with torch.no_grad():
        first = mha(given, mask=mask, cache=cache.padded(lengths, side=side))
        cache.fill_unused(torch.nan)
        later = decode(mha, rest, [5, *[1] * 35], mask, cache)
        for item, count in enumerate(lengths):
            whole = mha(torch.cat([x[item, :count], rest[item]])[None], mask=mask)[0]
            rows = first[item, longest - count :] if side == "left" else first[item, :count]
            assert close(rows, whole[:count], 1e-11)
            assert close(later[item], whole[count:], 1e-11)
            pads = first[item, : longest - count] if side == "left" else first[item, count:]
            assert not pads.any()
    assert cache.lengths == [longest + 40, 43, 61]


@pytest.mark.parametrize("kind", EXACT)
def test_padded_chunks_may_come_in_the_middle(kind):
    make, mask = EXACT[kind]
    mha, x, cache = module(), random(3, 30, 48), make()
    with torch.no_grad():
        mha(x[:, :11], mask=mask, cache=cache.padded([11, 5, 0]))
        middle = mha(x[:, 11:25], mask=mask, cache=cache.padded([3, 14, 9], side="left"))
        last = mha(x[:, 25:], mask=mask, cache=cache.padded([2, 5, 1], tokens=5))
        for item, (a, b, c) in enumerate([(11, 3, 2), (5, 14, 5), (0, 9, 1)]):
            alone = torch.cat([x[item, :a], x[item, 25 - b : 25], x[item, 25 : 25 + c]])[None]
            whole = mha(alone, mask=mask)[0]
            assert close(middle[item, 14 - b :], whole[a : a + b], 1e-11)
            assert close(last[item, :c], whole[a + b :], 1e-11)


def test_without_a_mask_new_tokens_see_everything_before_and_beside_them():
    mha, x, cache = module(), random(3, 11, 48), KVCache(13)
    with torch.no_grad():
        mha(x[:, :5], cache=cache.padded([5, 2, 4]))
        cache.fill_unused(torch.nan)
        out = mha(x[:, 5:], cache=cache)
        for item, count in enumerate([5, 2, 4]):
            alone = torch.cat([x[item, :count], x[item, 5:]])[None]
            assert close(out[item], mha(alone)[0, count:], 1e-11)


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_stays_within_twice_its_own_error(kind, dtype):  # rule 28
    make, mask = EXACT[kind]
    exact = module(rotary=False)
    mha = module(rotary=False)
    mha.load_state_dict(exact.state_dict())
    mha.to(dtype)
    exact.load_state_dict(mha.state_dict())
    x = random(3, 63, 48).to(dtype)
    truth = exact(x.double(), mask=mask)
    own = (mha(x, mask=mask).double() - truth).abs().max()
    error = (decode(mha, x, [31, *[1] * 32], mask, make()).double() - truth).abs().max()
    assert error <= 2 * own + 1e-5


@pytest.mark.parametrize("dim", [7, 32, 64, 111, 128])
@pytest.mark.parametrize("kind", INT8)
def test_int8_output_is_within_one_percent_of_its_norm(kind, dim):
    make, mask = INT8[kind]
    torch.manual_seed(dim)
    query, key, value = torch.randn(3, 4, 101, dim), torch.randn(3, 2, 101, dim), torch.randn(3, 2, 101, dim)
    cache = make()
    steps = [slice(0, 50), *(slice(i, i + 1) for i in range(50, 101))]
    parts = [cache.attend(query[:, :, t], key[:, :, t], value[:, :, t], mask=mask) for t in steps]
    exact = EXACT[kind][0]().attend(query, key, value, mask=mask)
    assert (torch.cat(parts, 2) - exact).norm() <= 0.01 * exact.norm()


def test_int8_takes_a_byte_and_an_eighth_a_number():
    plain, small = KVCache(64), KVCache(64, int8=True)
    for cache in (plain, small):
        cache.update(torch.randn(3, 2, 5, 64), torch.randn(3, 2, 5, 32))
    numbers = 3 * 2 * 64 * (64 + 32)
    assert plain.bytes == 4 * numbers
    assert small.bytes == numbers * 9 // 8


def test_int8_keeps_nan_and_zero_as_they_are():
    key = torch.zeros(1, 1, 3, 40)
    key[0, 0, 1, 35] = torch.nan
    key[0, 0, 2, :] = torch.inf
    keys, _, _ = KVCache(3, int8=True).update(key, key)
    assert not keys[0, 0, 0].any()
    assert keys[0, 0, 1, 32:].isnan().all() and not keys[0, 0, 1, :32].any()
    assert keys[0, 0, 2].isnan().all()


@pytest.mark.parametrize("kind", [lambda: KVCache(40), lambda: RollingCache(7), lambda: PagedCache(BlockPool(31, 5))])
@pytest.mark.parametrize("ragged", [False, True])
def test_gradients_reach_the_tokens_of_their_own_call_only(kind, ragged):
    """The past is a constant: the same as attention over constant keys and the new ones."""
    mask = masks.causal() & masks.window(left=7)
    past = (random(3, 2, 5, 12), random(3, 2, 5, 10))
    q, k, v = random(3, 4, 6, 12, grad=True), random(3, 2, 6, 12, grad=True), random(3, 2, 6, 10, grad=True)
    cache = kind()
    counts = [5, 2, 4] if ragged else [5, 5, 5]
    first = cache.padded(counts) if ragged else cache
    with torch.no_grad():
        first.attend(random(3, 4, 5, 12), *past, mask=mask)
    out = cache.attend(q, k, v, mask=mask)
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    wanted = [torch.zeros_like(x) for x in (q, k, v)]
    for item, n in enumerate(counts):
        keys = torch.cat([past[0][item : item + 1, :, :n], k[item : item + 1]], 2)
        values = torch.cat([past[1][item : item + 1, :, :n], v[item : item + 1]], 2)
        alone = _plain(q[item : item + 1], keys, values, mask)
        assert close(out[item : item + 1], alone)
        parts = torch.autograd.grad(alone.square().sum(), (q, k, v))
        wanted = [a + b for a, b in zip(wanted, parts, strict=True)]
    assert all(close(a, b, 1e-11) for a, b in zip(found, wanted, strict=True))


def _plain(query, key, value, mask):
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    logits = query @ key.transpose(2, 3) / query.shape[3] ** 0.5
    return logits.masked_fill(~mask.dense(query.shape[2], key.shape[2]), -torch.inf).softmax(-1) @ value


def test_int8_gradients_are_those_of_the_numbers_before_rounding():
    q, k, v = random(1, 1, 5, 12), random(1, 1, 5, 12, grad=True), random(1, 1, 5, 12, grad=True)
    out = KVCache(7, int8=True).attend(q, k, v, mask=CAUSAL)
    (grad,) = torch.autograd.grad(out[0, 0, 0].sum(), v)
    assert grad[0, 0, 0].eq(1.0).all() and not grad[0, 0, 1:].any()


def test_softcap_scale_and_sinks_enter_once_whatever_the_number_of_pieces():
    q, k, v = random(3, 4, LONG, 12), random(3, 2, LONG, 12), random(3, 2, LONG, 10)
    given = {"scale": 0.7, "softcap": 1.3, "sinks": random(4), "bias": random(1, 4, LONG, LONG)}
    whole = regard.attention(q, k, v, mask=CAUSAL, **given)
    cache = PagedCache(BlockPool(701, 5))
    bias = given.pop("bias")
    parts = []
    for t in (slice(0, LONG - 16), slice(LONG - 16, LONG - 15), slice(LONG - 15, LONG)):
        here = bias[:, :, t, : t.stop]
        parts.append(cache.attend(q[:, :, t], k[:, :, t], v[:, :, t], mask=CAUSAL, bias=here, **given))
    assert close(torch.cat(parts, 2), whole)


def test_caches_work_across_inference_mode():
    mha, x, cache = module(), random(3, 11, 48), KVCache(13)
    with torch.inference_mode():
        mha(x[:, :5], mask=CAUSAL, cache=cache)
    with torch.no_grad():
        out = mha(x[:, 5:], mask=CAUSAL, cache=cache)
    assert close(out, mha(x, mask=CAUSAL)[:, 5:].detach(), 1e-11)


@pytest.mark.parametrize("kind", EXACT)
def test_items_of_different_lengths_in_inference_mode_go_on_with_gradients(kind):
    make, mask = EXACT[kind]
    mha, x, cache = build(48, 4, num_kv_heads=2, positions=Rotary(12)).eval(), random(3, 14, 48), make()
    with torch.inference_mode():
        mha(x[:, :11], mask=mask, cache=cache.padded([11, 7, 3]))
        for t in (11, 12):
            mha(x[:, t : t + 1], mask=mask, cache=cache)
    new = x[:, 13:].clone().requires_grad_()
    mha(new, mask=mask, cache=cache).square().sum().backward()
    for item, count in enumerate([11, 7, 3]):
        last = x[item : item + 1, 13:].clone().requires_grad_()
        alone = torch.cat([x[item : item + 1, :count], x[item : item + 1, 11:13], last], 1)
        mha(alone, mask=mask)[:, -1:].square().sum().backward()
        assert close(new.grad[item], last.grad[0], 1e-9)
