"""Many short training runs of one model in one process: weights are set anew, captured steps serve all of them.

Processes share a GPU by time slices, so several small models gain nothing from training at once. Here one process has
the device to itself, and every shape of batch is one CUDA graph. Epochs are planned so that their shapes are the same
each time: 46 for Multi30k with widths rounded to 2. What a graph needs, and where it comes from:

- static shapes: `plan_epoch` cuts the sorted lengths, which are the same in every epoch;
- no host synchronisation in a step: losses stay on the device, the learning rate is a tensor that the graph reads;
- dropout: torch registers the device's generator with each graph, and a replay draws anew; regard's dropout takes its
  seed from that generator by a captured operation;
- bfloat16: autocast casts weights in every step (`cache_enabled=False`), so no stale copy is replayed;
- weights, optimizer state and averages are only ever written in place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from regard._files.write import write_atomically
from regard.train import Settings, Words, _loss
from regard.train._average import Average
from regard.train._batches import Batch, Corpus, Soft, plan_epoch
from regard.train._build import model_of
from regard.train._checkpoint import random_state
from regard.train._schedule import learning_rate
from regard.train._step import Stepper

EPOCHS = 10  # plans that are made beforehand; a run draws from them
LOOK = 250  # steps between looks at the loss and the clock
SAVE = 20.0  # seconds between writings of an unfinished run: what a kill costs


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class Diverged(Exception):
    """A run that learnt nothing: its learning rate was too high."""


class Unfinished(Exception):
    """The time was used up before the run was done: what there is of it is written, and `step` says how far it came."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}")
        self.step = step


class Runs:
    """One model, one optimizer and one set of graphs, for one run after another."""

    def __init__(
        self,
        settings: Settings,
        words: Words,
        corpus: Corpus,
        device: torch.device,
        *,
        graphs: bool = True,
        epochs: int = EPOCHS,
    ) -> None:
        self.settings, self.words, self.device = settings, words, device
        how = {"multiple": settings.round_lengths}
        self.epochs = [plan_epoch(corpus, settings.batch_tokens, seed=1, epoch=n, **how) for n in range(epochs)]
        self.corpus = corpus.to(device)
        self.rows = [[torch.tensor(each.rows, device=device) for each in epoch] for epoch in self.epochs]
        self.model = model_of(settings, len(words), device).train()
        self.stepper = Stepper(self.model, settings, device, graphs=graphs)
        self.average = Average(self.model, settings)
        self.milliseconds = math.nan

    def batch(self, epoch: int, at: int) -> Batch:
        return self.corpus.take(self.rows[epoch][at], self.epochs[epoch][at].widths)

    def prepare(self, timed: int) -> int:
        """Capture every shape (once kernel by kernel, once recorded), then time steps of all shapes."""
        shapes: dict[tuple[Any, ...], tuple[int, int]] = {}
        for number, epoch in enumerate(self.epochs):
            for at, each in enumerate(epoch):
                shapes.setdefault((len(each.rows), each.widths), (number, at))
        for place in shapes.values() if self.stepper.graphs else ():
            for _ in range(2):
                self.stepper(self.batch(*place), 1e-6)
        places = [(0, at % len(self.epochs[0])) for at in range(timed)]
        for place in places[:3]:
            self._step(place, 1, 1e-6)
        wait(self.device)
        began = time.monotonic()
        for place in places:
            self._step(place, 1, 1e-6)
        wait(self.device)
        self.milliseconds = 1000 * (time.monotonic() - began) / len(places)
        return len(shapes)

    def _step(self, place: tuple[int, int], step: int, rate: float) -> _loss.Loss:
        loss = self.stepper(self.batch(*place), rate)
        self.average.after_step(step)
        return loss

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """New weights, and everything else as before the first step, in place."""
        torch.manual_seed(seed)
        fresh = model_of(self.settings, len(self.words), self.device)
        for model in (self.model, self.average.model):
            for own, new in zip(model.parameters(), fresh.parameters(), strict=True):
                own.copy_(new)
        for state in self.stepper.optimizer.state.values():
            for value in state.values():
                value.zero_()

    def train(
        self,
        seed: int,
        steps: int,
        *,
        peak: float,
        seconds: float = math.inf,
        held: Path | None = None,
        progress: Callable[[int, float], None] = lambda step, loss: None,
    ) -> dict[str, Any]:
        """A run of so many steps, whose learning rate rises to `peak` and falls as the settings say; `average.model` is
        its result.

        An unfinished run stands in the file `held`, and this goes on with it where it is the same one. The caller
        removes the file when it has kept the result.

        Raises:
            Unfinished: the run has had its `seconds`.
            Diverged: the loss is no number, or hardly lower than it was after 250 steps.
        """
        self.reset(seed)
        self.model.train()
        draw = torch.Generator().manual_seed(seed)
        # losses: means over 250 steps, as batches hold sentences of one length, and differ
        run: dict[str, Any] = {"seed": seed, "planned": steps, "text": self._text(), "peak_lr": peak, "steps": 0}
        run |= {"at": 0, "tokens": 0, "seconds": 0.0, "losses": []}
        run = self._held(held, run, draw)
        settings = dataclasses.replace(self.settings, steps=steps, peak_lr=run["peak_lr"])
        before, began = run["seconds"], time.monotonic()
        saved = began
        sums = torch.zeros(2, device=self.device)
        while run["steps"] < steps:
            drawn = draw.get_state()
            epoch = int(torch.randint(len(self.epochs), (), generator=draw))
            order = torch.randperm(len(self.epochs[epoch]), generator=draw).tolist()
            for at in order[run["at"] :]:
                step = run["steps"] = run["steps"] + 1
                run["at"] += 1
                loss = self._step((epoch, at), step, learning_rate(settings, step))
                run["tokens"] += self.epochs[epoch][at].tokens
                sums += torch.stack([loss.nll.detach().float(), loss.tokens.float()])
                # a GPU is behind the clock until it is waited for; a CPU is not, and may be slow
                late = self.device.type == "cpu" and time.monotonic() - began > seconds
                if step % LOOK and step < steps and not late:
                    continue
                nll, counted = sums.tolist()  # waits for the device
                run["losses"].append(nll / max(counted, 1.0))
                sums.zero_()
                progress(step, run["losses"][-1])
                now = time.monotonic()
                run["seconds"] = before + now - began
                if step == steps:
                    break
                late = late or now - began > seconds
                if held is not None and (late or now - saved > SAVE):
                    self._hold(held, run, drawn)
                    saved = now
                if late:
                    raise Unfinished(step)
            run["at"] = 0
        wait(self.device)
        losses = run["losses"]
        if not math.isfinite(losses[-1]) or (len(losses) > 8 and losses[-1] > 0.8 * losses[0]):
            raise Diverged(
                f"the loss of seed {seed} is {losses[-1]:.3f} after {steps} steps with a rate of {run['peak_lr']:g}"
            )
        kept = {name: run[name] for name in ("seed", "peak_lr", "steps", "planned", "seconds", "losses")}
        return {**kept, "tokens_per_second": run["tokens"] / run["seconds"]}

    def _text(self) -> list[int]:
        """By which a run on other sentences is told from this one."""
        return [self.corpus.target.flat.numel(), *map(len, self.epochs)]

    def _tensors(self) -> dict[str, torch.Tensor]:
        """All that a run changes, by name."""
        found = {}
        for number, (own, mean) in enumerate(
            zip(self.model.parameters(), self.average.model.parameters(), strict=True)
        ):
            found |= {f"model.{number}": own, f"average.{number}": mean}
            found |= {f"optimizer.{number}.{name}": each for name, each in self.stepper.optimizer.state[own].items()}
        return found

    def _hold(self, held: Path, run: dict[str, Any], drawn: torch.Tensor) -> None:
        tensors = {**self._tensors(), **random_state(self.device), "draw": drawn}
        content = {name: each.detach().cpu().contiguous() for name, each in tensors.items()}
        write_atomically(held, [save(content, metadata={"run": json.dumps(run)})])

    @torch.no_grad()
    def _held(self, held: Path | None, run: dict[str, Any], draw: torch.Generator) -> dict[str, Any]:
        """The run in the file, put in place, if it is one of this seed, length and text; else `run` as it is given."""
        if held is None or not held.is_file():
            return run
        with safe_open(held, framework="pt") as file:
            found: dict[str, Any] = json.loads((file.metadata() or {}).get("run", "{}"))
            if any(found.get(name) != run[name] for name in ("seed", "planned", "text")):
                return run
            for name, own in self._tensors().items():
                own.copy_(file.get_tensor(name))  # captured steps read and write this very memory
            draw.set_state(file.get_tensor("draw"))
            torch.set_rng_state(file.get_tensor("random.cpu"))
            if self.device.type == "cuda":
                torch.cuda.set_rng_state(file.get_tensor("random.cuda"), self.device)
        return found


def check_fused(words: int, device: torch.device) -> str:
    """Switch the fused loss off where it fails or differs from torch's operations, with and without teachers."""
    if device.type != "cuda":
        return "not on a CPU"
    if not _loss.fuses():
        return "NOT used: Triton is not installed"
    draw = torch.Generator(device=device).manual_seed(1)
    logits = torch.randn(2 * 64, 9, words, device=device, generator=draw).mul_(2).bfloat16().requires_grad_()
    outputs = torch.randint(4, words, (64, 9), device=device, generator=draw)
    outputs[3, 4:] = 0
    top = torch.randn(64, 9, words, device=device, generator=draw).softmax(-1).topk(16)
    said = []
    try:
        for distill in (0.0, 0.5):
            found = []
            for fused in (True, False):
                _loss.FUSED = fused
                soft = Soft(top.indices, top.values)
                loss = _loss.loss_of(logits, outputs, smoothing=0.1, r_drop=0.7, soft=soft, distill=distill)
                (grad,) = torch.autograd.grad(loss.total, logits)
                found.append((float(loss.total.detach()), float(loss.nll.detach()), grad.float()))
            (a, n, g), (b, m, h) = found
            off = float((g - h).norm() / h.norm())
            said.append(f"loss {a:.4f} and {b:.4f}, gradients differ by {off:.1e}")
            if not (abs(a - b) < 1e-3 * abs(b) and abs(n - m) < 1e-3 * abs(m) and off < 0.02):
                _loss.FUSED = False
                return f"NOT used: {'; '.join(said)}"
    except Exception as error:
        _loss.FUSED = False
        return f"NOT used: {type(error).__name__}: {str(error)[:300]}"
    _loss.FUSED = True
    return f"used: {'; '.join(said)}"


@contextlib.contextmanager
def attention_by(kind: str) -> Iterator[None]:
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
