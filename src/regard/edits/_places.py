"""Which tokens are meant: positions, slices, token strings."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from regard._checks import as_int
from regard.edits._edit import Place

Chosen = NDArray[np.bool_]
Where = int | str | slice | range | Sequence[int | str | slice | range] | NDArray[np.integer[Any]] | Tensor
_MARKS = " ĠĊ▁\n"  # what tokenizers put before a word


@dataclass(frozen=True)
class Span:
    """A slice, as a value: those of Python have no hash before 3.12."""

    start: int | None
    stop: int | None
    step: int | None

    @property
    def at(self) -> slice:
        return slice(self.start, self.stop, self.step)

    def __repr__(self) -> str:
        parts = [self.start, self.stop, self.step]
        if self.step is None:
            parts = parts[:2] if self.start is not None else [self.stop]
        return f"slice({', '.join(map(repr, parts))})"


def checked(name: str, given: Any) -> Any:
    """Positions as values that compare and have a hash, or an error that says what they may be; lists become tuples."""
    if given is None or (one := _value(given)) is not None:
        return given if given is None else one
    if isinstance(given, Iterable) and not isinstance(given, (bytes, Mapping)) and getattr(given, "shape", None) != ():
        found = tuple(_value(each) for each in given)
        if found and all(each is not None for each in found):
            return found
    raise TypeError(
        f"{name} must be a position, a slice, a token's text or a list of such, got {given!r}; any other rule is a "
        "mask: cut(masks.…)"
    )


def _value(given: Any) -> int | str | range | Span | None:
    if isinstance(given, slice):
        bounds = [given.start, given.stop, given.step]
        found = [as_int(bound) for bound in bounds]
        return Span(*found) if all((a is None) == (b is None) for a, b in zip(found, bounds, strict=True)) else None
    return given if isinstance(given, (str, range)) else as_int(given)


def queries(where: Any, place: Place) -> Chosen:
    """[batch or 1, query]."""
    if where is None:
        return np.ones((1, place.queries), dtype=np.bool_)
    if place.first is None:
        raise place.refuse(
            "which tokens its queries are is not known: its cache does not say how many came before; leave queries= "
            "away, or run without a cache"
        )
    firsts = [max(0, first) for first in _numbers(place.first)]
    rows = _each(where, [first + place.queries for first in firsts], place, "queries")
    return np.concatenate([row[:, row.shape[1] - place.queries :] for row in rows])


def keys(where: Any, place: Place) -> Chosen:
    """[batch or 1, key]; positions from the end count from the last key that was read."""
    if where is None:
        return np.ones((1, place.keys), dtype=np.bool_)
    if place.misplaced:
        raise place.refuse(f"its cache has forgotten {place.forgotten}, so their positions are not those of tokens")
    if place.read is None and _from_the_end(where):
        raise place.refuse(
            f"keys={shown(where)} counts from the end, and which of its {place.keys} keys is the last that was read is "
            "not known: give positions from the start"
        )
    counts = [place.keys] if place.read is None else [min(count, place.keys) for count in _numbers(place.read)]
    rows = _each(where, [place.dropped + count for count in counts], place, "keys")
    rows = [row[:, place.dropped :] for row in rows]
    if any(row.shape[1] < place.keys for row in rows):
        rows = [np.pad(row, ((0, 0), (0, place.keys - row.shape[1]))) for row in rows]
    return np.concatenate(rows)


def _numbers(given: int | Tensor) -> list[int]:
    """One for all items, or one an item."""
    found = [given] if isinstance(given, int) else given.flatten().tolist()
    return found[:1] if len(set(found)) == 1 else found


def _each(where: Any, counts: list[int], place: Place, name: str) -> list[Chosen]:
    """[1, count] of each item, whose texts may be its own; or one [items, count] for all."""
    rows = [_rows(where, count, place, name) for count in counts]
    return rows if len(rows) == 1 else [row[item : item + 1] if len(row) > 1 else row for item, row in enumerate(rows)]


def _from_the_end(where: Any) -> bool:
    parts: Sequence[Any] = where if isinstance(where, tuple) else (where,)
    return any(
        bound is not None and bound < 0
        for part in parts
        if isinstance(part, (int, Span))
        for bound in ((part.start, part.stop) if isinstance(part, Span) else (part,))
    )


def _rows(where: Any, count: int, place: Place, name: str) -> Chosen:
    """[items, count]: one row where all items are alike."""
    parts: Sequence[Any] = where if isinstance(where, tuple) else (where,)
    numbers = [part for part in parts if not isinstance(part, str)]
    texts = [part for part in parts if isinstance(part, str)]
    row = np.zeros((1, count), dtype=np.bool_)
    for part in numbers:
        if isinstance(part, Span):
            row[0, part.at] = True
        elif isinstance(part, range):
            row[0, [n for n in part if 0 <= n < count]] = True
        elif -count <= part < count:
            row[0, part] = True
    if texts:
        items = _texts(place, name)
        _check_there(items, texts, name)
        row = row | np.array([_matches(tokens, texts, count) for tokens in items])
    return row


def _texts(place: Place, name: str) -> list[list[str]]:
    if not place.tokens:
        raise place.refuse(
            f"{name} are given by their text, and the tokens are not known: pass regard.edit(model, …, tokens=[…]), or "
            "tokenizer=… where the model is given input_ids"
        )
    if place.kind == "cross" and name == "keys":
        raise place.refuse("keys of cross attention are tokens of another sequence: give their positions")
    if len(place.tokens) not in (1, place.batch):
        raise place.refuse(f"tokens has {len(place.tokens)} items, and the batch {place.batch}")
    counts = sorted({len(item) for item in place.tokens})
    if place.first == 0 and (counts[0] < place.queries or (counts[-1] > place.queries and not place.goes_on)):
        raise place.refuse(
            f"there are {' or '.join(map(str, counts))} tokens, and it reads {place.queries}: give one string for "
            "each, special ones and padding too; or, where it reads something else (a picture, an encoder's text), "
            "name the other layers with layers=[…]"
        )
    return place.tokens


def _check_there(items: list[list[str]], texts: list[str], name: str) -> None:
    tokens = list(dict.fromkeys(token for item in items for token in item))
    for text in texts:
        if not any(_same(token, text) for token in tokens):
            near = difflib.get_close_matches(text, tokens, 3, 0.4)
            raise ValueError(
                f"{name} names the token {text!r}, which is not among the tokens"
                + (f"; the nearest are {', '.join(map(repr, near))}" if near else "")
            )


def _matches(tokens: list[str], texts: list[str], count: int) -> list[bool]:
    found = [any(_same(token, text) for text in texts) for token in tokens[:count]]
    return found + [False] * (count - len(found))


def _same(token: str, text: str) -> bool:
    return token == text or token.strip(_MARKS) == text.strip(_MARKS) != ""


def shown(where: Any) -> str:
    """As it is written in a call."""
    return f"[{', '.join(map(shown, where))}]" if isinstance(where, tuple) else repr(where)
