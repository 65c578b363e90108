"""Models that call regard as ONNX files and as plain exported programs; what tracing is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
import torch
from torch import nn

from regard import bias, interop, masks, models
from regard.nn import MultiHeadAttention

pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporter, about itself


class Masked(nn.Module):
    def __init__(self, mask: Any, added: Any = None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = MultiHeadAttention(24, 4, **options)
        self.mask, self.added = mask, added

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, mask=self.mask, bias=self.added)


def run(path: Path, given: torch.Tensor) -> torch.Tensor:
    session = ort.InferenceSession(str(path))
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: given.numpy()})[0])


MADE: dict[str, Any] = {
    "grouped, causal": lambda: Masked(masks.causal(), num_kv_heads=2),
    "window, softcap, sinks": lambda: Masked(masks.causal() & masks.window(left=2), softcap=2.0, sinks=True),
    "alibi": lambda: Masked(masks.causal(), bias.alibi(4)),
}


@pytest.mark.parametrize("name", MADE)
def test_an_onnx_file_gives_what_the_model_gives(name: str, tmp_path: Path) -> None:
    model, x = MADE[name]().eval(), torch.randn(2, 5, 24)
    interop.to_onnx(model, (x,), tmp_path / "model.onnx")
    with torch.no_grad():
        torch.testing.assert_close(run(tmp_path / "model.onnx", x), model(x), rtol=0, atol=2e-6)


def test_a_whole_model_and_a_batch_that_varies(tmp_path: Path) -> None:
    sizes = {"vocab_size": 31, "embed_dim": 12, "num_layers": 2, "num_heads": 3, "ff_dim": 7, "max_tokens": 11}
    decoder = models.Decoder(models.config("gpt2", **sizes)).eval()
    tokens = torch.randint(0, 31, (2, 7))
    batch = torch.export.Dim("batch")
    interop.to_onnx(decoder, (tokens,), tmp_path / "gpt2.onnx", dynamic_shapes={"tokens": {0: batch}})
    more = torch.randint(0, 31, (5, 7))
    with torch.no_grad():
        torch.testing.assert_close(run(tmp_path / "gpt2.onnx", more), decoder(more), rtol=0, atol=2e-6)


def test_a_length_that_varies_is_refused_with_the_way_round(tmp_path: Path) -> None:
    model, x = Masked(masks.causal()).eval(), torch.randn(2, 5, 24)
    with pytest.raises(ValueError, match=r"x \(dim 1\) cannot vary.*one file for each length"):
        interop.to_onnx(model, (x,), tmp_path / "m.onnx", dynamic_shapes={"x": {1: torch.export.Dim("token")}})
    assert not (tmp_path / "m.onnx").exists()


def test_a_program_without_our_op() -> None:
    model, x = Masked(masks.causal()).eval(), torch.randn(2, 5, 24)
    with torch.no_grad():
        program = torch.export.export(model, (x,)).run_decompositions(interop.decompositions())
        torch.testing.assert_close(program.module()(x), model(x))
    assert not any("regard" in str(node.target) for node in program.graph.nodes)


def test_tracing_is_refused_with_the_way_round() -> None:
    x = torch.randn(2, 5, 24)
    with pytest.raises(RuntimeError, match="torch.jit.trace cannot record regard's calls.*torch.export.*to_onnx"):
        torch.jit.trace(Masked(masks.causal()), x)


def test_torchs_own_export_of_our_op_says_what_to_use(tmp_path: Path) -> None:
    model = Masked(masks.causal()).eval()
    with pytest.raises(Exception, match=r"use regard\.interop\.to_onnx"):
        torch.onnx.export(model, (torch.randn(1, 5, 24),), str(tmp_path / "x.onnx"), verbose=False)
