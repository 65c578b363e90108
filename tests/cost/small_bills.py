"""Small models of every kind, what goes through them, and what torch says that they cost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from typer.testing import CliRunner

from regard import api, cost, masks, models
from regard.cli import app

WORDS = 37
SIZES: dict[str, Any] = {"embed_dim": 60, "num_layers": 3, "num_heads": 5, "ff_dim": 111}
OFF: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0}
GPT: dict[str, Any] = {"vocab_size": WORDS, "max_tokens": 700, **SIZES, **OFF}
MLA: dict[str, Any] = {"embed_dim": 60, "num_heads": 5, "kv_lora_rank": 23, "nope_dim": 12, "rope_dim": 6}


class Case(NamedTuple):
    config: models.Config
    length: int
    source: int | None
    run: Callable[[Any, int], list[Tensor]]  # everything the model can give, of a batch


def words(batch: int, length: int) -> Tensor:
    return torch.randint(0, WORDS, (batch, length))


def _decoder(config: models.Config, length: int = 63) -> Case:
    return Case(config, length, None, lambda model, batch: [model(words(batch, length))])


def _bert(config: models.Config, length: int = 63) -> Case:
    def run(model: Any, batch: int) -> list[Tensor]:
        states = model(words(batch, length))
        built = {"pooled": config.pooler, "masked-lm": config.masked_lm}  # type: ignore[union-attr]
        return [states, *(model.read(states, head) for head, there in built.items() if there)]

    return Case(config, length, None, run)


def _translator(config: models.Config, source: int = 63, length: int = 35) -> Case:
    return Case(config, length, source, lambda model, batch: [model(words(batch, source), words(batch, length))])


def _vit(**changes: Any) -> Case:
    config = models.config("vit-base", image_size=63, patch_size=9, **SIZES, **changes)
    head = "classes" if config.classes else "pooled"
    return Case(config, 50, None, lambda model, batch: [model(torch.randn(batch, 3, 63, 63), head=head)])


def _whisper() -> Case:
    config = models.config("whisper-tiny", vocab_size=WORDS, mel_bins=7, max_frames=63, max_tokens=35, **SIZES)
    return Case(config, 35, 63, lambda model, batch: [model(torch.randn(batch, 7, 126), words(batch, 35))])


def _latent(**changes: Any) -> Case:
    config = models.config("deepseek-v3-attention", **{"q_lora_rank": 33, "value_head_dim": 11, **MLA, **changes})

    def run(model: Any, batch: int) -> list[Tensor]:
        x = torch.randn(batch, 63, config.embed_dim, dtype=model.out_proj.weight.dtype, requires_grad=True)
        return [model(x, mask=masks.causal())]

    return Case(config, 63, None, run)


CASES: dict[str, Case] = {
    "gpt": _decoder(models.config("gpt2", **GPT)),
    "gpt, untied, plain projections": _decoder(models.config("gpt2", **GPT, tied=False, packed=False)),
    "gpt with rotary positions, packed": _decoder(models.config("gpt2", **GPT, positions="rotary")),
    "llama": _decoder(models.config("llama-3-8b", **GPT | {"num_kv_heads": 1})),
    "llama with wide heads and relu": _decoder(
        models.config("llama-2-7b", **GPT | {"num_kv_heads": 5, "head_dim": 22, "activation": "relu"})
    ),
    "llama with windows in some layers": _decoder(
        models.config("llama-3-8b", **GPT | {"num_kv_heads": 1, "window": 11}, windowed=(True, False, True)), 600
    ),
    "llama with a window": _decoder(models.config("llama-3-8b", **GPT | {"num_kv_heads": 1, "window": 11}), 600),
    "bert": _bert(models.config("bert-base", vocab_size=WORDS, max_tokens=63, **SIZES, **OFF)),
    "bert, masked": _bert(
        models.config("bert-base", vocab_size=WORDS, max_tokens=63, masked_lm=True, token_types=0, **SIZES, **OFF)
    ),
    "vit": _vit(),
    "vit, classes": _vit(pooler=False, classes=11),
    "transformer": _translator(models.config("transformer-base", vocab_size=WORDS, **SIZES, **OFF)),
    "transformer, pre-norm, untied": _translator(
        models.config(
            "transformer-base", vocab_size=WORDS, target_vocab_size=WORDS, norm="pre", tied=False, attention_bias=True,
            decoder_layers=2, **SIZES, **OFF,
        )
    ),
    "gpt, no output layer": _decoder(models.config("gpt2", **GPT, tied=False, head=False)),
    "qwen": _decoder(models.config("llama-3-8b", **GPT | {"num_kv_heads": 5, "qk_norm": True})),
    "gpt, heads normed, packed": _decoder(models.config("gpt2", **GPT, qk_norm=True)),
    "gpt, heads normed and turned, packed": _decoder(models.config("gpt2", **GPT, qk_norm=True, positions="rotary")),
    "gemma": _decoder(
        models.config(
            "llama-2-7b", **GPT | {"num_kv_heads": 5, "head_dim": 22}, norm_plus_one=True, post_norms=True, tied=True,
            activation="gelu_tanh", attention_softcap=5.0, logit_softcap=3.0,
        )
    ),
    "roberta": _bert(models.config("bert-base", vocab_size=WORDS, max_tokens=63, position_offset=2, **SIZES, **OFF)),
    "transformer, other widths and norms": _translator(
        models.config(
            "transformer-base", vocab_size=WORDS, norm="pre", rms_norm=True, gated=True, ff_bias=False, head_dim=14,
            embedding_norm=True, **SIZES, **OFF,
        )
    ),
    "transformer, wide values": _translator(
        models.config("transformer-base", vocab_size=WORDS, head_dim=10, value_head_dim=16, **SIZES, **OFF), length=63
    ),
    "whisper": _whisper(),
    "latent attention": _latent(),
    "latent attention, queries direct": _latent(q_lora_rank=None, value_head_dim=12),
}  # fmt: skip


def bill(case: Case, batch: int, **given: Any) -> cost.Cost:
    return cost.of(
        case.config,
        length=case.length,
        source_length=case.source,
        batch=batch,
        **{"dtype": "float32", "device": "cpu"} | given,
    )


def loss_of(found: list[Tensor]) -> Tensor:
    """Cross entropy where words come out, else a sum, which keeps nothing."""
    total = torch.zeros(())
    for out in found:
        if out.shape[-1] == WORDS:
            total = total + F.cross_entropy(out.flatten(0, 1), words(1, out.shape[0] * out.shape[1])[0])
        else:
            total = total + out.sum()
    return total


@contextlib.contextmanager
def attention_by(backend: str) -> Iterator[None]:
    usual = api.attention

    def named(*given: Any, **keywords: Any) -> Tensor:
        return usual(*given, **keywords | {"backend": backend})

    api.attention = named  # type: ignore[assignment]
    try:
        yield
    finally:
        api.attention = usual


def kept_bytes(model: nn.Module, run: Callable[[], Tensor]) -> int:
    """Bytes of all storages that autograd keeps, each once, without those of the parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, Any] = {}  # holding them: another tensor must not get the same address

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    assert out.requires_grad
    return sum(storage.nbytes() for storage in found.values())


def counted_flops(run: Callable[[], Tensor]) -> tuple[int, int]:
    """What torch counts forward and backward. Of its fused kernels it knows all but the CPU's: that gets their rule."""
    aten = torch.ops.aten
    rules = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_, **__: (
            sdpa_backward_flop_count(g, q, k, v)
        ),
    }
    with FlopCounterMode(display=False, custom_mapping=rules) as forward:
        out = run()
    with FlopCounterMode(display=False, custom_mapping=rules) as backward:
        out.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def keep(patch: pytest.MonkeyPatch, found: cost.Device) -> None:
    """Store what `regard info --measure` would have found on this machine."""
    with patch.context() as here:
        here.setattr(cost, "measure", lambda where="cpu", threads=None: found)
        words = ["info", "--measure", "--threads", str(found.threads)]
        assert CliRunner().invoke(app, words).exit_code == 0
