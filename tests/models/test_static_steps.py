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
    wanted = model.generate(PROMPTS, max_new_tokens=13)
    assert static(model, PROMPTS, 13) == wanted
    assert static(model, PROMPTS[:1], 13) == wanted[:1]
    stop = {wanted[0][4], wanted[2][7]}
    assert static(model, PROMPTS, 13, stop=stop) == model.generate(PROMPTS, max_new_tokens=13, stop=list(stop))


def test_draws_are_those_of_plain_steps_beyond_what_is_drawn_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_static, "_AHEAD", 4)
    model = small.llama()
    how = {"temperature": 0.8, "top_k": 11, "top_p": 0.9}
    wanted = model.generate(PROMPTS, max_new_tokens=13, seed=[3, 5, 8], **how)
    assert static(model, PROMPTS, 13, seed=[3, 5, 8], **how) == wanted


def test_a_model_that_gives_nan_is_reported_with_its_prompt() -> None:
    model = small.gpt()
    with torch.no_grad():
        model.position_embedding.weight[9] = torch.nan  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="NaN for prompt 0 after 3 new tokens"):
        static(model, PROMPTS, 8)


def test_a_step_asks_nothing_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would make the host wait, and cannot be recorded in a graph, is not called between two steps."""
    model = small.llama()
    with torch.inference_mode():
        caches = model.caches(20)
        logits = _generation._last_logits(model, PROMPTS, caches)
    steps = _static.StaticSteps(model, logits, caches, 9, Sampling(), None, graphs=True)
    monkeypatch.setattr(regard.masks._arguments, "plain", lambda tensor: False)  # as it is on a GPU
    for module in ("_padding", "_base", "_arguments"):
        monkeypatch.setattr(f"regard.masks.{module}.plain", lambda tensor: False, raising=False)
    monkeypatch.setattr("regard.positions._rotary.plain", lambda tensor: False)
    read: list[str] = []
    for name in ("item", "tolist", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, noted(name, read, getattr(torch.Tensor, name)))
    with torch.no_grad(), torch.device("cpu"):
        steps._step()
    # on a CPU, values are looked at to keep what is masked from leaking: that is all
    assert set(read) <= {"item"}


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
