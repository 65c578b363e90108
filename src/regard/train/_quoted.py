"""Checkpoints and vocabularies of attention-is-all-you-need-pytorch (github.com/jadore801120), as models of ours.

What its Transformer does differently from the paper: a LayerNorm after the embeddings of encoder and decoder, heads
whose keys and values may have different widths, 0.1 dropout of the weights whatever `-dropout` says, and, where the
output layer is the target's embedding, logits divided by √d_model in place of embeddings multiplied by it ("prj").
"""

from __future__ import annotations

import argparse
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard._checks import check_choice
from regard.models import Transformer, TransformerConfig

# a layer's names there, and here
_SUBLAYERS = {
    "slf_attn.w_qs.weight": "attention.q_proj.weight",
    "slf_attn.w_ks.weight": "attention.k_proj.weight",
    "slf_attn.w_vs.weight": "attention.v_proj.weight",
    "slf_attn.fc.weight": "attention.out_proj.weight",
    "slf_attn.layer_norm": "attention_norm",
    "enc_attn.w_qs.weight": "cross_attention.q_proj.weight",
    "enc_attn.w_ks.weight": "cross_attention.k_proj.weight",
    "enc_attn.w_vs.weight": "cross_attention.v_proj.weight",
    "enc_attn.fc.weight": "cross_attention.out_proj.weight",
    "enc_attn.layer_norm": "cross_attention_norm",
    "pos_ffn.w_1": "feed_forward.up",
    "pos_ffn.w_2": "feed_forward.down",
    "pos_ffn.layer_norm": "feed_forward_norm",
}
_LAYER = re.compile(r"(encoder|decoder)\.layer_stack\.(\d+)\.(.+)")
_SCALES = {"emb": "embedding", "prj": "output", "none": "none"}
BLANK, UNKNOWN, BEGIN, END = "<blank>", "<unk>", "<s>", "</s>"


class Vocabulary(NamedTuple):
    """Words by number, as that repository's data file holds them."""

    words: list[str]
    numbers: dict[str, int]

    def encode(self, words: Sequence[str]) -> list[int]:
        """Numbers of words, between those of `<s>` and `</s>`; a word that is not known is `<unk>`."""
        unknown = self.numbers[UNKNOWN]
        return [self.numbers[BEGIN], *(self.numbers.get(word, unknown) for word in words), self.numbers[END]]

    def decode(self, numbers: Sequence[int]) -> list[str]:
        return [self.words[each] for each in numbers if self.words[each] not in (BLANK, BEGIN, END)]


def quoted_config(
    source_words: int,
    target_words: int,
    *,
    d_model: int = 512,
    d_inner: int = 2048,
    n_layers: int = 6,
    n_head: int = 8,
    d_k: int = 64,
    d_v: int = 64,
    dropout: float = 0.1,
    share_projection: bool = True,
    share_embeddings: bool = True,
    scale: str = "prj",
) -> TransformerConfig:
    """That repository's Transformer as a configuration of ours; its options under its names.

    Args:
        source_words, target_words: sizes of the two vocabularies.
        d_model, d_inner, n_layers, n_head, d_k, d_v, dropout: as there.
        share_projection: `-proj_share_weight`; without it nothing is scaled.
        share_embeddings: `-embs_share_weight`.
        scale: `-scale_emb_or_prj`: "emb", "prj" or "none".
    """
    check_choice("scale", scale, _SCALES)
    if share_embeddings and source_words != target_words:
        raise ValueError(f"shared embeddings need one vocabulary, got {source_words} and {target_words} words")
    return TransformerConfig(
        vocab_size=source_words,
        target_vocab_size=None if share_embeddings else target_words,
        embed_dim=d_model,
        ff_dim=d_inner,
        num_layers=n_layers,
        num_heads=n_head,
        head_dim=d_k,
        value_head_dim=d_v,
        dropout=dropout,
        attention_dropout=0.1,
        tied=share_projection,
        scale=_SCALES[scale] if share_projection else "none",
        embedding_norm=True,
    )


def load_quoted(path: str | Path) -> Transformer:
    """The model of a checkpoint (`model.chkpt`), in evaluation mode. Nothing in the file is run.

    Raises:
        ValueError: the file is no such checkpoint, or its weights do not fit its settings.
    """
    held = _checkpoint(Path(path))
    given = vars(held["settings"])
    try:
        config = quoted_config(
            given["src_vocab_size"],
            given["trg_vocab_size"],
            d_model=given["d_model"],
            d_inner=given["d_inner_hid"],
            n_layers=given["n_layers"],
            n_head=given["n_head"],
            d_k=given["d_k"],
            d_v=given["d_v"],
            dropout=given["dropout"],
            share_projection=given["proj_share_weight"],
            share_embeddings=given["embs_share_weight"],
            scale=given.get("scale_emb_or_prj", "prj"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: its settings do not describe a model: {error}") from None
    state = _renamed(held["model"], config)
    if config.num_layers > len(state):
        raise ValueError(f"{path}: weights that do not fit its settings: n_layers={config.num_layers}")
    # sizes that the file claims are compared with what it holds before memory is taken for them
    wanted = {name: each.shape for name, each in Transformer(config, device="meta").state_dict().items()}
    wrong = sorted(n for n in wanted.keys() | state.keys() if n not in state or wanted.get(n) != state[n].shape)
    if wrong:
        raise ValueError(f"{path}: weights that do not fit its settings: {', '.join(wrong[:4])}")
    model = Transformer(config)
    model.load_state_dict(state)
    return model.eval()


def load_quoted_vocabularies(path: str | Path) -> tuple[Vocabulary, Vocabulary]:
    """Source and target vocabulary of that repository's data file (`-save_data`), without running what it pickles.

    Raises:
        ValueError: the file is damaged, or holds no vocabularies.
    """
    try:
        with Path(path).open("rb") as file:
            held = _Inert(file).load()
        found = []
        fields = held["vocab"]  # one for both languages where its text was split into byte pairs
        for side in ("src", "trg"):
            field = fields[side] if isinstance(fields, dict) else fields
            words = dict(vars(vars(field)["vocab"])["stoi"])
            if not all(isinstance(k, str) and isinstance(v, int) for k, v in words.items()):
                raise ValueError("its words have no numbers")
            if sorted(words.values()) != list(range(len(words))):
                raise ValueError("its numbers are not 0, 1, 2, …")
            missing = [each for each in (BLANK, UNKNOWN, BEGIN, END) if each not in words]
            if missing:
                raise ValueError(f"it lacks {', '.join(missing)}")
            found.append(Vocabulary(sorted(words, key=words.__getitem__), words))
    except (pickle.UnpicklingError, EOFError, LookupError, TypeError, AttributeError, ValueError, ArithmeticError,
            MemoryError) as error:  # fmt: skip
        raise ValueError(f"{path} holds no vocabularies of attention-is-all-you-need-pytorch: {error}") from None
    return found[0], found[1]


def _checkpoint(path: Path) -> dict[str, Any]:
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            held = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).strip().splitlines() or ["it is damaged"]
        raise ValueError(f"{path} cannot be read as weights alone: {reason[0][:200]}") from None
    if not isinstance(held, dict) or not isinstance(held.get("settings"), argparse.Namespace):
        raise ValueError(f"{path} is no checkpoint of attention-is-all-you-need-pytorch: expected model and settings")
    if not isinstance(held.get("model"), dict) or not all(isinstance(x, Tensor) for x in held["model"].values()):
        raise ValueError(f"{path} is no checkpoint of attention-is-all-you-need-pytorch: it holds no weights")
    return held


def _renamed(theirs: dict[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Weights under our names. Tables of positions are computed here, and shared weights are held once."""
    state: dict[str, Tensor] = {}
    for name, weight in theirs.items():
        if layer := _LAYER.fullmatch(name):
            side, number, rest = layer.groups()
            for before, after in _SUBLAYERS.items():
                if rest.startswith(before):
                    rest = after + rest.removeprefix(before)
                    break
            state[f"{side}_layers.{number}.{rest}"] = weight
        elif ".layer_norm." in name:
            side, _, rest = name.split(".")
            state[f"{side}_input_norm.{rest}"] = weight
        elif name.endswith("pos_table"):
            continue
        elif name == "encoder.src_word_emb.weight":
            state["token_embedding.weight" if config.target_vocab_size is None else "source_embedding.weight"] = weight
        elif name == "decoder.trg_word_emb.weight":
            if config.target_vocab_size is not None:
                state["target_embedding.weight"] = weight
        elif name == "trg_word_prj.weight":
            if not config.tied:
                state["head.weight"] = weight
        else:
            state[name] = weight  # which no model of ours has: it is named in the error
    return state


class _Thing:
    """Stands for any object of the file: it keeps what it was given and does nothing."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self.__dict__.update(named)

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.__dict__.update({str(name): value for name, value in part.items()})

    def __call__(self, *given: Any, **named: Any) -> _Thing:
        return self

    def append(self, item: Any) -> None:
        pass

    def extend(self, items: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class _Table(dict[Any, Any]):
    """Stands for every kind of dict; what makes a missing value there is left out."""

    def __init__(self, *given: Any) -> None:
        super().__init__(given[0] if given and isinstance(given[0], dict) else {})

    def __setstate__(self, state: Any) -> None:
        pass


class _Inert(pickle.Unpickler):
    """Reads a pickle's plain data. No class or function that the file names is looked up, so none can run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in {
            ("collections", "defaultdict"),
            ("collections", "OrderedDict"),
            ("collections", "Counter"),
        }:
            return _Table
        return type(name, (_Thing,), {})

    def persistent_load(self, pid: Any) -> Any:
        return _Thing()
