"""Which tokens are meant: positions, slices, token strings."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.edits._edit import Place

Where = int | str | slice | range | Sequence[int | str]
_MARKS = " ĠĊ▁\n"  # what tokenizers put before a word


def checked(name: str, given: Any) -> Any:
    """Positions as they were given, or an error that says what they may be; lists become tuples."""
    if given is None or isinstance(given, (str, slice, range)) or _whole(given):
        return given
    if isinstance(given, Tensor):
        given = given.tolist()
    if isinstance(given, Iterable):
        found = tuple(given)
        if found and all(_whole(one) or isinstance(one, str) for one in found):
            return found
    raise TypeError(
        f"{name} must be a position, a slice, a token's text or a list of such, got {given!r}; any other rule is a "
        "mask: cut(masks.…)"
    )


def queries(where: Where | None, place: Place) -> Tensor:
    """bool [batch or 1, query]."""
    offsets = place.offset.tolist() if isinstance(place.offset, Tensor) else [place.offset]
    rows = [_rows(where, item, max(0, first) + place.queries, place, "queries") for item, first in enumerate(offsets)]
    if len(rows) == 1 or len(rows[0]) == 1:
        parts = [row[:, max(0, first) :] for row, first in zip(rows, offsets, strict=True)]
        return torch.cat(parts).to(place.device)
    found = [row[item, max(0, first) :] for item, (row, first) in enumerate(zip(rows, offsets, strict=True))]
    return torch.stack(found).to(place.device)


def keys(where: Where | None, place: Place) -> Tensor:
    """bool [batch or 1, key]."""
    if where is not None and place.dropped:
        raise place.refuse(f"its cache has forgotten {place.dropped} keys, so their positions are not those of tokens")
    return _rows(where, 0, place.keys, place, "keys").to(place.device)


def _rows(where: Where | None, item: int, count: int, place: Place, name: str) -> Tensor:
    """bool [items, count]: one row where all items are alike."""
    if where is None:
        return torch.ones(1, count, dtype=torch.bool)
    parts: Sequence[Any] = where if isinstance(where, tuple) else (where,)
    numbers = [part for part in parts if not isinstance(part, str)]
    texts = [part for part in parts if isinstance(part, str)]
    row = torch.zeros(1, count, dtype=torch.bool)
    for part in numbers:
        if isinstance(part, slice):
            row[0, list(range(count)[part])] = True
        elif isinstance(part, range):
            row[0, [n for n in part if 0 <= n < count]] = True
        elif -count <= part < count:
            row[0, part] = True
    if texts:
        items = _texts(place, name)
        _check_there(items, texts, name)
        row = row | torch.tensor([_matches(tokens, texts, count) for tokens in items])
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


def _whole(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


def shown(where: Any) -> str:
    """As it is written in a call."""
    if isinstance(where, slice):
        parts = [where.start, where.stop, where.step]
        if where.step is None:
            parts = parts[:2] if where.start is not None else [where.stop]
        return f"slice({', '.join(map(repr, parts))})"
    if isinstance(where, tuple):
        return f"[{', '.join(map(shown, where))}]"
    return repr(where)
