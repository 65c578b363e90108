"""Sixty model types of Hugging Face under `regard.watch`; `make test-zoo` has all that small configurations build.

Rules 67 and 68: the outputs keep their bits, and every call is recorded, with the numbers of the model's own softmaxes.
"""

from __future__ import annotations

import pytest
import transformers
from tests.watching.zoo.run import looked_at

TYPES = [
    "albert", "bart", "bert", "big_bird", "bigbird_pegasus", "blenderbot", "bloom", "canine", "clip", "codegen",
    "convbert", "ctrl", "deberta", "deberta-v2", "deepseek_v3", "distilbert", "dpr", "electra", "falcon", "flaubert",
    "fsmt", "funnel", "gemma2", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "hiera", "imagegpt",
    "layoutlm", "llama", "longt5", "lxmert", "m2m_100", "mistral", "mixtral", "mpnet", "mpt", "nystromformer", "opt",
    "phi", "prophetnet", "pvt", "qwen2_moe", "qwen2_5_vl_vision", "qwen3", "roformer", "segformer", "siglip",
    "squeezebert", "swin", "t5", "tapas", "vitdet", "wav2vec2", "whisper", "xlm", "xlnet",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # what models warn of when they are made by the dozen
@pytest.mark.parametrize("model_type", TYPES)
def test_a_model_type_is_seen_whole_and_exactly_and_keeps_its_bits(model_type: str) -> None:
    transformers.utils.logging.set_verbosity(50)
    row = looked_at(model_type)
    assert row.problem == ""
    assert row.calls > 0 and row.missed == () and row.unseen == ()
    assert row.inexact == () and row.bitwise


def test_sixty_types_are_looked_at() -> None:
    assert len(set(TYPES)) == 60


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["longformer", "pegasus_x"])
def test_what_cannot_be_read_is_listed_and_nothing_of_it_is_recorded_wrongly(model_type: str) -> None:
    row = looked_at(model_type)
    assert row.problem == "" and row.bitwise
    assert row.missed and row.inexact == ()
