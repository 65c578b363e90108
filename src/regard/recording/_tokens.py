"""Token strings: checking them, and getting them from a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def checked_tokens(given: Sequence[str] | Sequence[Sequence[str]], name: str) -> list[list[str]]:
    """The tokens as one list an item of the batch."""
    if isinstance(given, str):
        raise TypeError(f"{name} must be a list of strings, one per token, got one string: split it as the model does")
    if hasattr(given, "convert_ids_to_tokens"):
        raise TypeError(f"{name} must be a list of strings, got a {type(given).__name__}: pass it as tokenizer=")
    if not isinstance(given, Iterable) or any(not isinstance(item, Iterable) for item in given):
        raise TypeError(
            f"{name} must be a list of strings, or one list of strings for each item of the batch, got "
            f"{type(given).__name__}{' of other things' if isinstance(given, Iterable) else ''}"
        )
    items: list[Any] = list(given)
    if all(isinstance(token, str) for token in items):
        return [items] if items else []
    lists = [list(item) for item in items if not isinstance(item, str)]
    if len(lists) != len(items) or any(not isinstance(token, str) for item in lists for token in item):
        raise TypeError(f"{name} must be a list of strings, or one list of strings for each item of the batch")
    return lists


_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
_MOST_PIECES = 12  # tokens that are tried as one text


def check_tokenizer(given: Any) -> None:
    if not hasattr(given, "decode") and not hasattr(given, "convert_ids_to_tokens"):
        raise TypeError(
            "tokenizer must have decode and convert_ids_to_tokens, as those of transformers do, got "
            f"{type(given).__name__}"
        )


def ids_to_text(tokenizer: Any, ids: Any) -> list[list[str]]:
    """Each id as text of its own.

    Tokens that are parts of a character are named by the character and a number: 猫₁, 猫₂, 猫₃. A part without the rest
    keeps the tokenizer's name for it.
    """
    check_tokenizer(tokenizer)
    rows = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if rows and not isinstance(rows[0], list):
        rows = [rows]
    texts: dict[int, str] = {}
    parts = set()  # ids that are no text by themselves
    for token in {token for row in rows for token in row}:
        text = tokenizer.decode([token]) if hasattr(tokenizer, "decode") else ""
        if "�" in text:
            parts.add(token)
        if not text or "�" in text:
            name = tokenizer.convert_ids_to_tokens([token])[0]
            text = f"<id {token}>" if name is None else str(name)  # a model may have more ids than its tokenizer
        texts[token] = text
    names = [[texts[token] for token in row] for row in rows]
    for row, named in zip(rows, names, strict=True) if parts else ():
        _name_parts(tokenizer, row, parts, named)
    return names


def _name_parts(tokenizer: Any, row: list[int], parts: set[int], names: list[str]) -> None:
    """Name neighbours that make a text only together by that text, in place."""
    start = 0
    while start < len(row):
        end = start
        while end < len(row) and end - start < _MOST_PIECES and row[end] in parts:
            end += 1
            whole = tokenizer.decode(row[start:end])
            if end - start > 1 and whole and "�" not in whole:
                for at in range(start, end):
                    text = whole if at == start else whole.lstrip()
                    names[at] = text + str(at - start + 1).translate(_SUBSCRIPTS)
                break
        else:
            end = start + 1
        start = end
