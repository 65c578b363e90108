"""Tokens that are named by their text are those of the call that is edited: of this pass, of this side of the model. A
list of another length than what was read is refused, since its texts would stand at the wrong places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tests.editing.by_hand import model_of

import regard
from regard import edits

ONE, TWO = torch.tensor([[3, 14, 15, 9, 26, 5, 35]]), torch.tensor([[9, 8, 7, 6, 5]])
NOT_ALL = "there are {} tokens, and it reads 7: give one string for each, special ones and padding too"


class Tokenizer:
    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [f"w{n}" for n in ids]


@torch.no_grad()
def test_each_pass_of_a_block_has_its_own_text() -> None:
    model = model_of("llama")
    with regard.edit(model, edits.cut(keys="w9"), tokenizer=Tokenizer()):
        found = [model(ids).logits for ids in (ONE, TWO)]
    for ids, at, one in zip((ONE, TWO), (3, 0), found, strict=True):
        with regard.edit(model, edits.cut(keys=at)):
            assert torch.equal(model(ids).logits, one)


@torch.no_grad()
def test_steps_with_a_cache_go_on_with_the_text_and_a_new_one_starts_again() -> None:
    model = model_of("llama")
    found = []
    with regard.edit(model, edits.steer("w9", 2.0), tokenizer=Tokenizer()):
        for ids in (ONE, TWO):
            cache = transformers.DynamicCache()
            parts = [model(ids[:, :4], past_key_values=cache).logits]
            parts += [model(ids[:, n : n + 1], past_key_values=cache).logits for n in range(4, ids.shape[1])]
            found.append(torch.cat(parts, 1))
    for ids, at, one in zip((ONE, TWO), (3, 0), found, strict=True):
        with regard.edit(model, edits.steer(at, 2.0)):
            torch.testing.assert_close(one, model(ids, use_cache=False).logits, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_encoder_and_decoder_read_texts_of_their_own() -> None:
    config = transformers.BartConfig(
        vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32,
        decoder_start_token_id=3, pad_token_id=2, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.BartForConditionalGeneration(config).eval().double()
    source, target = torch.tensor([[9, 8, 7, 6, 5, 4, 3]]), ONE  # of the same length

    def run(edit: edits.Edit, **where: Any) -> torch.Tensor:
        with regard.edit(model, edit, **where):
            found: torch.Tensor = model(input_ids=source, decoder_input_ids=target).logits
        return found

    for side, at in (("encoder", 0), ("decoder", 3)):
        layers = [f"model.{side}.layers.0.self_attn"]
        by_text = run(edits.cut(keys="w9"), layers=layers, tokenizer=Tokenizer())
        assert torch.equal(by_text, run(edits.cut(keys=at), layers=layers))
    cross = ["model.decoder.layers.0.encoder_attn"]
    by_text = run(edits.ablate("zero", queries="w9"), layers=cross, tokenizer=Tokenizer())
    assert torch.equal(by_text, run(edits.ablate("zero", queries=3), layers=cross))


@torch.no_grad()
@pytest.mark.parametrize(
    ("tokens", "cached", "message"),
    [
        (["a"] * 6, False, NOT_ALL.format(6)),  # the first and the last, which are special, left away, say
        (["a"] * 6, True, NOT_ALL.format(6)),
        (["a"] * 8, False, NOT_ALL.format(8)),
        (["a"] * 9, True, "tokens has 9 entries for one item, and the model read 7"),
        ([["a"] * 7, ["a"] * 3], False, NOT_ALL.format("3 or 7")),
    ],
)
def test_a_list_of_another_length_is_refused(tokens: Any, cached: bool, message: str) -> None:
    model, ids = model_of("llama"), ONE.expand(2, -1)
    with pytest.raises(ValueError, match=message), regard.edit(model, edits.cut(keys="a"), tokens=tokens):
        model(ids, use_cache=cached)


@torch.no_grad()
def test_a_list_that_goes_on_after_the_prompt_is_taken() -> None:
    model = model_of("llama")
    cache = transformers.DynamicCache()
    tokens = [f"w{n}" for n in ONE[0].tolist()]
    with regard.edit(model, edits.cut(keys="w26"), tokens=tokens):
        parts = [model(ONE[:, start:stop], past_key_values=cache).logits for start, stop in ((0, 3), (3, 6), (6, 7))]
    with regard.edit(model, edits.cut(keys=4)):
        expected = model(ONE, use_cache=False).logits
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-9, atol=1e-9)
