"""Draws the pictures of docs/statistics.md: python docs/pictures/make.py"""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.figure import Figure

import regard

WORDS = ["The", "cat", "sat", "on", "the", "mat", "because", "it", "was", "tired"]
HERE = Path(__file__).parent


def example() -> regard.Observation:
    """One causal head that looks mostly at the word before, sometimes at "cat", and at the first word otherwise."""
    torch.manual_seed(4)
    count = len(WORDS)
    i, j = torch.arange(count)[:, None], torch.arange(count)
    logits = 2.2 * (j == i - 1) + 1.6 * (j == 0) + 2.8 * ((j == 1) & (i >= 7)) + 0.5 * torch.randn(count, count)
    keys = torch.eye(count).expand(1, 1, -1, -1)
    want = regard.Want(map=(5, 5), top_k=2, first=2, weights=(slice(None), slice(None)))
    return regard.observe(logits[None, None], keys, keys, mask=regard.masks.causal(), scale=1.0, want=want)


def rows_and_keys(seen: regard.Observation) -> Figure:
    figure = Figure(figsize=(10.4, 6.2), layout="constrained")
    grid = figure.add_gridspec(2, 5, width_ratios=(3.6, 1, 1, 1, 1), height_ratios=(3, 1))
    main = figure.add_subplot(grid[0, 0])
    main.imshow(seen.weights[0, 0], cmap="viridis", vmin=0, aspect="auto")
    main.tick_params(labelbottom=False)
    main.set_yticks(range(len(WORDS)), WORDS)
    main.set_title("weights: one row per query, one column per key")
    beside_it = (
        ("entropy", seen.entropy, 2.3),
        ("max_weight", seen.max_weight, 1.0),
        ("first_mass\n(two keys)", seen.first_mass, 1.0),
        ("lse", seen.lse, 4.5),
    )
    for column, (name, values, most) in enumerate(beside_it, start=1):
        beside = figure.add_subplot(grid[0, column], sharey=main)
        beside.barh(range(len(WORDS)), values[0, 0], color=f"C{column}")
        beside.set_title(name, fontsize=11)
        beside.set_xlim(0, most)
        beside.tick_params(labelleft=False)
    below = figure.add_subplot(grid[1, 0], sharex=main)
    below.bar(range(len(WORDS)), seen.key_mass[0, 0], color="C5")
    below.set_xticks(range(len(WORDS)), WORDS, rotation=90)
    below.set_ylabel("key_mass")
    return figure


def coarser(seen: regard.Observation) -> Figure:
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    axes = figure.subplots(1, 3)
    axes[0].imshow(seen.map[0, 0], cmap="viridis", vmin=0)
    axes[0].set_title("map: 5 × 5 cells")
    axes[0].set_xlabel("keys, two a cell")
    axes[0].set_ylabel("queries, two a cell")
    axes[1].imshow(torch.full((len(WORDS), len(WORDS)), 0.0), cmap="Greys", vmin=0, vmax=1)
    for rank, mark in ((1, "o"), (0, "s")):
        there = seen.top_keys[0, 0, :, rank] >= 0
        rows = torch.arange(len(WORDS))[there]
        axes[1].scatter(
            seen.top_keys[0, 0, there, rank],
            rows,
            s=140 * seen.top_weights[0, 0, there, rank],
            marker=mark,
            label="largest" if rank == 0 else "second",
        )
    axes[1].set_title("top_keys (size: weight)")
    axes[1].set_xlabel("key")
    axes[1].set_ylabel("query")
    axes[1].legend(fontsize=8)
    axes[2].bar(range(5), seen.distance[0, 0, :5])
    axes[2].set_xticks(range(5), ["0", "1", "2–3", "4–7", "8–15"])
    axes[2].set_title("distance: total weight")
    axes[2].set_xlabel("tokens back")
    return figure


if __name__ == "__main__":
    rows_and_keys(example()).savefig(HERE / "rows-and-keys.png", dpi=90)
    coarser(example()).savefig(HERE / "coarser.png", dpi=90)
