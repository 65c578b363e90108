"""attention-is-all-you-need-pytorch: its checkpoints and vocabularies, against a computation written out by hand."""

from __future__ import annotations

import argparse
import collections
import os
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from regard.train import load_quoted, load_quoted_vocabularies, quoted_config

SIZES: dict[str, int] = {"d_model": 12, "d_inner_hid": 20, "n_layers": 2, "n_head": 3, "d_k": 5, "d_v": 7}


def checkpoint(path: Path, *, source: int, target: int, prj: bool, embs: bool, scale: str) -> dict[str, Tensor]:
    """A file as that repository writes it, with random weights."""
    draw = torch.Generator().manual_seed(7)
    d, inner, n, heads, dk, dv = (
        SIZES[each] for each in ("d_model", "d_inner_hid", "n_layers", "n_head", "d_k", "d_v")
    )
    made: dict[str, Tensor] = {}

    def add(name: str, *shape: int) -> None:
        made[name] = torch.randn(*shape, generator=draw) * 0.4

    def norm(name: str) -> None:
        add(f"{name}.weight", d)
        add(f"{name}.bias", d)

    for side, attentions in (("encoder", ["slf_attn"]), ("decoder", ["slf_attn", "enc_attn"])):
        made[f"{side}.position_enc.pos_table"] = torch.zeros(1, 200, d)  # ours are computed
        norm(f"{side}.layer_norm")
        for layer in range(n):
            at = f"{side}.layer_stack.{layer}"
            for each in attentions:
                add(f"{at}.{each}.w_qs.weight", heads * dk, d)
                add(f"{at}.{each}.w_ks.weight", heads * dk, d)
                add(f"{at}.{each}.w_vs.weight", heads * dv, d)
                add(f"{at}.{each}.fc.weight", d, heads * dv)
                norm(f"{at}.{each}.layer_norm")
            add(f"{at}.pos_ffn.w_1.weight", inner, d)
            add(f"{at}.pos_ffn.w_1.bias", inner)
            add(f"{at}.pos_ffn.w_2.weight", d, inner)
            add(f"{at}.pos_ffn.w_2.bias", d)
            norm(f"{at}.pos_ffn.layer_norm")
    add("decoder.trg_word_emb.weight", target, d)
    made["encoder.src_word_emb.weight"] = made["decoder.trg_word_emb.weight"]
    if not embs:
        add("encoder.src_word_emb.weight", source, d)
    made["trg_word_prj.weight"] = made["decoder.trg_word_emb.weight"]
    if not prj:
        add("trg_word_prj.weight", target, d)
    settings = argparse.Namespace(
        **SIZES, src_vocab_size=source, trg_vocab_size=target, dropout=0.1, proj_share_weight=prj,
        embs_share_weight=embs, scale_emb_or_prj=scale, d_word_vec=d, src_pad_idx=1, trg_pad_idx=1,
    )  # fmt: skip
    torch.save({"epoch": 3, "settings": settings, "model": made}, path)
    return made


class ByHand:
    """Their forward pass in NumPy, float64, for one sentence pair without padding."""

    def __init__(self, weights: dict[str, Tensor], *, prj: bool, scale: str) -> None:
        self.w = {name: each.double().numpy() for name, each in weights.items()}
        self.emb, self.prj = prj and scale == "emb", prj and scale == "prj"

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        return scaled * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def embed(self, ids: list[int], table: str, side: str) -> np.ndarray:
        d = SIZES["d_model"]
        x = self.w[table][ids] * (d**0.5 if self.emb else 1.0)
        for position in range(len(ids)):
            for j in range(d):
                angle = position / 10000 ** (2 * (j // 2) / d)
                x[position, j] += np.sin(angle) if j % 2 == 0 else np.cos(angle)
        return self.norm(x, f"{side}.layer_norm")

    def attend(self, x: np.ndarray, memory: np.ndarray, name: str, causal: bool) -> np.ndarray:
        heads, dk, dv = SIZES["n_head"], SIZES["d_k"], SIZES["d_v"]
        out = []
        for head in range(heads):
            q = x @ self.w[f"{name}.w_qs.weight"][head * dk : (head + 1) * dk].T
            k = memory @ self.w[f"{name}.w_ks.weight"][head * dk : (head + 1) * dk].T
            v = memory @ self.w[f"{name}.w_vs.weight"][head * dv : (head + 1) * dv].T
            logits = q @ k.T / dk**0.5
            if causal:
                logits = np.where(np.tril(np.ones(logits.shape)) == 0, -1e9, logits)
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            out.append(weights / weights.sum(-1, keepdims=True) @ v)
        return self.norm(np.concatenate(out, -1) @ self.w[f"{name}.fc.weight"].T + x, f"{name}.layer_norm")

    def feed(self, x: np.ndarray, name: str) -> np.ndarray:
        inner = np.maximum(x @ self.w[f"{name}.w_1.weight"].T + self.w[f"{name}.w_1.bias"], 0)
        return self.norm(inner @ self.w[f"{name}.w_2.weight"].T + self.w[f"{name}.w_2.bias"] + x, f"{name}.layer_norm")

    def logits(self, source: list[int], target: list[int]) -> np.ndarray:
        x = self.embed(source, "encoder.src_word_emb.weight", "encoder")
        for layer in range(SIZES["n_layers"]):
            at = f"encoder.layer_stack.{layer}"
            x = self.feed(self.attend(x, x, f"{at}.slf_attn", False), f"{at}.pos_ffn")
        y = self.embed(target, "decoder.trg_word_emb.weight", "decoder")
        for layer in range(SIZES["n_layers"]):
            at = f"decoder.layer_stack.{layer}"
            y = self.attend(y, y, f"{at}.slf_attn", True)
            y = self.feed(self.attend(y, x, f"{at}.enc_attn", False), f"{at}.pos_ffn")
        found = y @ self.w["trg_word_prj.weight"].T
        return found * SIZES["d_model"] ** -0.5 if self.prj else found


@pytest.mark.parametrize("scale", ["emb", "prj", "none"])
@pytest.mark.parametrize(("prj", "embs"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_checkpoint_gives_the_logits_of_their_formulas(tmp_path: Path, prj: bool, embs: bool, scale: str) -> None:
    path = tmp_path / "model.chkpt"
    sizes = {"source": 11, "target": 11 if embs else 13}
    weights = checkpoint(path, **sizes, prj=prj, embs=embs, scale=scale)
    model = load_quoted(path).double()
    assert not model.training and model.config.attention_dropout == 0.1
    source, target = [[2, 7, 4, 3], [2, 9, 3, 1]], [[2, 5, 6], [2, 8, 10]]
    found = model(torch.tensor(source), torch.tensor(target), source_lengths=[4, 3]).detach().numpy()
    hand = ByHand(weights, prj=prj, scale=scale)
    for item, length in enumerate((4, 3)):
        np.testing.assert_allclose(found[item], hand.logits(source[item][:length], target[item]), rtol=1e-9, atol=1e-9)


def test_their_base_model_has_the_size_it_has_there() -> None:
    config = quoted_config(9521, 9521)
    from regard.models import Transformer

    count = sum(each.numel() for each in Transformer(config, device="meta").parameters())
    layer = 4 * 512 * 512 + 2 * 512
    feed = 2 * 512 * 2048 + 2048 + 512 + 2 * 512
    assert count == 9521 * 512 + 6 * (3 * layer + 2 * feed) + 4 * 512


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layers": 3}, "weights that do not fit its settings"),
        ({"d_k": 6}, "weights that do not fit its settings"),
        ({"d_inner_hid": 10**11}, "weights that do not fit its settings: decoder_layers.0.feed_forward"),
        ({"n_layers": 10**9}, "weights that do not fit its settings: n_layers=1000000000"),
        ({"d_model": "wide"}, "its settings do not describe a model"),
        ({"scale_emb_or_prj": "both"}, "scale must be one of emb, prj, none"),
    ],
)
def test_settings_that_do_not_fit_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "model.chkpt"
    checkpoint(path, source=11, target=11, prj=True, embs=True, scale="prj")
    with torch.serialization.safe_globals([argparse.Namespace]):
        held = torch.load(path, weights_only=True)
    for name, value in change.items():
        setattr(held["settings"], name, value)
    torch.save(held, path)
    with pytest.raises(ValueError, match=message):
        load_quoted(path)


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("it-ran",)


@pytest.mark.parametrize("held", [Runs(), {"model": {}, "settings": Runs()}, {"model": {}}, [1]])
def test_a_checkpoint_that_runs_code_or_is_none_is_refused(tmp_path: Path, held: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(held, tmp_path / "model.chkpt")
    with pytest.raises(ValueError, match="cannot be read as weights alone|is no checkpoint"):
        load_quoted(tmp_path / "model.chkpt")
    assert not (tmp_path / "it-ran").exists()


def data_file(path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], **more: Any) -> None:
    """As preprocess.py writes it: fields of torchtext, each with a vocabulary and a function."""
    module = types.ModuleType("torchtext_like")

    class Vocab:
        pass

    class Field:
        pass

    def unknown() -> int:
        return 0

    for each in (Vocab, Field, unknown):
        each.__module__, each.__qualname__ = "torchtext_like", each.__name__
        setattr(module, each.__name__, each)
    monkeypatch.setitem(sys.modules, "torchtext_like", module)
    vocab, field = Vocab(), Field()
    stoi = collections.defaultdict(unknown, {word: number for number, word in enumerate(words)})
    vocab.__dict__.update(stoi=stoi, itos=words, freqs=collections.Counter(words))
    field.__dict__.update(vocab=vocab, tokenize=unknown, lower=True, pad_token="<blank>")
    fields: Any = field if more.pop("one_field", False) else {"src": field, "trg": field}
    data = {"settings": argparse.Namespace(max_len=100), "vocab": fields, "train": [], **more}
    path.write_bytes(pickle.dumps(data))
    monkeypatch.delitem(sys.modules, "torchtext_like")


@pytest.mark.parametrize("one_field", [False, True])
def test_vocabularies_are_read_without_running_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_field: bool
) -> None:
    """Where its text was split into byte pairs, both languages have one field."""
    monkeypatch.chdir(tmp_path)
    words = ["<unk>", "<blank>", "<s>", "</s>", "a", "man"]
    data_file(tmp_path / "data.pkl", monkeypatch, words, trap=Runs(), one_field=one_field)
    source, target = load_quoted_vocabularies(tmp_path / "data.pkl")
    assert source.words == target.words == words
    assert source.encode(["a", "man", "rides"]) == [2, 4, 5, 0, 3]
    assert target.decode([2, 4, 5, 0, 3]) == ["a", "man", "<unk>"]
    assert not (tmp_path / "it-ran").exists()


OVERSIZED = b"\x80\x04\x8e" + (2**50).to_bytes(8, "little")  # claims to hold so many bytes


@pytest.mark.parametrize(
    "content", [b"", b"no pickle", pickle.dumps({}), pickle.dumps({"vocab": {"src": 1}}), OVERSIZED, None]
)
def test_a_file_without_vocabularies_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any) -> None:
    path = tmp_path / "data.pkl"
    if content is None:
        data_file(path, monkeypatch, ["<unk>", "a"])
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match="data.pkl holds no vocabularies of attention-is-all-you-need-pytorch"):
        load_quoted_vocabularies(path)
