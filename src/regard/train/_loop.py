"""A training run: epochs, validation, checkpoints, and the exact way back into it."""

from __future__ import annotations

import itertools
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard import interop
from regard._files.write import write_atomically
from regard.train import _checkpoint
from regard.train._average import Average
from regard.train._batches import Batch, Corpus, plan_epoch
from regard.train._loss import loss_of
from regard.train._processes import Processes, whole
from regard.train._schedule import learning_rate
from regard.train._settings import Settings
from regard.train._step import Stepper, logits_of
from regard.train._tokens import PAD, STOP, Words

LAST = "last.safetensors"
METRICS = "metrics.jsonl"

# where a run stands, as its checkpoint says it
PLACE: dict[str, Any] = {
    "step": int,
    "epoch": int,
    "position": int,
    "best": dict,
    "since_best": int,
    "seconds": float,
    "ended": str | None,
    "text": str,
}

Report = Callable[[dict[str, Any]], None]
Encode = Callable[[int], Corpus]  # the training corpus of an epoch: another one each time with BPE-dropout
Score = Callable[[nn.Module], float]  # BLEU of a model on the validation text


class Stopped(Exception):
    """The run was asked to end (SIGTERM, or Ctrl-C), and has saved itself. `status` is what a command exits with."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.status = 128 + number


class Trainer:
    """Trains a model into a folder.

        trainer = Trainer(model, settings, words, encode, valid, out, device)
        trainer.resume()
        trainer.run(report)

    `encode(epoch)` gives the training corpus of an epoch; `score(model)`, where given, the validation BLEU.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        words: Words,
        encode: Encode,
        valid: Corpus,
        out: Path,
        device: torch.device,
        *,
        score: Score | None = None,
        how: str = "copies",
    ) -> None:
        self.settings, self.words, self.out, self.device = settings, words, out, device
        self.encode, self.valid, self.score = encode, valid.to(device), score
        self.processes = Processes(device, how)
        self.average = Average(model, settings)
        self.model = model
        self.running = self.processes.wrap(model)  # what steps run: the model, or its part in a group of processes
        graphs = settings.graphs and self.processes.count == 1
        self.stepper = Stepper(self.running, settings, device, graphs=graphs, processes=self.processes.data[1])
        self.step = self.epoch = self.position = 0
        self.best: dict[str, float] = {}
        self.since_best = 0
        self.seconds = 0.0
        self.left_out = 0  # pairs of sentences that are too long
        self.text = ""  # which text the run reads, for a resume to compare
        self.ended: str | None = None
        self._asked_to_stop = False
        self._signal: int = signal.SIGTERM
        if self.processes.count > 1:  # each part of a batch has its dropout
            torch.manual_seed(settings.seed + 7919 * self.processes.data[0])

    # -- the way in and out of a run

    def start(self) -> None:
        """Write what a reader of the folder needs besides the weights."""
        if not self.processes.first:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        if not (self.out / LAST).is_file():
            (self.out / METRICS).unlink(missing_ok=True)  # of a run that ended before it saved anything
        write_atomically(self.out / "settings.json", [self.settings.as_json().encode()])
        write_atomically(self.out / "tokenizer.json", [self.words.as_json().encode()])

    def save(self) -> None:
        """Everything that an exact resume needs."""
        tensors = {f"model.{name}": whole(each) for name, each in self.model.state_dict().items()}
        tensors |= _checkpoint.optimizer_state(self.stepper.optimizer) | self.average.state()
        for rank, random in enumerate(self.processes.gather(_checkpoint.random_state(self.device))):
            tensors |= {f"{name}.{rank}": each for name, each in random.items()}
        if not self.processes.first:
            return
        _checkpoint.write(self.out / LAST, tensors, {name: getattr(self, name) for name in PLACE})

    def resume(self) -> bool:
        """Go on where the folder's checkpoint stands; False when there is none.

        Raises:
            ValueError: the checkpoint is damaged, of other settings, or of a run on another text.
        """
        path = self.out / LAST
        if not path.is_file():
            return False
        tensors, about = _checkpoint.read(path)
        about.setdefault("text", self.text)  # of a run that did not note it
        if wrong := [name for name, kind in PLACE.items() if not isinstance(about.get(name), kind)]:
            raise ValueError(f"{path} cannot be read: it does not say where the run stands ({', '.join(wrong)})")
        if about["text"] != self.text:
            raise ValueError(
                f"{self.out} was trained on another text than the one given; a resumed run needs the same text, and "
                "the same teachers where it has them"
            )
        weights = {name.removeprefix("model."): each for name, each in tensors.items() if name.startswith("model.")}
        try:
            _checkpoint.set_weights(self.model, weights)
            self.average.load(tensors)
            _checkpoint.set_optimizer_state(self.stepper.optimizer, tensors)
            _checkpoint.set_random_state(tensors, self.device, self.processes.rank)
        except (RuntimeError, LookupError, TypeError, ValueError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ValueError(f"{path} does not fit these settings: {reason}") from None
        for name in PLACE:
            setattr(self, name, about[name])
        if self.processes.first:
            _cut_metrics(self.out / METRICS, self.step)
        return True

    # -- the run

    def run(self, report: Report = lambda event: None) -> None:
        """Train until `steps`, `minutes` or `patience` are used up, then save.

        Raises:
            Stopped: after SIGTERM or Ctrl-C; everything is saved. A second Ctrl-C does not wait for that.
        """
        self._check_alike()
        began, before = time.monotonic(), self.seconds
        window_places, window_sums, window_since = 0, None, began
        self.model.train()
        with _on_signals(self._stop):
            for batch, whole_batch in self._batches():
                self.step += 1
                tokens_of = whole_batch if self.processes.data[1] > 1 else None
                loss = self.stepper(batch, learning_rate(self.settings, self.step), tokens_of)
                self.average.after_step(self.step)
                self.position += 1
                here = torch.stack([loss.nll, loss.tokens.to(loss.nll.dtype), batch.tokens().to(loss.nll.dtype)])
                window_sums = here if window_sums is None else window_sums + here
                window_places += batch.places
                self.seconds = before + time.monotonic() - began
                out_of_time = self.settings.minutes is not None and self.seconds > 60 * self.settings.minutes
                stop = self._asked_to_stop
                if self.processes.count > 1 and self.step % 10 == 0:  # all must stop at the same step
                    stop, out_of_time = self.processes.any(stop), self.processes.any(out_of_time)
                elif self.processes.count > 1:
                    stop = out_of_time = False
                ends = self.step >= self.settings.steps or out_of_time
                if ends or self.step % self.settings.validate_every == 0:
                    last = torch.tensor([float(window_places)], device=self.device, dtype=window_sums.dtype)
                    sums = torch.cat([window_sums, last])
                    sums = self.processes.total(sums) if self.processes.data[1] > 1 else sums
                    nll, tokens, real, places = sums.tolist()
                    if not math.isfinite(nll):
                        raise ValueError(
                            f"the loss is {nll} at step {self.step}: lower peak_lr, or raise warmup or clip"
                        )
                    now = time.monotonic()
                    event = {
                        "step": self.step,
                        "epoch": self.epoch,
                        "loss": nll / max(tokens, 1),
                        "learning_rate": learning_rate(self.settings, self.step),
                        "tokens_per_second": tokens / max(now - window_since, 1e-9),
                        "padding": 1 - real / max(places, 1),
                        **self._validate(last=ends),
                        "seconds": self.seconds,
                    }
                    window_places, window_sums, window_since = 0, None, time.monotonic()
                    if self.processes.first:
                        _append(self.out / METRICS, event)
                        report(event)
                    if ends or (self.settings.patience and self.since_best >= self.settings.patience):
                        self.ended = "steps" if self.step >= self.settings.steps else "time" if ends else "patience"
                        self.save()
                        return
                elif self.step % 10 == 0 and self.processes.first:
                    report({"step": self.step} | self._so_far(window_sums, window_since))
                if stop or (self._asked_to_stop and self.processes.count == 1):
                    self.save()
                    raise Stopped(self._signal)
                if self.step % self.settings.save_every == 0:
                    self.save()

    def _check_alike(self) -> None:
        """On several machines each process reads files of its own."""
        here = {
            "settings": self.settings,
            "texts": self.text,
            "checkpoints": (self.step, self.epoch, self.position, self.best),
        }
        first, *others = self.processes.gather(here)
        if wrong := [name for name in here if any(each[name] != first[name] for each in others)]:
            raise ValueError(
                f"the {' and '.join(wrong)} of the processes differ: on several machines --data and --out must be "
                "folders that all of them share"
            )

    def _so_far(self, sums: Tensor, since: float) -> dict[str, float]:
        """The loss and speed since the last validation, of this process's sentences; a GPU is asked less often, since
        the host waits for its answer."""
        if self.device.type != "cpu" and self.step % 50:
            return {}
        nll, tokens, _ = sums.tolist()
        speed = self.processes.data[1] * tokens / max(time.monotonic() - since, 1e-9)
        return {"loss_so_far": nll / max(tokens, 1), "tokens_per_second": speed}

    def _stop(self, number: int = signal.SIGTERM) -> None:
        self._asked_to_stop, self._signal = True, number

    def _batches(self) -> Iterator[tuple[Batch, int]]:
        """This process's part of each batch and the tokens of the whole one, from where the run stands on."""
        settings = self.settings
        used_up = {
            "patience": 0 < settings.patience <= self.since_best,
            "time": settings.minutes is not None and self.seconds > 60 * settings.minutes,
        }
        if self.ended is not None and (self.step >= settings.steps or used_up.get(self.ended)):
            return
        while True:
            corpus = self.encode(self.epoch)
            planned = plan_epoch(
                corpus,
                settings.batch_tokens,
                seed=settings.seed,
                epoch=self.epoch,
                multiple=settings.round_lengths,
            )
            corpus = corpus.to(self.device)
            # a process that has no sentence of a batch runs one that counts for nothing: the others wait for it
            parts = [each.part(*self.processes.data) or each.rows[:1] for each in planned]
            rows = torch.tensor([row for part in parts for row in part], device=self.device, dtype=torch.int64)
            begins = [0, *itertools.accumulate(map(len, parts))]
            for at in range(self.position, len(planned)):
                batch = corpus.take(rows[begins[at] : begins[at + 1]], planned[at].widths)
                if not planned[at].part(*self.processes.data):
                    batch = batch._replace(outputs=torch.full_like(batch.outputs, PAD))
                yield batch, planned[at].tokens
            self.epoch, self.position = self.epoch + 1, 0

    # -- validation

    def _validate(self, *, last: bool) -> dict[str, float]:
        """The averaged weights' loss on the validation text, and now and then their BLEU; the best are kept."""
        self.average.before_validation()
        found: dict[str, float] = {}
        if self.processes.first:
            model = self.average.model
            model.eval()
            found["valid_loss"] = self.validation_loss(model)
            due = self.step // self.settings.validate_every % self.settings.bleu_every == 0
            if self.score is not None and (due or last):
                found["valid_bleu"] = self.score(model)
            self._keep_best(model, found)
            self.model.train()
        found, self.best, self.since_best = self.processes.agree((found, self.best, self.since_best))
        return found

    def _keep_best(self, model: nn.Module, found: dict[str, float]) -> None:
        """By BLEU where it is measured, by loss where it never is."""
        if self.score is not None:
            if "valid_bleu" not in found:
                return
            better = found["valid_bleu"] > self.best.get("valid_bleu", -1.0)
        else:
            better = found["valid_loss"] < self.best.get("valid_loss", math.inf)
        self.since_best = 0 if better else self.since_best + 1
        if better:
            self.best = {"step": self.step, **found}
            interop.save(model, self.out, stop=[STOP])

    @torch.inference_mode()
    def validation_loss(self, model: nn.Module) -> float:
        """Mean −log P of a validation token, in nats."""
        total, tokens = 0.0, 0.0
        for planned in plan_epoch(self.valid, self.settings.batch_tokens, seed=0, epoch=0):
            rows = torch.tensor(planned.rows, device=self.device)
            batch = self.valid.take(rows, planned.widths)
            dtype = self.stepper.dtype
            with torch.autocast(self.device.type, dtype, dtype != torch.float32):
                loss = loss_of(logits_of(model, batch), batch.outputs)
            total += float(loss.nll)
            tokens += float(loss.tokens)
        return total / max(tokens, 1.0)


class _on_signals:
    """While inside, SIGTERM and the first Ctrl-C ask the run to stop after its step. Only the main thread of a process
    can be told so."""

    def __init__(self, stop: Callable[[int], None]) -> None:
        self.stop = stop
        self.before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for each in (signal.SIGTERM, signal.SIGINT):
                # a job that a shell runs in the background ignores Ctrl-C, and goes on doing so
                if signal.getsignal(each) is not signal.SIG_IGN:
                    self.before[each] = signal.signal(each, self._on_signal)

    def _on_signal(self, number: int, _: object) -> None:
        self.stop(number)
        if number == signal.SIGINT:  # the second one does not wait
            signal.signal(signal.SIGINT, self.before[signal.SIGINT] or signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        for each, handler in self.before.items():
            if handler is not None:  # None: set by something else than Python
                signal.signal(each, handler)


def _append(path: Path, event: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The validations of a run, one per line; a last line that a kill cut off is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def _cut_metrics(path: Path, step: int) -> None:
    """Drop what the run wrote after the checkpoint it goes on from: it will write that again."""
    kept = [event for event in read_metrics(path) if event["step"] <= step]
    if path.is_file():
        write_atomically(path, [(json.dumps(event) + "\n").encode() for event in kept])
