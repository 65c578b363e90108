"""Cache policies: the same keys stay as in a simulation by hand, whether they are hidden or really dropped."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from tests.editing.by_hand import model_of
from torch import Tensor, nn

import regard
from regard import edits, masks
from regard.cache import BlockPool, CacheFull, KeptCache, KVCache
from regard.models import Decoder

POLICIES = [
    edits.keep("recent", 5, first=2),
    edits.keep("key_mass", 6, first=1, recent=2),
    edits.keep("window", 6, recent=3),
    edits.keep("key_mass", 7),
]
IDS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 3]


def by_hand(edit: edits.Keep, q: Any, k: Any, v: Any, calls: list[int]) -> tuple[Any, list[list[list[int]]]]:
    """Attention of one item, [head, token, dim] in float64, read in calls of so many tokens: its output, and the tokens
    that each head of keys holds after each call."""
    policy, budget, first, recent = edit.budget
    heads, shared = len(q), len(q) // len(k)
    held: list[list[int]] = [[] for _ in k]
    mass = np.zeros((len(k), q.shape[1]))
    outs, after, start = [], [], 0
    for count in calls:
        new = range(start, start + count)
        out = np.zeros((heads, count, v.shape[2]))
        for h in range(heads):
            for i in new:
                seen = [j for j in held[h // shared] + list(new) if j <= i]
                logits = np.array([q[h, i] @ k[h // shared, j] for j in seen]) / np.sqrt(q.shape[2])
                weights = np.exp(logits - logits.max())
                weights /= weights.sum()
                out[h, i - start] = weights @ v[h // shared, seen]
                if policy == "key_mass" or (policy == "window" and i >= start + count - recent):
                    mass[h // shared, seen] += weights
        start += count
        for h in range(len(k)):
            everything = held[h] + list(new)
            newest = everything[len(everything) - (budget - first if policy == "recent" else recent) :]
            always = {j for j in everything if j < first} | set(newest)
            others = sorted((j for j in everything if j not in always), key=lambda j: (-mass[h, j], -j))
            held[h] = sorted([*always, *others[: budget - len(always)]]) if len(everything) > budget else everything
        outs.append(out)
        after.append([list(one) for one in held])
    return np.concatenate(outs, 1), after


class Layer(nn.Module):
    """Attention with grouped heads over a cache, given query, key and value."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cache: Any) -> Tensor:
        if hasattr(cache, "held"):
            out: Tensor = cache.attend(q, k, v, mask=masks.causal())
            return out
        keys, values, offset = cache.update(k, v)
        return regard.attention(q, keys, values, mask=masks.causal(), query_offset=offset)


@pytest.mark.parametrize("edit", POLICIES, ids=str)
def test_the_keys_that_stay_are_those_of_a_simulation(edit: edits.Keep) -> None:
    generator = torch.Generator().manual_seed(5)
    q = 2 * torch.randn(2, 4, 13, 3, generator=generator, dtype=torch.float64)
    k, v = (2 * torch.randn(2, 2, 13, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    calls = [7, 1, 3, 1, 1]
    model, cache, all_of_it = Layer(), KeptCache(edit.budget), KVCache(13)
    dropped, hidden, start = [], [], 0
    expected = [by_hand(edit, q[n].numpy(), k[n].numpy(), v[n].numpy(), calls) for n in range(2)]
    with regard.edit(model, edit) as report:
        for number, count in enumerate(calls):
            part = [x[:, :, start : start + count] for x in (q, k, v)]
            hidden.append(model(*part, all_of_it))
            with torch.no_grad():
                dropped.append(Layer()(*part, cache))
            start += count
            for item in range(2):
                assert cache.places[item].tolist() == expected[item][1][number]
            assert cache.held == min(start, edit.budget.keys) and cache.position == start
    for found in (torch.cat(dropped, 2), torch.cat(hidden, 2)):
        np.testing.assert_allclose(found.numpy(), np.stack([one for one, _ in expected]), rtol=1e-9, atol=1e-9)
    # the first call saw all of itself, and dropped keys only where they were more than the budget
    assert len(report) == (4 if edit.budget.keys < calls[0] else 3)


@pytest.mark.parametrize("edit", POLICIES, ids=str)
def test_generate_with_a_cache_that_shrinks_writes_what_hidden_keys_let_it(edit: edits.Keep) -> None:
    model = regard.interop.from_hf(model_of("llama")).eval()
    assert isinstance(model, Decoder)
    prompts = torch.tensor([IDS[:9], IDS[3:]])
    caches = edit.caches(model)
    shrunk = model.generate(prompts, max_new_tokens=6, caches=caches)
    with regard.edit(model, edit) as report:
        hidden = model.generate(prompts, max_new_tokens=6)
    assert shrunk == hidden and len(report) == 2 * 5
    for cache in caches:
        assert cache.held == edit.budget.keys and cache.lengths == [14, 14]
        assert cache.bytes == 2 * 2 * 2 * edit.budget.keys * 6 * 8  # key and value, items, kv heads, tokens, dim, bytes


@pytest.mark.parametrize("edit", POLICIES, ids=str)
def test_in_a_pool_the_blocks_shrink_to_the_budget_and_the_text_is_the_same(edit: edits.Keep) -> None:
    model = regard.interop.from_hf(model_of("llama")).eval()
    prompts, pools = torch.tensor([IDS[:9], IDS[3:]]), [BlockPool(11, block_size=3) for _ in model.layers]
    expected = model.generate(prompts, max_new_tokens=6, caches=edit.caches(model))
    caches = edit.caches(model, pools)
    assert model.generate(prompts, max_new_tokens=6, caches=caches) == expected
    blocks = 2 * -(-edit.budget.keys // 3)  # of two items
    for cache, pool in zip(caches, pools, strict=True):
        assert cache.held == edit.budget.keys and pool.free_blocks == 11 - blocks
        assert cache.bytes == 2 * blocks * 3 * 2 * 6 * 8  # key and value, tokens, kv heads, dim, bytes
        cache.free()
        assert (pool.free_blocks, cache.lengths, cache.bytes) == (11, [], 0)
    with pytest.raises(ValueError, match="pools has 1 pools, and the model 2 layers"):
        edit.caches(model, pools[:1])


def test_forks_and_beams_in_a_pool_share_blocks_until_they_read_on() -> None:
    x = torch.randn(1, 2, 12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole, pool = KeptCache(POLICIES[1].budget), BlockPool(6, block_size=3)
    paged = KeptCache(POLICIES[1].budget, pool)
    for cache in (whole, paged):
        cache.attend(x[:, :, :9], x[:, :, :9], x[:, :, :9], mask=masks.causal())
        cache.reorder([0, 0])
    assert pool.free_blocks == 4  # both items read the same two
    other, step = paged.fork(), x[:, :, 9:10].expand(2, -1, -1, -1)
    expected = whole.attend(step, step, step)
    torch.testing.assert_close(paged.attend(step, step, step), expected, rtol=1e-12, atol=1e-12)
    assert pool.free_blocks == 0 and other.held == 6
    with pytest.raises(CacheFull, match="4 blocks of 3 tokens are needed for a budget of 6, and 2 of 6 are free"):
        other.attend(step, step, step)
    assert other.position == 9  # as it was
    paged.free()
    torch.testing.assert_close(other.attend(step, step, step), expected, rtol=1e-12, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_a_hugging_face_model_decodes_under_a_policy_as_regards_own_does(how: str) -> None:
    theirs = model_of("llama")
    theirs.set_attn_implementation(how)
    own = regard.interop.from_hf(theirs).eval()
    edit = POLICIES[1]
    ids = torch.tensor([IDS])
    caches = edit.caches(own)
    expected = torch.cat(
        [own(ids[:, :7], caches=caches), *(own(ids[:, n : n + 1], caches=caches) for n in range(7, 12))], 1
    )
    with regard.edit(theirs, edit):
        step = theirs(input_ids=ids[:, :7], use_cache=True)
        found = [step.logits]
        for n in range(7, 12):
            step = theirs(input_ids=ids[:, n : n + 1], past_key_values=step.past_key_values, use_cache=True)
            found.append(step.logits)
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-5, atol=1e-5)
    plain = theirs(input_ids=ids).logits
    assert (plain[:, :7] - expected[:, :7]).abs().max() < 1e-4 < (plain[:, 8:] - expected[:, 8:]).abs().max()


PROMPTS = [IDS[:5], IDS[2:], IDS[:9]]


@torch.no_grad()
@pytest.mark.parametrize("edit", POLICIES, ids=str)
@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_an_item_of_a_padded_batch_keeps_what_it_keeps_alone(how: str, edit: edits.Keep) -> None:
    """Padding at the left, as Hugging Face's models want it: it is none of the first tokens."""
    model = copy.deepcopy(model_of("llama")).float()  # in float64 Hugging Face's eager code gives NaN for padding
    model.set_attn_implementation(how)

    def decoded(prompts: list[list[int]]) -> Tensor:
        longest = max(map(len, prompts))
        ids = torch.tensor([[2] * (longest - len(one)) + one for one in prompts])
        real = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
        settings = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False, "output_logits": True}
        with regard.edit(model, edit):
            found = model.generate(input_ids=ids, attention_mask=real, return_dict_in_generate=True, **settings)
        return torch.stack(found.logits, 1)

    together = decoded(PROMPTS)
    for item, prompt in enumerate(PROMPTS):
        torch.testing.assert_close(together[item], decoded([prompt])[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("edit", POLICIES, ids=str)
def test_prompts_of_several_lengths_keep_what_each_keeps_alone(edit: edits.Keep) -> None:
    """Padding at the right, which regard's own models write over as they go on."""
    model = regard.interop.from_hf(model_of("llama")).eval()

    def decoded(prompts: list[list[int]]) -> list[list[int]]:
        with regard.edit(model, edit):
            return model.generate(prompts, max_new_tokens=7)  # type: ignore[no-any-return]

    together = decoded(PROMPTS)
    assert together == [decoded([prompt])[0] for prompt in PROMPTS]
    assert together != model.generate(PROMPTS, max_new_tokens=7)


def test_an_item_that_ends_before_the_others_is_refused() -> None:
    model = regard.interop.from_hf(model_of("llama")).eval()
    ends = model.generate(PROMPTS[1:], max_new_tokens=1)[0][-1]
    message = "cache now has 9 tokens in a batch of 1, and had 10 in a batch of 2 after the last call"
    with pytest.raises(edits.CannotEdit, match=message), regard.edit(model, POLICIES[0]):
        model.generate(PROMPTS[1:], max_new_tokens=7, stop=ends)


@torch.no_grad()
def test_items_that_change_places_between_calls_are_refused() -> None:
    model = model_of("llama")
    model.set_attn_implementation("sdpa")
    ids = torch.tensor([IDS[:9], IDS[3:]])
    with regard.edit(model, POLICIES[1]), pytest.raises(edits.CannotEdit, match="changed places between two calls"):
        step = model(input_ids=ids, use_cache=True)
        step = model(input_ids=ids[:, :1], past_key_values=step.past_key_values, use_cache=True)
        step.past_key_values.reorder_cache(torch.tensor([1, 0]))
        model(input_ids=ids[:, :1], past_key_values=step.past_key_values, use_cache=True)


def test_a_prompt_alone_is_not_changed_and_that_is_said() -> None:
    model = regard.interop.from_hf(model_of("llama")).eval()
    with (
        pytest.raises(edits.CannotEdit, match="keep acts between the calls of a cache"),
        regard.edit(model, POLICIES[0]),
    ):
        model(torch.tensor([IDS]))


def test_a_kept_cache_refuses_what_means_something_else_once_keys_are_gone() -> None:
    cache = KeptCache(POLICIES[0].budget)
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"goes with mask=masks\.causal\(\), got window"):
        cache.attend(q, q, q, mask=masks.window(2))
    with pytest.raises(ValueError, match="bias goes by the positions of keys"):
        cache.attend(q, q, q, mask=masks.causal(), bias=torch.zeros(3, 3))
    with pytest.raises(TypeError, match="value_dim"):
        cache.attend(q, q, q, mask=masks.causal(), value_dim=2)
    with pytest.raises(ValueError, match="call cache.attend"):
        cache.update(q, q)
    with pytest.raises(ValueError, match="prompts of one length"):
        cache.padded([1, 2])
    cache.attend(q, q, q, mask=masks.causal())
    with pytest.raises(ValueError, match="holds"):
        cache.attend(q[:, :1], q[:, :1], q[:, :1], mask=masks.causal())
    other = cache.fork()
    cache.truncate(0)
    assert (cache.held, cache.lengths, other.held) == (0, [], 3)
    with pytest.raises(ValueError, match="0 tokens only"):
        other.truncate(1)
    with pytest.raises(TypeError, match=r"must be a regard\.models\.Decoder, got Linear"):
        POLICIES[0].caches(nn.Linear(1, 1))
