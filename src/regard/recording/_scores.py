"""What each head does, as one number for each thing that heads are known to do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from regard._checks import as_int, check_count
from regard._display import Printed
from regard.recording._labels import first_key
from regard.statistics import RELATIONS

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from torch import Tensor

    from regard.recording import Recording
    from regard.recording._calls import Recorded

NAMES = (*RELATIONS, "sink")
_NEED_TOKENS = RELATIONS[2:]


class Scores(Printed):
    """One row for each head, in ``rows`` (dicts, as pandas.DataFrame takes them): print it, loop over it, or ask for
    the ``best`` heads. A score is None where no query had a key to look at: "next" in a causal model, say.
    """

    def __init__(self, recording: Recording, queries: slice | None = None) -> None:
        ends = [None] if queries is None else [getattr(queries, end, ...) for end in ("start", "stop", "step")]
        if any(end is not None and as_int(end) is None for end in ends):
            raise TypeError(f"scores(queries=...) must be a slice of rows, such as slice(-5, None), got {queries!r}")
        calls = [call for call in recording.calls if call.kind == "self"]
        if not calls:
            raise ValueError("the recording has no self attention, and scores are about tokens of one text")
        if any("relations" not in call.parts for call in calls):
            raise ValueError(
                "scores need what was not recorded: ask for it with regard.watch(model, want=regard.Want(scores=True))"
            )
        known = all(call.relations.shape[-1] == len(RELATIONS) for call in calls)
        self.title = recording.title
        self.names = tuple(
            name
            for name in NAMES
            if (known or name not in _NEED_TOKENS) and (name != "sink" or all("key_mass" in c.parts for c in calls))
        )
        self.rows: list[dict[str, Any]] = [
            {"layer": layer, "head": head, "module": here[0].path, **self._row(here, head, queries)}
            for layer in range(len(recording.sites))
            if (here := [call for call in calls if call.layer == layer])
            for head in here[0].heads
        ]

    def _row(self, calls: list[Recorded], head: int, queries: slice | None) -> dict[str, float | None]:
        found = []
        for call in calls:
            rows = call.relations[:, call.row(head)].cpu()
            found.append(rows[:, queries or slice(None)].flatten(0, 1)[:, : len(RELATIONS)])
        means = torch.cat(found).double().nanmean(0).tolist()
        row: dict[str, float | None] = {
            name: None if math.isnan(mean) else mean
            for name, mean in zip(RELATIONS, means, strict=False)
            if name in self.names
        }
        if "sink" in self.names:
            row["sink"] = _sink(calls, head)
        return row

    def best(self, name: str, count: int = 5) -> list[dict[str, Any]]:
        """The heads with the highest score of a name, highest first."""
        self._check(name)
        check_count("count", count)
        there = [row for row in self.rows if row[name] is not None]
        return sorted(there, key=lambda row: -row[name])[:count]

    def of(self, name: str) -> dict[int, dict[int, float | None]]:
        """One score of all heads, by layer and head."""
        self._check(name)
        found: dict[int, dict[int, float | None]] = {}
        for row in self.rows:
            found.setdefault(row["layer"], {})[row["head"]] = row[name]
        return found

    def _check(self, name: str) -> None:
        if name in self.names:
            return
        if name in _NEED_TOKENS:
            raise ValueError(
                f"{name} needs the tokens, and the model was not seen to be given any: pass it integers "
                "[batch, token], such as input_ids, while it is watched with regard.Want(scores=True)"
            )
        if name == "sink":
            raise ValueError("sink needs the key mass: watch with regard.Want(scores=True, key_mass=True)")
        raise ValueError(f"there is no score {name!r}; there are {', '.join(self.names)}")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(f"{self.title}: the best heads of each score"), box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("score")
        table.add_column("layer.head score, highest first")
        for name in self.names:
            heads = [f"{row['layer']}.{row['head']} {row[name]:.2f}" for row in self.best(name, 6)]
            table.add_row(name, ", ".join(heads) or "no query had such a key")
        yield table
        if absent := [name for name in _NEED_TOKENS if name not in self.names]:
            yield Text(f"{', '.join(absent)}: the tokens were not seen", style="dim italic")


def _sink(calls: list[Recorded], head: int) -> float | None:
    """Mean weight on the first key that is seen at all, over the queries that see something."""
    given, count = 0.0, 0
    for call in calls:
        mass: Tensor = call.key_mass[:, call.row(head)].cpu()
        given += float(mass.gather(-1, first_key(mass)).sum())
        count += int((call.lse[:, call.row(head)] != -torch.inf).sum())
    return given / count if count else None
