"""What other packages ask of a mask, whatever it is made of: a plain rule states facts, a join answers from its parts.

No other package knows the kinds of mask by name. A new kind states its facts in its class, and every question below
has its answer.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from regard.masks._flex import JOINS, Frame, Predicate

if TYPE_CHECKING:
    from regard.masks._base import Mask

Answer = TypeVar("Answer")
# A set of keys, and the set that the opposite of the mask has; None where nothing is known.
KeySets = tuple[Tensor | None, Tensor | None]


class Facts:
    """The questions about a whole tree of masks."""

    # The masks that a join is made of; a plain rule has none.
    parts: tuple[Mask, ...] = ()

    # Facts of a plain rule. A join leaves them None.
    _relative: ClassVar[bool | None] = False  # asks only how far apart query and key are
    _recent: ClassVar[bool | None] = False  # hides every key that is neither near nor among the first
    _countable: ClassVar[bool | None] = False  # its pairs may be counted one by one, however many they are
    _of_intervals: ClassVar[bool] = False  # a row sees a few intervals of keys, wherever contents can be read
    _by_call: ClassVar[bool] = False  # names the rows and columns of one call by number, not positions
    _about_keys: bool | None = False  # says the same to all rows of an item
    _side: str | None = None  # where it puts padding
    _grain: int | None = 0  # the size of the blocks it is made of; 0 where there are none
    is_open: bool = False  # asks which item or head it is, and was not told how many there are

    @classmethod
    def intervals_in(cls, structure: tuple[Any, ...]) -> float:
        """The most intervals of keys that a row sees, by a plain rule of this structure."""
        return 1 if cls._of_intervals else math.inf

    def _marks(self) -> bool:
        """Whether a plain rule calls some tokens padding."""
        return False

    def survives(self, window: int, sinks: int) -> bool:
        """Whether a plain rule means the same once all but the last ``window`` and first ``sinks`` keys are gone."""
        return False

    def _per_head(self, B: int, H: int) -> Mask | None:
        """A plain rule with one batch item for each head of an item; None where it cannot be taken apart."""
        return None

    def _sized(self, B: int, H: int) -> Mask:
        """An open rule, told how many items and heads there are."""
        raise NotImplementedError

    def _predicate(self, frame: Frame) -> Predicate:
        """A plain rule for one pair at a time."""
        raise NotImplementedError

    # Answers for the whole mask.

    def fold(
        self,
        ask: Callable[[Mask], Answer | None],
        both: Callable[[Answer, Answer], Answer],
        either: Callable[[Answer, Answer], Answer],
        opposite: Callable[[Answer], Answer],
    ) -> Answer:
        """``ask(mask)``; where that is None and the mask is a join, the answers of its parts, joined as they are."""
        answer = ask(self)  # type: ignore[arg-type]
        if answer is not None or not self.parts:
            return answer  # type: ignore[return-value]
        parts = [part.fold(ask, both, either, opposite) for part in self.parts]
        joined: Answer = self._join(parts, both, either, opposite)
        return joined

    def _join(self, answers: list[Any], both: Any, either: Any, opposite: Any) -> Any:
        """One answer of several, by the sign of a join."""
        raise NotImplementedError

    @property
    def leaves(self) -> list[Mask]:
        """The plain rules that the mask is made of, in order."""
        return [leaf for part in self.parts for leaf in part.leaves] if self.parts else [self]  # type: ignore[list-item]

    @property
    def conjuncts(self) -> list[Mask]:
        """Masks that mean this one when they are joined by ``&``."""
        return [self]  # type: ignore[list-item]

    @property
    def disjuncts(self) -> list[Mask]:
        """Masks that mean this one when they are joined by ``|``."""
        return [self]  # type: ignore[list-item]

    @property
    def by_call(self) -> bool:
        """Whether some part names the rows and columns of one call by number; all other rules speak of positions."""
        return any(leaf._by_call for leaf in self.leaves)

    @property
    def relative(self) -> bool:
        """Whether only the distance between query and key matters: the mask may be moved along the diagonal."""
        return bool(self.fold(lambda mask: mask._relative, operator.and_, operator.and_, _same))

    @property
    def about_keys(self) -> bool:
        """Whether a key is permitted to all rows of an item, or to none."""
        return bool(self.fold(lambda mask: mask._about_keys, operator.and_, operator.and_, _same))

    @property
    def placeless(self) -> bool:
        """Whether the place of the queries among the keys (``query_offset``) says nothing to the mask."""
        return all(leaf._by_call or leaf.about_keys for leaf in self.leaves)

    @property
    def bounded(self) -> bool:
        """Whether the mask hides every key that is neither near nor among the first."""
        return bool(self.fold(lambda mask: mask._recent, operator.or_, operator.and_, lambda _: False))

    @property
    def grain(self) -> int:
        """The largest block that lies on the grid of every table of blocks in the mask; 0 where there is no table."""
        return self.fold(lambda mask: mask._grain, math.gcd, math.gcd, _same)

    @property
    def marks_padding(self) -> bool:
        """Whether the mask calls some tokens padding (or may do so, where its contents cannot be read)."""
        return self._padding(lambda mask: True if mask._marks() else None) is not None

    @property
    def padding_side(self) -> str | None:
        """The side that the mask puts padding on; None where it marks none, or not by a side."""
        sides = [leaf._side for leaf in self.leaves if leaf._side is not None]
        return sides[0] if sides and self.marks_padding else None

    def padding_keys(self, S: int, device: torch.device | str) -> Tensor | None:
        """[B or 1, S], True at the tokens that the mask calls padding; None where it calls none so.

        ``masks.padding`` does, and a document id of −1, also within ``&`` and on both sides of ``|``. Other masks hide
        keys too (``columns``, ``keep``, ``~padding``) and do not say that a token is no token.
        """
        found: Tensor | None = self._padding(lambda mask: mask.hidden_keys(S, device) if mask._marks() else None)
        return found

    def _padding(self, ask: Callable[[Any], Any]) -> Any:
        return self.fold(lambda mask: None if mask.parts else (ask(mask), None), *SETS)[0]

    def per_head(self, B: int, H: int) -> Mask | None:
        """The mask with one batch item for each head of an item; None where it cannot be taken apart."""

        def ask(mask: Mask) -> Mask | None:
            return mask if mask.batch == 1 and mask.heads == 1 else mask._per_head(B, H)

        apart = [ask(leaf) for leaf in self.leaves]
        if None in apart:
            return None
        rest = iter(apart)
        found: Mask = self.fold(
            lambda mask: None if mask.parts else next(rest), operator.and_, operator.or_, operator.invert
        )
        return found

    def sized(self, B: int, H: int) -> Mask:
        """The mask for a call of B items and H heads: rules that ask which item or head it is are told how many."""
        mask: Mask = self  # type: ignore[assignment]
        if not self.is_open:
            return mask
        signs = operator.and_, operator.or_, operator.invert

        def ask(part: Mask) -> Mask | None:
            return None if part.parts else part._sized(B, H) if part.is_open else part

        found: Mask = mask.remember(("sized", B, H), 0, lambda: mask.fold(ask, *signs))
        return found

    def predicate(self, frame: Frame) -> Predicate:
        """The rule for one pair at a time, as FlexAttention takes it."""
        return self.fold(lambda mask: None if mask.parts else mask._predicate(frame), *JOINS)


def _same(answer: Answer) -> Answer:
    return answer


def _union(a: Any, b: Any) -> Any:
    return (b if a is None else a) if a is None or b is None else a | b


def _common(a: Any, b: Any) -> Any:
    return None if a is None or b is None else a & b


# How &, | and ~ join what is known of keys: the keys that a mask hides, and those that its opposite hides.
SETS: tuple[Any, Any, Any] = (
    lambda a, b: (_union(a[0], b[0]), _common(a[1], b[1])),
    lambda a, b: (_common(a[0], b[0]), _union(a[1], b[1])),
    lambda sets: (sets[1], sets[0]),
)
