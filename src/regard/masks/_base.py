"""What every mask is: a rule with a hashable structure, the tensors it reads, and the questions backends ask of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor

from regard._display import Displayed
from regard.masks._areas import LEAST_ROWS, Area, areas_of
from regard.masks._arguments import describe, plain
from regard.masks._blocks import BlockTable, block_table, most_blocks
from regard.masks._count import kept_pairs
from regard.masks._facts import Facts, KeySets
from regard.masks._flags import CAUSAL, Fused, trimmed
from regard.masks._grid import Grid
from regard.masks._intervals import RowIntervals, Spans, Strip, row_intervals
from regard.masks._memo import Memo, shared_memo, versions
from regard.masks._show import show

Answer = TypeVar("Answer")
Structure = tuple[Any, ...]
Offset = int | Tensor
Range = range | slice

KINDS: dict[str, Any] = {}
# The blocks that a table on a CPU has, how many of them are listed for an estimate, and what each takes there.
_BLOCK, _MOST_BLOCKS, _BLOCK_BYTES = 128, 2**23, 5


class Mask(Facts, Displayed):
    """A rule that says which query may attend to which key: True = may attend.

    Masks are values: join them with ``&``, ``|`` and ``~``, compare them with ``==``, and never change one. Query row r
    of a call stands at position ``i = r + query_offset`` among the keys, by default ``S − L`` (the last query is
    aligned with the last key).

    >>> from regard import masks
    >>> print((masks.causal() & masks.window(left=1) | masks.columns(1)).show(3, 5))
    (causal() & window(left=1)) | columns(1): 3 queries, 5 keys, first query at 2
        0 1 2 3 4
     2  ■ ■ ■ · ·
     3  ■ · ■ ■ ·
     4  ■ · · ■ ■
    """

    kind: ClassVar[str] = ""
    # s where a mask keeps exactly the pairs with (i − j) mod s = 0
    period: int | None = None

    def __init_subclass__(cls) -> None:
        if cls.kind:
            KINDS[cls.kind] = cls

    def __init__(
        self, structure: Structure, tensors: tuple[Tensor, ...] = (), batch: int = 1, heads: int = 1, made: bool = False
    ) -> None:
        self.structure = structure
        self.code = repr(structure)
        self.tensors = tensors
        self.batch = batch
        self.heads = heads
        self._made = made
        self._hash: int | None = None
        self._memo: Memo | None = None
        self._unread: Memo | None = None  # of tensors that cannot be read: what does not depend on what they hold

    # What a kind of mask defines, with its facts. ``_see`` is the rule itself; leaving out the rest costs only speed.

    def _see(self, grid: Grid) -> Tensor:
        """The rule on one tile: a bool tensor broadcastable to [B, H, rows, columns]."""
        raise NotImplementedError

    def _spans(self, strip: Strip) -> Spans | None:
        """The rule as intervals of keys for a strip of rows, or None where it has no such form."""
        return None

    def _block_states(self, strip: Strip, block_q: int, block_k: int) -> Any:
        """Empty, partial or full for each block of a strip (one batch group); None when that is not known."""
        return None

    def _states_at(self, strip: Strip, rows: Any, cols: Any, block_q: int, block_k: int) -> Any:
        """The same for some blocks of the strip alone; None where that is not cheaper than for all."""
        return None

    def _count_below(self, strip: Strip, key: Any) -> Any:
        """How many keys below ``key`` each row of the strip may see (one batch group, one head); None if not known."""
        return None

    def _most_keys(self, S: int) -> int:
        """The most of S keys that one row sees."""
        return S

    def _flags(self) -> Fused | None:
        """The rule as flags of a fused kernel, or None."""
        return None

    def _key_sets(self, S: int, device: torch.device) -> KeySets:
        """Keys that no query sees and keys that all queries see, [B or 1, S] each, or None where not known."""
        return None, None

    def _check_shape(self, B: int, H: int, L: int, S: int) -> None:
        """Raise ValueError when the mask's own tensors do not fit the call."""

    def _text(self) -> str:
        raise NotImplementedError

    @classmethod
    def _rebuild(cls, structure: Structure, tensors: Iterator[Tensor]) -> Mask:
        """The mask of this structure again, taking its tensors in order; nothing is checked a second time."""
        return cls(*structure[1:])

    # Values.

    def __and__(self, other: Mask) -> Mask:
        other = _operand(self, other, "&")
        # with a part of its own, a mask is what it was; so a structure never says less than what kernels are given
        for one, part in ((self, other), (other, self)):
            if any(part is each for each in one.conjuncts):
                return one
        joined: Mask = KINDS["and"](self, other)
        return joined

    def __or__(self, other: Mask) -> Mask:
        joined: Mask = KINDS["or"](self, _operand(self, other, "|"))
        return joined

    def __rand__(self, other: object) -> NoReturn:
        _refuse_operand(self, other, "&")

    def __ror__(self, other: object) -> NoReturn:
        _refuse_operand(self, other, "|")

    def __invert__(self) -> Mask:
        opposite: Mask = KINDS["not"](self)
        return opposite

    def __bool__(self) -> NoReturn:
        raise TypeError(
            f"the mask {self!r} has no truth value. Join masks with & | ~ (not with `and`, `or`, `not`), "
            "and test for a missing one with `mask is None`."
        )

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Mask):
            return NotImplemented
        if self.code != other.code:
            return False
        return all(_same_contents(mine, yours) for mine, yours in zip(self.tensors, other.tensors, strict=True))

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self.structure)
        return self._hash

    def __repr__(self) -> str:
        return self._text()

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_memo": None,
            "_unread": None,
            "_hash": None,
        }  # string hashes differ from process to process

    # Questions about tensors.

    @property
    def given(self) -> tuple[Tensor, ...]:
        """The tensors that came from the caller as tensors: their device is the caller's choice."""
        return () if self._made else self.tensors

    def readable(self) -> bool:
        """Whether the contents of all its tensors may be read now: on CPU, and outside compile, vmap and fake modes."""
        if torch.compiler.is_compiling():
            return False
        return all(plain(tensor) for tensor in self.tensors)

    def check(self, B: int, H: int, L: int, S: int) -> None:
        """Raise ValueError when the mask cannot apply to a call of these sizes. A mask never enlarges a call."""
        if self.batch not in (1, B):
            raise ValueError(f"the mask {self!r} is for {self.batch} batch items, but the call has {B}")
        if self.heads not in (1, H):
            raise ValueError(f"the mask {self!r} is for {self.heads} heads, but the call has {H}")
        self._check_shape(B, H, L, S)

    # Pictures.

    def tile(
        self, rows: Range, cols: Range, L: int, S: int, *, offset: Offset, device: torch.device | str = "cpu"
    ) -> Tensor:
        """The rule on a rectangle of the call's rows and columns: bool [B or 1, H or 1, len(rows), len(cols)]."""
        grid = Grid(rows, cols, L, S, offset, torch.device(device))
        height, width = grid.height, grid.width
        if height == 0 or width == 0:
            return torch.zeros(self.batch, self.heads, height, width, dtype=torch.bool, device=grid.device)
        seen = self._see(grid)
        batch = seen.shape[0] if seen.dim() == 4 else 1
        heads = seen.shape[1] if seen.dim() == 4 else 1
        return seen.expand(batch, heads, height, width)

    def dense(
        self,
        L: int,
        S: int,
        *,
        query_offset: Offset | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """The whole mask as booleans: [L, S], or [B or 1, H or 1, L, S] where batch or head matter.

        >>> from regard import masks
        >>> masks.causal().dense(2, 3).int()
        tensor([[1, 1, 0],
                [1, 1, 1]], dtype=torch.int32)
        """
        _check_sizes(L, S)
        offset = S - L if query_offset is None else query_offset
        items = offset.numel() if isinstance(offset, Tensor) else 1
        self.check(items if self.batch == 1 else self.batch, self.heads, L, S)
        if device is None:
            device = self.tensors[0].device if self.tensors else torch.device("cpu")
        whole = self.tile(range(L), range(S), L, S, offset=offset, device=device)
        return whole[0, 0] if whole.shape[0] == 1 and whole.shape[1] == 1 else whole

    def show(self, L: int, S: int, *, query_offset: Offset | None = None) -> str:
        """A drawing: ■ may attend, · may not (and ▒ partly, where a large mask is drawn block by block).

        Beyond 2**24 pairs only masks that are a few intervals of keys for each query (causal, windows, padding,
        documents, …) are drawn; the others raise ValueError.

        >>> from regard import masks
        >>> print(masks.window(left=1).show(2, 4))
        window(left=1): 2 queries, 4 keys, first query at 2
            0 1 2 3
         2  · ■ ■ ·
         3  · · ■ ■
        """
        _check_sizes(L, S)
        return show(self, L, S, S - L if query_offset is None else query_offset)

    # Questions that backends ask, answered without building L × S.

    def rows(self, L: int, S: int, offset: Offset, B: int = 1) -> RowIntervals | None:
        """For each row its permitted keys as at most 4 intervals, or None (no such form, or contents not readable)."""
        return self.remember(("rows", L, S, offset, B), offset, lambda: row_intervals(self, L, S, offset, B))

    def areas(self, L: int, S: int, offset: int) -> tuple[Area, ...] | None:
        """The mask as a few rectangles and triangles of pairs; None where it is not, or its tensors would decide."""
        if self.tensors or L < LEAST_ROWS:
            return None
        return self.remember(("areas", L, S, offset), offset, lambda: areas_of(self.rows(L, S, offset)))

    def blocks(self, L: int, S: int, offset: Offset, B: int, block_q: int, block_k: int) -> BlockTable:
        """Which blocks of block_q × block_k pairs are empty (left out), partial, or full; see ``BlockTable``."""
        key = ("blocks", L, S, offset, B, block_q, block_k)
        return self.remember(key, offset, lambda: block_table(self, L, S, offset, B, block_q, block_k))

    def unlisted_bytes(self, L: int, S: int, offset: Offset, B: int) -> int | None:
        """At most the bytes of the table of blocks, where it is too large to be made only to be measured; else None."""
        most = self.remember(("most", L, S, offset, B), offset, lambda: most_blocks(self, L, S, offset, B, _BLOCK))
        return None if most <= _MOST_BLOCKS else most * _BLOCK_BYTES

    def kept_pairs(self, L: int, S: int, offset: Offset, B: int, H: int) -> tuple[int, bool]:
        """How many (item, head, query, key) are permitted, and whether that is exact; else it is an upper bound."""
        return self.remember(("pairs", L, S, offset, B, H), offset, lambda: kept_pairs(self, L, S, offset, B, H))

    @property
    def flags(self) -> Fused | None:
        """The flags of a fused kernel that mean the same in a call of any size; None when there are none."""
        return self._flags()

    @property
    def is_causal(self) -> bool:
        """Whether the mask is the causal one, however it was written."""
        return self._flags() == CAUSAL

    def fused(self, L: int, S: int, offset: Offset) -> Fused | None:
        """The flags of a fused kernel that mean the same, from the structure alone; None when there are none."""
        flags = self._flags()
        return None if flags is None else trimmed(flags, L, S, offset)

    def hidden_keys(self, S: int, device: torch.device | str) -> Tensor | None:
        """[B or 1, S], True at keys that no query may see wherever it stands; None when no such key is known of."""
        return self._key_sets(S, torch.device(device))[0]

    def _on(self, device: torch.device) -> Tensor:
        """The mask's first tensor where a tile is computed; only what is on CPU is moved (lists become CPU tensors)."""
        tensor = self.tensors[0]
        if tensor.device == device or tensor.device.type != "cpu":
            return tensor
        if torch.compiler.is_compiling():
            return tensor.to(device)

        def copy() -> Tensor:
            # Made in inference mode, the copy could not be kept for calls outside of it.
            with torch.inference_mode(False):
                return tensor.to(device)

        return self.remember(("on", device), 0, copy)

    def recalled(self, key: Any) -> Any:
        """What ``remember`` keeps without looking at tensors; None where it has to look, or keeps nothing."""
        memo = self._unread if self.tensors else self._memo
        return None if memo is None else memo.found.get(key)

    def remember(self, key: Any, offset: Offset, make: Callable[[], Answer], *, reads: bool = True) -> Answer:
        """``make()``, remembered unless it depends on tensors whose changes cannot be noticed. Without ``reads`` it
        depends on what they hold only where that can be read: on a GPU, then, on the mask's structure alone."""
        if torch.compiler.is_compiling() or isinstance(offset, Tensor):
            return make()
        if not self.tensors:
            if self._memo is None:
                self._memo = shared_memo(self.code)
            return self._memo.recall(key, make)
        if not reads and self._unread is not None:
            return self._unread.recall(key, make)
        state = versions(self.tensors)
        if state is not None:
            if self._memo is None:
                self._memo = Memo()
            return self._memo.recall((state, key), make)
        if reads or any([tensor.is_cpu for tensor in self.tensors]):
            return make()
        places = [str(tensor.device) for tensor in self.tensors]
        self._unread = shared_memo(f"{self.code} {places} {self._made}")
        return self._unread.recall(key, make)


def _check_sizes(L: int, S: int) -> None:
    if L < 0 or S < 0:
        raise ValueError(f"the numbers of queries and keys must be at least 0, got L={L} and S={S}")


def _same_contents(mine: Tensor, yours: Tensor) -> bool:
    if mine is yours:
        return True
    if mine.is_meta or yours.is_meta:
        return False
    return torch.equal(mine, yours if mine.device == yours.device else yours.to(mine.device))


def _operand(mask: Mask, other: object, sign: str) -> Mask:
    if isinstance(other, Mask):
        return other
    _refuse_operand(mask, other, sign)


def _refuse_operand(mask: Mask, other: object, sign: str) -> NoReturn:
    raise TypeError(
        f"{sign} joins two masks: got {describe(other)} and {mask!r}. Wrap a boolean tensor in masks.keep "
        "(True = may attend) or masks.drop (True = forbidden)."
    )
