"""Named sparse patterns, each a mask made of the masks that exist: time and memory follow the pairs it keeps.

Positions are those of the keys; a pattern that has to know how many there are takes ``length``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard import masks
from regard._checks import autocasts, check_count, is_int
from regard.masks import Mask

__all__ = [
    "bigbird",
    "chosen_blocks",
    "dilated",
    "fixed",
    "longformer",
    "select_blocks",
    "streaming",
    "strided",
]


_MOST_BLOCKS = 2**15  # of a row of bigbird's table, which is 1 GiB then


def longformer(length: int, *, window: int, tokens: int, causal: bool = False) -> Mask:
    """Longformer: ``window`` positions to each side, and the first ``tokens`` tokens see all and are seen by all.

    >>> print(longformer(6, window=1, tokens=1).show(6, 6))
    window(left=1, right=1) | prefix(1) | ~documents(lengths=[1, 5]): 6 queries, 6 keys, first query at 0
        0 1 2 3 4 5
     0  ■ ■ ■ ■ ■ ■
     1  ■ ■ ■ · · ·
     2  ■ ■ ■ ■ · ·
     3  ■ · ■ ■ ■ ·
     4  ■ · · ■ ■ ■
     5  ■ · · · ■ ■
    """
    length, window, tokens = _whole(length=length), _whole(window=window), _whole(tokens=tokens)
    mask = masks.window(left=window, right=window)
    if tokens := min(tokens, length):
        # as two documents, the global tokens and the rest see across to each other exactly where documents do not
        across = ~masks.documents(lengths=[tokens, length - tokens])
        mask = mask | masks.prefix(tokens) | across
    return masks.causal() & mask if causal else mask


def bigbird(
    length: int,
    *,
    size: int = 64,
    window: int = 3,
    tokens: int = 1,
    random: int = 3,
    seed: int = 0,
    causal: bool = False,
) -> Mask:
    """BigBird, in blocks of ``size``: a band of ``window`` blocks (an odd number), the first ``tokens`` blocks global
    in both directions, and ``random`` blocks drawn for each row of blocks (they may fall on the others).

    >>> print(bigbird(8, size=1, window=1, tokens=1, random=1, seed=5).show(8, 8))
    blocks(<bool [8, 8]>, size=1) | random_blocks(count=1, size=1, seed=5): 8 queries, 8 keys, first query at 0
        0 1 2 3 4 5 6 7
     0  ■ ■ ■ ■ ■ ■ ■ ■
     1  ■ ■ ■ · · · · ·
     2  ■ · ■ · · · · ·
     3  ■ · · ■ · · ■ ·
     4  ■ · · · ■ · · ·
     5  ■ · · ■ · ■ · ·
     6  ■ · · · · · ■ ·
     7  ■ · · · ■ · · ■
    """
    size = _whole(least=1, size=size)
    window, tokens, random = _whole(least=1, window=window), _whole(tokens=tokens), _whole(random=random)
    if window % 2 == 0:
        raise ValueError(f"bigbird: window must be an odd number of blocks, as many on each side, got {window}")
    count = _count(_whole(length=length), size)
    if count > _MOST_BLOCKS:
        raise ValueError(
            f"bigbird: length {length} in blocks of {size} is a table of {count} × {count} blocks, "
            f"{count**2 / 2**30:.1f} GiB, and may be {_MOST_BLOCKS} × {_MOST_BLOCKS}: pass "
            f"size={-(-length // _MOST_BLOCKS)} or more, or take longformer, which needs no table"
        )
    table = torch.zeros(count, count, dtype=torch.bool)
    for off in range(-min(window // 2, count), min(window // 2, count) + 1):
        table.diagonal(off).fill_(True)
    table[:, :tokens] = table[:tokens] = True
    mask = masks.blocks(table, size)
    if random:
        mask = mask | masks.random_blocks(random, size, seed)
    return masks.causal() & mask if causal else mask


def strided(stride: int) -> Mask:
    """Sparse Transformer, strided: the last ``stride`` tokens, and every ``stride``-th one before them; causal.

    >>> print(strided(3).show(4, 8))
    causal() & (window(left=2) | strided(3)): 4 queries, 8 keys, first query at 4
        0 1 2 3 4 5 6 7
     4  · ■ ■ ■ ■ · · ·
     5  · · ■ ■ ■ ■ · ·
     6  ■ · · ■ ■ ■ ■ ·
     7  · ■ · · ■ ■ ■ ■
    """
    stride = _whole(least=1, stride=stride)
    return masks.causal() & (masks.window(left=stride - 1) | masks.strided(stride))


def fixed(length: int, *, stride: int, summary: int = 1) -> Mask:
    """Sparse Transformer, fixed: a token's own block of ``stride``, and the last ``summary`` tokens of every block;
    causal.

    >>> print(fixed(8, stride=3, summary=1).show(4, 8))
    causal() & (documents(lengths=[3, 3, 2]) | keep(<bool [8]>)): 4 queries, 8 keys, first query at 4
        0 1 2 3 4 5 6 7
     4  · · ■ ■ ■ · · ·
     5  · · ■ ■ ■ ■ · ·
     6  · · ■ · · ■ ■ ·
     7  · · ■ · · ■ ■ ■
    """
    length, stride = _whole(length=length), _whole(least=1, stride=stride)
    summary = _whole(summary=summary)
    if summary > stride:
        raise ValueError(f"fixed: summary must be at most stride={stride}, got {summary}")
    own = masks.documents(lengths=_cut(length, stride))
    last = masks.keep(torch.arange(length) % stride >= stride - summary)
    return masks.causal() & (own | last)


def streaming(*, left: int, sinks: int) -> Mask:
    """StreamingLLM: the ``left`` tokens before a token, itself, and the first ``sinks`` tokens of all; causal.

    >>> print(streaming(left=1, sinks=2).show(3, 6))
    causal() & (window(left=1) | columns(2)): 3 queries, 6 keys, first query at 3
        0 1 2 3 4 5
     3  ■ ■ ■ ■ · ·
     4  ■ ■ · ■ ■ ·
     5  ■ ■ · · ■ ■
    """
    return masks.causal() & (masks.window(left=_whole(left=left)) | masks.columns(_whole(sinks=sinks)))


def dilated(*, left: int, step: int, right: int = 0) -> Mask:
    """A window with gaps: ``left`` keys before a token and ``right`` after it, ``step`` apart.

    >>> print(dilated(left=2, step=2).show(3, 7))
    window(left=4) & strided(2): 3 queries, 7 keys, first query at 4
        0 1 2 3 4 5 6
     4  ■ · ■ · ■ · ·
     5  · ■ · ■ · ■ ·
     6  · · ■ · ■ · ■
    """
    left, right, step = _whole(left=left), _whole(right=right), _whole(least=1, step=step)
    return masks.window(left=left * step, right=right * step) & masks.strided(step)


def chosen_blocks(rows: Sequence[Sequence[int]], size: int) -> Mask:
    """Blocks of one's own choice: ``rows[q]`` lists the key blocks that query block q sees.

    >>> print(chosen_blocks([[0], [0, 1], [2, 0]], size=2).show(4, 6))
    blocks(<bool [3, 3]>, size=2): 4 queries, 6 keys, first query at 2
        0 1 2 3 4 5
     2  ■ ■ ■ ■ · ·
     3  ■ ■ ■ ■ · ·
     4  ■ ■ · · ■ ■
     5  ■ ■ · · ■ ■
    """
    if not _is_list(rows) or not all(_is_list(row) for row in rows):
        raise TypeError(f"rows must hold one list of key blocks for each query block, got {_kind(rows)}")
    lists = [[_whole(**{f"rows[{q}]": col}) for col in row] for q, row in enumerate(rows)]
    width = 1 + max((col for row in lists for col in row), default=-1)
    table = torch.zeros(len(lists), width, dtype=torch.bool)
    for q, row in enumerate(lists):
        table[q, row] = True
    return masks.blocks(table, _whole(least=1, size=size))


def select_blocks(
    query: Tensor,
    key: Tensor,
    *,
    size: int,
    keep: int,
    causal: bool = True,
    local: int = 1,
    sinks: int = 0,
    mask: Mask | None = None,
    query_offset: int | None = None,
) -> Mask:
    """For each head and block of ``size`` queries the ``keep`` blocks of keys that it scores highest, as a mask.

    A block of keys is scored by the mean of its keys. A block of queries scores by its mean query, or, where it is
    ``causal``, by its first one: what comes later has no say in what an earlier token sees. Always kept are the
    ``local`` blocks up to a query block's own and the first ``sinks`` ones; ``keep`` counts those chosen in addition.
    With ``causal``, blocks after a query block's own are never seen, and the mask includes ``masks.causal()``.

    Args:
        query, key: [batch, head, L, dim] and [batch, kv head, S, dim], as for ``regard.attention``.
        mask: keys that it hides from all queries (padding) do not count in the means. It is not part of the result.
        query_offset: position of the first query among the keys, at least 0; S - L when None.

    The choice has no gradient; attention under the mask has.
    """
    size, keep = _whole(least=1, size=size), _whole(keep=keep)
    local, sinks = _whole(least=1, local=local), _whole(sinks=sinks)
    _check_rules(causal, mask)
    offset = _check_selection(query, key, query_offset)
    L, S = query.shape[2], key.shape[2]
    first, rows, cols = offset // size, _count(offset + L, size), _count(S, size)
    with torch.no_grad():
        scores = _scores(query, key, size, offset, causal, mask)  # [B, H, rows − first, cols]
        row = torch.arange(first, rows, device=key.device)[:, None]
        col = torch.arange(cols, device=key.device)
        always = ((col <= row) & (col > row - local)) | (col < sinks)
        open_ = col < row if causal else torch.ones_like(always)
        scores = scores.masked_fill(always | ~open_, -torch.inf)
        best = scores.topk(min(keep, cols), dim=-1)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best.indices, best.values > -torch.inf)
        seen = chosen | (always & (col <= row) if causal else always)
        table = torch.nn.functional.pad(seen, (0, 0, first, 0))
    found = masks.blocks(table, size)
    return masks.causal() & found if causal else found


def _check_rules(causal: Any, mask: Any) -> None:
    if not isinstance(causal, bool):
        raise TypeError(f"select_blocks: causal must be True or False, got {_kind(causal)}")
    if mask is not None and not isinstance(mask, Mask):
        given = "a bare tensor: wrap it in masks.keep or masks.drop" if isinstance(mask, Tensor) else _kind(mask)
        raise TypeError(f"select_blocks: mask must be a regard mask such as masks.padding(lengths), got {given}")


def _check_selection(query: Any, key: Any, query_offset: Any) -> int:
    for name, given in (("query", query), ("key", key)):
        if not isinstance(given, Tensor):
            raise TypeError(f"select_blocks: {name} must be a tensor [batch, head, token, dim], got {_kind(given)}")
        if given.dim() != 4:
            raise ValueError(f"select_blocks: {name} must be [batch, head, token, dim], got shape {list(given.shape)}")
        if not given.is_floating_point():
            raise TypeError(f"select_blocks: {name} must be floating point, got {given.dtype}")
    if query.device != key.device or (query.dtype != key.dtype and not autocasts(query.device.type)):
        raise TypeError(
            f"select_blocks: query and key must have one dtype and device, got {query.dtype} on {query.device} and "
            f"{key.dtype} on {key.device}; convert one with .to"
        )
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3] or query.shape[1] % max(1, key.shape[1]):
        raise ValueError(
            "select_blocks: query and key must have one batch size and head dim, and heads that divide; got "
            f"{list(query.shape)} and {list(key.shape)}"
        )
    offset = key.shape[2] - query.shape[2] if query_offset is None else query_offset
    if not is_int(offset):
        raise TypeError(f"select_blocks: query_offset must be an int, got {_kind(offset)}")
    if offset < 0:
        raise ValueError(f"select_blocks: the first query must not stand before the first key, got offset {offset}")
    return offset


def _scores(query: Tensor, key: Tensor, size: int, offset: int, causal: bool, mask: Mask | None) -> Tensor:
    """Query blocks (from the first that has queries) against key blocks, -inf for blocks without a key."""
    B, _, S, D = key.shape
    hidden = None if mask is None else mask.hidden_keys(S, key.device)
    counts = torch.ones(B, S, device=key.device) if hidden is None else (~hidden).expand(B, S).float()
    keys = key.float() if hidden is None else key.float().masked_fill(hidden[:, None, :, None], 0.0)
    number = _in_blocks(counts[:, None, :, None], 0, size).sum(3)  # [B, 1, cols, 1]
    means = _in_blocks(keys, 0, size).sum(3) / number.clamp(min=1)
    pooled = _pooled_queries(query.float(), offset % size, size, causal)
    scores = pooled @ means.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(-1, -2)
    # a NaN would win every comparison, or lose it, as the order of the blocks happens to be
    return scores.nan_to_num(-torch.inf, torch.inf, -torch.inf).masked_fill(
        number[..., 0].unsqueeze(2) == 0, -torch.inf
    )


def _pooled_queries(query: Tensor, before: int, size: int, causal: bool) -> Tensor:
    """One query for each block of positions; ``before`` positions of the first block have none."""
    if causal:
        starts = torch.arange(-before, query.shape[2], size, device=query.device).clamp(min=0)
        return query[:, :, starts]
    count = _in_blocks(torch.ones_like(query[:1, :1, :, :1]), before, size).sum(3)
    return _in_blocks(query, before, size).sum(3) / count.clamp(min=1)


def _in_blocks(x: Tensor, before: int, size: int) -> Tensor:
    """[B, H, tokens, D] as [B, H, blocks, size, D], zeros before the first token and after the last."""
    after = -(before + x.shape[2]) % size
    return torch.unflatten(torch.nn.functional.pad(x, (0, 0, before, after)), 2, (-1, size))


def _cut(length: int, size: int) -> Tensor:
    """The lengths of the blocks of ``size`` that ``length`` tokens are cut into."""
    return torch.arange(0, length, size).neg().add(length).clamp(max=size)


def _count(length: int, size: int) -> int:
    return -(-length // size)


def _is_list(given: object) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, (str, bytes))


def _whole(*, least: int = 0, **named: Any) -> int:
    ((name, given),) = named.items()
    check_count(name, given, least, kind=int)
    return int(given)


def _kind(given: object) -> str:
    return f"{given!r} ({type(given).__name__})"
