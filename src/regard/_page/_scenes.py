"""A recording as readers think of it: texts, and for each text its layers, calls that continue each other joined.

A model that generates makes one call per layer and token. Here they are one layer over one text: prompt and generated
tokens. A scene is one item of a batch in one such run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regard._page._character import Seen, character

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from regard.recording import Recorded, Recording

MOST_SCENES = 16  # items of batches and runs in one page


@dataclass
class Layer:
    """One place that attends, in one scene. Arrays are [head, …]; what was not recorded is None."""

    index: int  # in the recording
    path: str
    kind: str
    sight: str  # "self", "cross", or "causal" where no query saw a later key
    heads: tuple[int, ...]
    query_text: int  # indices into the texts of the page
    key_text: int
    first: int  # place of the first query in its text
    generated: int | None  # place in that text from which tokens came one by one
    queries: int
    keys: int
    top_keys: NDArray[np.int32] | None
    top_weights: NDArray[np.float32] | None
    map: NDArray[np.float32] | None
    is_exact: bool  # one cell of the map is one pair
    entropy: NDArray[np.float32] | None
    key_mass: NDArray[np.float32] | None
    rows: list[dict[str, Any]] = field(default_factory=list)  # for each head: its numbers and its character


@dataclass
class Scene:
    run: int
    item: int
    layers: list[Layer]


class Texts:
    """Lists of tokens, each kept once."""

    def __init__(self) -> None:
        self.lists: list[list[str]] = []
        self._known: dict[tuple[str, ...], int] = {}

    def index(self, tokens: list[str]) -> int:
        key = tuple(tokens)
        if key not in self._known:
            self._known[key] = len(self.lists)
            self.lists.append(tokens)
        return self._known[key]


def scenes(recording: Recording, texts: Texts) -> tuple[list[Scene], int]:
    """The scenes of a page, and how many there would be in all."""
    runs = _runs(recording)
    wanted = [(number, item) for number, run in enumerate(runs) for item in range(max(call.batch for call in run))]
    found = []
    for number, item in wanted[:MOST_SCENES]:
        by_layer: dict[int, list[Recorded]] = {}
        for call in runs[number]:
            if item < call.batch:
                by_layer.setdefault(call.layer, []).append(call)
        layers = [_layer(recording, by_layer[index], item, texts) for index in sorted(by_layer)]
        found.append(Scene(number, item, layers))
    return found, len(wanted)


def _runs(recording: Recording) -> list[list[Recorded]]:
    """Calls by the text that they belong to: a pass that decodes continues the one before it."""
    passes: dict[int, list[Recorded]] = {}
    for call in recording.calls:
        passes.setdefault(call.number, []).append(call)
    runs: list[list[Recorded]] = []
    for calls in passes.values():
        continues = any(call.phase == "decode" for call in calls)
        if runs and continues and {call.batch for call in calls} <= {call.batch for call in runs[-1]}:
            runs[-1].extend(calls)
        else:
            runs.append(list(calls))
    return runs


def _layer(recording: Recording, calls: list[Recorded], item: int, texts: Texts) -> Layer:
    calls = [call.cpu() for call in calls if call.heads == calls[0].heads]
    last = max(calls, key=lambda call: call.keys)
    keys, queries = last.keys, sum(call.queries for call in calls)
    key_tokens = recording.key_tokens(last, item)
    if calls[0].kind == "cross":
        first, query_tokens = 0, _cross_tokens(recording, calls, item, queries)
    else:
        first = _position(calls[0], item)
        query_tokens = key_tokens if 0 <= first <= keys - queries else recording.query_tokens(calls[0], item)[:queries]
        first = first if query_tokens is key_tokens else 0
    top_keys, top_weights = _joined(calls, "top_keys", item), _joined(calls, "top_weights", item)
    at = np.arange(queries) + _position(calls[0], item)
    grid, is_exact = _map(calls, item, queries, keys)
    sight = calls[0].kind
    if sight == "self" and top_keys is not None and queries > 1 and bool((top_keys <= at[None, :, None]).all()):
        sight = "causal"
    layer = Layer(
        index=calls[0].layer,
        path=calls[0].path,
        kind=calls[0].kind,
        sight=sight,
        heads=calls[0].heads,
        query_text=texts.index(query_tokens),
        key_text=texts.index(key_tokens),
        first=first,
        generated=_generated(calls, first),
        queries=queries,
        keys=keys,
        top_keys=top_keys,
        top_weights=top_weights,
        map=grid,
        is_exact=is_exact,
        entropy=_joined(calls, "entropy", item),
        key_mass=_key_mass(calls, item, keys),
    )
    layer.rows = character(layer, key_tokens, _seen(calls, item, at))
    return layer


def _seen(calls: list[Recorded], item: int, positions: NDArray[Any]) -> Seen:
    seeing = torch.stack([(call.lse[item] != -torch.inf).sum(-1) for call in calls]).sum(0)
    distance = None
    if all("distance" in call.parts for call in calls):
        distance = torch.stack([call.distance[item] for call in calls]).sum(0).numpy()
    return Seen(
        positions=positions,
        permitted=torch.cat([call.counts()[item] for call in calls], 1).numpy(),
        seeing=seeing.clamp_min(1).numpy(),
        max_weight=_joined(calls, "max_weight", item),
        distance=distance,
    )


def _generated(calls: list[Recorded], first: int) -> int | None:
    alone = 0
    for call in reversed(calls):
        if call.phase != "decode" or call.queries != 1:
            break
        alone += 1
    return first + sum(call.queries for call in calls) - alone if alone else None


def _position(call: Recorded, item: int) -> int:
    return int(call.positions[item if len(call.positions) > 1 else 0])


def _cross_tokens(recording: Recording, calls: list[Recorded], item: int, queries: int) -> list[str]:
    """The text of the queries of joined calls: the first says where it begins, and the others go on."""
    known = recording.tokens
    own = known[item if len(known) > 1 else 0] if known and (len(known) == 1 or item < len(known)) else []
    start = _position(calls[0], item)
    return [own[at] if 0 <= at < len(own) else f"[{at}]" for at in range(start, start + queries)]


def _joined(calls: list[Recorded], name: str, item: int) -> NDArray[Any] | None:
    """A statistic of the queries, [head, query, …], calls one after the other."""
    if any(name not in call.parts for call in calls):
        return None
    parts = [call.parts[name][item] for call in calls]
    if name in ("top_keys", "top_weights"):
        most = max(part.shape[-1] for part in parts)
        fill = -1 if name == "top_keys" else 0
        parts = [torch.nn.functional.pad(part, (0, most - part.shape[-1]), value=fill) for part in parts]
    found: NDArray[Any] = torch.cat(parts, 1).numpy()
    return found


def _key_mass(calls: list[Recorded], item: int, keys: int) -> NDArray[np.float32] | None:
    if any("key_mass" not in call.parts for call in calls):
        return None
    total = np.zeros((len(calls[0].heads), keys), np.float32)
    for call in calls:
        total[:, : call.keys] += call.key_mass[item].numpy()
    return total


def _map(calls: list[Recorded], item: int, queries: int, keys: int) -> tuple[NDArray[np.float32] | None, bool]:
    """The map of all queries, and whether each of its cells is one pair."""
    if any("map" not in call.parts for call in calls):
        return None, False
    maps = [call.parts["map"][item].float().numpy() for call in calls]
    exact = all(m.shape[1:] == (call.queries, call.keys) for m, call in zip(maps, calls, strict=True))
    if len(calls) == 1:
        return maps[0], exact
    if exact:
        whole = np.zeros((len(calls[0].heads), queries, keys), np.float32)
        row = 0
        for part in maps:
            whole[:, row : row + part.shape[1], : part.shape[2]] = part
            row += part.shape[1]
        return whole, True
    return _repooled(calls, maps, queries, keys), False


def _repooled(calls: list[Recorded], maps: list[NDArray[np.float32]], queries: int, keys: int) -> NDArray[np.float32]:
    """Maps of calls with other numbers of queries and keys on one grid: each cell's sum goes to the cell that holds its
    middle."""
    rows, columns = min(queries, maps[0].shape[1]), min(keys, maps[0].shape[2])
    total = np.zeros((maps[0].shape[0], rows, columns), np.float64)
    start = 0
    for call, part in zip(calls, maps, strict=True):
        q, k = edges(call.queries, part.shape[1]), edges(call.keys, part.shape[2])
        sums = part * np.diff(q)[:, None] * np.diff(k)[None, :]
        row = ((start + (q[:-1] + q[1:]) / 2) * rows / queries).astype(int).clip(0, rows - 1)
        column = (((k[:-1] + k[1:]) / 2) * columns / keys).astype(int).clip(0, columns - 1)
        for head in range(len(total)):
            np.add.at(total[head], (row[:, None], column[None, :]), sums[head])
        start += call.queries
    sizes = np.diff(edges(queries, rows))[:, None] * np.diff(edges(keys, columns))[None, :]
    found: NDArray[np.float32] = (total / sizes).astype(np.float32)
    return found


def edges(size: int, count: int) -> NDArray[np.int64]:
    """Where `count` cells of about equal size begin, and where the last one ends."""
    return np.arange(count + 1, dtype=np.int64) * size // max(1, count)
