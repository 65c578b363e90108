"""With the same weights, the models give what Hugging Face's give: every layer, every head, and the gradients."""

from __future__ import annotations

from typing import Any

import torch
from tests.interop.hub import Unrounded
from tests.models import peers
from torch import Tensor

EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-11}


def tokens(batch: int, length: int, most: int = 37) -> Tensor:
    return torch.randint(3, most, (batch, length))


def check_layers(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], how: dict[str, Any], *, normed: Any) -> None:
    """Hugging Face gives the last layer's output after the model's norm."""
    assert len(found) == len(wanted)
    for ours, theirs in zip((*found[:-1], normed(found[-1])), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, **how)


def test_bert_gives_every_layer_the_pooled_state_and_the_logits_of_both_heads() -> None:
    theirs, ours = peers.bert()
    ids, types = tokens(5, 11), torch.randint(0, 3, (5, 11))
    there = theirs(input_ids=ids, token_type_ids=types, output_hidden_states=True)
    states, hidden = ours(ids, token_types=types, hidden_states=True)
    check_layers(hidden, there.hidden_states, EXACT, normed=lambda x: x)
    torch.testing.assert_close(states, there.hidden_states[-1], **EXACT)
    torch.testing.assert_close(ours(ids, token_types=types, head="masked-lm"), there.prediction_logits, **EXACT)
    torch.testing.assert_close(ours(ids, token_types=types, head="classes"), there.seq_relationship_logits, **EXACT)
    pooled = theirs.bert(input_ids=ids, token_type_ids=types).pooler_output
    torch.testing.assert_close(ours(ids, token_types=types, head="pooled"), pooled, **EXACT)


def test_a_padded_bert_batch_is_hugging_faces_at_every_real_token() -> None:
    theirs, ours = peers.bert()
    ids, lengths = tokens(3, 11), [11, 7, 3]
    keep = torch.arange(11) < torch.tensor(lengths).unsqueeze(1)
    there = theirs(input_ids=ids, attention_mask=keep.long()).prediction_logits
    here = ours(ids, lengths=lengths, head="masked-lm")
    torch.testing.assert_close(here[keep], there[keep], **EXACT)


def test_a_bert_batch_padded_on_the_left_is_hugging_faces_with_positions_of_real_tokens() -> None:
    theirs, ours = peers.bert()
    ids, lengths = tokens(3, 11), torch.tensor([11, 7, 3])
    keep = torch.arange(11) >= 11 - lengths.unsqueeze(1)
    places = (keep.long().cumsum(1) - 1).clamp_min(0)
    there = theirs(input_ids=ids, attention_mask=keep.long(), position_ids=places).prediction_logits
    here = ours(ids, lengths=lengths, side="left", head="masked-lm")
    torch.testing.assert_close(here[keep], there[keep], **EXACT)


def test_vit_gives_every_layer_and_the_pooled_state() -> None:
    theirs, ours = peers.vit()
    images = torch.randn(2, 3, 15, 15, dtype=torch.float64)
    there = theirs(pixel_values=images, output_hidden_states=True)
    states, hidden = ours(images, hidden_states=True)
    for mine, other in zip(hidden[:-1], there.hidden_states[:-1], strict=True):
        torch.testing.assert_close(mine, other, **EXACT)
    torch.testing.assert_close(states, there.last_hidden_state, **EXACT)
    torch.testing.assert_close(ours(images, head="pooled"), there.pooler_output, **EXACT)


def test_gpt2_gives_every_layer_the_logits_and_the_gradients() -> None:
    theirs, ours = peers.gpt2()
    ids = tokens(3, 23)
    there = theirs(ids, output_hidden_states=True)
    logits, hidden = ours(ids, hidden_states=True)
    check_layers(hidden, there.hidden_states, EXACT, normed=ours.norm)
    torch.testing.assert_close(logits, there.logits, **EXACT)
    for found in (logits, there.logits):
        torch.nn.functional.cross_entropy(found[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    layer = theirs.transformer.h[1]
    pairs = [
        (ours.layers[1].attention.qkv_proj.weight, layer.attn.c_attn.weight.grad.T),
        (ours.layers[1].feed_forward.up.weight, layer.mlp.c_fc.weight.grad.T),
        (ours.token_embedding.weight, theirs.transformer.wte.weight.grad),
        (ours.position_embedding.weight, theirs.transformer.wpe.weight.grad),
    ]
    for parameter, wanted in pairs:
        torch.testing.assert_close(parameter.grad, wanted, **EXACT)


def test_llama_gives_every_layer_and_the_logits_with_grouped_heads_and_scaled_rotary_positions() -> None:
    theirs, ours = peers.llama()
    ids = tokens(3, 23)
    with Unrounded():  # its norms are float32 whatever its weights are
        there = theirs(ids, output_hidden_states=True)
        logits, hidden = ours(ids, hidden_states=True)
        check_layers(hidden, there.hidden_states, EXACT, normed=ours.norm)
    torch.testing.assert_close(logits, there.logits, **EXACT)


def test_whisper_gives_every_layer_of_both_stacks_and_the_logits() -> None:
    theirs, ours = peers.whisper()
    sound, ids = torch.randn(2, 7, 30, dtype=torch.float64), tokens(2, 11, 61)
    there = theirs(input_features=sound, decoder_input_ids=ids, output_hidden_states=True)
    logits, seen, written = ours(sound, ids, hidden_states=True)
    check_layers(seen, there.encoder_hidden_states, EXACT, normed=ours.encoder_norm)
    check_layers(written, there.decoder_hidden_states, EXACT, normed=ours.decoder_norm)
    torch.testing.assert_close(logits, there.logits, **EXACT)
