"""Three seeds of the En→De translator, one after the other in one process, in a given time; results as they come.

    REGARD_DATA=multi30k python benchmarks/translator_seeds.py --seconds 190 --out build/seeds       on a GPU
    python benchmarks/translator_seeds.py --data FOLDER --seconds 60 --tiny --out build/tiny         on a CPU

Processes share a GPU by time slices, so several small models gain nothing from training at once: here one process has
the device to itself, every shape of batch is one captured graph, and the graphs serve all seeds (weights, optimizer and
averages are set anew in place). The learning rate falls to 0 with the time that is left. Nothing is chosen on the test.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()

import torch  # noqa: E402

from regard import interop  # noqa: E402
from regard import train as engine  # noqa: E402
from regard.train import _loss  # noqa: E402
from regard.train._average import Average  # noqa: E402
from regard.train._batches import Corpus, plan_epoch  # noqa: E402
from regard.train._build import encode_pairs, model_of  # noqa: E402
from regard.train._step import Stepper  # noqa: E402
from translator import _attention  # noqa: E402

RECIPE: dict[str, Any] = {
    "lowercase": True, "vocab_size": 10_000, "embed_dim": 192, "ff_dim": 384, "num_layers": 4, "num_heads": 6,
    "dropout": 0.3, "attention_dropout": 0.1, "batch_tokens": 7_500, "round_lengths": 2, "warmup": 600,
    "peak_lr": 4e-3, "r_drop": 0.7, "ema_decay": 0.998, "max_tokens": 128,
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 600, "embed_dim": 32, "ff_dim": 64, "num_layers": 1, "num_heads": 2, "batch_tokens": 1_000,
    "warmup": 10, "attention_dropout": 0.0,
}  # fmt: skip


def say(*words: Any) -> None:
    print(f"{time.monotonic() - BEGAN:6.1f} s ", *words, flush=True)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class Seeds:
    """One model, one optimizer and one set of graphs, for one seed after another."""

    def __init__(self, settings: Any, words: Any, corpus: Corpus, device: torch.device, epochs: int) -> None:
        self.settings, self.words, self.device = settings, words, device
        how = {"multiple": settings.round_lengths}
        self.epochs = [plan_epoch(corpus, settings.batch_tokens, seed=1, epoch=n, **how) for n in range(epochs)]
        self.corpus = corpus.to(device)
        self.rows = [[torch.tensor(each.rows, device=device) for each in epoch] for epoch in self.epochs]
        self.model = model_of(settings, len(words), device).train()
        self.stepper = Stepper(self.model, settings, device, graphs=True)
        self.average = Average(self.model, settings)

    def batch(self, epoch: int, at: int) -> Any:
        return self.corpus.take(self.rows[epoch][at], self.epochs[epoch][at].widths)

    def prepare(self) -> int:
        """Run each shape twice: kernel by kernel, then captured."""
        shapes: dict[tuple[Any, ...], tuple[int, int]] = {}
        for number, epoch in enumerate(self.epochs):
            for at, each in enumerate(epoch):
                shapes.setdefault((len(each.rows), each.widths), (number, at))
        for place in shapes.values():
            for _ in range(2 if self.stepper.graphs else 0):
                self.stepper(self.batch(*place), 1e-6)
        wait(self.device)
        return len(shapes)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        torch.manual_seed(seed)
        fresh = model_of(self.settings, len(self.words), self.device)
        for own, new in zip(self.model.parameters(), fresh.parameters(), strict=True):
            own.copy_(new)
        for own, new in zip(self.average.model.parameters(), fresh.parameters(), strict=True):
            own.copy_(new)
        for state in self.stepper.optimizer.state.values():
            for value in state.values():
                value.zero_()

    def train(self, seed: int, seconds: float) -> dict[str, Any]:
        self.reset(seed)
        self.model.train()
        draw = torch.Generator().manual_seed(seed)
        settings, step, tokens, began = self.settings, 0, 0, time.monotonic()
        progress, seen, loss = 0.0, [], None
        while progress < 1.0:
            epoch = int(torch.randint(len(self.epochs), (), generator=draw))
            for at in torch.randperm(len(self.epochs[epoch]), generator=draw).tolist():
                progress = (time.monotonic() - began) / seconds
                if progress >= 1.0:
                    break
                step += 1
                fall = 0.5 * (1 + math.cos(math.pi * progress))
                loss = self.stepper(self.batch(epoch, at), settings.peak_lr * min(1.0, step / settings.warmup) * fall)
                self.average.after_step(step)
                tokens += self.epochs[epoch][at].tokens
                if step % 500 == 0:
                    seen.append(float(loss.nll) / float(loss.tokens))  # also keeps the host close to the device
                    say(f"seed {seed} step {step} loss {seen[-1]:.3f}")
        wait(self.device)
        took = time.monotonic() - began
        return {"seed": seed, "steps": step, "seconds": took, "tokens_per_second": tokens / took, "losses": seen}


def milliseconds(seeds: Seeds, attention: str) -> float:
    """Of a step as a graph, over three shapes."""
    middle = [len(seeds.epochs[0]) // 4 * n for n in (1, 2, 3)]
    with _attention(attention):
        for at in middle * 3:
            seeds.stepper(seeds.batch(0, at), 1e-6)
        wait(seeds.device)
        began = time.monotonic()
        for at in middle * 5:
            seeds.stepper(seeds.batch(0, at), 1e-6)
        wait(seeds.device)
    return 1000 * (time.monotonic() - began) / 15


def check_fused(settings: Any, words: Any, corpus: Corpus, device: torch.device) -> str:
    """Switch the fused loss off where it fails or differs."""
    if device.type != "cuda":
        return "not on a CPU"
    draw = torch.Generator(device=device).manual_seed(1)
    logits = torch.randn(2 * 64, 9, len(words), device=device, generator=draw).mul_(2).bfloat16().requires_grad_()
    outputs = torch.randint(4, len(words), (64, 9), device=device, generator=draw)
    outputs[3, 4:] = 0
    found = []
    try:
        for fused in (True, False):
            _loss.FUSED = fused
            loss = _loss.loss_of(logits, outputs, smoothing=0.1, r_drop=0.7)
            (grad,) = torch.autograd.grad(loss.total, logits)
            found.append((float(loss.total), float(loss.nll), grad.float()))
        (a, n, g), (b, m, h) = found
        off = float((g - h).norm() / h.norm())
        good = abs(a - b) < 1e-3 * abs(b) and abs(n - m) < 1e-3 * abs(m) and off < 0.02
        _loss.FUSED = good
        return f"{'used' if good else 'NOT used'}: loss {a:.4f} and {b:.4f}, gradients differ by {off:.1e}"
    except Exception as error:
        _loss.FUSED = False
        return f"NOT used: {type(error).__name__}: {str(error)[:300]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.environ.get("REGARD_DATA"))
    parser.add_argument("--out", default=os.environ.get("OUT", "build/seeds"))
    parser.add_argument("--seconds", type=float, default=190.0, help="of everything, the start included")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--source", default="en")
    parser.add_argument("--target", default="de")
    parser.add_argument("--r-drop", type=float, default=RECIPE["r_drop"])
    parser.add_argument("--least", type=int, default=4500, help="steps below which R-Drop is left out")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    if not given.data or not Path(given.data).is_dir():
        sys.exit("translator_seeds.py: give --data FOLDER, or REGARD_DATA")
    out = Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = {**RECIPE, **(TINY if given.tiny else {}), "source": given.source, "target": given.target}
    settings = engine.Settings(**{**chosen, "r_drop": given.r_drop})
    data = engine.read_folder(given.data, given.source, given.target)
    test = engine.read_pairs(*(engine.find(given.data, "test_2016", each) for each in (given.source, given.target)))
    if given.tiny:
        data = engine.Data(
            *(engine.Pairs(*(each[:n] for each in pairs)) for n, pairs in ((400, data.train), (20, data.valid)))
        )
        test = engine.Pairs(*(each[:20] for each in test))
    words = engine.Words.learn([*data.train.source, *data.train.target], vocab_size=settings.vocab_size, lowercase=True)
    corpus = encode_pairs(words, data.train, settings)
    say(f"read {len(data.train.source)} pairs, {len(words)} pieces")
    report: dict[str, Any] = {"recipe": chosen, "r_drop": given.r_drop, "device": str(device)}
    if device.type == "cuda":
        report["device"], report["torch"] = torch.cuda.get_device_name(), torch.__version__
    report["fused_loss"] = check_fused(settings, words, corpus, device)
    say("fused loss", report["fused_loss"])
    times: dict[str, float] = {}
    kinds = ("regard", "torch") if device.type == "cuda" else ("regard",)
    for kind in kinds:
        try:
            times[kind] = milliseconds(Seeds(settings, words, corpus, device, 1), kind)
        except Exception as error:
            say(f"{kind}: {type(error).__name__}: {str(error)[:300]}")
        say(f"a step by {kind}'s attention: {times.get(kind, float('nan')):.2f} ms")
    kind = min(times, key=lambda each: times[each] * (0.93 if each == "regard" else 1.0))
    report["milliseconds"], report["attention"] = times, kind
    evaluation = 12.0 if not given.tiny else 8.0
    left = (given.seconds - (time.monotonic() - BEGAN) - 10 - given.seeds * evaluation) / given.seeds
    if settings.r_drop and 1000 * left / times[kind] < given.least and not given.tiny:
        settings = engine.Settings(**{**chosen, "r_drop": 0.0})
        report["r_drop"] = 0.0
        say("too slow for R-Drop: left out")
    results: list[dict[str, Any]] = []
    with _attention(kind):
        seeds = Seeds(settings, words, corpus, device, 1 if given.tiny else 10)
        say(f"{seeds.prepare()} shapes are ready")
        for seed in range(1, given.seeds + 1):
            remaining = given.seconds - (time.monotonic() - BEGAN)
            count = given.seeds - seed + 1
            budget = max(3.0, (remaining - 3) / count - evaluation)
            result = seeds.train(seed, budget)
            began = time.monotonic()
            translator = engine.Translator([seeds.average.model.eval()], words)
            for name, pairs in (("test", test), ("valid", data.valid)):
                found = translator(pairs.source, beams=5, length_penalty=1.0, batch_tokens=60_000)
                lines = [each[0].text for each in found]
                result[name] = engine.bleu(lines, pairs.target, lowercase=True)
                if name == "test":
                    result["chrf"] = engine.scores(lines, pairs.target)[2].score
                    (out / f"seed-{seed}.txt").write_text("\n".join(lines) + "\n")
                say(f"seed {seed}: {result['steps']} steps, {name} BLEU {result[name]:.2f}")
            result["evaluated_in"] = evaluation = time.monotonic() - began
            evaluation += 1.5
            result["parameters"] = sum(each.numel() for each in seeds.model.parameters())
            results.append(result)
            report["seeds"] = results
            report["mean_test"] = statistics.fmean(each["test"] for each in results)
            report["mean_valid"] = statistics.fmean(each["valid"] for each in results)
            (out / "seeds.json").write_text(json.dumps(report, indent=1))
            say(f"mean of {len(results)}: test {report['mean_test']:.2f}, valid {report['mean_valid']:.2f}")
            if seed == 1 or result["valid"] == max(each["valid"] for each in results):
                keep(seeds.average.model, words, settings, out)
    say("done")


def keep(model: Any, words: Any, settings: Any, out: Path) -> None:
    """The best seed by validation, in float16, as one file."""
    folder = out / "best"
    interop.save(copy.deepcopy(model).half(), folder, stop=[3])
    (folder / "tokenizer.json").write_text(words.as_json())
    (folder / "settings.json").write_text(settings.as_json())
    shutil.make_archive(str(out / "best"), "tar", out, "best")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
