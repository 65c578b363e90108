"""What conversions are given by mistake is refused in their own words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.interop.hub import bert

from regard import interop, models, nn

HEADS = ("q_linear", "k_linear", "v_linear", "out")
SQUARE: dict[str, Any] = {f"{name}.weight": torch.zeros(12, 12) for name in HEADS}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"ignore": 3}, "ignore must be a pattern of names"),
        ({"ignore": [3]}, "ignore must be a pattern of names"),
        ({"layer": "1"}, "layer must be an int, got '1'"),
        ({"layer": -1}, "layer must be at least 0"),
        ({"device": 3.5}, "device must be a torch.device or its name"),
    ],
)
def test_from_hf_names_the_argument(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises((TypeError, ValueError), match=complaint):
        interop.from_hf(bert(), **given)


def test_from_hf_says_what_reads_another_folder_and_that_it_downloads_nothing(tmp_path: Path) -> None:
    interop.save(interop.from_hf(bert()), tmp_path)
    with pytest.raises(ValueError, match=r"interop\.save wrote: read it with regard\.interop\.load"):
        interop.from_hf(tmp_path)
    with pytest.raises(ValueError, match="downloads nothing: give it transformers"):
        interop.from_hf("bert-base-uncased")


def test_folders_that_cannot_be_are_refused(tmp_path: Path) -> None:
    model = models.build("gpt2", device="meta")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; expected a folder"):
        interop.save(model, tmp_path / "file")
    for call in (lambda: interop.save(model, None), lambda: interop.load(None)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="folder must be a path, as text or a pathlib.Path, got None"):
            call()
    with pytest.raises(TypeError, match="stop must be token numbers .*got 3"):
        interop.save(model, tmp_path, stop=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("weights", "heads", "complaint"),
    [
        (SQUARE, 0, "num_heads must be at least 1, got 0"),
        (SQUARE, "3", "num_heads must be an int, got '3'"),
        ({**SQUARE, "out.weight": [1.0]}, 3, "out.weight must be a tensor, got list"),
    ],
)
def test_from_plain_names_what_is_wrong(weights: dict[str, Any], heads: Any, complaint: str) -> None:
    with pytest.raises((TypeError, ValueError), match=complaint):
        interop.from_plain(weights, num_heads=heads)


def test_attention_without_an_output_projection_has_no_counterpart_in_torch() -> None:
    bare = interop.from_hf(bert().bert.encoder.layer[0].attention.self)
    with pytest.raises(ValueError, match="module has no output projection, which torch.nn.MultiheadAttention"):
        interop.to_torch(bare)
    with pytest.raises(TypeError, match="got TransformerEncoderLayer; of a layer of torch's, give its self_attn"):
        interop.from_torch(torch.nn.TransformerEncoderLayer(12, 3, 7))
    with pytest.raises(ValueError, match="module has sinks=True"):
        interop.to_torch(nn.MultiHeadAttention(12, 3, sinks=True))
