"""A model over two and four processes by its heads gives the logits, gradients and text of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.train.group import together

from regard import models
from regard.models import Decoder, DecoderConfig, Transformer, TransformerConfig
from regard.nn import MultiHeadAttention
from regard.train import tensor_parallel

SIZES: dict[str, Any] = {"vocab_size": 23, "embed_dim": 16, "num_layers": 2, "num_heads": 4, "ff_dim": 24}


def translator() -> Transformer:
    torch.manual_seed(1)
    return Transformer(TransformerConfig(**SIZES, dropout=0.0), dtype=torch.float64)


def writer() -> Decoder:
    torch.manual_seed(1)
    return Decoder(DecoderConfig(**SIZES, num_kv_heads=4, max_tokens=32, dropout=0.0), dtype=torch.float64)


def normed() -> Decoder:
    torch.manual_seed(1)
    config = DecoderConfig(**SIZES, num_kv_heads=4, max_tokens=32, dropout=0.0, qk_norm=True, positions="rotary")
    return Decoder(config, dtype=torch.float64)


def learn(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    reads = (tokens, tokens[:, :-1]) if isinstance(model, Transformer) else (tokens[:, :-1],)
    keywords = {"source_lengths": [7, 4, 6]} if isinstance(model, Transformer) else {}
    logits = model(*reads, **keywords)
    models.label_smoothed_loss(logits, tokens[:, 1:]).backward()
    return logits.detach(), {name: whole(each.grad) for name, each in model.named_parameters()}


def whole(tensor: Any) -> torch.Tensor:
    """A gradient in one piece, whose parts may lie on several processes."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def tokens() -> torch.Tensor:
    return torch.randint(4, 23, (3, 7), generator=torch.Generator().manual_seed(2))


def spread(count: int) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (count,))
    found: list[Any] = []
    for build in (translator, writer, normed):
        model = tensor_parallel(build(), mesh)
        held = sum(getattr(each, "to_local", lambda each=each: each)().numel() for each in model.parameters())
        found.append((learn(model, tokens()), held))
    with torch.no_grad():
        model = tensor_parallel(translator(), mesh).eval()
        how: dict[str, Any] = {"start": 2, "stop": 3, "max_new_tokens": 6, "beams": 3}
        written = [model.generate(tokens(), **how, use_cache=cached) for cached in (True, False)]
    said = []
    for wrong in (
        Transformer(TransformerConfig(**{**SIZES, "num_heads": 1})),
        models.T5(models.T5Config(**SIZES, head_dim=4)),
        torch.nn.ModuleList([MultiHeadAttention(16, 4, sinks=True)]),
    ):
        with pytest.raises(ValueError) as error:
            tensor_parallel(wrong, mesh)
        said.append(str(error.value))
    return [*found, written, said]


@pytest.mark.parametrize("count", [2, 4])
def test_heads_on_several_processes_compute_what_one_computes(count: int) -> None:
    everyone = together(count, spread, count)
    for at, build in enumerate((translator, writer, normed)):
        model = build()
        logits, grads = learn(model, tokens())
        for (found, found_grads), held in (each[at] for each in everyone):
            torch.testing.assert_close(found, logits, rtol=1e-9, atol=1e-10)
            assert found_grads.keys() == grads.keys()
            for name, grad in grads.items():
                torch.testing.assert_close(found_grads[name], grad, rtol=1e-8, atol=1e-10)
            assert held < sum(each.numel() for each in model.parameters())
    wanted = translator().eval().generate(tokens(), start=2, stop=3, max_new_tokens=6, beams=3, use_cache=False)
    for each in everyone:
        for written in each[3]:
            assert [item[0].tokens for item in written] == [item[0].tokens for item in wanted]
        assert f"num_heads=1, which {count} processes cannot share evenly" in each[4][0]
        assert each[4][1].startswith("encoder_bias and decoder_bias hold a column for each head")
        assert each[4][2].startswith("0 has a learned sink for each head")
