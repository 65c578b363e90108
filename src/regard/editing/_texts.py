"""Which tokens, by their text, a model has read so far: a tokenizer reads the ids that its modules are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from regard.recording._tokens import ids_to_text
from regard.watching._modules import Frame


class _Read(NamedTuple):
    number: int  # of the forward pass
    ids: Tensor  # of that pass
    tokens: list[list[str]]  # up to the end of that pass; none where it is not known what came before


class Texts:
    """Of each module that is given ids: encoder and decoder of one model read different texts."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._read: dict[str, _Read] = {}

    @property
    def are_none(self) -> bool:
        """Whether nobody reads the ids."""
        return self._tokenizer is None

    def of(self, stack: Sequence[Frame], number: int, first: int | Tensor | None) -> list[list[str]]:
        """Tokens of each item, for a call whose first query is token ``first``; none where they are not known."""
        if self._tokenizer is None:
            return []
        for frame in reversed(stack):
            ids = frame.given().get("input_ids")
            if isinstance(ids, Tensor) and ids.dim() == 2:
                break
        else:
            return []
        known = self._read.get(frame.path)
        if known is None or known.number != number or known.ids is not ids:
            new = ids_to_text(self._tokenizer, ids.detach().cpu())
            before = [] if known is None else known.tokens
            if isinstance(first, Tensor):
                each = set(first.flatten().tolist())
                first = each.pop() if len(each) == 1 else None
            if first == 0:
                tokens = new
            elif len(before) == len(new) and all(len(item) == first for item in before):
                tokens = [old + more for old, more in zip(before, new, strict=True)]
            else:
                tokens = []
            known = self._read[frame.path] = _Read(number, ids, tokens)
        return known.tokens
