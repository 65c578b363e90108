"""Small translators, trained and measured in one process and in a given time; a second call goes on where it stopped.

    REGARD_DATA=multi30k python benchmarks/translator_seeds.py --out build/en-de --seconds 540                on a GPU
    REGARD_DATA=multi30k python benchmarks/translator_seeds.py --out build/de-en --seconds 300 --teachers 0 \\
        --source de --target en
    python benchmarks/translator_seeds.py --toy --steps 400 --teachers 2 --seeds 1 --out build/toy    on a CPU, a minute

1. Teachers: N models that differ in their seed (R-Drop, label smoothing, averaged weights).
2. Lessons: together they translate the training sources (of their best few, the one closest to the reference), and say
   of every target token, real and translated, how likely they find which tokens.
3. Students: one model per seed learns from real and translated sentences with those probabilities. `--teachers 0`
   leaves 1 and 2 out: the students learn from the text alone.

A rehearsal takes the same way with the same sizes, in a minute: `--sentences 1200 --steps 30 --teachers 2 --seeds 1`.

Nothing is chosen on the test: the length penalty of each student is the one that is best on the validation text. What
was done, and what was not, is in `report.json`; it is written after each model, next to the teachers and the lessons,
from which a call with the same `--out` goes on. All students train for the same number of steps, whichever call trains
them. Times are per call: `--seconds` is never exceeded by more than one evaluation. Where steps cannot be captured, the
call starts anew with torch's attention, then without graphs.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gzip
import hashlib
import importlib.util
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

BEGAN = time.monotonic()

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from _graph_training import Diverged, Runs, attention_by, check_fused  # noqa: E402
from regard import interop  # noqa: E402
from regard import train as engine  # noqa: E402
from regard._files.write import write_atomically  # noqa: E402
from regard.train._batches import Corpus, join  # noqa: E402
from regard.train._build import encode_pairs, model_of  # noqa: E402

RECIPE: dict[str, Any] = {
    "lowercase": True, "vocab_size": 10_000, "embed_dim": 192, "ff_dim": 384, "num_layers": 4, "num_heads": 6,
    "norm": "post", "dropout": 0.3, "attention_dropout": 0.1, "smoothing": 0.1, "batch_tokens": 7_500,
    "round_lengths": 2, "warmup": 600, "peak_lr": 5e-3, "ema_decay": 0.998, "max_tokens": 128,
}  # fmt: skip
TOY: dict[str, Any] = {
    "vocab_size": 200, "embed_dim": 32, "ff_dim": 64, "num_layers": 1, "num_heads": 2, "batch_tokens": 600,
    "warmup": 10, "dropout": 0.1, "attention_dropout": 0.0, "ema_decay": 0.9,
}  # fmt: skip
# what must not change between calls of one run, next to the recipe
FIXED = ("teachers", "teacher_r_drop", "steps", "distill", "beams", "toy", "sentences")
PENALTIES = (1.0, 1.4, 1.8, 2.2)
# seconds that are set aside: for the vocabulary and the first kernels, for graphs, for one student's evaluation
START, CAPTURE, EVALUATE = 30.0, 15.0, 15.0


class Late(Exception):
    """The time of this call is used up; everything that is done is written."""


class Session:
    """One call: its clock, its folder, and what earlier calls left there."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.out = given, Path(given.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.settings = engine.Settings(
            **RECIPE
            | (TOY if given.toy else {})
            | {"r_drop": given.r_drop, "source": given.source, "target": given.target}
            | given.set
        )
        self.path = self.out / "report.json"
        fixed = {name: getattr(given, name) for name in FIXED}
        recipe = {**vars(self.settings), **fixed}
        self.report: dict[str, Any] = {"recipe": recipe, "teachers": [], "students": [], "calls": []}
        if self.path.is_file():
            held = json.loads(self.path.read_text())
            if held["recipe"] != recipe:
                changed = [name for name in recipe if held["recipe"].get(name) != recipe[name]]
                sys.exit(
                    f"translator_seeds.py: {self.out} holds a run with another {', '.join(changed)}; give another --out"
                )
            self.report = held
        self.call = {"device": str(self.device), "torch": torch.__version__, "seconds": given.seconds, "did": []}
        if self.device.type == "cuda":
            self.call["device"] = torch.cuda.get_device_name()
        self.report["calls"].append(self.call)

    def left(self) -> float:
        return self.given.seconds - (time.monotonic() - BEGAN)

    def say(self, *words: Any) -> None:
        print(f"{time.monotonic() - BEGAN:6.1f} s, {max(self.left(), 0):5.0f} s left: ", *words, flush=True)

    def need(self, seconds: float, what: str) -> None:
        """Go on only where the time of this call is enough."""
        if self.left() < seconds:
            self.say(f"{what} would take about {seconds:.0f} s: call again with the same --out to go on")
            raise Late

    def did(self, what: str) -> None:
        self.call["did"].append(what)
        self.call["used"] = round(time.monotonic() - BEGAN, 1)
        self.write()

    def write(self) -> None:
        write_atomically(self.path, [json.dumps(self.report, indent=1).encode()])

    def read(self) -> None:
        """The text and its vocabulary, which is learnt from the training text alone, the same in every call."""
        given = self.given
        if given.toy:
            self.data, self.test = engine.toy(given.sentences or 2000, 20), engine.toy(1, 20, seed=5).valid
        else:
            files = (engine.find(given.data, "test_2016", each) for each in (given.source, given.target))
            read = *engine.read_folder(given.data, given.source, given.target), engine.read_pairs(*files)
            if given.sentences:  # untrained models write long translations: fewer of those
                counts = given.sentences, given.sentences // 4, given.sentences // 4
                read = tuple(engine.Pairs(*(side[:n] for side in each)) for each, n in zip(read, counts, strict=True))
            self.data, self.test = engine.Data(*read[:2]), read[2]
        text = [*self.data.train.source, *self.data.train.target]
        self.words = engine.Words.learn(text, vocab_size=self.settings.vocab_size, lowercase=True)
        digest = hashlib.sha256(self.words.as_json().encode()).hexdigest()[:16]
        if self.report.setdefault("vocabulary", digest) != digest:
            sys.exit(f"translator_seeds.py: {self.out} was made with another text or vocabulary; give another --out")
        self.corpus = encode_pairs(self.words, self.data.train, self.settings)
        self.say(f"read {len(self.data.train.source)} pairs, {len(self.words)} pieces, on {self.call['device']}")

    def budget(self) -> dict[str, float]:
        """Seconds that each teacher and each student trains: fixed by the first call, so that all are alike."""
        if "budget" not in self.report:
            given = self.given
            aside = START + 2 * CAPTURE + given.seeds * EVALUATE + (given.lessons if given.teachers else 0.0)
            training = max(given.seconds - aside, 10.0)
            share = 0.45 if given.teachers else 0.0
            self.report["budget"] = {
                "teacher": share * training / max(given.teachers, 1),
                "student": (1 - share) * training / given.seeds,
            }
        found: dict[str, float] = self.report["budget"]
        return found


def steps_of(session: Session, runs: Runs, who: str) -> int:
    """Counted once from the time and the speed of a step; then kept for all models of that kind."""
    kept: dict[str, int] = session.report.setdefault("steps", {})
    if who not in kept:
        seconds = session.budget()[who]
        if who == "student":  # what is left of this call, where that is near to what was meant
            seeds = session.given.seeds
            rest = (session.left() - 3 - seeds * EVALUATE) / seeds
            seconds = rest if rest > 0.6 * seconds else seconds
        kept[who] = session.given.steps or max(200, int(1000 * seconds / runs.milliseconds))
        session.say(f"each {who} trains for {kept[who]} steps")
    return kept[who]


def prepared(session: Session, settings: Any, corpus: Corpus) -> Runs:
    """Runs whose steps are captured, on a GPU, and timed."""
    graphs = session.device.type == "cuda" and not session.given.no_graphs
    try:
        runs = Runs(settings, session.words, corpus, session.device, graphs=graphs)
        shapes = runs.prepare(timed=60 if graphs else 4)
    except Exception as error:
        if not graphs:
            raise
        restart(session, error, "--no-graphs")
    session.say(f"{shapes} shapes, {'captured' if graphs else 'no graphs'}; a step takes {runs.milliseconds:.2f} ms")
    return runs


def restart(session: Session, error: Exception, *words: str) -> NoReturn:
    """Go on in a new process: a capture that failed leaves torch's generator as if it were still captured."""
    reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300] if str(error).strip() else ''}"
    session.say(f"{reason}; again with {' '.join(words)}")
    session.did(f"failed ({reason}); again with {' '.join(words)}")
    given = [*session.given.words, *words, "--seconds", f"{session.left():.0f}"]
    sys.exit(subprocess.call([sys.executable, __file__, *given]))


def trained(session: Session, runs: Runs, who: str, seed: int) -> dict[str, Any]:
    steps = steps_of(session, runs, who)
    expected = steps * runs.milliseconds / 1000
    session.need(expected, f"{who} {seed}")

    def progress(step: int, loss: float) -> None:
        if step % 2500 == 0 or step == steps:
            session.say(f"{who} {seed}: step {step} of {steps}, loss {loss:.3f}")

    limit = math.inf if session.given.steps else max(1.3 * expected, 5.0)
    peak = session.settings.peak_lr
    try:
        found = runs.train(seed, steps, peak=peak, seconds=limit, progress=progress)
    except Diverged as error:
        session.say(f"{error}; again with a lower rate")
        session.need(expected, f"{who} {seed}")
        found = runs.train(seed, steps, peak=0.5 * peak, seconds=limit, progress=progress)
    # as it is kept: what is measured is what the file holds
    runs.average.model.half().float()
    found["parameters"] = sum(each.numel() for each in runs.model.parameters())
    return found


# -- 1. teachers


def teach(session: Session) -> None:
    wanted = range(len(session.report["teachers"]) + 1, session.given.teachers + 1)
    if not wanted:
        return
    session.need(CAPTURE, "capturing the teachers' steps")
    settings = engine.Settings(**{**vars(session.settings), "r_drop": session.given.teacher_r_drop})
    runs = prepared(session, settings, session.corpus)
    for seed in wanted:
        found = trained(session, runs, "teacher", seed)
        save_file(_halves(runs.average.model), session.out / f"teacher-{seed}.safetensors")
        found["valid, greedy"] = score(session, [runs.average.model], session.data.valid, beams=1, penalty=1.0)[0]
        session.report["teachers"].append(found)
        session.did(f"teacher {seed}")
        session.say(f"teacher {seed}: validation BLEU {found['valid, greedy']:.2f} (greedy)")


def _halves(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach().half().cpu().contiguous() for name, each in model.named_parameters()}


@torch.no_grad()
def ensemble(session: Session) -> list[Any]:
    found = []
    for seed in range(1, session.given.teachers + 1):
        model = model_of(session.settings, len(session.words), session.device).eval().requires_grad_(False)
        held = load_file(session.out / f"teacher-{seed}.safetensors")
        for name, own in model.named_parameters():
            own.copy_(held[name])
        found.append(model)
    return found


# -- 2. lessons


def lessons(session: Session, teachers: list[Any]) -> engine.Pairs:
    path = session.out / "lessons.json.gz"
    if path.is_file():
        return engine.Pairs(*json.loads(gzip.decompress(path.read_bytes())))
    session.need(min(session.given.lessons, 20.0), "translating the training text")
    real, began = session.data.train, time.monotonic()
    translator = engine.Translator(teachers, session.words)
    tokens = 200_000 if session.device.type == "cuda" else 6_000
    limit = min(session.given.lessons, session.left() - 5)
    told = [began]

    def progress(done: int) -> None:
        if time.monotonic() > told[0] + 5:
            told[0] = time.monotonic()
            session.say(f"the teachers translate: {done} of {len(real.source)}")

    how: dict[str, Any] = {"beams": session.given.beams, "batch_tokens": tokens, "seconds": limit}
    made = engine.distilled(translator, real, progress=progress, **how)
    took = time.monotonic() - began
    pairs = zip(made.target, real.target, strict=False)
    changed = statistics.fmean(a.lower() != b.lower() for a, b in pairs) if made.target else 0.0
    session.report["lessons"] = {
        "sentences": len(made.source), "of": len(real.source), "seconds": took, "other than the reference": changed,
    }  # fmt: skip
    write_atomically(path, [gzip.compress(json.dumps(made).encode())])
    session.did("lessons")
    session.say(f"the teachers translated {len(made.source)} of {len(real.source)} sentences in {took:.0f} s")
    return made


def taught(session: Session) -> Corpus:
    """Real and translated sentences, with the teachers' probabilities of each token."""
    teachers = ensemble(session)
    made = lessons(session, teachers)
    corpora = []
    for pairs in (session.data.train, made):
        if not pairs.source:
            continue
        corpus = encode_pairs(session.words, pairs, session.settings).to(session.device)
        on_gpu = session.device.type == "cuda"
        soft = engine.soft_targets(teachers, corpus, k=16, half=on_gpu, batch_tokens=40_000 if on_gpu else 8_000)
        corpora.append(corpus._replace(soft=soft))
    return join(corpora)


# -- 3. students


def learn(session: Session) -> None:
    wanted = range(len(session.report["students"]) + 1, session.given.seeds + 1)
    if not wanted:
        return
    settings = engine.Settings(**{**vars(session.settings), "distill": session.given.distill})
    corpus = taught(session) if session.given.teachers else session.corpus
    session.need(CAPTURE, "capturing the students' steps")
    runs = prepared(session, settings, corpus)
    for seed in wanted:
        found = trained(session, runs, "student", 100 * bool(session.given.teachers) + seed)
        model, began = runs.average.model.eval(), time.monotonic()
        valid = {each: score(session, [model], session.data.valid, penalty=each)[0] for each in PENALTIES}
        found["length penalty"] = max(valid, key=lambda each: valid[each])
        found["valid"] = valid[found["length penalty"]]
        found["test"], lines = score(session, [model], session.test, penalty=found["length penalty"])
        lowered = [each.lower() for each in session.test.target]
        found["chrf"], found["translated"] = engine.scores(lines, lowered)[2].score, lines
        found["evaluated in"] = time.monotonic() - began
        students = session.report["students"]
        if found["valid"] >= max((each["valid"] for each in students), default=0.0):
            keep(model, session.words, settings, session.out)
        students.append(found)
        session.report["mean of students"] = mean(students)
        session.did(f"student {seed}")
        session.say(
            f"student {seed}: valid {found['valid']:.2f}, test {found['test']:.2f} with penalty "
            f"{found['length penalty']}; {mean(students)}"
        )


def mean(students: list[dict[str, Any]]) -> dict[str, Any]:
    values = {name: round(statistics.fmean(each[name] for each in students), 3) for name in ("valid", "test", "chrf")}
    return {"seeds": len(students), **values}


def score(
    session: Session, models: list[Any], pairs: engine.Pairs, *, penalty: float, beams: int = 5
) -> tuple[float, list[str]]:
    """Lower-cased sacreBLEU, and the translations."""
    translator = engine.Translator([each.eval() for each in models], session.words)
    tokens = 60_000 if session.device.type == "cuda" else 6_000
    found = translator(pairs.source, beams=beams, length_penalty=penalty, batch_tokens=tokens)
    lines = [each[0].text for each in found]
    return engine.bleu(lines, pairs.target, lowercase=True), lines


def keep(model: Any, words: Any, settings: Any, out: Path) -> None:
    """The best student by validation, in float16, as one file that `regard translate` reads when unpacked."""
    folder = out / "best"
    interop.save(copy.deepcopy(model).half(), folder, stop=[3])
    (folder / "tokenizer.json").write_text(words.as_json())
    (folder / "settings.json").write_text(settings.as_json())
    shutil.make_archive(str(folder), "tar", out, "best")
    shutil.rmtree(folder)


def together(session: Session) -> None:
    """The ensemble itself, where there is time: what the students could have learnt."""
    if session.given.teachers and "ensemble" not in session.report and session.left() > EVALUATE * 2:
        found = score(session, ensemble(session), session.test, penalty=1.0)[0]
        session.report["ensemble"] = {"models": session.given.teachers, "test": found}
        session.did("ensemble")
        session.say(f"the {session.given.teachers} teachers together: test {found:.2f}")


def choose_attention(session: Session) -> str:
    """regard's, unless it fails on this device or torch's is faster by more than a quarter."""
    given = session.given
    if given.attention or given.no_graphs or session.device.type != "cuda":
        return given.attention or "regard"
    times: dict[str, float] = {}
    for kind, other in (("regard", "torch"), ("torch", "regard")):
        try:
            runs = Runs(session.settings, session.words, session.corpus, session.device, epochs=1)
            runs.epochs, runs.rows = [runs.epochs[0][:4]], [runs.rows[0][:4]]
            with attention_by(kind):
                runs.prepare(timed=20)
        except Exception as error:
            restart(session, error, "--attention", other)
        times[kind] = runs.milliseconds
    session.call["milliseconds"] = times
    chosen = min(times, key=lambda kind: times[kind] * (0.8 if kind == "regard" else 1.0))
    session.say(f"milliseconds of a step: {times}; {chosen}'s attention is used")
    return chosen


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.environ.get("REGARD_DATA"))
    parser.add_argument("--out", default=os.environ.get("OUT", "build/seeds"))
    parser.add_argument("--seconds", type=float, default=540.0, help="of this call, the start included")
    parser.add_argument("--teachers", type=int, default=5, help="0: students learn from the text alone")
    parser.add_argument("--seeds", type=int, default=3, help="students")
    parser.add_argument("--source", default="en")
    parser.add_argument("--target", default="de")
    parser.add_argument("--r-drop", type=float, default=0.7)
    parser.add_argument("--teacher-r-drop", type=float, default=0.0, help="a step without R-Drop takes half the time")
    parser.add_argument("--distill", type=float, default=0.5, help="share of the loss that the teachers have")
    parser.add_argument("--beams", type=int, default=4, help="of the teachers' search")
    parser.add_argument("--lessons", type=float, default=25.0, help="seconds that the teachers translate at most")
    parser.add_argument("--steps", type=int, default=0, help="of each model; counted from the time by default")
    parser.add_argument("--until", choices=["teachers", "lessons", "students"], default="students")
    parser.add_argument("--attention", choices=["regard", "torch"], help="whose steps; measured on a GPU by default")
    parser.add_argument("--no-graphs", action="store_true", help="kernel by kernel, where steps cannot be captured")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other settings than the recipe's")
    parser.add_argument("--toy", action="store_true", help="the generated language and a tiny model")
    parser.add_argument(
        "--sentences", type=int, default=0, help="of the training text, for a rehearsal; a quarter of the others"
    )
    given = parser.parse_args(arguments)
    given.set = {name: read_value(name, text) for name, _, text in (each.partition("=") for each in given.set)}
    given.words = sys.argv[1:] if arguments is None else arguments
    # before anything is trained: they are used for the first time at its end
    missing = [name for name in ("tokenizers", "sacrebleu") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"translator_seeds.py: {' and '.join(missing)} not installed: pip install 'regard[train]'")
    if given.toy:
        given.source, given.target = engine.toy_settings().source, engine.toy_settings().target
    elif not given.data or not Path(given.data).is_dir():
        sys.exit("translator_seeds.py: give --data FOLDER, or REGARD_DATA, or --toy")
    return given


def read_value(name: str, text: str) -> Any:
    """A setting as it is written on the command line."""
    kind = type(getattr(engine.Settings(), name, None))
    if kind not in (int, float, str):
        sys.exit(
            f"translator_seeds.py: --set {name}={text}: expected the name of a number or word of regard.train.Settings"
        )
    return kind(text)


def main(arguments: list[str] | None = None) -> None:
    session = Session(parse(arguments))
    session.read()
    session.call["fused loss"] = check_fused(len(session.words), session.device)
    session.say("fused loss", session.call["fused loss"])
    session.call["attention"] = choose_attention(session)
    with contextlib.suppress(Late), attention_by(session.call["attention"]):
        teach(session)
        if session.given.until == "teachers":
            return
        if session.given.until == "lessons":
            lessons(session, ensemble(session))
            return
        learn(session)
        together(session)
    done = len(session.report["students"])
    session.write()
    session.say(f"{done} of {session.given.seeds} students are done: {session.report.get('mean of students', '')}")


if __name__ == "__main__":
    main()
