"""The masks that people write. Each docstring draws its mask for more keys than queries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from regard.masks._arguments import FLOATS, at_least, attendance, describe, integers, whole
from regard.masks._attendance import Additive, Drop, Keep, check_additive
from regard.masks._base import Mask
from regard.masks._documents import Documents, filled_up, ids_from
from regard.masks._padding import Padding
from regard.masks._rules import Causal, Columns, Everything, Prefix, Strided, Window
from regard.masks._tables import Blocks, RandomBlocks

_FROM_FLAGS = (
    ": of a mask [batch, key] with 1 or True at the real tokens, t.sum(-1) gives the lengths; or keep it as it is with "
    "masks.keep(t.bool()[:, None, None, :])"
)

# Equal masks without numbers are the same object: nothing about them can change.
_EVERYTHING = Everything()
_CAUSAL = Causal()


def everything() -> Mask:
    """Every query may attend to every key.

    >>> print(everything().show(3, 5))
    everything(): 3 queries, 5 keys, first query at 2
        0 1 2 3 4
     2  ■ ■ ■ ■ ■
     3  ■ ■ ■ ■ ■
     4  ■ ■ ■ ■ ■
    """
    return _EVERYTHING


def causal() -> Mask:
    """A query at position i sees the keys j ≤ i: itself and what came before.

    The last query is aligned with the last key unless ``query_offset`` says otherwise.

    >>> print(causal().show(3, 5))
    causal(): 3 queries, 5 keys, first query at 2
        0 1 2 3 4
     2  ■ ■ ■ · ·
     3  ■ ■ ■ ■ ·
     4  ■ ■ ■ ■ ■
    """
    return _CAUSAL


def window(left: int, right: int = 0) -> Mask:
    """A query at position i sees the keys −left ≤ j − i ≤ right: ``left + right + 1`` keys, itself included.

    >>> print(window(left=1, right=1).show(3, 6))
    window(left=1, right=1): 3 queries, 6 keys, first query at 3
        0 1 2 3 4 5
     3  · · ■ ■ ■ ·
     4  · · · ■ ■ ■
     5  · · · · ■ ■

    Raises:
        ValueError: ``left`` or ``right`` is negative.
    """
    return Window(whole("window", "left", left), whole("window", "right", right))


def padding(lengths: Tensor | Iterable[int], side: Literal["right", "left"] = "right") -> Mask:
    """Item b has ``lengths[b]`` real keys; the others are padding (on the right or the left), and no query sees them.

    Only keys are masked: a padded query sees the real keys too. A length beyond the call's keys means that all of them
    are real, so one mask of whole lengths serves shorter calls too.

    >>> print(padding([4, 2]).show(2, 5))
    padding([4, 2]): 2 queries, 5 keys, first query at 3, item 0
        0 1 2 3 4
     3  ■ ■ ■ ■ ·
     4  ■ ■ ■ ■ ·
    <BLANKLINE>
    padding([4, 2]): 2 queries, 5 keys, first query at 3, item 1
        0 1 2 3 4
     3  ■ ■ · · ·
     4  ■ ■ · · ·

    Raises:
        TypeError: ``lengths`` does not hold integers.
        ValueError: a length is negative, ``lengths`` is not a list or [batch], or ``side`` is unknown.
    """
    if side not in ("right", "left"):
        raise ValueError(f'masks.padding: side must be "right" or "left" (where the padding is), got {side!r}')
    hint = _FROM_FLAGS if isinstance(lengths, Tensor) and lengths.dim() == 2 else ""
    tensor, made = integers("padding", "lengths", lengths, (1,), hint)
    at_least("padding", "lengths", tensor, 0)
    return Padding(tensor, side, made)


def documents(
    lengths: Tensor | Iterable[int] | Iterable[Iterable[int]] | None = None,
    *,
    ids: Tensor | Iterable[int] | None = None,
) -> Mask:
    """Several documents in one row of tokens: a query sees the keys of its own document.

    Give either ``lengths`` (of the documents in order, adding up to S; one list for all items, or a list of lists, one
    for each item, where what is left of a shorter item is padding) or ``ids`` ([S] or [batch, S], −1 = padding). A
    query at position i belongs to the document of key i; outside 0 … S − 1 it sees nothing.

    >>> print(documents(lengths=[2, 3]).show(4, 5))
    documents(lengths=[2, 3]): 4 queries, 5 keys, first query at 1
        0 1 2 3 4
     1  ■ ■ · · ·
     2  · · ■ ■ ■
     3  · · ■ ■ ■
     4  · · ■ ■ ■
    >>> print(documents(ids=[7, 7, -1, 4, 4]).show(3, 5))
    documents(ids=[7, 7, -1, 4, 4]): 3 queries, 5 keys, first query at 2
        0 1 2 3 4
     2  · · · · ·
     3  · · · ■ ■
     4  · · · ■ ■
    >>> documents(lengths=[[2, 3], [1, 1, 2]]) == documents(ids=[[0, 0, 1, 1, 1], [0, 1, 2, 2, -1]])
    True

    Raises:
        TypeError: both or neither are given, or they do not hold integers.
        ValueError: a length is negative, an id is below −1, or the rank is wrong.
    """
    if (lengths is None) == (ids is None):
        raise TypeError(
            f"masks.documents: give either lengths= or ids=, got {'neither' if lengths is None else 'both'}"
        )
    if ids is None:
        tensor, made = integers("documents", "lengths", filled_up(lengths), (1, 2))
        at_least("documents", "lengths", tensor, 0)
        return Documents("lengths", tensor, made) if tensor.dim() == 1 else Documents("ids", ids_from(tensor), made)
    tensor, made = integers("documents", "ids", ids, (1, 2))
    at_least("documents", "ids", tensor, -1)
    return Documents("ids", tensor, made)


def prefix(n: int) -> Mask:
    """Among the first n positions everyone sees everyone: i < n and j < n. Usually joined: ``causal() | prefix(n)``.

    >>> print(prefix(4).show(3, 6))
    prefix(4): 3 queries, 6 keys, first query at 3
        0 1 2 3 4 5
     3  ■ ■ ■ ■ · ·
     4  · · · · · ·
     5  · · · · · ·
    >>> print((causal() | prefix(4)).show(4, 5))
    causal() | prefix(4): 4 queries, 5 keys, first query at 1
        0 1 2 3 4
     1  ■ ■ ■ ■ ·
     2  ■ ■ ■ ■ ·
     3  ■ ■ ■ ■ ·
     4  ■ ■ ■ ■ ■
    """
    return Prefix(whole("prefix", "n", n))


def columns(n: int) -> Mask:
    """Every query sees the first n keys (global tokens, attention sinks): j < n.

    >>> print(columns(2).show(3, 5))
    columns(2): 3 queries, 5 keys, first query at 2
        0 1 2 3 4
     2  ■ ■ · · ·
     3  ■ ■ · · ·
     4  ■ ■ · · ·
    """
    return Columns(whole("columns", "n", n))


def strided(s: int) -> Mask:
    """A query sees every s-th key counted from itself, on both sides: (i − j) mod s = 0.

    >>> print(strided(2).show(3, 6))
    strided(2): 3 queries, 6 keys, first query at 3
        0 1 2 3 4 5
     3  · ■ · ■ · ■
     4  ■ · ■ · ■ ·
     5  · ■ · ■ · ■
    """
    return Strided(whole("strided", "s", s, least=1))


def blocks(table: Tensor, size: int) -> Mask:
    """Blocks of ``size`` × ``size`` positions: query i sees key j iff ``table[i // size, j // size]``.

    ``table`` is a bool tensor [query blocks, key blocks] or [batch or 1, heads or 1, query blocks, key blocks], True =
    may attend. Positions outside it see nothing and are not seen.

    >>> print(blocks(torch.tensor([[True, False], [False, True]]), size=2).show(3, 5))
    blocks(<bool [2, 2]>, size=2): 3 queries, 5 keys, first query at 2
        0 1 2 3 4
     2  · · ■ ■ ·
     3  · · ■ ■ ·
     4  · · · · ·

    Raises:
        TypeError: ``table`` is not a bool tensor.
        ValueError: its rank is not 2 or 4, or ``size`` is below 1.
    """
    if not isinstance(table, Tensor) or table.dtype != torch.bool:
        raise TypeError(f"masks.blocks: table must be a bool tensor (True = may attend), got {describe(table)}")
    if table.dim() not in (2, 4):
        raise ValueError(
            "masks.blocks: table must be [query blocks, key blocks] or [B or 1, H or 1, query blocks, key blocks], "
            f"got shape {list(table.shape)}"
        )
    return Blocks(table, whole("blocks", "size", size, least=1))


def random_blocks(count: int, size: int, seed: int = 0) -> Mask:
    """Each block of ``size`` queries sees ``count`` different blocks of ``size`` keys (all, where there are fewer).

    They are the blocks with the smallest hash of (seed, row, column), ties to the lower column: the same on every
    device and in every run.

    >>> print(random_blocks(count=1, size=2, seed=3).show(4, 8))
    random_blocks(count=1, size=2, seed=3): 4 queries, 8 keys, first query at 4
        0 1 2 3 4 5 6 7
     4  · · ■ ■ · · · ·
     5  · · ■ ■ · · · ·
     6  ■ ■ · · · · · ·
     7  ■ ■ · · · · · ·
    """
    seed = whole("random_blocks", "seed", seed, least=-(2**63))
    return RandomBlocks(whole("random_blocks", "count", count), whole("random_blocks", "size", size, least=1), seed)


def keep(tensor: Tensor) -> Mask:
    """Your own booleans, True = may attend (the meaning of torch's ``scaled_dot_product_attention``).

    The tensor is [S], [L, S] or [B or 1, H or 1, L or 1, S or 1]; it indexes the rows and columns of the call, not
    positions.

    >>> print(keep(torch.tensor([[True, False, True], [False, True, True]])).show(2, 3))
    keep(<bool [2, 3]>): 2 queries, 3 keys, first query at 1
        0 1 2
     1  ■ · ■
     2  · ■ ■

    Raises:
        TypeError: the tensor is not boolean. Integers do not say which value may attend; floats belong to ``bias=`` or
            ``from_additive``.
        ValueError: its rank is not 1, 2 or 4.
    """
    return Keep(attendance("keep", tensor, (torch.bool,)))


def drop(tensor: Tensor) -> Mask:
    """Your own booleans, True = forbidden (the meaning of ``torch.nn.MultiheadAttention``).

    Shapes as in ``keep``.

    >>> print(drop(torch.tensor([[True, False, True], [False, True, True]])).show(2, 3))
    drop(<bool [2, 3]>): 2 queries, 3 keys, first query at 1
        0 1 2
     1  · ■ ·
     2  ■ · ·

    Raises:
        TypeError: the tensor is not boolean.
        ValueError: its rank is not 1, 2 or 4.
    """
    return Drop(attendance("drop", tensor, (torch.bool,)))


def from_additive(tensor: Tensor) -> Mask:
    """A float mask that was to be added to the logits: 0 = may attend, −inf (or the dtype's minimum) = forbidden.

    Shapes as in ``keep``. Contents are checked where they can be read (on CPU, in eager mode); elsewhere whatever
    is not 0 is forbidden.

    >>> print(from_additive(torch.tensor([[0.0, -torch.inf, 0.0], [0.0, 0.0, -torch.inf]])).show(2, 3))
    from_additive(<float32 [2, 3]>): 2 queries, 3 keys, first query at 1
        0 1 2
     1  ■ · ■
     2  ■ ■ ·

    Raises:
        TypeError: the tensor is not floating point.
        ValueError: it holds another number (that is a ``bias=``), requires grad, or its rank is not 1, 2 or 4.
    """
    attendance("from_additive", tensor, FLOATS)
    check_additive(tensor)
    return Additive(tensor)
