"""Every model type of Hugging Face that a small configuration builds, under `regard.watch`: what was seen.

python -m tests.watching.zoo.run                  # all of them, with a table; some minutes
python -m tests.watching.zoo.run bert swin mpt    # some
"""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
from tests.watching.zoo.feed import runnable
from tests.watching.zoo.oracle import Rows, collected
from tests.watching.zoo.small import small_config
from transformers.models.auto import modeling_auto

import regard

SECONDS, PARAMETERS = 40, 8e7
BAR = 0.97  # of the classes with softmax attention, seen whole


# Softmaxes of these types, besides those of attention, are something else.
NO_ATTENTION = {
    "blt": "the entropy of the next byte says where patches begin",
    "deepseek_v4": "streams of the residual are mixed by a doubly stochastic matrix",
    "glm5_next": "the same, and keys are pooled by gates whose softmax is over the pool",
    "glm5_next_text": "the same",
    "groupvit": "tokens are assigned to groups, by a softmax over them; what values are multiplied by is recorded",
    "lightglue": "a detector of keypoints is a softmax over cells",
    "patchtsmixer": "gates of a mixer: products with what they gate, number by number",
    "zaya": "experts are chosen",
}


class Row(NamedTuple):
    """What became of one class."""

    model_type: str
    name: str
    problem: str = ""  # why it did not run at all, without a watch
    calls: int = 0
    missed: tuple[tuple[str, str], ...] = ()
    unseen: tuple[str, ...] = ()  # softmaxes and attention calls that are in neither
    inexact: tuple[str, ...] = ()  # recorded calls that no softmax of the model fits
    bitwise: bool = False

    @property
    def has_attention(self) -> bool:
        return bool(self.calls or self.missed)

    @property
    def whole(self) -> bool:
        return not self.missed and not self.unseen


class TooSlow(Exception):
    pass


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TooSlow(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def all_types() -> list[str]:
    return list(modeling_auto.MODEL_MAPPING_NAMES)


def built(model_type: str) -> Any:
    """A small model of the type, with random weights."""
    names = modeling_auto.MODEL_MAPPING_NAMES[model_type]
    cls = getattr(transformers, names if isinstance(names, str) else names[0])
    config = small_config(model_type)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(config).parameters())
    if size > PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f} M parameters are no small model")
    torch.manual_seed(0)
    model = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # many start at exactly 0, where all weights are alike
            if not parameter.any():
                parameter.normal_(std=0.05)
    return model


def looked_at(model_type: str, implementation: str | None = None) -> Row:
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            model = built(model_type)
            if implementation is not None:
                model.set_attn_implementation(implementation)
            inputs = runnable(model)
            return seen_by_watch(model_type, model, (), inputs)
    except TooSlow:
        raise
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0]
        name = modeling_auto.MODEL_MAPPING_NAMES[model_type]
        return Row(model_type, name if isinstance(name, str) else name[0], f"{type(error).__name__}: {text[:110]}")


def seen_by_watch(label: str, model: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> Row:
    """The model with and without a watch, and what its softmaxes gave."""

    def run() -> list[torch.Tensor]:
        torch.manual_seed(1)
        return tensors_of(model(*args, **inputs))

    expected = run()
    with collected() as rows:
        again = run()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with regard.watch(model, count_padding=True) as recording:
                out = run()
    except Exception as error:
        if isinstance(error, TooSlow):
            raise
        return Row(label, type(model).__name__, missed=(("the model", f"it raised under a watch: {error!r}"),))
    unseen, inexact = compared(label, rows, recording)
    bitwise = same(out, expected) or not same(expected, again)  # a few models draw numbers of their own
    return Row(label, type(model).__name__, "", len(recording), tuple(recording.missed), unseen, inexact, bitwise)


def compared(label: str, rows: list[Rows], recording: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Softmaxes that no recorded call fits, and recorded calls that no softmax fits."""
    left = sorted(
        rows, key=lambda row: row.what in ("logsumexp", "division")
    )  # a softmax first: some models take both of the same logits
    inexact = []
    for call in recording:
        fit = next((row for row in left if row.fits(call.entropy)), None)
        if fit is None and call.keys > 1:  # one key has all the weight, and is not collected
            inexact.append(f"{call.path} {list(call.entropy.shape)}")
        elif fit is not None:
            left.remove(fit)
    listed = len(recording.missed)
    unseen = [
        f"{row.what} {list(row.shape)}"
        for row in left
        if row.what == "attention" or (len(row.shape) >= 3 and row.what == "softmax")
    ]
    return () if label in NO_ATTENTION else tuple(unseen[listed:]), tuple(inexact)


def tensors_of(out: Any) -> list[torch.Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(_plain(out)) if isinstance(x, torch.Tensor)]


def _plain(out: Any) -> Any:
    return dict(out) if isinstance(out, dict) else out


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(
        x.shape == y.shape and torch.equal(x.nan_to_num(), y.nan_to_num())
        if x.is_floating_point()
        else torch.equal(x, y)
        for x, y in zip(a, b, strict=True)
    )


def main(types: list[str]) -> int:
    transformers.utils.logging.set_verbosity(50)
    torch.set_num_threads(1)
    rows = []
    for model_type in types or all_types():
        try:
            with time_limit(SECONDS):
                row = looked_at(model_type)
        except TooSlow as late:
            row = Row(model_type, "", str(late))
        rows.append(row)
        print(line(row), flush=True)
        gc.collect()
    return summary(rows)


def line(row: Row) -> str:
    """One row of the table."""
    start = f"{row.model_type:34} {row.name:38}"
    if row.problem:
        return f"{start} not run: {row.problem}"
    reasons = [
        *dict.fromkeys(reason for _, reason in row.missed),
        *dict.fromkeys(f"unseen {what}" for what in row.unseen),
    ]
    parts = [f"{row.calls:3} calls seen, {len(row.missed) + len(row.unseen)} missed"]
    parts += [f"exact {'no: ' + ', '.join(row.inexact) if row.inexact else 'yes'}"]
    parts += [f"bitwise {'yes' if row.bitwise else 'no'}"]
    return "; ".join([f"{start} {parts[0]}", *parts[1:], *reasons])


def summary(rows: list[Row]) -> int:
    """Says whether the bar is held, and gives the process's status."""
    ran = [row for row in rows if not row.problem]
    attend = [row for row in ran if row.has_attention or row.unseen]
    whole = [row for row in attend if row.whole]
    silent, inexact = [row for row in ran if row.unseen], [row for row in ran if row.inexact]
    changed = [row for row in ran if not row.bitwise]
    share = len(whole) / max(1, len(attend))
    print(f"{len(rows)} classes; {len(ran)} built and ran; {len(attend)} have softmax attention")
    print(f"seen whole: {len(whole)} ({share:.1%}); partial and silent: {len(silent)}; not exact: {len(inexact)}; "
          f"outputs changed: {len(changed)}")  # fmt: skip
    return int(share < BAR or bool(silent or inexact or changed))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
