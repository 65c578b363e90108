"""Run by `make dist` in an environment that has nothing but the package: what every user does first works."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import regard
from regard import masks


def main() -> None:
    assert "site-packages" in regard.__file__, regard.__file__
    query, key, value = (torch.randn(1, 4, 7, 16) for _ in range(3))
    seen = regard.observe(query, key, value, mask=masks.causal())
    torch.testing.assert_close(seen.out, regard.attention(query, key, value, mask=masks.causal()))
    module = regard.nn.MultiHeadAttention(32, 4)
    with regard.watch(module) as recording:
        module(torch.randn(1, 5, 32))
    command = Path(sys.executable).with_name("regard")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        recording.to_html(page)
        assert "<html" in page.read_text(encoding="utf-8")
        regard.interop.save(regard.models.Decoder(_small()), Path(folder, "model"))
    for words in (["--version"], ["walk", "E1"], ["info"], ["cost", "gpt2"], ["models"], ["lab", "E3", "--json"]):
        done = subprocess.run([command, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0 and done.stdout, (words, done.stderr)
    done = subprocess.run([command, "look", "minilm"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "pip install transformers" in done.stderr, done.stderr


def _small() -> regard.models.DecoderConfig:
    sizes = {"vocab_size": 31, "embed_dim": 12, "num_layers": 1, "num_heads": 3, "ff_dim": 7, "max_tokens": 11}
    return regard.models.config("gpt2", **sizes)


main()
