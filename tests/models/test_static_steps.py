"""Steps that are all alike, as CUDA graphs hold them, give the tokens of plain steps; here without graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests import forced
from tests.models import small

import regard
from regard.models import Decoder

PROMPTS = [[5, 3, 17, 8, 30, 2, 9], [11], [7, 7, 21]]
MAKERS = {
    "gpt": small.gpt,
    "llama": small.llama,
    "windows": lambda: small.llama(window=3, windowed=(True, False, True)),
}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Such steps are taken from here on; the number of prompts, for each time that they were."""
    return forced.static_steps(monkeypatch)


def plain(model: Decoder, prompts: list[list[int]], count: int, **how: Any) -> list[list[int]]:
    """In steps of a cache of the caller's, which are never those."""
    return model.generate(prompts, max_new_tokens=count, caches=model.caches(7 + count), **how)


@pytest.mark.parametrize("make", MAKERS)
def test_the_tokens_are_those_of_plain_steps_for_prompts_of_any_lengths(make: str, used: list[int]) -> None:
    model = MAKERS[make]()
    wanted = plain(model, PROMPTS, 9)
    assert model.generate(PROMPTS, max_new_tokens=9) == wanted
    stop = [wanted[0][3], wanted[2][1]]
    assert model.generate(PROMPTS, max_new_tokens=9, stop=stop) == plain(model, PROMPTS, 9, stop=stop)
    assert used == [3, 3]


@pytest.mark.gpu
@pytest.mark.parametrize("make", MAKERS)
def test_recorded_steps_give_the_tokens_of_plain_ones(make: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replay, replayed = torch.cuda.CUDAGraph.replay, list[int]()
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replayed.append(1), replay(graph))[1])
    model = MAKERS[make]().to("cuda", torch.float32)
    prompts = [[(7 * token + row) % 37 for token in range(3 * row + 1)] for row in range(8)]
    for how in ({}, {"temperature": 0.8, "top_k": 11, "top_p": 0.9, "seed": 5}):
        wanted = model.generate(prompts, max_new_tokens=24, caches=model.caches(64), **how)
        replayed.clear()
        assert model.generate(prompts, max_new_tokens=24, **how) == wanted
        assert len(replayed) > 20
        assert (
            model.generate(prompts[5:6], max_new_tokens=24, **how)[0][:3]
            == model.generate(prompts[5:6], max_new_tokens=3, **how)[0]
        )


def test_draws_are_those_of_plain_steps_beyond_what_is_drawn_ahead(
    monkeypatch: pytest.MonkeyPatch, used: list[int]
) -> None:
    forced.sizes(monkeypatch, tokens_generated_ahead=4)
    model = small.llama()
    how = {"temperature": 0.8, "top_k": 11, "top_p": 0.9, "seed": [3, 5, 8]}
    assert model.generate(PROMPTS, max_new_tokens=9, **how) == plain(model, PROMPTS, 9, **how)
    assert used == [3]


def test_layers_of_other_kinds_are_not_recorded(used: list[int]) -> None:
    model = small.gpt()

    class Other(type(model.layers[0])):  # type: ignore[misc]
        pass

    model.layers[1].__class__ = Other
    assert model.generate(PROMPTS, max_new_tokens=9) == plain(model, PROMPTS, 9)
    assert used == []


def test_a_model_that_gives_nan_is_reported_with_its_prompt(used: list[int]) -> None:
    model = small.gpt()
    with torch.no_grad():
        model.position_embedding.weight[9] = torch.nan  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="NaN for prompt 0 after 3 new tokens"):
        model.generate(PROMPTS, max_new_tokens=8)
    assert used == [3]


def test_a_step_asks_nothing_of_the_device_but_its_tokens(monkeypatch: pytest.MonkeyPatch, used: list[int]) -> None:
    """What would make the host wait, and cannot be recorded in a graph. Attention itself is another matter: on a CPU it
    looks at values, to keep what is masked from leaking."""
    model = small.llama(window=3, windowed=(True, False, True))
    forced.nothing_read_by_attention(monkeypatch)
    read: list[str] = []
    for name in ("item", "tolist", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, noted(name, read, getattr(torch.Tensor, name)))
    asked = []
    for count in (9, 14):
        read.clear()
        model.generate(PROMPTS, max_new_tokens=count, temperature=0.7, top_k=5, top_p=0.9, seed=1)
        asked.append(sorted(read))
    more = asked[1].copy()
    for name in asked[0]:
        more.remove(name)
    assert more == ["tolist"] * 5 and used == [3, 3]


def noted(name: str, read: list[str], own: Any) -> Any:
    def method(self: torch.Tensor, *given: Any) -> Any:
        read.append(name)
        return own(self, *given)

    return method


def test_a_stream_that_is_watched_runs_operation_by_operation(used: list[int]) -> None:
    model = small.llama()
    with regard.watch(model) as recording:
        model.generate(PROMPTS, max_new_tokens=4)
    assert used == []
    assert len(recording.sites) == len(model.layers)
    assert len(recording.calls) == 4 * len(model.layers)
    ran: list[int] = []
    hook = model.layers[1].register_forward_hook(lambda *given: ran.append(1))
    model.generate(PROMPTS, max_new_tokens=4)
    assert used == [] and len(ran) >= 4
    hook.remove()
    model.generate(PROMPTS, max_new_tokens=4)
    assert used == [3]
