"""Draws the pictures of docs/train.md from the folder of a run.

    regard train --toy --out runs/toy
    python docs/pictures/translator.py runs/toy                                              into docs/pictures
    python docs/pictures/translator.py runs/en-de --lines test_2016.en --out build/pictures

translator-alignment.png: which source pieces each target piece attends to, in sentences that were not trained on.
translator-heads.png: every head before and after training, by how spread out its weights are and by its name.
translator-curves.png: loss and BLEU of the run, from its metrics, or with --report those of `translator_seeds.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

import regard
from regard import train
from regard.recording import Recorded
from regard.train._build import model_of
from regard.train._tokens import START, STOP

KINDS = ("encoder", "decoder, itself", "decoder, source")


def alignment(translator: train.Translator, lines: Sequence[str]) -> Figure:
    """One panel per sentence; darker means more weight."""
    figure = Figure(figsize=(4.6 * len(lines), 4.8), layout="constrained")
    for at, line in enumerate(lines):
        found = train.align(translator, line)
        axes = figure.add_subplot(1, len(lines), at + 1)
        axes.imshow(found.weights, cmap="Greys", vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(len(found.source)), found.source, rotation=90)
        axes.set_yticks(range(len(found.target)), found.target)
        axes.set_title(f"{line}\n{found.text}", fontsize=8)
    return figure


def recorded(model: Any, words: train.Words, pairs: Sequence[tuple[str, str]]) -> regard.Recording:
    """The model as it reads sentences and their translations, one at a time: padding would count as queries."""
    device = next(model.parameters()).device
    sources, targets = (words.encode(side) for side in zip(*pairs, strict=True))
    with torch.inference_mode(), regard.watch(model.eval()) as recording:
        for source, target in zip(sources, targets, strict=True):
            model(*(torch.tensor([each], device=device) for each in ([*source, STOP], [START, *target])))
    return recording


def heads(before: regard.Recording, after: regard.Recording) -> Figure:
    """Colour: mean entropy of a head, of the largest possible (dark is sharp); text: its name, where it has one."""
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    panels = figure.subplots(len(KINDS), 2, squeeze=False)
    picture: Any = None
    for column, (when, recording) in enumerate((("before training", before), ("after training", after))):
        for row, kind in enumerate(KINDS):
            layers = dict.fromkeys(call.layer for call in recording.calls if _kind(call) == kind)
            rows = [_means(recording, layer) for layer in layers]
            axes = panels[row][column]
            spreads = [[value for value, _ in each] for each in rows]
            picture = axes.imshow(spreads, cmap="viridis", vmin=0, vmax=1, aspect="auto")
            for layer, each in enumerate(rows):
                for head, (value, name) in enumerate(each):
                    axes.text(
                        head, layer, name, ha="center", va="center", fontsize=7, color="w" if value < 0.6 else "k"
                    )
            axes.set_xticks(range(len(rows[0])))
            axes.set_yticks(range(len(rows)))
            axes.set_title(f"{kind}, {when}", fontsize=9)
            axes.set_ylabel("layer")
    panels[-1][0].set_xlabel("head")
    panels[-1][1].set_xlabel("head")
    figure.colorbar(picture, ax=panels, label="entropy, as a share of the largest possible")
    return figure


def _kind(call: Recorded) -> str:
    if call.kind == "cross" or "cross" in call.path:
        return KINDS[2]
    return KINDS[0] if call.path.startswith("encoder") else KINDS[1]


def _means(recording: regard.Recording, layer: int) -> list[tuple[float, str]]:
    """Of each head: how spread out it is over the sentences, and the name that most of them give it."""
    calls = recording.at(layer)
    described = [row for call in calls for row in recording.described(call)]
    found = []
    for head in calls[0].heads:
        rows = [row for row in described if row["head"] == head]
        names = [row["label"] for row in rows]
        spreads = [row["spread"] for row in rows if row["spread"] is not None]
        found.append((sum(spreads) / max(len(spreads), 1), max(sorted(set(names)), key=names.count)))
    return found


def curves(events: Sequence[dict[str, Any]]) -> Figure:
    """Loss in training and on the validation text, and its BLEU."""
    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, label in (("loss", "training"), ("valid_loss", "validation, averaged weights")):
        left.plot([each["step"] for each in events], [each[name] for each in events], marker=".", label=label)
    left.set_xlabel("step")
    left.set_ylabel("−log P of a token, nats")
    left.legend()
    scored = [each for each in events if "valid_bleu" in each]
    right.plot([each["step"] for each in scored], [each["valid_bleu"] for each in scored], marker=".", color="C2")
    right.set_xlabel("step")
    right.set_ylabel("BLEU on the validation text")
    return figure


def seeds(report: dict[str, Any]) -> Figure:
    """Training losses of teachers and students, which `translator_seeds.py` notes every 250 steps."""
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axes = figure.subplots()
    for who, colour in (("teachers", "C0"), ("students", "C1")):
        for at, each in enumerate(report[who]):
            steps = [min(250 * (n + 1), each["steps"]) for n in range(len(each["losses"]))]
            axes.plot(steps, each["losses"], color=colour, alpha=0.7, label=who if at == 0 else None)
    axes.set_xlabel("step")
    axes.set_ylabel("−log P of a token, nats")
    axes.legend()
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder of a run of regard train, or an unpacked best.tar of translator_seeds.py")
    parser.add_argument("--lines", help="sentences to align, a file; those of the generated language without one")
    parser.add_argument("--count", type=int, default=3, help="how many of them")
    parser.add_argument("--report", help="report.json of translator_seeds.py, for the curves")
    parser.add_argument("--out", default=str(Path(__file__).parent))
    given = parser.parse_args(arguments)
    run, out = Path(given.run), Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    translator = train.Translator.load(run)
    model = translator.models[0].float()
    settings = train.read_settings(run / "settings.json")
    lines = train.read_lines(given.lines) if given.lines else train.toy().valid.source
    fitting = [line for line in lines if len(line.split()) <= 12][: given.count]
    alignment(translator, fitting).savefig(out / "translator-alignment.png", dpi=110)
    read = lines[:40]
    pairs = [(line, each[0].text) for line, each in zip(read, translator(read), strict=True)]
    torch.manual_seed(settings.seed)
    untrained = model_of(settings, model.config.vocab_size)
    before, after = (recorded(each, translator.words, pairs) for each in (untrained, model))
    heads(before, after).savefig(out / "translator-heads.png", dpi=110)
    events = train.read_metrics(run / "metrics.jsonl")
    if given.report:
        figure = seeds(json.loads(Path(given.report).read_text(encoding="utf-8")))
    elif events:
        figure = curves(events)
    else:
        said = f"{run} has no metrics.jsonl, so no curves are drawn; --report draws those of translator_seeds.py\n"
        sys.stdout.write(said)
        return
    figure.savefig(out / "translator-curves.png", dpi=110)


if __name__ == "__main__":
    main()
