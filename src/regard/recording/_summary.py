"""The table that ``Recording.summary`` gives."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from regard._display import Printed
from regard.recording._labels import THRESHOLD_NUMBERS
from regard.recording._summary_words import WORDS

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from torch import Tensor

    from regard.recording import Recording
    from regard.recording._calls import Recorded

_LABELS = ("first-token", "previous-token", "local", "broad")
_LONG = ("module", "most attended", "heads")
_PATH = 22  # letters of a module's path in one line
_WIDE = 110  # columns of a terminal in which all of it fits side by side
_NUMBERS = 40  # columns that the numbers take before it, where it does not


class Summary(Printed):
    """One row per layer. Print it, or read ``rows`` (a list of dicts, as pandas.DataFrame takes them)."""

    def __init__(self, recording: Recording, lang: str = "en") -> None:
        from regard._display.texts import text

        self._say = partial(text, WORDS, lang)
        self.title = recording.title
        self.notes = recording.notes(lang)
        self.rows = [_row(recording, layer) for layer in range(len(recording.sites)) if recording.at(layer)]
        self.thresholds = self._say("thresholds", **THRESHOLD_NUMBERS)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        # Rich cuts off what does not fit. Where there is little room, what is long stands in one column, line by line.
        is_wide = options.max_width >= _WIDE
        table = Table(title=Text(self.title), box=box.SIMPLE_HEAD if is_wide else None, pad_edge=False)
        columns = ["layer", "calls", "entropy", "first", "distance"]
        if with_value := any("first_value" in row for row in self.rows):
            columns.insert(4, "first_value")
        for name in columns:
            table.add_column(self._say(name), justify="right", no_wrap=True)
        names = [self._say(name) for name in _LONG]
        for name in names if is_wide else (", ".join(names),):
            table.add_column(name, overflow="fold")
        for row in self.rows:
            long = _long(row, self._say, _PATH if is_wide else options.max_width - _NUMBERS)
            table.add_row(*short(row, with_value), *map(Text, long if is_wide else ["\n".join(filter(None, long))]))
        yield table
        value = [self._say("value_note")] * with_value
        yield Text("\n".join([self.thresholds, *value, *self.notes]), style="dim italic")


def show(token: str) -> str:
    """A token in one visible piece: quoted unless it is a word, so that spaces and punctuation can be seen."""
    return token if token.isalnum() else repr(token)


def folded(path: str, width: int = _PATH) -> str:
    """A path in lines that end between its parts; a part that is too long by itself keeps its line."""
    lines = [""]
    for part in re.split(r"(?<=\.)|(?= \()", path):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part if lines[-1] else part.lstrip()
    return "\n".join(lines)


def short(row: dict[str, Any], with_value: bool) -> list[str]:
    """The layer, how many calls it made, and its numbers."""
    formats = {"entropy": "{:.2f}", "first": "{:.0%}", "first_value": "{:.0%}", "distance": "{:.1f}"}
    if not with_value:
        del formats["first_value"]
    numbers = ["–" if row.get(name) is None else how.format(row[name]) for name, how in formats.items()]
    return [str(row["layer"]), str(row["calls"]), *numbers]


def _long(row: dict[str, Any], say: Callable[[str], str], width: int) -> list[str]:
    """The module, the tokens that receive most, and the heads that have a name."""
    tokens = ", ".join(f"{show(token)} {_percent(share)}" for token, share in row["most_attended"])
    heads = "; ".join(f"{say(name)}: {', '.join(map(str, row['heads'][name]))}" for name in row["heads"])
    return [folded(f"{row['path']} ({say(row['kind'])})", width), tokens, heads]


def _percent(share: float) -> str:
    """Whole percents; in a long text what receives most may have less than one."""
    return f"{share:.0%}" if share >= 0.0095 else f"{share:.2%}"


def _row(recording: Recording, layer: int) -> dict[str, Any]:
    calls = recording.at(layer)
    heads = [row for call in calls for row in recording.described(call)]
    named: dict[str, list[int]] = {}
    for head in sorted({row["head"] for row in heads}):
        label = Counter(row["label"] for row in heads if row["head"] == head).most_common(1)[0][0]
        if label:
            named.setdefault(label, []).append(head)
    return {
        "layer": layer,
        "path": calls[0].path,
        "kind": calls[0].kind,
        "calls": len(calls),
        **{name: _mean([row[name] for row in heads]) for name in ("entropy", "first", "distance")},
        **({"first_value": _mean([row["first_value"] for row in heads])} if "first_value" in heads[0] else {}),
        "most_attended": _most_attended(recording, calls),
        "heads": {name: named[name] for name in _LABELS if name in named},
    }


def _most_attended(recording: Recording, calls: list[Recorded]) -> list[tuple[str, float]]:
    """The three tokens with the largest share of the layer's weight; a token that stands in several places is added up,
    and heads whose weights are NaN are left out."""
    mass: dict[int, Tensor] = {}  # by item: key positions mean the same in each call of a layer
    text: dict[int, list[str]] = {}
    for call in calls:
        for item in range(call.batch if "key_mass" in call.parts else 0):
            received = call.key_mass[item]
            more = received[~received.isnan().any(-1)].sum(0, dtype=torch.float64)
            before = mass.get(item, more.new_zeros(0))
            if len(more) >= len(before):
                more, before, text[item] = before, more.clone(), recording.key_tokens(call, item)
            before[: len(more)] += more
            mass[item] = before
    shares: Counter[str] = Counter()
    for item, all_of_it in mass.items():
        for token, value in zip(text[item], all_of_it.tolist(), strict=True):
            shares[token] += value
    total = sum(shares.values())
    return [(token, value / total) for token, value in shares.most_common(3) if total]


def _mean(values: list[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None
