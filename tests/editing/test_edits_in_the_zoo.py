"""Edits in model types of Hugging Face that attend in many ways: a key that is cut has no weight in any call, and what
heads wrote in the same run, patched in, leaves the output as it was, whatever its layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tests.watching.zoo.feed import runnable
from tests.watching.zoo.run import built, tensors_of

import regard
from regard import edits

TYPES = [
    "bart", "big_bird", "codegen", "convbert", "deberta-v2", "deepseek_v3", "falcon", "fsmt", "funnel", "gemma2",
    "gpt_oss", "hiera", "longt5", "mpt", "prophetnet", "qwen2_5_vl_vision", "segformer",
    "swin", "t5", "vitdet", "whisper", "xlnet",
]  # fmt: skip
WHOLE = regard.Want(weights="all", map=None, top_k=0)


@pytest.mark.filterwarnings("ignore")  # what models warn of when they are made by the dozen
@pytest.mark.parametrize("model_type", TYPES)
@torch.no_grad()
def test_a_model_type_is_edited_whole(model_type: str) -> None:
    transformers.utils.logging.set_verbosity(50)
    model: Any = built(model_type)
    inputs = runnable(model)

    def run() -> list[torch.Tensor]:
        torch.manual_seed(1)
        return tensors_of(model(**inputs))

    expected = run()
    with regard.watch(model, count_padding=True, want=WHOLE, keep=["output", "pattern"]) as plain:
        run()
    with (
        regard.edit(model, edits.cut(keys=0)) as report,
        regard.watch(model, count_padding=True, want=WHOLE) as recording,
    ):
        run()
    assert len(report) == len(recording) == len(plain) > 0 and not recording.missed
    assert all((call.weights[..., 0] == 0).all() for call in recording)
    before, after = plain.calls[0].weights, recording.calls[0].weights  # the first layer reads what it read before
    left = 1 - before[..., :1]
    cut = torch.where(left > 1e-5, before / left.clamp_min(1e-9), 0.0)
    torch.testing.assert_close(after[..., 1:], cut[..., 1:], rtol=1e-4, atol=1e-5)
    for what in ("output", "pattern"):
        with regard.edit(model, edits.patch(plain, what)):
            found = run()
        for one, other in zip(found, expected, strict=True):
            close = 1e-4 * float(other.float().abs().max()) if other.numel() else 0.0
            torch.testing.assert_close(one, other, rtol=1e-4, atol=close)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["longformer", "reformer"])
@torch.no_grad()
def test_a_model_type_that_moves_its_weights_about_is_refused(model_type: str) -> None:
    model: Any = built(model_type)
    inputs = runnable(model)
    with pytest.raises(edits.CannotEdit, match="cannot be edited: .*weights"), regard.edit(model, edits.cut(keys=0)):
        model(**inputs)


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_heads_that_a_model_lays_together_in_groups_are_all_of_its_heads() -> None:
    model: Any = built("jetmoe")
    inputs = runnable(model)
    found = []
    for how in ("sdpa", "eager"):
        model.set_attn_implementation(how)
        with regard.watch(model) as recording, regard.edit(model, edits.ablate("zero"), heads=[0], layers=[0]):
            found.append(tensors_of(model(**inputs))[0])
        heads = model.config.num_attention_heads
        assert heads > 2 and all(call.heads == tuple(range(heads)) for call in recording)
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)
