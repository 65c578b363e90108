"""``regard.watch``: see the attention of any model while it runs."""

from __future__ import annotations

import contextlib
import difflib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from regard._checks import as_int
from regard.recording import Recorded, Recording
from regard.recording._tokens import check_tokenizer, checked_tokens
from regard.statistics import Want
from regard.watching import _around, _together
from regard.watching._follower import Asked, Follower
from regard.watching._modules import paths
from regard.watching._operators import Listening
from regard.watching._watcher import Watcher


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
    heads_dim: int | Mapping[str, int] | None = None,
    tokens: Sequence[str] | Sequence[Sequence[str]] | None = None,
    tokenizer: Any = None,
    on_call: Callable[[Recorded], None] | None = None,
    gather: bool = True,
    keep: Sequence[str] = (),
) -> Iterator[Recording]:
    """Record the statistics of every attention call that the model makes inside the block.

        with regard.watch(model) as recording:
            model(**inputs)
        print(recording.summary())

    The model's code and outputs stay as they are: its operators run untouched, and attention is recognised among them.
    Seen are torch's attention function and modules, Hugging Face models with any implementation, regard's own calls,
    and attention that a model writes out: a softmax whose product with values follows, of whatever rank. A call that
    cannot be observed is listed in ``recording.missed`` with the reason, and a warning says so at the end.

    Args:
        model: any module; only calls made while it runs are recorded, and only on this thread.
        layers: numbers (in the order in which they attend) or module paths; all when None.
        heads: which heads of each layer; all when None.
        want: which statistics; ``regard.Want()`` when None.
        keep_on_cpu: move statistics off the device, at the end of each pass; False leaves them there.
        count_padding: whether queries that are padding count. By default their rows are missing (NaN) and in no sum:
            those where the model's ``attention_mask`` is 0 or torch's ``key_padding_mask`` is True, and those that
            ``masks.padding`` names in regard's own calls.
        memory_limit: bytes of statistics after which further calls are listed as missed; None for no limit.
        heads_dim: which axis of the weights holds the heads, for attention that a model writes out in a way that does
            not show it (``recording.missed`` says so); an int, or one for each module path.
        tokens: text of the positions, see ``Recording.tokens``.
        tokenizer: gives the tokens of ``input_ids`` instead.
        on_call: called with each recorded call, for progress.
        gather: where processes share the model (DDP, FSDP2, tensor parallelism), leaving the block makes one recording
            of what all of them saw, the same in each: items of all batches one after another, heads in their order.
            All processes must leave the block then. False keeps what this process saw.
        keep: "output", "pattern" or both: also what each head wrote, and query and key of each call, for
            ``regard.edits.ablate`` and ``patch``. Held in memory as they are, and not written to files; torch's own
            modules leave their fused path for it. A call that an edit could not change raises ``edits.CannotEdit``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if want is not None and not isinstance(want, Want):
        raise TypeError(f"want must be a regard.Want, such as Want(top_k=4), got {type(want).__name__}")
    if tokens is not None:
        tokens = checked_tokens(tokens, "tokens")
    if tokenizer is not None:
        check_tokenizer(tokenizer)
    layers = checked_numbers("layers", layers, paths(model))
    heads = checked_numbers("heads", heads)
    layout = _together.layout_of(model) if gather else None
    by_heads = layout is not None and layout.heads is not None
    recording = Recording(_title(model))
    mine = None if by_heads else heads  # numbers mean the model's heads, of which this process has some
    wanted = Want() if want is None else want
    asked = Asked(layers, mine, wanted, keep_on_cpu, count_padding, memory_limit, heads_dim, tokenizer, on_call)
    watcher = Watcher(model, recording, asked)
    kept: Any = _keeping(model, recording, keep, layers, heads_dim) if keep else contextlib.nullcontext()
    with listening(watcher), kept:
        yield recording
    watcher.take_tokens()
    if tokens is not None:
        recording.tokens = tokens
    if layout is not None:
        most = _together.gather(recording, layout, None if heads is None else list(heads))
        watcher.recorder.most_heads = max(watcher.recorder.most_heads, most)
    _check_found(watcher, layers, heads)
    _warn_of_gaps(watcher)


def _title(model: nn.Module) -> str:
    """The model's own name, without what wraps it for several processes."""
    name = type(model).__name__
    inner = getattr(model, "module", None)
    if name == "DistributedDataParallel" and isinstance(inner, nn.Module):
        return type(inner).__name__
    return name.removeprefix("FSDP") if hasattr(model, "unshard") else name


@contextlib.contextmanager
def listening(watcher: Follower) -> Iterator[None]:
    """Show a watcher what its model does in the block; whatever way it is left, nothing of this stays behind."""
    with contextlib.ExitStack() as restore:
        restore.callback(watcher.unhook)
        restore.callback(_around.plain_calls(list(watcher.modules.values())))
        _around.join(watcher)
        restore.callback(_around.leave, watcher)
        restore.enter_context(Listening(watcher))
        yield


def _keeping(model: nn.Module, recording: Recording, keep: Sequence[str], layers: Any, heads_dim: Any) -> Any:
    from regard.editing._kept import KINDS, keeping  # outputs are taken where edits act

    if isinstance(keep, str) or any(what not in KINDS for what in keep):
        raise ValueError(f"keep must be a list of {' and '.join(map(repr, KINDS))}, got {keep!r}")
    return keeping(model, recording, tuple(keep), layers, heads_dim)


def checked_numbers(
    name: str, given: Any, names: Mapping[str, object] | None = None, *, empty: bool = True
) -> list[Any] | None:
    """Numbers of layers (or paths of modules, which are among ``names``) or heads, as a list; None where none were
    given. ``empty``: whether a list without any will do."""
    if given is None:
        return None
    kinds = "layer numbers or module paths" if names is not None else "head numbers"
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable) or getattr(given, "shape", None) == ():
        raise TypeError(f"{name} must be a list of {kinds}, got {given!r}")
    found: list[Any] = [one if names is not None and isinstance(one, str) else as_int(one) for one in given]
    if any(one is None for one in found):
        raise TypeError(f"{name} must be a list of {kinds}, got {given!r}")
    if not found and not empty:
        raise ValueError(f"{name} is an empty list, which means no {name} at all; leave it out for all of them")
    if names is not None:
        _check_layers(found, names)
    return found


def _check_layers(given: list[int | str], names: Mapping[str, object]) -> None:
    below = [n for n in given if isinstance(n, int) and n < 0]
    if below:
        raise ValueError(
            f"layers={below}: layers are numbered 0, 1, 2 … in the order in which they attend, and do not count from "
            "the end: how many there are is known only when the model has run"
        )
    for path in given:
        if isinstance(path, str) and path.partition(" #")[0].replace("(root)", "") not in names:
            near = difflib.get_close_matches(path, names, 3, 0.4)
            raise ValueError(
                f"layers names {path!r}, and the model has no module of that path"
                + (f"; the nearest are {', '.join(near)}" if near else "")
            )


def check_layers_found(watcher: Follower, layers: Sequence[int | str] | None) -> None:
    """Layers that were asked for and that no call had: known only now."""
    count = len(watcher.recording.sites)
    absent = [n for n in layers or () if isinstance(n, int) and not 0 <= n < count]
    if absent and count:
        raise ValueError(f"layers={absent} were asked for, and the layers that attend are 0 … {count - 1}")


def check_paths_found(watcher: Follower, layers: Sequence[int | str] | None) -> None:
    """Likewise paths of modules."""
    attended = {name for site in watcher.recording.sites for name in (site.path, str(site))}
    absent = [path for path in layers or () if isinstance(path, str) and path not in attended]
    if absent and attended:
        raise ValueError(
            f"layers={absent} were asked for, and made no attention call; those that attend are "
            + ", ".join(str(site) for site in watcher.recording.sites)
        )


def _check_found(watcher: Watcher, layers: Sequence[int | str] | None, heads: Sequence[int] | None) -> None:
    check_layers_found(watcher, layers)
    most = watcher.recorder.most_heads
    absent = [n for n in heads or () if not -most <= n < most]
    if absent and most:
        raise ValueError(f"heads={absent} were asked for, and the heads are 0 … {most - 1}")


def _warn_of_gaps(watcher: Watcher) -> None:
    recording = watcher.recording
    if recording.missed:
        whole = "saw no attention call that it could record" if not recording.calls else "missed some attention calls"
        reasons = list(dict.fromkeys(reason for _, reason in recording.missed))
        more = f", and {len(reasons) - 3} more reasons" if len(reasons) > 3 else ""
        warnings.warn(
            f"regard.watch {whole} in {recording.title}: {len(recording.missed)} have no statistics "
            f"({'; '.join(reasons[:3])}{more}). recording.missed lists them",
            stacklevel=4,
        )
    elif watcher.passes and not watcher.met:
        warnings.warn(
            f"regard.watch saw no attention call in {recording.title}: it may have none, or compute it in a way that "
            "shows no softmax over keys (state spaces, convolutions, linear attention, a kernel of its own)",
            stacklevel=4,
        )
    elif not watcher.passes and not recording.calls:
        warnings.warn(
            f"regard.watch did not see {recording.title} run in the block: call the model there; if a function "
            "compiled by torch.compile calls it, call that function uncompiled",
            stacklevel=4,
        )
