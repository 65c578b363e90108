"""Text from a decoder: the same tokens with and without a cache, batched and alone; draws; stops; work a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.models import peers, small
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard.cache import BlockPool, KVCache, PagedCache, RollingCache
from regard.masks import causal, window
from regard.models import Decoder

PROMPTS = [[5, 3, 17, 8, 30, 2, 9], [11], [7, 7, 21]]
MAKERS = [small.gpt, small.llama]


def plain(model: Decoder, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding as anybody would write it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(params=MAKERS, ids=lambda make: make.__name__)
def model(request: pytest.FixtureRequest) -> Decoder:
    return request.param()  # type: ignore[no-any-return]


def test_the_likeliest_tokens_follow_with_and_without_a_cache_batched_and_alone(model: Decoder) -> None:
    wanted = [plain(model, prompt, 13) for prompt in PROMPTS]
    assert len({token for row in wanted for token in row}) > 5  # a model that repeats itself would show nothing
    assert model.generate(PROMPTS, max_new_tokens=13) == wanted
    assert model.generate(PROMPTS, max_new_tokens=13, use_cache=False) == wanted
    for prompt, tokens in zip(PROMPTS, wanted, strict=True):
        assert model.generate([prompt], max_new_tokens=13) == [tokens]
        assert model.generate(torch.tensor([prompt]), max_new_tokens=13) == [tokens]


@pytest.mark.parametrize("kind", ["paged", "roomy", "rolling"])
def test_any_cache_serves(model: Decoder, kind: str) -> None:
    makers = {
        "paged": lambda: PagedCache(BlockPool(33, block_size=3)),
        "roomy": lambda: KVCache(50),
        "rolling": lambda: RollingCache(window=30),
    }
    caches = [makers[kind]() for _ in model.layers]
    assert model.generate(PROMPTS, max_new_tokens=13, caches=caches) == model.generate(PROMPTS, max_new_tokens=13)
    assert caches[0].lengths == [19, 13, 15]


def test_layers_may_have_caches_of_different_kinds(model: Decoder) -> None:
    caches = [KVCache(40), RollingCache(window=30), PagedCache(BlockPool(33, block_size=3))]
    assert model.generate(PROMPTS, max_new_tokens=13, caches=caches) == model.generate(PROMPTS, max_new_tokens=13)
    ids = torch.tensor([PROMPTS[0] * 2])
    caches = [KVCache(40), RollingCache(window=3), KVCache(40)]
    found = model(ids, caches=caches)
    narrow = [causal(), causal() & window(left=3), causal()]
    x = model.token_embedding(ids)
    x = x if model.position_embedding is None else model.position_embedding(x)
    for layer, mask in zip(model.layers, narrow, strict=True):
        x = layer(x, mask)
    torch.testing.assert_close(found, model.logits(model.norm(x)), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kind", ["all", "rolling", "paged"])
def test_a_cache_in_int8_gives_the_same_tokens_batched_and_alone(model: Decoder, kind: str) -> None:
    makers = {
        "all": lambda: KVCache(40, int8=True),
        "rolling": lambda: RollingCache(window=30, int8=True),
        "paged": lambda: PagedCache(BlockPool(33, block_size=3, int8=True)),
    }

    def written(prompts: list[list[int]]) -> list[list[int]]:
        return model.generate(prompts, max_new_tokens=9, caches=[makers[kind]() for _ in model.layers])

    found = written(PROMPTS)
    assert found == [written([prompt])[0] for prompt in PROMPTS]
    exact = model.generate(PROMPTS, max_new_tokens=9)
    assert [row[0] for row in found] == [row[0] for row in exact]  # a prompt attends to itself before it is rounded


@pytest.mark.parametrize("make", MAKERS)
def test_a_models_window_holds_beside_a_cache_that_keeps_more(make: Any) -> None:
    model = make(window=3)
    wanted = model.generate(PROMPTS, max_new_tokens=13, use_cache=False)
    for cache in (lambda: RollingCache(window=30), lambda: RollingCache(window=30, sinks=2), lambda: KVCache(40)):
        assert model.generate(PROMPTS, max_new_tokens=13, caches=[cache() for _ in model.layers]) == wanted


@pytest.mark.parametrize("make", MAKERS)
def test_a_rolling_cache_gives_what_a_model_with_that_window_does(make: Any) -> None:
    narrow, wide = make(window=5), make()
    caches = [RollingCache(window=5) for _ in wide.layers]
    found = wide.generate(PROMPTS, max_new_tokens=21, caches=caches)
    assert found == narrow.generate(PROMPTS, max_new_tokens=21, use_cache=False)
    assert found != wide.generate(PROMPTS, max_new_tokens=21)


def test_float32_gives_the_same_tokens_with_and_without_a_cache(model: Decoder) -> None:
    model = model.float()
    assert model.generate(PROMPTS, max_new_tokens=13) == model.generate(PROMPTS, max_new_tokens=13, use_cache=False)


@pytest.mark.parametrize("pair", [peers.gpt2, peers.llama])
def test_the_tokens_are_those_of_hugging_face(pair: Any) -> None:
    theirs, ours = pair()
    ids = torch.tensor([PROMPTS[0]])
    wanted = theirs.generate(ids, max_new_tokens=17, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert ours.generate(ids, max_new_tokens=17) == [wanted[0, 7:].tolist()]


def test_a_row_that_meets_a_stop_token_ends_with_it_and_leaves_the_batch(model: Decoder) -> None:
    whole = model.generate(PROMPTS, max_new_tokens=13)
    stops = [whole[0][4], whole[2][8]]
    wanted = [row[: min((row.index(s) for s in stops if s in row), default=12) + 1] for row in whole]
    rows: list[int] = []
    model.token_embedding.register_forward_hook(lambda _, given, __: rows.append(given[0].shape[0]))
    assert model.generate(PROMPTS, max_new_tokens=13, stop=stops) == wanted
    longest = max(map(len, wanted))
    assert rows == [sum(len(row) > step for row in wanted) for step in range(longest)]
    assert model.generate([PROMPTS[0]], max_new_tokens=13, stop=stops[0]) == [whole[0][: whole[0].index(stops[0]) + 1]]


def test_the_stream_gives_each_step_as_it_comes(model: Decoder) -> None:
    stop = model.generate([PROMPTS[1]], max_new_tokens=3)[0][2]
    calls: list[int] = []
    model.token_embedding.register_forward_hook(lambda *_: calls.append(1))
    steps = model.stream(PROMPTS, max_new_tokens=9, stop=stop)
    assert isinstance(steps, Iterator) and not calls
    seen = [next(steps)]
    assert len(calls) == 1
    assert not torch.is_inference_mode_enabled()
    seen += steps
    found: list[list[int]] = [[token for step in seen if (token := step[item]) is not None] for item in range(3)]
    assert found == model.generate(PROMPTS, max_new_tokens=9, stop=stop)
    assert [step[1] for step in seen[3:]] == [None] * len(seen[3:])


def test_generation_goes_on_where_caches_stopped(model: Decoder) -> None:
    whole = model.generate(PROMPTS, max_new_tokens=13)
    caches = model.caches(40)
    first = model.generate(PROMPTS, max_new_tokens=5, caches=caches)
    rest = model.generate([row[-1:] for row in first], max_new_tokens=8, caches=caches)
    assert [a + b for a, b in zip(first, rest, strict=True)] == whole


def test_an_items_draws_depend_on_its_seed_alone(model: Decoder) -> None:
    how: dict[str, Any] = {"max_new_tokens": 7, "temperature": 1.3, "top_k": 11, "top_p": 0.9}
    found = model.generate(PROMPTS, seed=[3, 5, 8], **how)
    assert model.generate(PROMPTS, seed=[3, 5, 8], use_cache=False, **how) == found
    for prompt, seed, tokens in zip(PROMPTS, [3, 5, 8], found, strict=True):
        assert model.generate([prompt], seed=[seed], **how) == [tokens]
    assert model.generate(PROMPTS, seed=[3, 6, 8], **how)[::2] == found[::2]
    assert model.generate(PROMPTS, seed=[3, 6, 8], **how)[1] != found[1]
    assert model.generate(PROMPTS, seed=7, **how) == model.generate(PROMPTS, seed=7, **how)
    assert model.generate(PROMPTS, seed=7, **how) != model.generate(PROMPTS, seed=8, **how)
    torch.manual_seed(3)
    drawn = model.generate(PROMPTS, **how)
    assert model.generate(PROMPTS, **how) != drawn
    torch.manual_seed(3)
    assert model.generate(PROMPTS, **how) == drawn


def test_narrow_draws_are_greedy(model: Decoder) -> None:
    greedy = model.generate(PROMPTS, max_new_tokens=7)
    for how in ({"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-6}):
        assert model.generate(PROMPTS, max_new_tokens=7, seed=0, **{"temperature": 1.0, **how}) == greedy


class Fresh(TorchDispatchMode):
    """Bytes of all results that are no views of what was there, and how many operations ran."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in known:
                self.bytes += x.untyped_storage().nbytes()
        self.operations += 1
        return out


def work(model: Decoder, steps: Iterator[list[int | None]]) -> list[tuple[int, int]]:
    """What each step after the first makes: (bytes, operations)."""
    next(steps)
    found = []
    while True:
        with Fresh() as fresh:
            if next(steps, None) is None:
                return found
        found.append((fresh.bytes, fresh.operations))


def test_a_step_makes_as_much_late_as_early(model: Decoder) -> None:
    found = work(model, model.stream([[5, 3, 8]], max_new_tokens=60))
    assert len(found) == 59
    assert set(found[1:]) == {found[1]}
    assert found[1][1] > 20 and found[1][0] > 1000  # something was counted


def test_a_step_of_prompts_of_different_lengths_takes_as_many_operations_late_as_early(model: Decoder) -> None:
    found = work(model, model.stream(PROMPTS, max_new_tokens=20))
    assert len({operations for _, operations in found[1:]}) == 1


def test_a_step_without_a_cache_makes_more_and_more(model: Decoder) -> None:
    found = work(model, model.stream([[5, 3, 8]], max_new_tokens=20, use_cache=False))
    assert found[-1][0] > 2 * found[1][0]  # what the test above would see in a cache that copies


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompts": [5, 3]}, "for one prompt give"),
        ({"prompts": "text"}, "prompts must be a list of lists of token numbers, got str"),
        ({"prompts": [[1], []]}, "each of one token at least"),
        ({"prompts": [[37]]}, "prompts holds 37; the model's tokens are 0 … 36"),
        ({"prompts": [[1.5]]}, "prompts must hold token numbers"),
        ({"prompts": torch.rand(2, 3)}, "prompts must be token numbers"),
        ({"stop": 37}, "stop holds 37"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": 2.0}, "max_new_tokens must be an int, got 2.0"),
        ({"max_new_tokens": 65}, "at most 64 can follow"),
        ({"temperature": -1.0}, "temperature must be a finite number, at least 0, got -1.0"),
        ({"temperature": 1.0, "top_k": 0}, "top_k must be an int, at least 1, got 0"),
        ({"temperature": 1.0, "top_p": 1.5}, r"top_p must be a number in \(0, 1\], got 1.5"),
        ({"top_k": 5}, "top_k is given, but temperature 0 takes the likeliest token"),
        ({"seed": 5}, "seed is given, but temperature 0 draws nothing"),
        ({"temperature": 1.0, "seed": [1, 2]}, "one int for each of the 1 prompts"),
        ({"use_cache": False, "caches": []}, "caches are given together with use_cache=False"),
        ({"caches": [KVCache(9)]}, "caches must be one for each of the 3 layers, got 1"),
        ({"caches": [KVCache(9)] * 3}, "caches holds the same cache twice"),
        ({"caches": KVCache(9)}, "caches must be a list, one for each of the 3 layers, got KVCache"),
        ({"caches": [KVCache(9), KVCache(9), KVCache(2)]}, "room for 2 tokens an item.*needs 3"),
        ({"stop": True}, r"stop must hold token numbers \(ints\), got True"),
        ({"stop": "a"}, "stop must hold token numbers"),
        ({"stop": None}, "stop must hold token numbers"),
        ({"temperature": 1.0, "seed": 2**64}, "seed must be from −2"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
    ],
)
def test_what_cannot_be_generated_is_refused_at_once(given: dict[str, Any], message: str) -> None:
    given = {"prompts": [[1]], "max_new_tokens": 3, **given}
    with pytest.raises((TypeError, ValueError), match=message):
        small.gpt().stream(given.pop("prompts"), **given)


def test_a_stream_says_which_arguments_there_are(model: Decoder) -> None:
    with pytest.raises(TypeError, match="stream has no argument topk; it has max_new_tokens, .*top_k, top_p, seed"):
        model.stream([[1]], max_new_tokens=2, topk=3)


def test_dropout_would_change_the_tokens_and_is_refused() -> None:
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        small.gpt().train().generate([[1]], max_new_tokens=3)


def test_numbers_that_are_not_pythons_own_are_tokens_too(model: Decoder) -> None:
    wanted = model.generate(PROMPTS, max_new_tokens=5, stop=9)
    prompts = [list(np.array(prompt)) for prompt in PROMPTS]
    assert model.generate(prompts, max_new_tokens=np.int64(5), stop=np.int64(9)) == wanted
    assert (
        model.generate([torch.tensor(prompt) for prompt in PROMPTS], max_new_tokens=5, stop=torch.tensor(9)) == wanted
    )
    assert all(type(token) is int for row in wanted for token in row)


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3, "top_p": 0.5}])
@pytest.mark.parametrize("broken", [0, 2])
def test_a_model_that_gives_nan_is_told_of_instead_of_tokens(
    model: Decoder, how: dict[str, float], broken: int
) -> None:
    plain_logits, calls = model.logits, iter(range(9))
    model.logits = lambda states: plain_logits(states) * (float("nan") if next(calls) == broken else 1.0)
    with pytest.raises(ValueError, match=f"gives NaN for prompt 0 after {broken} new tokens"):
        model.generate(PROMPTS, max_new_tokens=5, **how)


def test_a_model_without_weights_is_refused() -> None:
    with pytest.raises(ValueError, match='on the device "meta" and has no weights'):
        Decoder(small.gpt().config, device="meta").eval().generate([[1]], max_new_tokens=3)


def test_caches_of_another_batch_are_refused(model: Decoder) -> None:
    caches = model.caches(40)
    model.generate(PROMPTS, max_new_tokens=3, caches=caches)
    with pytest.raises(ValueError, match="caches hold 3 items, and 1 prompts are given"):
        model.generate([[1]], max_new_tokens=3, caches=caches)
