"""Train the translators that docs/train.md speaks of, on one GPU, in one go, and measure them.

    REGARD_DATA=multi30k python benchmarks/translator.py --out build/translator
    python benchmarks/translator.py --data FOLDER --out build/tiny --tiny      # a rehearsal, minutes on a CPU

Two stages. First several teachers are trained next to each other (R-Drop, one seed each); together they translate the
training sources once more and say how sure they are of each target token. Then students learn from the real and the
distilled sentences: two recipes, three seeds each, and three De→En models by the first stage's recipe. Everything is
chosen on the validation text (recipe, checkpoint, length penalty); the test is only read to be reported.

Each model is a process of its own. Processes share a GPU by time slices: on an H200 without MPS, nine at once made a
ninth of the steps each, so this needs an hour there and not minutes; `translator_seeds.py` trains seeds one after the
other in one process instead. The out folder gets at most eight files: all numbers
(`translator.json`), logs and translations (`texts.tar.gz`), and models (`NAME.tar`, weights in float16; unpack one to
use it with `regard translate`): the best recipe's three students, the best De→En and the best teacher, or with
`--keep teachers` the teachers, from which a later run goes on (`--teachers-from`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

PENALTIES = (1.0, 0.6, 1.4)
RECIPE: dict[str, Any] = {
    "lowercase": True, "vocab_size": 10_000, "embed_dim": 192, "ff_dim": 384, "num_layers": 4, "num_heads": 6,
    "dropout": 0.3, "batch_tokens": 7_500, "round_lengths": 2, "steps": 20_000, "warmup": 800, "peak_lr": 5e-3,
    "r_drop": 1.0, "ema_decay": 0.999, "validate_every": 250, "bleu_every": 2,
    "save_every": 1_000_000, "max_tokens": 128,
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 600, "embed_dim": 32, "ff_dim": 64, "num_layers": 1, "num_heads": 2, "batch_tokens": 1_000,
    "steps": 25, "warmup": 10, "validate_every": 10, "bleu_every": 1,
}  # fmt: skip


# -- what a process does


def train(job: dict[str, Any]) -> dict[str, Any]:
    import torch

    from regard import train as engine
    from regard.train._batches import Soft, join
    from regard.train._build import encode_pairs

    settings = engine.Settings(**job["settings"])
    data = _data(job, settings.source, settings.target)
    words = engine.Words.load(job["words"])
    scratch = Path(job["scratch"])
    trainer = engine.translation_trainer(settings, data, scratch, words=words, device=job["device"])
    if job.get("lessons"):
        from safetensors.torch import load_file

        real, made = [], []
        soft: list[dict[str, Any]] = []
        for path in sorted(Path(job["lessons"]).glob("*.json")):
            lesson = json.loads(path.read_text())
            real.append(encode_pairs(words, engine.Pairs(*lesson["real"]), settings))
            made.append(encode_pairs(words, engine.Pairs(*lesson["made"]), settings))
            soft.append(load_file(path.with_suffix(".safetensors")))
        if settings.distill:
            real = [each._replace(soft=Soft(s["real.tokens"].long(), s["real.weights"].float()))
                    for each, s in zip(real, soft, strict=True)]  # fmt: skip
            made = [each._replace(soft=Soft(s["made.tokens"].long(), s["made.weights"].float()))
                    for each, s in zip(made, soft, strict=True)]  # fmt: skip
        corpus = join([*real, *made]).to(job["device"])
        trainer.encode = lambda epoch: corpus
    trainer.score = lambda model: engine.bleu(
        _translated(engine.Translator([model], words), data.valid.source, 1.0, beams=1),
        data.valid.target,
        lowercase=True,
    )
    trainer.start()
    curve: list[dict[str, Any]] = []

    def report(event: dict[str, Any]) -> None:
        if "loss" in event:
            curve.append(event)
            print(json.dumps({key: round(value, 4) for key, value in event.items()}), flush=True)

    with _attention(job["attention"]):
        trainer.run(report)
    del trainer
    model = engine.Translator.load(scratch).models[0].half().float().to(job["device"])  # as it is shipped
    keep = Path(job["out"])
    from regard import interop

    interop.save(model.half(), keep, stop=[3])
    shutil.copy(scratch / "tokenizer.json", keep / "tokenizer.json")
    shutil.copy(scratch / "settings.json", keep / "settings.json")
    model = model.float().eval()
    memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    about = {"parameters": sum(each.numel() for each in model.parameters()), "curve": curve, "gigabytes": memory}
    return evaluate(engine.Translator([model], words), job, data, about)


def evaluate(translator: Any, job: dict[str, Any], data: Any, about: dict[str, Any]) -> dict[str, Any]:
    """BLEU on the validation text and the test by length penalty, both lower-cased, beam 5; written as it comes."""
    from regard import train as engine

    source, target = job["settings"]["source"], job["settings"]["target"]
    test = engine.read_pairs(*(engine.find(job["data"], "test_2016", each) for each in (source, target)))
    if job["limit"]:
        test = engine.Pairs(*(each[: job["limit"]] for each in test))
    found: dict[str, Any] = {**about, "valid": {}, "test": {}, "chrf": {}}
    began = time.monotonic()
    for alpha in job["penalties"]:
        for name, pairs in (("valid", data.valid), ("test", test)):
            with _attention(job["attention"]):
                out = _translated(translator, pairs.source, alpha)
            found[name][str(alpha)] = engine.bleu(out, pairs.target, lowercase=True)
            if name == "test":
                found["chrf"][str(alpha)] = engine.scores(out, pairs.target)[2].score
                found["examples"] = list(zip(pairs.source[:8], pairs.target[:8], out[:8], strict=True))
                found.setdefault("translated", out)
        found["evaluated_in"] = time.monotonic() - began
        Path(job["result"]).write_text(json.dumps(found))
    return found


def _translated(translator: Any, lines: list[str], alpha: float, beams: int = 5) -> list[str]:
    try:
        found = translator(lines, beams=beams, length_penalty=alpha, batch_tokens=60_000)
    except Exception:  # a cache that a device cannot run must not cost the whole run; it is reported
        print("with a cache: " + traceback.format_exc(limit=4), flush=True)
        found = translator(lines, beams=beams, length_penalty=alpha, batch_tokens=20_000, use_cache=False)
    return [each[0].text for each in found]


def together(job: dict[str, Any]) -> dict[str, Any]:
    """The teachers as an ensemble."""
    translator = _ensemble(job)
    return evaluate(translator, job, _data(job, job["settings"]["source"], job["settings"]["target"]), {})


def teach(job: dict[str, Any]) -> dict[str, Any]:
    """One share of the training text, as the teachers translate it and how sure they are."""
    import torch
    from safetensors.torch import save_file

    from regard import train as engine
    from regard.train._build import encode_pairs

    settings = engine.Settings(**job["settings"])
    data = _data(job, settings.source, settings.target)
    part, parts = job["share"]
    real = engine.Pairs(*(each[part::parts] for each in data.train))
    teachers = _ensemble(job)
    began = time.monotonic()
    how: dict[str, Any] = {"seconds": job["seconds"], "beams": job["beams"]}
    with _attention(job["attention"]):
        try:
            made = engine.distilled(teachers, real, **how)
        except Exception:
            print("with a cache: " + traceback.format_exc(limit=4), flush=True)
            made = engine.distilled(teachers, real, use_cache=False, batch_tokens=15_000, **how)
    translated = time.monotonic() - began
    tensors = {}
    for name, pairs in (("real", real), ("made", made)):
        corpus = encode_pairs(teachers.words, pairs, settings).to(job["device"])
        with _attention(job["attention"]):
            soft = engine.soft_targets(teachers.models, corpus, k=16, half=job["device"] == "cuda")
        tensors[f"{name}.tokens"], tensors[f"{name}.weights"] = soft.tokens.int().cpu(), soft.weights.half().cpu()
    path = Path(job["lessons"]) / f"{part}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path.with_suffix(".safetensors"))
    path.write_text(json.dumps({"real": real, "made": made}))
    changed = statistics.fmean(a != b for a, b in zip(made.target, real.target, strict=False)) if made.target else 0.0
    seconds = {"translated_in": translated, "taught_in": time.monotonic() - began}
    return {"sentences": len(made.source), "of": len(real.source), "changed": changed, **seconds,
            "gigabytes": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None}  # fmt: skip


def probe(job: dict[str, Any]) -> dict[str, Any]:
    """Whether steps run as CUDA graphs, give the same losses so, and how long a step takes."""
    import torch

    from regard import train as engine
    from regard.train._batches import plan_epoch
    from regard.train._build import encode_pairs
    from regard.train._step import Stepper

    device = torch.device(job["device"])
    found: dict[str, Any] = {}
    for graphs, dropout in ((job["graphs"], 0.0), (job["graphs"], job["settings"]["dropout"])):
        weights = {"dropout": dropout, "attention_dropout": job["settings"]["attention_dropout"] if dropout else 0.0}
        settings = engine.Settings(**{**job["settings"], **weights})
        data = _data(job, settings.source, settings.target)
        words = engine.Words.load(job["words"])
        torch.manual_seed(1)
        from regard.train._build import model_of

        model = model_of(settings, len(words), device).train()
        corpus = encode_pairs(words, engine.Pairs(*(each[:6000] for each in data.train)), settings)
        planned = plan_epoch(corpus, settings.batch_tokens, seed=1, epoch=0, multiple=settings.round_lengths)
        corpus = corpus.to(device)
        middle = sorted(planned, key=lambda each: each.widths)
        chosen = [middle[len(middle) // 4], middle[len(middle) // 2], middle[3 * len(middle) // 4]]
        batches = [corpus.take(torch.tensor(each.rows, device=device), each.widths) for each in chosen]
        stepper = Stepper(model, settings, device, graphs=graphs)
        with _attention(job["attention"]):
            losses = [float(stepper(batches[at % 3], 1e-3).total) for at in range(12)]
            _wait(device)
            began = time.monotonic()
            for at in range(job["steps"]):
                stepper(batches[at % 3], 1e-3)
            _wait(device)
        found["losses" if dropout == 0.0 else "noisy"] = losses
        found["milliseconds"] = 1000 * (time.monotonic() - began) / job["steps"]
    return found


def _wait(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize()


def _data(job: dict[str, Any], source: str, target: str) -> Any:
    from regard import train as engine

    data = engine.read_folder(job["data"], source, target)
    if not job["limit"]:
        return data
    cut = job["limit"]
    return engine.Data(*(engine.Pairs(*(each[: cut * times] for each in pairs)) for times, pairs in
                         ((10, data.train), (1, data.valid))))  # fmt: skip


def _ensemble(job: dict[str, Any]) -> Any:
    import torch

    from regard import train as engine

    translator = engine.Translator.load(*job["teachers"])
    models = [each.to(job["device"], torch.float32) for each in translator.models]
    return engine.Translator(models, translator.words)


@contextlib.contextmanager
def _attention(kind: str) -> Any:
    """`torch` puts torch's own function in the place of `regard.attention` while training: a yardstick."""
    if kind == "regard":
        yield
        return
    import torch.nn.functional as F

    from regard import api

    own = api.attention

    def plain(query: Any, key: Any, value: Any, *, mask: Any = None, bias: Any = None, dropout: float = 0.0,
              query_offset: Any = None, **rest: Any) -> Any:  # fmt: skip
        if bias is not None or any(each is not None for each in rest.values()):
            return own(query, key, value, mask=mask, bias=bias, dropout=dropout, query_offset=query_offset, **rest)
        queries, keys = query.shape[2], key.shape[2]
        if mask is not None and mask.structure[0] == "causal" and queries == keys and query_offset is None:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        keep = None if mask is None else mask.dense(queries, keys, query_offset=query_offset, device=query.device)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=keep, dropout_p=dropout)

    api.attention = plain
    try:
        yield
    finally:
        api.attention = own


# -- what the parent does


class Runner:
    """Starts processes, waits for them, and never longer than until the deadline."""

    def __init__(self, out: Path, scratch: Path, deadline: float) -> None:
        self.out, self.scratch, self.deadline = out, scratch, deadline
        self.log: dict[str, Any] = {}

    def start(self, name: str, job: dict[str, Any]) -> tuple[str, subprocess.Popen[bytes]]:
        folder = self.scratch / name
        folder.mkdir(parents=True, exist_ok=True)
        job = {**job, "scratch": str(folder), "out": str(self.out / name), "result": str(folder / "result.json")}
        (folder / "job.json").write_text(json.dumps(job))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"}
        with (folder / "log.txt").open("wb") as log:
            command = [sys.executable, __file__, "--job", str(folder / "job.json")]
            return name, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def wait(self, started: list[tuple[str, subprocess.Popen[bytes]]], until: float | None = None) -> dict[str, Any]:
        end = min(self.deadline, until or self.deadline)
        found = {}
        for name, process in started:
            try:
                process.wait(timeout=max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            result, log = self.scratch / name / "result.json", self.scratch / name / "log.txt"
            tail = log.read_text(errors="replace")[-1500:]
            found[name] = json.loads(result.read_text()) if result.is_file() else {"failed": tail}
            if "failed" in found[name]:
                print(f"{name} failed: {tail}", flush=True)
        return found

    def run(self, jobs: dict[str, dict[str, Any]], until: float | None = None) -> dict[str, Any]:
        return self.wait([self.start(name, job) for name, job in jobs.items()], until)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.environ.get("REGARD_DATA"), help="folder with train, val and test_2016")
    parser.add_argument("--only", choices=["en-de", "de-en"], help="one direction; both by default")
    parser.add_argument("--teachers-from", help="a folder that an earlier run wrote: no teachers are trained")
    parser.add_argument("--out", default=os.environ.get("OUT", "build/translator"))
    parser.add_argument("--minutes", type=float, default=8.7, help="of everything")
    parser.add_argument("--teachers", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=float, default=2.1, help="minutes that the teachers train")
    parser.add_argument("--keep", choices=["best", "teachers"], default="best", help="which models to pack")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        _work(Path(given.job))
        return
    if not given.data or not Path(given.data).is_dir():
        sys.exit("translator.py: give --data FOLDER, or REGARD_DATA, with train.en, train.de, val.*, test_2016*")
    _drive(given)


def _work(path: Path) -> None:
    job = json.loads(path.read_text())
    if job["device"] == "cpu":
        import torch

        torch.set_num_threads(1)
    kinds = {"train": train, "teach": teach, "together": together, "probe": probe}
    result = kinds[job["kind"]](job)
    Path(job["result"]).write_text(json.dumps(result))


def _drive(given: argparse.Namespace) -> None:
    import torch

    from regard import train as engine

    began = time.monotonic()
    out = Path(given.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        runner = Runner(scratch / "models", scratch, began + 60 * given.minutes - 8)
        settings = {**RECIPE, **(TINY if given.tiny else {})}
        limit = 40 if given.tiny else 0
        common: dict[str, Any] = {
            "data": str(Path(given.data).absolute()), "device": "cuda" if cuda else "cpu", "limit": limit,
            "words": str(scratch / "tokenizer.json"), "attention": "regard", "penalties": PENALTIES,
        }  # fmt: skip
        both = {"en-de": {"source": "en", "target": "de"}, "de-en": {"source": "de", "target": "en"}}
        text = _data(common, "en", "de").train
        words = engine.Words.learn([*text.source, *text.target], vocab_size=settings["vocab_size"], lowercase=True)
        Path(common["words"]).write_text(words.as_json())
        report: dict[str, Any] = {"device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__}

        def note(**found: Any) -> None:
            report.update(found, seconds=time.monotonic() - began)
            (out / "translator.json").write_text(json.dumps(report, indent=1))

        note(recipe=settings, vocabulary=len(words))
        how = _choose(runner, common, {**settings, **both["en-de"]}, cuda, given.tiny)
        note(probes=how.pop("probes"), chosen=how)
        print(f"{time.monotonic() - began:.0f} s: steps run by {how}", flush=True)
        common["attention"] = how["attention"]
        settings |= {"graphs": how["graphs"], "attention_dropout": how["attention_dropout"]}

        def job(kind: str, direction: str, seed: int, **more: Any) -> dict[str, Any]:
            changes = more.pop("settings", {})
            return {
                **common,
                "kind": kind,
                "settings": {**settings, **both[direction], "seed": seed, **changes},
                **more,
            }

        taught: dict[str, Any] = {}
        if given.only != "de-en" and not given.teachers_from:
            jobs = {
                f"teacher-{seed}": job("train", "en-de", seed, penalties=[1.0],
                                       settings={**changes, "minutes": given.first})
                for seed, changes in enumerate(_variety(given.teachers, given.seeds), 1)
            }  # fmt: skip
            taught = runner.run(jobs, until=time.monotonic() + 60 * given.first + (80 if cuda else 300))
            note(teachers=_short(taught), recipe_1=_summary(taught, list(taught)[: given.seeds]))
            print(f"{time.monotonic() - began:.0f} s: teachers {report['recipe_1']}", flush=True)
        where = Path(given.teachers_from).absolute() if given.teachers_from else runner.out
        for packed in sorted(where.glob("teacher-*.tar")):
            shutil.unpack_archive(packed, scratch / "models", filter="data")
            where = runner.out
        teachers = [str(each.parent) for each in sorted(where.glob("teacher-*/config.json"))]
        started, lessons = [], scratch / "lessons"
        if teachers and given.only != "de-en":
            shares = 2 if given.tiny else 6
            jobs = {
                f"lesson-{part}": job("teach", "en-de", 1, teachers=teachers, share=[part, shares],
                                      lessons=str(lessons), seconds=55.0, beams=5)
                for part in range(shares)
            }  # fmt: skip
            found = runner.run(jobs, until=time.monotonic() + (100 if cuda else 300))
            note(lessons=found)
            print(f"{time.monotonic() - began:.0f} s: lessons {_short(found)}", flush=True)
        # students and De→En share what is left, less the time that starting and evaluating take
        left = max((runner.deadline - time.monotonic() - (80 if cuda else 60)) / 60, 0.3)
        second = {}
        for seed in range(1, given.seeds + 1):
            for recipe, changes in (("both", {"distill": 0.7}), ("sequence", {"distill": 0.0})):
                if any(lessons.glob("*.json")):
                    second[f"student-{recipe}-{seed}"] = job(
                        "train", "en-de", 100 + seed, lessons=str(lessons), settings={**changes, "minutes": left}
                    )
            if given.only != "en-de":
                second[f"de-en-{seed}"] = job("train", "de-en", 200 + seed, settings={"minutes": left})
        started += [runner.start(name, each) for name, each in second.items()]
        if teachers and given.only != "de-en":
            started.append(runner.start("ensemble", job("together", "en-de", 1, teachers=teachers, penalties=[1.0])))
        found = runner.wait(started)
        note(students=_short(found))
        tables = {
            name: _summary(found, [each for each in found if each.startswith(name)])
            for name in ("student-both", "student-sequence", "de-en")
        }
        note(summary={"teacher": report.get("recipe_1"), **tables}, ensemble=found.get("ensemble", {}).get("test"))
        _pack(out, scratch, {**taught, **found}, _kept(given.keep, {**taught, **found}, tables))
        print(json.dumps(report["summary"], indent=1), f"ensemble: {report['ensemble']}", sep="\n", flush=True)
        print(f"{time.monotonic() - began:.0f} s in all", flush=True)


def _variety(count: int, seeds: int) -> list[dict[str, Any]]:
    """What each teacher changes: the first ones nothing, the others a little, which an ensemble gains from."""
    others: list[dict[str, Any]] = [{"r_drop": 2.0}, {"r_drop": 0.5, "peak_lr": 3e-3}, {"r_drop": 2.0, "peak_lr": 3e-3}]
    return [{} if at < seeds else others[(at - seeds) % len(others)] for at in range(count)]


def _choose(runner: Runner, common: dict[str, Any], settings: dict[str, Any], cuda: bool, tiny: bool) -> dict[str, Any]:
    """How steps run: the fastest way that gives the losses of plain steps."""
    ways: dict[str, dict[str, Any]] = {
        "plain": {"graphs": False, "attention": "regard", "attention_dropout": 0.0},
        "graphs": {"graphs": cuda, "attention": "regard", "attention_dropout": 0.0},
        "graphs, attention dropout": {"graphs": cuda, "attention": "regard", "attention_dropout": 0.1},
        "torch's attention": {"graphs": cuda, "attention": "torch", "attention_dropout": 0.1},
    }
    jobs = {
        f"probe-{at}": {**common, "kind": "probe",
                        "settings": {**settings, "attention_dropout": way["attention_dropout"]},
                        "graphs": way["graphs"], "attention": way["attention"], "steps": 3 if tiny else 60}
        for at, way in enumerate(ways.values())
    }  # fmt: skip
    if tiny:
        jobs.pop("probe-2")  # slow on a CPU
    found = runner.run(jobs, until=time.monotonic() + (75 if cuda else 300))
    probes = {name: found.get(f"probe-{at}", {"failed": "left out"}) for at, name in enumerate(ways)}
    wanted = probes["plain"].get("losses") or probes["torch's attention"].get("losses")
    able = {}
    for name, way in ways.items():
        seen = probes[name]
        if "losses" not in seen or wanted is None:
            continue
        same = all(abs(a - b) <= 0.02 * abs(b) for a, b in zip(seen["losses"], wanted, strict=True))
        seen["same"] = same
        if same:
            # attention dropout is worth a little time
            able[name] = seen["milliseconds"] * (0.8 if way["attention_dropout"] and cuda else 1.0)
    best = min(able, key=lambda name: able[name]) if able else "plain"
    if cuda and "graphs, attention dropout" in able and able["graphs, attention dropout"] <= 1.25 * able[best]:
        best = "graphs, attention dropout"  # ours, where it is near
    return {"way": best, **ways[best], "probes": probes}


def _summary(found: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Means over seeds; the length penalty is the validation text's choice."""
    runs = [found[name] for name in names if "failed" not in found.get(name, {"failed": ""})]
    if not runs:
        return {"seeds": 0}
    shared = [each for each in runs[0]["valid"] if all(each in run["test"] for run in runs)]
    if not shared:
        return {"seeds": 0}
    alpha = max(shared, key=lambda each: statistics.fmean(run["valid"][each] for run in runs))
    return {
        "seeds": len(runs), "length_penalty": alpha,
        "valid": statistics.fmean(run["valid"][alpha] for run in runs),
        "test": statistics.fmean(run["test"][alpha] for run in runs),
        "test_each": [round(run["test"][alpha], 2) for run in runs],
        "chrf": statistics.fmean(run["chrf"][alpha] for run in runs),
        "parameters": runs[0]["parameters"],
        "steps": [run["curve"][-1]["step"] for run in runs],
        "tokens_per_second": [round(run["curve"][-1]["tokens_per_second"]) for run in runs],
    }  # fmt: skip


def _short(found: dict[str, Any]) -> dict[str, Any]:
    return {name: {key: value for key, value in run.items() if key != "translated"} for name, run in found.items()}


def _kept(keep: str, found: dict[str, Any], tables: dict[str, Any]) -> list[str]:
    """The models that are packed: best on the validation text."""

    def valid(name: str) -> float:
        return max(found[name].get("valid", {}).values(), default=-1.0)

    teachers = sorted((name for name in found if name.startswith("teacher")), key=valid, reverse=True)
    if keep == "teachers":
        return teachers[:6]
    recipe = max(("student-both", "student-sequence"), key=lambda name: tables[name].get("valid", -1.0))
    others = sorted((name for name in found if name.startswith("de-en")), key=valid, reverse=True)
    students = [name for name in found if name.startswith(recipe)][:3]
    return [*students, *others[: max(1, 4 - len(students))], *teachers[:1]]


def _pack(out: Path, scratch: Path, found: dict[str, Any], kept: list[str]) -> None:
    texts = scratch / "texts"
    texts.mkdir()
    for name, run in found.items():
        if "translated" in run:
            (texts / f"{name}.txt").write_text("\n".join(run["translated"]) + "\n")
    for path in scratch.glob("*/log.txt"):
        (texts / f"{path.parent.name}.log").write_text(path.read_text(errors="replace")[-20_000:])
    shutil.make_archive(str(out / "texts"), "gztar", texts)
    for name in kept:
        if (scratch / "models" / name / "config.json").is_file():
            shutil.make_archive(str(out / name), "tar", scratch / "models", name)


if __name__ == "__main__":
    main()
