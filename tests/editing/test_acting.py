"""Acting on trained models: the tokens and heads that SmolLM2 and Whisper tiny.en rest on."""

from __future__ import annotations

import contextlib
import itertools
import random
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from tests import packaged
from tests.interop.test_real_weights import speech
from tests.watching.test_whisper import whisper  # noqa: F401 (a fixture)
from transformers import GenerationMixin

import regard
from regard import edits, masks

pytestmark = pytest.mark.models

LENGTH, LATE = 768, 128


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return packaged.smollm2()


@pytest.fixture(scope="module")
def smollm2(loaded: tuple[Any, Any]) -> tuple[Any, torch.Tensor]:
    model, tokenizer = loaded
    text = "\n".join(topics[key] for key in sorted(topics))  # the language reference that comes with Python
    ids = tokenizer(text, truncation=True, max_length=LENGTH, return_tensors="pt")["input_ids"]
    return model, ids


def perplexity(model: Any, ids: torch.Tensor, edit: edits.Edit | None = None) -> float:
    """Of the tokens from 256 on, read in one pass."""
    with torch.no_grad(), contextlib.nullcontext() if edit is None else regard.edit(model, edit):
        logits = model(input_ids=ids, use_cache=False).logits
    return float(F.cross_entropy(logits[0, 256:-1], ids[0, 257:]).exp())


def test_late_tokens_cannot_do_without_the_first_four(smollm2: tuple[Any, torch.Tensor]) -> None:
    plain = perplexity(*smollm2)
    late = slice(LATE, None)
    assert perplexity(*smollm2, edits.cut(queries=late, keys=slice(0, 4))) > 1.5 * plain
    for other in (slice(4, 8), slice(60, 64)):
        assert perplexity(*smollm2, edits.cut(queries=late, keys=other)) < 1.05 * plain
    # where no token ever sees them, the fifth takes their place: what is needed is a first token, not these
    assert perplexity(*smollm2, edits.cut(queries=slice(4, None), keys=slice(0, 4))) < 1.05 * plain


def test_a_window_collapses_and_four_first_tokens_restore_it(smollm2: tuple[Any, torch.Tensor]) -> None:
    plain = perplexity(*smollm2)
    window = perplexity(*smollm2, edits.cut(~masks.window(left=63)))
    restored = perplexity(*smollm2, edits.cut(~(masks.window(left=59) | masks.columns(4))))
    assert window > 3 * plain and restored < 1.6 * plain


def test_perplexity_against_the_budget_of_three_policies(smollm2: tuple[Any, torch.Tensor]) -> None:
    """A prompt of 192 tokens, then pieces of 16: the same for all policies. The newest keys alone collapse, with the
    first four they do not, and what received most weight keeps the first token without being told."""
    model, ids = smollm2
    ours, ids = regard.interop.from_hf(model).eval(), ids[:, :448]

    def read(caches: Any) -> float:
        with torch.inference_mode():
            parts = [ours(ids[:, :192], caches=caches)]
            parts += [ours(ids[:, n : n + 16], caches=caches) for n in range(192, 448, 16)]
        return float(F.cross_entropy(torch.cat(parts, 1)[0, 192:-1], ids[0, 193:]).exp())

    plain = read(ours.caches(448))
    found: dict[str, list[float]] = {"streaming": [], "key_mass": [], "window": []}
    for budget in (32, 128):
        found["streaming"].append(read(edits.keep("recent", budget, first=4).caches(ours)))
        for policy in ("key_mass", "window"):
            caches = edits.keep(policy, budget, recent=budget // 2).caches(ours)
            found[policy].append(read(caches))
            assert all(cache.held == budget for cache in caches)
            first = torch.stack([(cache.places == 0).any(2).float().mean() for cache in caches])
            assert float(first.mean()) > 0.8  # in most heads of keys
    for small, large in found.values():
        assert plain < large < 1.2 * plain < small < 2 * plain
    assert read(edits.keep("recent", 128).caches(ours)) > 2 * plain
    # the same masks, whether keys are dropped or hidden
    edit = edits.keep("key_mass", 32, recent=16)
    with regard.edit(ours, edit):
        hidden = read(ours.caches(448))
    assert abs(hidden / found["key_mass"][0] - 1) < 1e-3


COUNTRIES = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Germany": "Berlin", "Russia": "Moscow",
             "England": "London", "Greece": "Athens", "Spain": "Madrid", "China": "Beijing"}  # fmt: skip


def test_an_answer_needs_the_relation_in_middle_layers_and_the_subject_in_late_ones(loaded: tuple[Any, Any]) -> None:
    """Knockout, layer by layer, on nine facts that the model knows: the last token of "The capital of France is" may
    not look at some words in five layers (Geva et al., 2023)."""
    model, tokenizer = loaded
    ids = tokenizer([f"The capital of {country} is" for country in COUNTRIES], return_tensors="pt")["input_ids"]
    assert ids.shape == (9, 5)
    answers = torch.tensor([tokenizer(f" {city}")["input_ids"][0] for city in COUNTRIES.values()])

    def chances() -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(input_ids=ids, use_cache=False).logits[:, -1].softmax(-1)
        return found

    plain = chances()
    assert torch.equal(plain.argmax(-1), answers)  # it knows them all

    def kept(keys: list[int], layers: range, heads: list[int] | None = None) -> float:
        """The share of its probability that the answer keeps."""
        with regard.edit(model, edits.cut(queries=-1, keys=keys), layers=layers, heads=heads) as report:
            found = chances()
        assert report.layers == list(layers)
        return float((found / plain).gather(1, answers[:, None]).mean())

    starts = list(range(0, 30, 5))
    subject, relation = ([kept(keys, range(start, start + 5)) for start in starts] for keys in ([3], [1, 2]))
    assert starts[int(np.argmin(subject))] == 20 and min(subject) < 0.5
    assert starts[int(np.argmin(relation))] == 10 and min(relation) < 0.6
    assert min(subject[:2]) > 0.8 and min(relation[:2]) > 0.8 and relation[4] > 0.75 and subject[5] > 0.75
    # of the late layers it is one, and in that one head
    assert kept([3], range(23, 24), [4]) < 0.4
    others = [head for head in range(9) if head != 4]
    assert kept([3], range(23, 24), others) > 0.7


# OpenAI's list for tiny.en: heads of cross attention that follow the sound, from which its word times are read
ALIGNMENT = [(1, 0), (2, 0), (2, 5), (3, 0), (3, 1), (3, 2), (3, 3), (3, 4)]
# and two that are not on it, each of which the text rests on alone
NEEDED = [(0, 4), (1, 2)]
REST = [(n, h) for n in range(4) for h in range(6) if (n, h) not in ALIGNMENT + NEEDED]
STAMPS = 50363  # the token of 0.00 s; each that follows is 20 ms later


@pytest.fixture(scope="module")
def heard(whisper: Any) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:  # noqa: F811
    """The model, what its encoder made of half a minute of speech, and what it wrote, without and with time stamps."""
    model = whisper
    model.set_attn_implementation("sdpa")
    settings = transformers.GenerationConfig(
        max_new_tokens=200, do_sample=False, eos_token_id=50256, pad_token_id=50256
    )
    with torch.no_grad():
        memory = model.model.encoder(speech())
        plain, stamped = (
            GenerationMixin.generate(
                model, encoder_outputs=memory, decoder_input_ids=torch.tensor([start]), generation_config=settings
            )
            for start in ([50257, 50362], [50257, STAMPS])
        )
    return model, memory, plain, stamped


def without(model: Any, heads: list[tuple[int, int]]) -> Any:
    """The model without the output of these heads of cross attention."""
    places: dict[int | str, list[int]] = {}
    for layer, head in heads:
        places.setdefault(f"model.decoder.layers.{layer}.encoder_attn", []).append(head)
    return regard.edit(model, edits.ablate("zero"), heads=places) if heads else contextlib.nullcontext()


def test_whispers_alignment_heads_matter_more_than_other_eights_but_for_two_heads_that_matter_most(
    heard: tuple[Any, Any, torch.Tensor, torch.Tensor],
) -> None:
    model, memory, said, _ = heard

    def loss(heads: list[tuple[int, int]]) -> float:
        """Nats a token of what the model itself wrote."""
        with torch.no_grad(), without(model, heads):
            logits = model(encoder_outputs=memory, decoder_input_ids=said).logits
        return float(F.cross_entropy(logits[0, 1:-1], said[0, 2:]))

    plain, aligned = loss([]), loss(ALIGNMENT)
    assert plain < 0.4 and aligned > 1.2
    assert min(loss([head]) for head in NEEDED) > aligned
    draw = random.Random(0)
    assert max(loss(draw.sample(REST, 8)) for _ in range(8)) < 0.75 * aligned


def starts_of_tokens(weights: torch.Tensor) -> Any:
    """Seconds at which each token begins, as OpenAI reads them: the cheapest path in order through the standardised
    and smoothed weights [head, token, frame] of some heads (dynamic time warping)."""
    scores = (weights - weights.mean(-2, keepdim=True)) / weights.std(-2, keepdim=True, unbiased=False)
    scores = F.pad(scores, (3, 3), mode="reflect").unfold(-1, 7, 1).median(-1).values
    cost = -scores.mean(0).double().numpy()
    count, frames = cost.shape
    total = np.full((count + 1, frames + 1), np.inf)
    total[0, 0] = 0.0
    for i, j in itertools.product(range(1, count + 1), range(1, frames + 1)):
        total[i, j] = cost[i - 1, j - 1] + min(total[i - 1, j - 1], total[i - 1, j], total[i, j - 1])
    first, i, j = np.zeros(count), count, frames
    while i and j:
        first[i - 1] = 0.02 * (j - 1)
        i, j = min(((i - 1, j - 1), (i - 1, j), (i, j - 1)), key=lambda at: total[at])
    return first


def test_word_times_are_read_from_the_alignment_heads_and_rest_on_others(
    heard: tuple[Any, Any, torch.Tensor, torch.Tensor],
) -> None:
    """Without what the eight write, word times stay, both those read from their weights and the time stamps that the
    model writes; without one of two other heads, both go. So they show the time, and do not carry it."""
    model, memory, said, stamped = heard

    def words(heads: list[tuple[int, int]]) -> list[torch.Tensor]:
        """Weights [head, token, frame] of cross attention, layer by layer."""
        want = regard.Want(weights="all", map=None, top_k=0)
        with torch.no_grad(), without(model, heads), regard.watch(model.model.decoder, want=want) as recording:
            model(encoder_outputs=memory, decoder_input_ids=said, use_cache=False)
        return [call.weights[0, :, 1:-1] for call in recording if call.kind == "cross"]

    def read(weights: list[torch.Tensor], heads: list[tuple[int, int]]) -> Any:
        return starts_of_tokens(torch.stack([weights[layer][head] for layer, head in heads]))

    plain = words([])
    times = read(plain, ALIGNMENT)
    assert (np.diff(times) >= 0).all() and times[-1] > 25

    def moved(heads: list[tuple[int, int]]) -> float:
        return float(np.abs(read(words(heads), ALIGNMENT) - times).mean())

    assert moved(ALIGNMENT) < 0.15
    assert min(moved([head]) for head in NEEDED) > 0.5

    at = [n for n, token in enumerate(stamped[0].tolist()) if token >= STAMPS and n > 1]
    assert len(at) == 3

    def stamps(heads: list[tuple[int, int]]) -> float:
        """Seconds between the stamps that the model would write and those it wrote, in the mean."""
        with torch.no_grad(), without(model, heads):
            logits = model(encoder_outputs=memory, decoder_input_ids=stamped).logits[0]
        said_here = logits[[n - 1 for n in at], STAMPS:].argmax(-1)
        return 0.02 * float((said_here - (stamped[0, at] - STAMPS)).abs().float().mean())

    assert stamps(ALIGNMENT) < 0.1
    assert min(stamps([head]) for head in NEEDED) > 1.0
