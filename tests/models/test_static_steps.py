"""Steps that are all alike, as CUDA graphs hold them, give the tokens of plain steps; here without graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.models import small

import regard
from regard.models import Decoder, _generation, _static
from regard.models._sampling import Draws, Sampling

PROMPTS = [[5, 3, 17, 8, 30, 2, 9], [11], [7, 7, 21]]
MAKERS = {
    "gpt": small.gpt,
    "llama": small.llama,
    "windows": lambda: small.llama(window=3, windowed=(True, False, True)),
}


def static(model: Decoder, prompts: list[list[int]], count: int, seed: Any = None, **how: Any) -> list[list[int]]:
    stops = how.pop("stop", set())
    draws = None if seed is None else Draws(seed, len(prompts))
    steps = _generation.static_steps(model, prompts, count, Sampling(**how), draws, stops)
    found: list[list[int]] = [[] for _ in prompts]
    for step in steps:
        for row, token in zip(found, step, strict=True):
            if token is not None:
                row.append(token)
    return found


@pytest.mark.parametrize("make", MAKERS)
def test_the_tokens_are_those_of_plain_steps_for_prompts_of_any_lengths(make: str) -> None:
    model = MAKERS[make]()
    wanted = model.generate(PROMPTS, max_new_tokens=9)
    assert static(model, PROMPTS, 9) == wanted
    stop = {wanted[0][3], wanted[2][1]}
    assert static(model, PROMPTS, 9, stop=stop) == model.generate(PROMPTS, max_new_tokens=9, stop=list(stop))


@pytest.mark.gpu
@pytest.mark.parametrize("make", MAKERS)
def test_recorded_steps_give_the_tokens_of_plain_ones(make: str) -> None:
    model = MAKERS[make]().to("cuda", torch.float32)
    prompts = [[(7 * token + row) % 37 for token in range(3 * row + 1)] for row in range(8)]
    for how in ({}, {"temperature": 0.8, "top_k": 11, "top_p": 0.9, "seed": 5}):
        wanted = model.generate(prompts, max_new_tokens=24, caches=model.caches(64), **how)
        assert _static.is_worthwhile(model, 24)
        assert model.generate(prompts, max_new_tokens=24, **how) == wanted
        assert (
            model.generate(prompts[5:6], max_new_tokens=24, **how)[0][:3]
            == model.generate(prompts[5:6], max_new_tokens=3, **how)[0]
        )


def test_draws_are_those_of_plain_steps_beyond_what_is_drawn_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_static, "_AHEAD", 4)
    model = small.llama()
    how = {"temperature": 0.8, "top_k": 11, "top_p": 0.9}
    wanted = model.generate(PROMPTS, max_new_tokens=9, seed=[3, 5, 8], **how)
    assert static(model, PROMPTS, 9, seed=[3, 5, 8], **how) == wanted


def test_layers_of_other_kinds_are_not_recorded() -> None:
    model = small.gpt()
    assert _static.can_be_recorded(model)

    class Other(type(model.layers[0])):  # type: ignore[misc]
        pass

    model.layers[1].__class__ = Other
    assert not _static.can_be_recorded(model)


def test_a_model_that_gives_nan_is_reported_with_its_prompt() -> None:
    model = small.gpt()
    with torch.no_grad():
        model.position_embedding.weight[9] = torch.nan  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="NaN for prompt 0 after 3 new tokens"):
        static(model, PROMPTS, 8)


def test_a_step_asks_nothing_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would make the host wait, and cannot be recorded in a graph. Attention itself is another matter: on a CPU it
    looks at values, to keep what is masked from leaking."""
    model = small.llama(window=3, windowed=(True, False, True))
    with torch.inference_mode():
        caches = model.caches(20)
        logits = _generation._last_logits(model, PROMPTS, caches)
    steps = _static.StaticSteps(model, logits, caches, 9, Sampling(0.7, top_k=5, top_p=0.9), Draws(1, 3))
    monkeypatch.setattr("regard.api.attention", lambda query, key, value, **how: query)
    for module in ("masks._padding", "masks._arguments", "masks._rules", "positions._rotary"):
        monkeypatch.setattr(f"regard.{module}.plain", lambda tensor: False, raising=False)  # as it is on a GPU
    read: list[str] = []
    for name in ("item", "tolist", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, noted(name, read, getattr(torch.Tensor, name)))
    with torch.no_grad():
        steps._step()
    assert read == []
    assert steps._steps.lengths.tolist() == [8, 2, 4]
    assert read == ["tolist"]  # it would have been noted


def noted(name: str, read: list[str], own: Any) -> Any:
    def method(self: torch.Tensor, *given: Any) -> Any:
        read.append(name)
        return own(self, *given)

    return method


def test_a_stream_that_is_watched_runs_operation_by_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small.llama()

    def steps() -> Iterator[list[int | None]]:
        return _generation.static_steps(model, PROMPTS, 4, Sampling(), None, set())

    assert not _static._is_watched(model)
    with regard.watch(model) as recording:
        assert _static._is_watched(model)
        list(steps())
    assert len(recording.sites) == len(model.layers)
    assert len(recording.calls) == 4 * len(model.layers)
