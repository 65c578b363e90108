"""Small Hugging Face models, and the same edits made by hand: on the eager logits, and before the output projection."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 35], [8, 9, 7, 9, 3, 2, 38]])
OTHER = torch.tensor([[27, 18, 28, 18, 2, 8, 4], [1, 6, 18, 0, 33, 9, 8]])
LAYERS, HEADS, DIM = 2, 4, 6

LogitsEdit = Callable[[int, Tensor], Tensor]
OutputEdit = Callable[[int, Tensor], Tensor]


def _llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=24, intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=24, intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        max_position_embeddings=64,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def _gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=40, n_embd=24, n_layer=LAYERS, n_head=HEADS, n_positions=64, bos_token_id=0, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


def _bloom() -> Any:
    config = transformers.BloomConfig(
        vocab_size=40, hidden_size=24, n_layer=LAYERS, n_head=HEADS, bos_token_id=0, eos_token_id=1, pad_token_id=2
    )
    return transformers.BloomForCausalLM(config)


MAKE: dict[str, Callable[[], Any]] = {"llama": _llama, "bert": _bert, "gpt2": _gpt2, "bloom": _bloom}
# (model, implementation): Bloom writes its attention out, whatever it is told
CASES = [(name, how) for name in ("llama", "bert", "gpt2") for how in ("sdpa", "eager")] + [("bloom", "eager")]


@lru_cache(None)
def model_of(name: str) -> Any:
    torch.manual_seed(0)
    transformers.utils.logging.set_verbosity_error()
    model = MAKE[name]().double().eval()
    for weight in model.parameters():
        weight.data.normal_(0.0, 0.3)  # initial weights are so small that all attention is uniform
    return model


def run(model: Any, ids: Tensor = IDS, how: str = "sdpa") -> Tensor:
    if "bloom" not in type(model).__name__.lower():
        model.set_attn_implementation(how)
    logits: Tensor = model(input_ids=ids).logits
    return logits


def _projections(model: Any) -> list[Any]:
    ends = ("o_proj", "attention.output.dense", "attn.c_proj", "self_attention.dense")
    return [module for name, module in model.named_modules() if name.endswith(ends)]


@contextlib.contextmanager
def edited_by_hand(
    model: Any, logits_edit: LogitsEdit | None = None, output_edit: OutputEdit | None = None
) -> Iterator[dict[int, Tensor]]:
    """Every softmax of [batch, head, query, key] takes edited logits; yields the weights, layer by layer."""
    real, weights = F.softmax, {}

    def softmax(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer = len(weights) % LAYERS
        out = real(logits if logits_edit is None else logits_edit(layer, logits), -1)
        weights[len(weights)] = out = out.nan_to_num(0.0)
        return out

    def before(layer: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...]) -> Any:
            if output_edit is None:
                return None
            apart = args[0].unflatten(-1, (HEADS, DIM)).transpose(1, 2)
            return (output_edit(layer, apart).transpose(1, 2).flatten(2), *args[1:])

        return hook

    handles = [module.register_forward_pre_hook(before(n)) for n, module in enumerate(_projections(model))]
    assert len(handles) == LAYERS
    try:
        with mock.patch.object(torch.nn.functional, "softmax", softmax):
            yield weights
    finally:
        for handle in handles:
            handle.remove()


def by_hand(
    model: Any, ids: Tensor = IDS, logits_edit: LogitsEdit | None = None, output_edit: OutputEdit | None = None
) -> Tensor:
    with edited_by_hand(model, logits_edit, output_edit):
        return run(model, ids, "eager")


def only(heads: list[int], layers: list[int], edit: Callable[[Tensor], Tensor]) -> Callable[[int, Tensor], Tensor]:
    """An edit [batch, head, …] for some heads of some layers."""

    def apply(layer: int, x: Tensor) -> Tensor:
        if layer not in layers:
            return x
        chosen = torch.zeros(x.shape[1], dtype=torch.bool)
        chosen[heads] = True
        return torch.where(chosen[None, :, None, None], edit(x), x)

    return apply
