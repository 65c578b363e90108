"""T5: `from_hf` gives their logits, generates what they generate, and goes back bitwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.interop.hub import IDS, LEFT, LENGTHS, RIGHT, check_as_good_as, exactly, t5

from regard import interop, models
from regard.interop import from_hf, to_hf


def apart() -> Any:
    """As T5 1.1: the output layer has a matrix of its own."""
    model = t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    torch.manual_seed(1)
    model.lm_head.weight = torch.nn.Parameter(0.2 * torch.randn(97, 42))
    return model


MADE: dict[str, Any] = {
    "t5": t5,
    "gated": lambda: t5(feed_forward_proj="gated-gelu", num_decoder_layers=2),
    "silu, not scaled": lambda: t5(tie_word_embeddings=False, feed_forward_proj="gated-silu"),
    "1.1": apart,
    "bare": lambda: transformers.T5Model(t5().config).eval(),
}
TARGET = IDS[:, :11].flip(1)


@pytest.mark.parametrize("name", MADE)
def test_logits_are_theirs_and_the_way_back_is_bitwise(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MADE[name]()
    found = from_hf(model)
    assert type(found) is models.T5 and (found.config.tied, found.config.head) == (name != "1.1", name != "bare")
    left = {"source_lengths": LENGTHS, "side": "left"}  # distances alone matter
    for mask, mine in ((RIGHT, {"source_lengths": LENGTHS}), (LEFT, left), (None, {})):
        given = {"input_ids": IDS, "decoder_input_ids": TARGET}
        given |= {} if mask is None else {"attention_mask": mask.long()}
        with torch.no_grad():
            peer, exact, ours = model(**given)[0], exactly(model, given)[0], found(IDS, TARGET, **mine)
        check_as_good_as([ours], [peer], [exact], times=2)
    back = to_hf(found)
    assert type(back) is type(model)
    theirs, again = model.state_dict(), back.state_dict()
    assert theirs.keys() == again.keys() and all(torch.equal(theirs[key], again[key]) for key in theirs)
    with torch.no_grad():
        both = [one(input_ids=IDS, decoder_input_ids=TARGET)[0] for one in (back, model)]
    assert torch.equal(*both)
    interop.save(found, tmp_path / "ours")
    same = interop.load(tmp_path / "ours")
    assert same.config == found.config
    with torch.no_grad():
        assert torch.equal(same(IDS, TARGET), found(IDS, TARGET))


def test_gradients_reach_both_tables_of_the_bias() -> None:
    model = t5().train()
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        if hasattr(part, "dropout") and isinstance(part.dropout, float):
            part.dropout = 0.0
    found = from_hf(t5())
    peer = model(input_ids=IDS, decoder_input_ids=TARGET).logits
    ours = found(IDS, TARGET)
    weight = torch.linspace(-1, 1, ours.numel()).view_as(ours)
    (peer * weight).sum().backward()
    (ours * weight).sum().backward()
    for side in ("encoder", "decoder"):
        bias = getattr(model, side).block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad
        mine = getattr(found, f"{side}_bias").weight.grad
        torch.testing.assert_close(mine, bias, rtol=1e-3, atol=1e-4 * float(bias.abs().max()))
        assert float(bias.abs().max()) > 0


@pytest.mark.parametrize("name", ["t5", "1.1"])
def test_it_generates_what_theirs_generates(name: str) -> None:
    model = MADE[name]()
    found = from_hf(model)
    with torch.no_grad():
        theirs = model.generate(
            input_ids=IDS, attention_mask=RIGHT.long(), max_new_tokens=9, do_sample=False, num_beams=1, eos_token_id=96
        )
    for use_cache in (True, False):
        mine = found.generate(
            IDS, source_lengths=LENGTHS, start=0, stop=96, max_new_tokens=9, beams=1, use_cache=use_cache
        )
        for row, best in zip(theirs.tolist(), mine, strict=True):
            expected = row[1:]
            tokens = list(best[0].tokens)
            assert tokens == expected[: len(tokens)] and (len(tokens) == 9 or tokens[-1] == 96)


def test_a_folder_is_read_and_fields_that_contradict_are_refused(tmp_path: Path) -> None:
    model = t5(feed_forward_proj="gated-gelu")
    model.save_pretrained(tmp_path)
    config = from_hf(tmp_path).config
    assert config == from_hf(model).config
    assert config.dropout == config.attention_dropout == config.ff_dropout == 0.1  # theirs has one for all three
    given = json.loads((tmp_path / "config.json").read_text())
    for changes, complaint in (
        ({"feed_forward_proj": "gated-relu"}, "feed_forward_proj is 'gated-relu'"),
        ({"is_gated_act": False}, "is_gated_act = False and feed_forward_proj = 'gated-gelu'"),
        ({"dense_act_fn": "relu"}, "dense_act_fn = 'relu'"),
        ({"is_decoder": True}, "is_decoder"),
        ({"d_kv": 0}, "d_kv"),
        ({"feed_forward_proj": ["relu"]}, r"feed_forward_proj is \['relu'\]"),
        ({"dense_act_fn": ["relu"]}, r"dense_act_fn = \['relu'\]"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**given, **changes}))
        with pytest.raises(ValueError, match=complaint):
            from_hf(tmp_path)
    small = {"vocab_size": 31, "embed_dim": 12, "num_layers": 1, "num_heads": 3, "ff_dim": 7, "head_dim": 4}
    for changes, complaint in (
        ({"attention_scale": None}, "attention_scale=None"),
        ({"activation": "silu"}, "activation='silu' with gated=False"),
        ({"attention_bias": True}, "a bias"),
        ({"embedding_norm": True}, "embedding_norm=True"),
        ({"ff_dropout": 0.3}, "dropout=0.1 with ff_dropout=0.3"),
        ({"scale": "embedding"}, "scale='embedding'"),
    ):
        with pytest.raises(ValueError, match=f"{complaint}.*which T5 cannot express"):
            to_hf(models.T5(models.T5Config(**small, **{"attention_dropout": 0.1, "ff_dropout": 0.1, **changes})))
    bare = models.T5(models.T5Config(**small, head=False))
    assert bare(IDS % 31, TARGET % 31).shape == (3, 11, 12)
    states, seen, written = bare.eval()(IDS % 31, TARGET % 31, hidden_states=True)
    assert torch.equal(states, bare.states(IDS % 31, TARGET % 31)) and (len(seen), len(written)) == (2, 2)
    with pytest.raises(ValueError, match="head=False"):
        bare.logits(torch.zeros(1, 12))
