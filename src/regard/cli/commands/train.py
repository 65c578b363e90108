"""`regard train`: a translator from parallel text, or a language model from any text."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli import complete, options, terminal
from regard.cli.options import about

if TYPE_CHECKING:
    from regard.train import Settings, Trainer

# what a resumed run may change: how long it goes on, and how often it looks up
MAY_CHANGE = ("steps", "minutes", "patience", "save_every", "validate_every", "bleu_every", "graphs")


def train(
    out: Annotated[Path, about("Output folder of the run: weights, checkpoint, metrics.")] = Path("runs/translator"),
    data: Annotated[
        Path | None,
        about("Data folder with train.SOURCE, train.TARGET and val.* (also .gz).", envvar="REGARD_DATA"),
    ] = None,
    source: Annotated[str | None, about("File extension of the source language (default: en).")] = None,
    target: Annotated[str | None, about("File extension of the target language (default: de).")] = None,
    task: Annotated[str | None, about("Task: translate, or lm, a language model (default: translate).")] = None,
    text: Annotated[Path | None, about("With --task lm: text file to train on.")] = None,
    toy: Annotated[
        bool, about("Train on a small generated language: needs no data, takes about a minute.", "--toy")
    ] = False,
    steps: Annotated[int | None, about("Number of training steps.")] = None,
    minutes: Annotated[float | None, about("Stop after this many minutes.")] = None,
    seed: Annotated[int | None, about("Seed of the initial weights, the data order and dropout (default: 1).")] = None,
    device: Annotated[str, options.one_of(complete.DEVICES, "Device: auto, cpu, cuda or mps.")] = "auto",
    change: Annotated[
        list[str] | None,
        about("Change a setting, name=value; repeat for several. See --settings.", "--set"),
    ] = None,
    distill: Annotated[
        list[Path] | None,
        about("Folder of a trained teacher model, whose translations are added to the data; repeat for an ensemble."),
    ] = None,
    shard: Annotated[
        bool,
        about("Under torchrun: shard weights and optimizer state over the processes (FSDP2).", "--shard"),
    ] = False,
    tensor_parallel: Annotated[
        bool,
        about("Under torchrun: split the heads over the processes.", "--tensor-parallel"),
    ] = False,
    resume: Annotated[bool, about("Resume from the checkpoint in --out.", "--resume")] = False,
    tensorboard: Annotated[
        bool, about("Write TensorBoard event files into the output folder.", "--tensorboard")
    ] = False,
    settings: Annotated[bool, about("Show every setting and its default, and exit.", "--settings")] = False,
    as_json: Annotated[bool, about("Print one JSON object per validation.", "--json")] = False,
) -> None:
    """Train a translator on parallel text, or a language model on any text.

    The vocabulary is learnt from the training text alone. `regard translate` and `evaluate` read the output folder.
    On Ctrl-C and SIGTERM the run saves a checkpoint and exits (status 130, 143); --resume continues exactly there.

    Examples:
      regard train --toy --out runs/toy
      regard train --data multi30k --source en --target de --out runs/en-de --set lowercase=true --steps 6000
      regard train --task lm --text book.txt --out runs/book --steps 2000
      regard train --data multi30k --out runs/en-de --resume

    On several GPUs or machines, run the same command under torchrun (DDP; FSDP2 with --shard):
      torchrun --nproc-per-node 8 -m regard train --data multi30k --out runs/en-de
    """
    from regard import train as engine

    if settings:
        _show_settings(engine.Settings(), as_json)
        return
    try:
        words: dict[str, Any] = {
            name: value for name, value in (("task", task), ("source", source), ("target", target)) if value is not None
        }
        base = dataclasses.replace(engine.toy_settings() if toy else engine.Settings(), **words)
        given: dict[str, Any] = {
            name: value for name, value in (("steps", steps), ("minutes", minutes), ("seed", seed)) if value is not None
        }
        _check_length(steps, minutes)
        changes = _changes(base, change or [])
        if twice := sorted((given.keys() | words.keys()) & changes.keys()):
            raise ValueError(f"--{twice[0]} and --set {twice[0]} were both given; give one")
        for name in sorted(changes.keys() & {"vocab_size", "lowercase", "bpe_dropout"}) if distill else ():
            raise ValueError(f"--distill: a student splits text as its teachers do; leave out --set {name}")
        chosen = dataclasses.replace(base, **given, **changes)
        if shard and tensor_parallel:
            raise ValueError("--shard and --tensor-parallel were both given; give one")
        where = _device(device)
        engine.join_group(where)
        # every process looks into --out, which on several machines may not be the same folder
        named = {*given, *changes, *words}
        chosen = engine.on_all(lambda: _resumed(out, chosen, named) if resume else _fresh(out, chosen))
        _check_words(chosen, data, text, toy, distill or [], named)
        if (shard or tensor_parallel) and not engine.in_group():
            raise ValueError(
                f"--{'shard' if shard else 'tensor-parallel'} needs several processes: torchrun --nproc-per-node 2 -m "
                "regard train …"
            )
        how = "shards" if shard else "heads" if tensor_parallel else "copies"
        trainer = _trainer(chosen, out, data, text, toy, where, distill or [], how, resume)
        if resume:
            trainer.resume()  # before anything is written: it may refuse
        trainer.start()
        if trainer.processes.first:
            _say_start(trainer, learnt=not (toy or resume or distill))
        with _reporting(trainer, tensorboard and trainer.processes.first, as_json) as report:
            trainer.run(report)
    except engine.Stopped as stopped:
        typer.echo(f"regard: stopped at step {trainer.step}; {out} is saved, go on with --resume", err=True)
        raise typer.Exit(stopped.status) from None
    except (RuntimeError, MemoryError) as error:
        if terminal.is_out_of_memory(error):
            terminal.stop("there is not enough memory for this run; lower batch_tokens, or make the model smaller")
        if not engine.in_group():
            raise
        reason = str(error).splitlines()[0][:160]
        saved = (out / engine.LAST).is_file()
        then = f"the checkpoint in {out} is whole: start again with --resume" if saved else "nothing was saved yet"
        terminal.stop(f"another process of this run ended ({reason}); {then}")
    except (ValueError, TypeError) as error:
        terminal.stop(str(error))
    except OSError as error:
        saved = (out / engine.LAST).is_file()
        then = "nothing was saved yet: free some space and start again"
        then = "what was saved before is whole: free some space, then --resume" if saved else then
        hint = f"; {then}" if error.errno == errno.ENOSPC else ""
        terminal.stop(f"{error.filename or out}: {error.strerror or error}{hint}")
    if not as_json and trainer.processes.first:
        _say_end(trainer, out, toy)
    engine.leave_group()


def _show_settings(defaults: Settings, as_json: bool) -> None:
    found = dataclasses.asdict(defaults)
    if as_json:
        terminal.data(found)
        return
    for name, value in found.items():
        typer.echo(f"{name:18} {value}")


def _changes(base: Settings, words: list[str]) -> dict[str, Any]:
    """`name=value` words as settings, each read as its default's kind."""
    from regard import train as engine

    kinds = {field.name: getattr(base, field.name) for field in dataclasses.fields(engine.Settings)}
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"--set {word}: expected name=value, such as --set dropout=0.2")
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, 2, 0.6)
            meant = f"did you mean {' or '.join(near)}? " if near else ""
            raise ValueError(f"--set {word}: there is no setting {name}; {meant}regard train --settings lists them all")
        found[name] = _read(name, value, kinds[name])
    return found


def _check_length(steps: int | None, minutes: float | None) -> None:
    if steps is not None and steps < 1:
        raise ValueError(f"--steps is {steps}; expected a number of steps to train for, at least 1")
    if minutes is not None and not 0 < minutes < float("inf"):
        raise ValueError(f"--minutes is {minutes:g}; expected a time to train for, above 0")


def _read(name: str, value: str, like: Any) -> Any:
    if isinstance(like, bool):
        if value.lower() not in ("true", "false"):
            raise ValueError(f"--set {name}={value}: expected true or false")
        return value.lower() == "true"
    try:
        return int(value) if isinstance(like, int) else value if isinstance(like, str) else float(value)
    except ValueError:
        kind = "a whole number" if isinstance(like, int) else "a number"
        raise ValueError(f"--set {name}={value}: expected {kind}") from None


def _fresh(out: Path, chosen: Settings) -> Settings:
    from regard.train import LAST

    if (out / LAST).exists():
        raise ValueError(f"{out} holds a run already; go on with --resume, or give another --out")
    if (out / "model.safetensors").exists():
        raise ValueError(f"{out} holds a model already, which this run would replace; give another --out")
    return chosen


def _resumed(out: Path, chosen: Settings, named: set[str]) -> Settings:
    """The run's own settings, with what may be changed on the way; ``named``: settings that were given now."""
    from regard.train import LAST, read_settings

    path = out / "settings.json"
    if not path.is_file() or not (out / LAST).is_file():
        shared = "; on several machines --out must be a folder that all of them share"
        # a run that was killed between its first validation and its first checkpoint left the weights of the one
        other = ", and with another --out, since a new run would replace the model that is there"
        start = f"start without --resume{other * (out / 'model.safetensors').is_file()}"
        raise ValueError(f"{out} holds no checkpoint to resume from; {start}{shared * ('RANK' in os.environ)}")
    held = read_settings(path)
    for name in sorted(named - set(MAY_CHANGE)):
        if getattr(chosen, name) != getattr(held, name):
            raise ValueError(
                f"{name} is {getattr(held, name)} in {out} and {getattr(chosen, name)} here: a resumed run goes on as "
                f"it was; only {', '.join(MAY_CHANGE)} may change"
            )
    return dataclasses.replace(held, **{name: getattr(chosen, name) for name in named & set(MAY_CHANGE)})


# what a language model has no use for
_OF_TRANSLATORS = ("source", "target", "bpe_dropout", "norm", "branch_init", "ff_dropout", "bleu_every", "distill")


def _check_words(
    chosen: Settings,
    data: Path | None,
    text: Path | None,
    toy: bool,
    distill: list[Path],
    named: set[str],
) -> None:
    if toy and chosen.task != "translate":
        raise ValueError(f"--toy trains a translator; leave out --task {chosen.task}")
    languages = ("source", "target")
    for name in (name for name in _OF_TRANSLATORS if chosen.task == "lm" and name in named):
        typed = f"--{name}" if name in languages else f"--set {name}"
        raise ValueError(f"{typed} is for translators, and a language model has no use for it: leave it out")
    for name in (name for name in languages if toy and name in named):
        raise ValueError(f"--{name} is for text of your own, and --toy makes its own: leave it out")
    held = os.environ.get("REGARD_DATA")
    given = data is not None and (not held or data != Path(held))
    if given and (toy or chosen.task == "lm"):
        raise ValueError(f"--data and {'--toy' if toy else '--task lm'} were both given; give one")
    if chosen.task == "lm":
        if text is None:
            raise ValueError("--task lm needs --text FILE")
        if distill:
            raise ValueError("--distill is for translation: leave out --task lm")
    elif text is not None:
        raise ValueError("--text is for --task lm; a translator reads --data FOLDER")
    elif data is None and not toy:
        raise ValueError("--data FOLDER is missing (or REGARD_DATA); --toy needs none")


def _device(name: str) -> Any:
    import torch

    from regard.cli import parse

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:  # each process of torchrun has a GPU of its own
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    return torch.device(parse.device(name))


def _trainer(
    chosen: Settings,
    out: Path,
    data: Path | None,
    text: Path | None,
    toy: bool,
    device: Any,
    distill: list[Path],
    how: str,
    resume: bool,
) -> Trainer:
    from regard import train as engine

    words = engine.Words.load(out / "tokenizer.json") if resume else None
    if chosen.task == "lm":
        assert text is not None
        return engine.language_trainer(chosen, engine.read_lines(text), out, words=words, device=device, how=how)
    with terminal.saying("reading the text and learning its vocabulary"):
        if toy:
            read = engine.toy()
        else:
            assert data is not None
            read = engine.read_folder(data, chosen.source, chosen.target)
        teachers = engine.Translator.load(*distill, device=device) if distill else None
        if teachers is not None:
            words = teachers.words
            chosen = dataclasses.replace(chosen, vocab_size=len(words), lowercase=words.lowercase)
        trainer = engine.translation_trainer(chosen, read, out, words=words, device=device, how=how)
    if teachers is not None:
        with terminal.progress() as bars:
            bar = bars.add_task("the teachers translate", total=len(read.train.source))
            engine.learn_from(trainer, teachers, read.train, progress=lambda done: bars.update(bar, completed=done))
    return trainer


@contextlib.contextmanager
def _reporting(trainer: Trainer, tensorboard: bool, as_json: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """What is told while it runs: a bar for who watches, a line per validation, event files on request."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    chosen = trainer.settings
    writer = _writer(trainer) if tensorboard else None
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bars:
        bar = bars.add_task("training", total=chosen.steps)
        began, seen = time.monotonic(), list[int]()  # the steps that were reported

        def report(event: dict[str, Any]) -> None:
            bars.update(bar, completed=event["step"])
            seen.append(event["step"])
            if len(seen) == 2 and "loss" not in event and not sys.stderr.isatty():
                # where no bar is drawn: an early word on how long it will take
                pace = (time.monotonic() - began) / (seen[1] - seen[0] + 10)
                left = min(pace * (chosen.steps - event["step"]), 60 * (chosen.minutes or float("inf")))
                typer.echo(f"step {event['step']:6}  of {chosen.steps}: about {left:.0f} s to go", err=True)
            if "loss_so_far" in event:
                told = f"loss {event['loss_so_far']:.3f}, {event['tokens_per_second']:,.0f} tokens/s"
                bars.update(bar, description=told)
            if "loss" not in event:
                return
            speed = f"{event['tokens_per_second']:,.0f} tokens/s"
            bars.update(bar, description=f"loss {event['loss']:.3f}, {speed}")
            if as_json:
                terminal.data(event, indent=None)
            else:
                bleu = f"  BLEU {event['valid_bleu']:5.2f}" if "valid_bleu" in event else ""
                typer.echo(
                    f"step {event['step']:6}  loss {event['loss']:.3f}  valid {event['valid_loss']:.3f}{bleu}  {speed}"
                )
            if writer is not None:
                for name, value in event.items():
                    if name != "step":
                        writer.add_scalar(name, value, event["step"])

        try:
            yield report
        finally:
            if writer is not None:
                writer.close()


def _writer(trainer: Trainer) -> Any:
    """A run that goes on writes what came after its checkpoint again: readers drop the first of the two."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ImportError("--tensorboard needs its package: pip install tensorboard") from None
    return SummaryWriter(str(trainer.out / "tensorboard"), purge_step=trainer.step + 1)


def _say_start(trainer: Trainer, *, learnt: bool) -> None:
    """At once, and where the numbers of other programs do not go: the first line of a validation can be far away."""
    chosen = trainer.settings
    million = sum(each.numel() for each in trainer.model.parameters()) / 1e6
    end = f"{chosen.steps} steps" if chosen.minutes is None else f"{chosen.steps} steps or {chosen.minutes:g} minutes"
    what = f"{million:.2f} million parameters on {trainer.device} from step {trainer.step} for {end}"
    typer.echo(f"training {what}; a line every {chosen.validate_every} steps", err=True)
    pieces, asked = len(trainer.words), chosen.vocab_size
    if learnt and pieces != asked:
        why = "the text has no more" if pieces < asked else "each sign of the text is one"
        typer.echo(f"the vocabulary has {pieces} pieces, not vocab_size={asked}: {why}", err=True)
    if trainer.left_out:
        long = f"{trainer.left_out} pairs of sentences are left out: longer than max_tokens={chosen.max_tokens} tokens"
        typer.echo(long, err=True)


def _say_end(trainer: Trainer, out: Path, toy: bool) -> None:
    best = trainer.best
    told = (
        f"BLEU {best['valid_bleu']:.2f}" if "valid_bleu" in best else f"loss {best.get('valid_loss', float('nan')):.3f}"
    )
    typer.echo(f"wrote {out}: the best weights are those of step {best.get('step', 0)}, {told} on the validation text")
    if toy:
        from regard import train as engine
        from regard.cli.commands.translate import show_alignment

        line = engine.toy().valid.source[0]
        show_alignment(engine.Translator.load(out), line, None)
