"""Small translators, trained and measured in one process and in a given time; a second call goes on where it stopped.

    export REGARD_DATA=multi30k                                                                        on a GPU
    python benchmarks/translator_seeds.py --out build/en-de --seconds 550 --until lessons
    python benchmarks/translator_seeds.py --out build/en-de --seconds 510
    python benchmarks/translator_seeds.py --out build/de-en --seconds 1100 --source de --target en
    python benchmarks/translator_seeds.py --toy --steps 400 --teachers 2 --seeds 1 --out build/toy    on a CPU, a minute

1. Teachers: N models that differ in their seed (R-Drop, label smoothing, averaged weights).
2. Lessons: all of them together translate the training sources, with beams, or each alone (`--lessons-by teachers`).
3. Students: one model per seed learns from the real sentences; from the translations that are closest to the reference
   (Kim and Rush, 2016); and, with `--back`, from real targets whose sources the teachers of the other direction wrote
   (Nguyen et al., 2020). At every target token it also learns how likely all teachers together find which tokens.
   `--teachers 0` leaves 1 and 2 out: the students learn from the text alone.

A rehearsal takes the same way with the same sizes, in a minute: `--sentences 1200 --steps 30 --teachers 2 --seeds 1`.

Nothing is chosen on the test: the length penalty of each student is the one that is best on the validation text. What
was done, and what was not, is in `report.json`; it is written after each model, next to the teachers and the lessons,
from which a call with the same `--out` goes on. A model whose time ends in the middle goes on in the next call where it
stood; a kill costs 20 seconds of it. All students train for the same number of steps, whichever call trains them. Times
are per call: `--seconds` is never exceeded by more than one evaluation. Where steps cannot be captured, the call starts
anew with torch's attention, then without graphs.
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
from typing import Any, NamedTuple, NoReturn

BEGAN = time.monotonic()

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from _graph_training import Diverged, Runs, Unfinished, attention_by, check_fused  # noqa: E402
from regard import interop  # noqa: E402
from regard import train as engine  # noqa: E402
from regard._files.write import write_atomically  # noqa: E402
from regard.train._batches import Corpus, join  # noqa: E402
from regard.train._build import encode_pairs, model_of  # noqa: E402
from regard.train._evaluate import sentence_bleu  # noqa: E402

RECIPE: dict[str, Any] = {
    "lowercase": True, "vocab_size": 10_000, "embed_dim": 192, "ff_dim": 384, "num_layers": 4, "num_heads": 6,
    "norm": "post", "dropout": 0.3, "attention_dropout": 0.1, "smoothing": 0.1, "batch_tokens": 7_500,
    "round_lengths": 2, "warmup": 600, "peak_lr": 5e-3, "schedule": "cosine", "ema_decay": 0.998,
    "max_tokens": 128,
}  # fmt: skip
TOY: dict[str, Any] = {
    "vocab_size": 200, "embed_dim": 32, "ff_dim": 64, "num_layers": 1, "num_heads": 2, "batch_tokens": 600,
    "warmup": 10, "dropout": 0.1, "attention_dropout": 0.0, "ema_decay": 0.9,
}  # fmt: skip
LESSONS = "lessons.json.gz"
# what must not change between calls of one run, next to the recipe
FIXED = ("teachers", "teacher_r_drop", "lessons_by", "steps", "distill", "toy", "sentences")
PENALTIES = (1.0, 1.4, 1.8, 2.2)
BACK = 2  # sources per real target that the other direction's teachers wrote, at most
# seconds that are set aside: for graphs, for one student's evaluation, for one teacher's
CAPTURE, EVALUATE, GREEDY = 15.0, 14.0, 3.0


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
        self.path, self.held = self.out / "report.json", self.out / "unfinished.safetensors"
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
            about = "more time" if math.isinf(seconds) else f"about {seconds:.0f} s"
            self.say(f"{what} would take {about}: call again with the same --out to go on")
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

    def seconds_for(self, who: str) -> float:
        """Of what is left of this call, for the training of one model."""
        given = self.given
        if who == "student":
            return (self.left() - 3 - given.seeds * EVALUATE) / given.seeds
        rest = self.left() - given.lessons - given.teachers * GREEDY
        if given.until == "students":  # the smaller half: the students' steps take twice the time
            rest = 0.45 * (rest - CAPTURE - given.seeds * EVALUATE)
        return rest / given.teachers


def steps_of(session: Session, runs: Runs, who: str) -> int:
    """Counted once from the time and the speed of a step; then kept for all models of that kind."""
    kept: dict[str, int] = session.report.setdefault("steps", {})
    if who not in kept:
        least = kept.get("teacher", 200)  # a student that starts too late waits for the next call
        fits = int(1000 * session.seconds_for(who) / runs.milliseconds)
        if not session.given.steps and fits < least:
            session.need(math.inf, f"{who}s of at least {least} steps")
        kept[who] = session.given.steps or fits
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
    after = EVALUATE if who == "student" else GREEDY
    session.need(after + min(expected, 10.0), f"{who} {seed}")

    def progress(step: int, loss: float) -> None:
        if step % 2500 == 0 or step == steps:
            session.say(f"{who} {seed}: step {step} of {steps}, loss {loss:.3f}")

    def attempt(peak: float) -> dict[str, Any]:
        how: dict[str, Any] = {"seconds": session.left(), "held": session.held, "progress": progress}
        return runs.train(seed, steps, peak=peak, **how)

    peak = session.settings.peak_lr
    try:
        try:
            found = attempt(peak)
        except Diverged as error:
            session.say(f"{error}; again with a lower rate")
            session.held.unlink(missing_ok=True)
            found = attempt(0.5 * peak)
    except Unfinished as error:
        session.did(f"{who} {seed} up to step {error.step}")
        session.say(f"{who} {seed} came to step {error.step} of {steps}: call again with the same --out to go on")
        raise Late from None
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
        session.held.unlink(missing_ok=True)
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


class Lessons(NamedTuple):
    """Sources, and what each teacher made of each of them."""

    source: list[str]
    texts: list[list[str]]


def read_lessons(folder: Path) -> Lessons:
    return Lessons(*json.loads(gzip.decompress((folder / LESSONS).read_bytes())))


def lessons(session: Session, teachers: list[Any]) -> Lessons:
    """Of as many sentences as `--lessons` seconds allow, in all calls together; written after each part."""
    given, real = session.given, session.data.train
    made = read_lessons(session.out) if (session.out / LESSONS).is_file() else Lessons([], [])
    before = session.report.get("lessons", {}).get("seconds", 0.0)
    if len(made.source) == len(real.source) or before >= given.lessons or session.report["students"]:
        return made
    session.need(min(given.lessons - before, 20.0), "translating the training text")
    began = time.monotonic()
    limit = min(given.lessons - before, session.left() - 5)
    on_gpu = session.device.type == "cuda"
    at_once = (8_000 if given.lessons_by == "teachers" else 4_000) if on_gpu else 200
    while len(made.source) < len(real.source) and time.monotonic() < began + limit:
        lines = real.source[len(made.source) :][:at_once]
        made.source.extend(lines)
        made.texts.extend(translated(session, teachers, lines))
        session.report["lessons"] = about(made, real) | {"seconds": before + time.monotonic() - began}
        write_atomically(session.out / LESSONS, [gzip.compress(json.dumps(made).encode())])
        session.write()
        session.say(f"the teachers translated {len(made.source)} of {len(real.source)} sentences")
    session.did("lessons")
    return made


def translated(session: Session, teachers: list[Any], lines: list[str]) -> list[list[str]]:
    """Several translations of each line: one by each teacher, greedy, or the five best that they find together."""
    how: dict[str, Any] = {"batch_tokens": 100_000 if session.device.type == "cuda" else 6_000}
    if session.given.lessons_by == "ensemble":
        found = engine.Translator(teachers, session.words)(lines, beams=5, best=5, **how)
        return [[one.text for one in of_line] for of_line in found]
    each = [engine.Translator([teacher], session.words)(lines, beams=1, **how) for teacher in teachers]
    return [[one[0].text for one in of_line] for of_line in zip(*each, strict=True)]


def about(made: Lessons, real: engine.Pairs) -> dict[str, Any]:
    pairs = list(zip(made.texts, real.target, strict=False))
    return {
        "sentences": len(made.source), "of": len(real.source),
        "different translations per sentence": statistics.fmean(len(set(texts)) for texts, _ in pairs),
        "equal to the reference": statistics.fmean(
            text == target.lower() for texts, target in pairs for text in texts
        ),
    }  # fmt: skip


def closest(made: Lessons, real: engine.Pairs) -> engine.Pairs:
    """Each source with the translation that is closest to its reference."""
    found = engine.Pairs([], [])
    for source, texts, target in zip(made.source, made.texts, real.target, strict=False):
        texts = [each for each in dict.fromkeys(texts) if each.strip()]
        if texts:
            found.source.append(source)
            found.target.append(max(texts, key=lambda text: sentence_bleu(text, target)))
    return found


def turned(made: Lessons, real: engine.Pairs) -> engine.Pairs:
    """Real targets, with sources that the other direction's teachers wrote, where they are not the real ones."""
    found = engine.Pairs([], [])
    for target, texts, source in zip(made.source, made.texts, real.source, strict=False):
        others = [each for each in dict.fromkeys(texts) if each.strip() and each != source.lower()]
        for each in others[:BACK]:
            found.source.append(each)
            found.target.append(target)
    return found


def taught(session: Session) -> Corpus:
    """Real and translated sentences, with the teachers' probabilities of each token."""
    teachers, real = ensemble(session), session.data.train
    texts = {"real": real, "closest": closest(lessons(session, teachers), real)}
    if session.given.back:
        other = read_lessons(Path(session.given.back))
        if other.source != real.target[: len(other.source)]:
            sys.exit(f"translator_seeds.py: {session.given.back} holds lessons of another text or direction")
        texts["back"] = turned(other, real)
    corpora = []
    for pairs in texts.values():
        if not pairs.source:
            continue
        corpus = encode_pairs(session.words, pairs, session.settings).to(session.device)
        on_gpu = session.device.type == "cuda"
        soft = engine.soft_targets(teachers, corpus, k=16, half=on_gpu, batch_tokens=40_000 if on_gpu else 8_000)
        corpora.append(corpus._replace(soft=soft))
    session.report["sentences"] = {name: len(pairs.source) for name, pairs in texts.items()}
    session.say(f"the students learn from {session.report['sentences']}")
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
        save_file(_halves(model), session.out / f"student-{seed}.safetensors")
        students = session.report["students"]
        if found["valid"] >= max((each["valid"] for each in students), default=0.0):
            keep(model, session.words, settings, session.out)
        students.append(found)
        session.report["mean of students"] = mean(students)
        session.did(f"student {seed}")
        session.held.unlink(missing_ok=True)
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
    if session.given.teachers and "ensemble" not in session.report and session.left() > EVALUATE:
        found = score(session, ensemble(session), session.data.valid, penalty=PENALTIES[1])[0]
        session.report["ensemble"] = {"models": session.given.teachers, "valid": found}
        session.did("ensemble")
        session.say(f"the {session.given.teachers} teachers together: validation {found:.2f}")


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
    parser.add_argument("--teacher-r-drop", type=float, default=1.0, help="0: a step takes half the time")
    parser.add_argument("--distill", type=float, default=0.5, help="share of the loss that the teachers have")
    parser.add_argument("--back", metavar="FOLDER", help="the --out of the other direction, which has its lessons")
    parser.add_argument("--lessons", type=float, default=80.0, help="seconds that the teachers translate at most")
    parser.add_argument(
        "--lessons-by", choices=["teachers", "ensemble"], default="ensemble",
        help="each teacher alone, greedy; or all together, by a search with 5 beams (default)",
    )  # fmt: skip
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
    if given.back and not (Path(given.back) / LESSONS).is_file():
        sys.exit(f"translator_seeds.py: --back {given.back} has no {LESSONS}; run that direction with --until lessons")
    if not given.toy and (not given.data or not Path(given.data).is_dir()):
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
            together(session)
            return
        learn(session)
        together(session)
    done = len(session.report["students"])
    session.write()
    session.say(f"{done} of {session.given.seeds} students are done: {session.report.get('mean of students', '')}")


if __name__ == "__main__":
    main()
