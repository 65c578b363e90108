"""A forward pass of a model, with every attention call that it makes, kept until they are needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from regard.recording import Recording, Site
from regard.watching._block import check_layers_found, check_paths_found, checked_numbers, listening
from regard.watching._follower import Asked
from regard.watching._in_memory import InMemory
from regard.watching._modules import paths
from regard.watching._projection import Waiting
from regard.watching._seen import Seen, check_same
from regard.watching._watcher import Watcher


class Collected(NamedTuple):
    """One attention call: what it was given, and what it gave (with its place in autograd's graph)."""

    seen: Seen | InMemory
    site: Site
    layer: int
    kind: str


class Collector(Watcher):
    """A watch that writes nothing down: it hands each call on."""

    def __init__(self, model: nn.Module, layers: Sequence[int | str] | None, take: Callable[[Collected], None]) -> None:
        super().__init__(model, Recording(type(model).__name__), Asked(layers))
        self.take = take

    def _record(self, call: Waiting, projection: object) -> None:
        ready, (kind, _, _) = self.recorder.ready(call.seen, call.stack, call.site)
        if call.out is not None and isinstance(ready, Seen):
            check_same(ready, call.out, None)
        self.take(Collected(ready, call.site, call.layer, kind))


@contextlib.contextmanager
def collecting(
    model: nn.Module, layers: Sequence[int | str] | None, take: Callable[[Collected], None]
) -> Iterator[Collector]:
    """Hand every attention call of the model to ``take``; leaving the block raises if one could not be followed."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    layers = checked_numbers("layers", layers, paths(model), empty=False)
    collector = Collector(model, layers, take)
    with listening(collector):
        yield collector
    missed = collector.recording.missed
    if missed:
        raise ValueError(
            f"{len(missed)} attention calls of the model could not be followed, the first in {missed[0][0]}: "
            f"{missed[0][1]}. A result without them would be wrong; name the others with layers=[…]"
        )
    if not collector.met:
        raise ValueError(f"no attention call was seen in {type(model).__name__}")
    check_layers_found(collector, layers)
    check_paths_found(collector, layers)


def run(model: nn.Module, inputs: Any) -> Any:
    """The model on its inputs: a mapping of keywords, a tuple of arguments, or one argument."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)) and not isinstance(inputs, Tensor):
        return model(*inputs)
    return model(inputs)
