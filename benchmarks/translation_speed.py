"""How fast a Transformer trains and translates, next to the design that textbooks and old repositories use.

    REGARD_DATA=multi30k python benchmarks/translation_speed.py --model RUN --out build/speed.json   minutes on a GPU
    REGARD_DATA=multi30k python benchmarks/translation_speed.py --reduced                            a minute on a CPU
    python benchmarks/translation_speed.py --toy --steps 6 --sentences 40                            a rehearsal

Training: the design of attention-is-all-you-need-pytorch, written anew here (matrix products and a softmax of its own,
batches of 256 sentences in any order, float32, no graphs), against `regard train` with the same sizes: plain steps,
then CUDA graphs; target tokens without padding per second, alone on the device, rounds in turn. Translating: one
sentence at a time without a cache, against batches with one; the outputs must be the same. Sentences that are
translated alone are spread evenly over all lengths; their time is compared with that of a sentence of the batches.

On a GPU the bars are 5 and 20 times. On a CPU, where there are no graphs and no bfloat16, nothing is judged, and times
are CPU time of one thread, which other processes do not disturb.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard import train as engine
from regard.models import Transformer
from regard.train._batches import Batch, Corpus, Planned, plan_epoch
from regard.train._build import encode_pairs, model_of
from regard.train._step import Stepper

BARS = {"training": 5.0, "translating": 20.0}
REDUCED: dict[str, Any] = {
    "vocab_size": 2_000,
    "embed_dim": 96,
    "ff_dim": 192,
    "num_layers": 2,
    "num_heads": 4,
    "batch_tokens": 1_500,
}


class Attention(nn.Module):
    """Projections without bias, softmax(qkᵀ/√d) with −1e9 where the mask is 0, dropout, residual and norm inside."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.size = heads, dim // heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.norm, self.dropout, self.weights_dropout = (
            nn.LayerNorm(dim, eps=1e-6),
            nn.Dropout(dropout),
            nn.Dropout(0.1),
        )

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.view(y.shape[0], y.shape[1], self.heads, self.size).transpose(1, 2)

        q, k, v = split(self.query(x)), split(self.key(memory)), split(self.value(memory))
        weights = (q / self.size**0.5) @ k.transpose(2, 3)
        weights = weights.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        weights = self.weights_dropout(F.softmax(weights, dim=-1))
        y = (weights @ v).transpose(1, 2).contiguous().view(x.shape)
        return self.norm(x + self.dropout(self.out(y)))


class FeedForward(nn.Module):
    def __init__(self, dim: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, inner), nn.Linear(inner, dim)
        self.norm, self.dropout = nn.LayerNorm(dim, eps=1e-6), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.dropout(self.down(F.relu(self.up(x)))))


class Plain(nn.Module):
    """The usual design, with the sizes of `settings`."""

    def __init__(self, settings: Any, words: int) -> None:
        super().__init__()
        dim, heads, inner, dropout = settings.embed_dim, settings.num_heads, settings.ff_dim, settings.dropout
        layers = range(settings.num_layers)
        self.embedding, self.dropout = nn.Embedding(words, dim, padding_idx=0), nn.Dropout(dropout)
        self.register_buffer("positions", torch.randn(1, 300, dim))
        self.encoder = nn.ModuleList(
            nn.ModuleList([Attention(dim, heads, dropout), FeedForward(dim, inner, dropout)]) for _ in layers
        )
        self.decoder = nn.ModuleList(
            nn.ModuleList(
                [Attention(dim, heads, dropout), Attention(dim, heads, dropout), FeedForward(dim, inner, dropout)]
            )
            for _ in layers
        )
        self.norms = nn.ModuleList(nn.LayerNorm(dim, eps=1e-6) for _ in range(2))

    def embed(self, tokens: Tensor, norm: nn.Module) -> Tensor:
        return norm(self.dropout(self.embedding(tokens) + self.positions[:, : tokens.shape[1]]))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        seen = (source != 0).unsqueeze(-2)
        length = target.shape[1]
        causal = (1 - torch.triu(torch.ones((1, length, length), device=target.device), diagonal=1)).bool()
        before = (target != 0).unsqueeze(-2) & causal
        x = self.embed(source, self.norms[0])
        for attention, feed in self.encoder:
            x = feed(attention(x, x, seen))
        y = self.embed(target, self.norms[1])
        for attention, cross, feed in self.decoder:
            y = feed(cross(attention(y, y, before), x, seen))
        return F.linear(y, self.embedding.weight) * y.shape[-1] ** -0.5


def by_sentences(corpus: Corpus, count: int, seed: int) -> list[Planned]:
    """Batches of so many sentences in a drawn order, each as wide as its longest."""
    assert corpus.source is not None
    source, target = corpus.source.lengths.tolist(), (corpus.target.lengths - 1).tolist()
    order = torch.randperm(len(target), generator=torch.Generator().manual_seed(seed)).tolist()
    found = []
    for at in range(0, len(order), count):
        rows = order[at : at + count]
        widths = max(source[row] for row in rows), max(target[row] for row in rows)
        found.append(Planned(rows, widths, sum(target[row] for row in rows)))
    return found


class Usual:
    """Their step: Adam, loss over the tokens that are no padding, float32."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.train()
        self.optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9, lr=1e-4)

    def __call__(self, batch: Batch, rate: float) -> None:
        self.optimizer.zero_grad()
        logits = self.model(batch.source, batch.inputs)
        F.cross_entropy(logits.flatten(0, 1), batch.outputs.flatten(), ignore_index=0, label_smoothing=0.1).backward()
        self.optimizer.step()


def tokens_per_second(step: Any, corpus: Corpus, planned: list[Planned], steps: int, device: torch.device) -> float:
    chosen = [planned[at % len(planned)] for at in range(steps)]
    batches = [corpus.take(torch.tensor(each.rows, device=device), each.widths) for each in chosen]
    began = now(device)
    for batch in batches:
        step(batch, 1e-4)
    return sum(each.tokens for each in chosen) / (now(device) - began)


def now(device: torch.device) -> float:
    """Seconds: of the clock, once the device has done its work, or of this process on a CPU."""
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def training(
    settings: Any, data: Any, words: Any, device: torch.device, steps: int, rounds: int, sentences: int
) -> dict[str, Any]:
    corpus = encode_pairs(words, data.train, settings)
    theirs, ours = (
        by_sentences(corpus, sentences, 1),
        plan_epoch(corpus, settings.batch_tokens, seed=1, epoch=0, multiple=settings.round_lengths),
    )
    ours = ours[: max(4, min(len(ours), steps // 3))]  # so that a graph of each shape exists before the clock starts
    corpus = corpus.to(device)
    ways: dict[str, tuple[Any, list[Planned]]] = {
        "usual design": (Usual(Plain(settings, len(words)).to(device)), theirs),
        "regard, plain steps": (Stepper(model_of(settings, len(words), device), settings, device, graphs=False), ours),
    }
    if device.type == "cuda":
        ways["regard, graphs"] = Stepper(model_of(settings, len(words), device), settings, device, graphs=True), ours
    for step, planned in ways.values():
        tokens_per_second(step, corpus, planned, 2 * len(planned) if planned is ours else 8, device)  # warm
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        names = list(ways)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            samples[name].append(tokens_per_second(ways[name][0], corpus, ways[name][1], steps, device))
    middle = {name: statistics.median(each) for name, each in samples.items()}
    ratios = {
        name: statistics.median(a / b for a, b in zip(samples[name], samples["usual design"], strict=True))
        for name in samples
    }
    return {"tokens_per_second": middle, "times the usual design": ratios, "samples": samples}


def translating(model: Transformer, words: Any, lines: list[str], alone: int, rounds: int) -> dict[str, Any]:
    translator = engine.Translator([model], words)
    device = next(model.parameters()).device
    translator(lines[:8], beams=5)
    by_length = sorted(range(len(lines)), key=lambda at: len(lines[at]))
    alone = min(alone, len(lines))
    chosen = [by_length[(2 * at + 1) * len(lines) // (2 * alone)] for at in range(alone)]
    fast, slow = [], []
    for _ in range(rounds):
        began = now(device)
        batched = translator(lines, beams=5, batch_tokens=60_000 if device.type == "cuda" else 6_000)
        between = now(device)
        single = [translator([lines[at]], beams=5, use_cache=False)[0] for at in chosen]
        fast.append((between - began) / len(lines))
        slow.append((now(device) - between) / alone)
    differ = [lines[at] for at, one in zip(chosen, single, strict=True) if batched[at][0].tokens != one[0].tokens]
    return {
        "sentences": len(lines),
        "seconds per sentence": statistics.median(fast),
        "alone without cache": statistics.median(slow),
        "times": statistics.median(b / a for a, b in zip(fast, slow, strict=True)),
        "tokens per translation": statistics.fmean(len(each[0].tokens) for each in batched),
        "alone": alone,
        "same output": alone - len(differ),
        "other output": differ[:5],
        "samples": {"batched": fast, "alone": slow},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.environ.get("REGARD_DATA"))
    parser.add_argument("--toy", action="store_true", help="the generated language and small sizes")
    parser.add_argument("--model", help="folder of a run, for translating; untrained weights otherwise")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--alone", type=int, default=20, help="sentences that are translated one at a time")
    parser.add_argument("--reduced", action="store_true", help="smaller sizes and batches, for a CPU")
    parser.add_argument("--out", help="a JSON file")
    given = parser.parse_args()
    if not given.toy and not given.data:
        sys.exit("translation_speed.py: give --data FOLDER or REGARD_DATA, or --toy")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if given.toy:
        settings, data = engine.toy_settings(), engine.toy(600, 100)
        test = engine.toy(1, given.sentences, seed=5).valid.source
    else:
        smaller = REDUCED if given.reduced else {}
        settings = engine.Settings(lowercase=True, r_drop=0.0, round_lengths=2, attention_dropout=0.0, **smaller)
        data = engine.read_folder(given.data, "en", "de")
        test = engine.read_lines(engine.find(given.data, "test_2016", "en"))
    if given.reduced:
        data = engine.Data(engine.Pairs(*(each[:3_000] for each in data.train)), data.valid)
    words = engine.Words.learn([*data.train.source, *data.train.target], vocab_size=settings.vocab_size, lowercase=True)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu, one thread"}
    if device.type == "cpu":
        torch.set_num_threads(1)
    sentences = 64 if given.reduced or given.toy else 256
    found["training"] = training(settings, data, words, device, given.steps, given.rounds, sentences)
    print(json.dumps({k: v for k, v in found["training"].items() if k != "samples"}, indent=1), flush=True)
    if given.model:
        loaded = engine.Translator.load(given.model)
        model, words = loaded.models[0].float().to(device), loaded.words
    else:
        model = model_of(settings, len(words), device).eval()
        print("no --model: untrained weights write until they are stopped", flush=True)
    found["translating"] = translating(model, words, test[: given.sentences], given.alone, given.rounds)
    print(json.dumps(found["translating"], indent=1), flush=True)
    if device.type == "cuda":
        reached = max(found["training"]["times the usual design"].values()), found["translating"]["times"]
        found["bars"] = {
            name: {"bar": bar, "reached": value, "met": value >= bar}
            for (name, bar), value in zip(BARS.items(), reached, strict=True)
        }
        found["bars"]["translating"]["met"] &= not found["translating"]["other output"]
        print(json.dumps(found["bars"], indent=1), flush=True)
    if given.out:
        Path(given.out).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
