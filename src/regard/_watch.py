"""``regard.watch``: see the attention of any model while it runs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from regard._watching import _meet
from regard._watching._watcher import Watcher
from regard.recording import Recorded, Recording
from regard.statistics import Want


@contextlib.contextmanager
def watch(
    model: nn.Module,
    *,
    layers: Sequence[int | str] | None = None,
    heads: Sequence[int] | None = None,
    want: Want | None = None,
    keep_on_cpu: bool = True,
    count_padding: bool = False,
    memory_limit: int | None = 4 << 30,
    tokens: Sequence[str] | Sequence[Sequence[str]] | None = None,
    tokenizer: Any = None,
    on_call: Callable[[Recorded], None] | None = None,
) -> Iterator[Recording]:
    """Record the statistics of every attention call that the model makes inside the block.

        with regard.watch(model) as recording:
            model(**inputs)
        print(recording.summary())

    The model's code and outputs stay as they are: each call runs with the model's own function, and is observed beside
    it. Seen are ``F.scaled_dot_product_attention`` by whatever name, ``torch.nn.MultiheadAttention`` (and what is built
    on it), Hugging Face models with any attention implementation, and regard's own calls. A call that cannot be
    observed is listed in ``recording.missed`` with the reason. Attention that a model computes with its own matrix
    products is not seen: its softmax is listed there too, and a warning says so when nothing else was seen.

    Args:
        model: any module; only calls made while it runs are recorded, and only on this thread.
        layers: numbers (in the order in which they attend) or module paths; all when None.
        heads: which heads of each layer; all when None.
        want: which statistics; ``regard.Want()`` when None.
        keep_on_cpu: move statistics off the device; False leaves them there.
        count_padding: whether queries that are padding count. By default their rows are missing (NaN) and in no sum:
            those where the model's ``attention_mask`` is 0 or torch's ``key_padding_mask`` is True, and those that
            ``masks.padding`` names in regard's own calls.
        memory_limit: bytes of statistics after which further calls are listed as missed; None for no limit.
        tokens: text of the positions, see ``Recording.tokens``.
        tokenizer: gives the tokens of ``input_ids`` instead.
        on_call: called with each recorded call, for progress.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if want is not None and not isinstance(want, Want):
        raise TypeError(f"want must be a regard.Want, such as Want(top_k=4), got {type(want).__name__}")
    recording = Recording(type(model).__name__)
    if tokens is not None:
        recording.tokens = tokens
    with contextlib.ExitStack() as restore:
        watcher = Watcher(
            model,
            recording,
            layers=layers,
            heads=heads,
            want=Want() if want is None else want,
            keep_on_cpu=keep_on_cpu,
            count_padding=count_padding,
            memory_limit=memory_limit,
            tokenizer=tokenizer,
            on_call=on_call,
        )
        restore.callback(watcher.unhook)
        _meet.join(watcher)
        restore.callback(_meet.leave, watcher)
        restore.enter_context(_meet.Meeting(watcher))
        yield recording
    watcher.take_tokens()
    watcher.report()
    if watcher.passes and not watcher.met:
        warnings.warn(
            f"regard.watch saw no attention call in {recording.title}: it may have none, run it on another thread, or "
            "compute attention by matrix products of its own, which cannot be seen: let it call "
            "torch.nn.functional.scaled_dot_product_attention",
            stacklevel=3,
        )
