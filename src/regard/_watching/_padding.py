"""Which queries of a call are padding, by what the model was told: such queries say nothing about the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard import masks
from regard._watching._modules import Frame

if TYPE_CHECKING:
    from regard._watching._seen import Seen

# Arguments [batch, token] that say which tokens are real: Hugging Face's are true at tokens, torch's at padding.
_REAL = ("attention_mask", "decoder_attention_mask")
_OF_DECODER = ("decoder_attention_mask", "tgt_key_padding_mask")
_OF_INPUT = ("attention_mask", "src_key_padding_mask")
_OF_KEYS = ("key_padding_mask",)


def without_padding(seen: Seen, stack: Sequence[Frame], kind: str) -> Seen:
    """The call with the rows of padding queries empty: their statistics are missing, and they add to no sum."""
    real = _told(seen, stack, kind)
    if real is None and kind == "self" and seen.mask is not None:
        real = _by_rule(seen)
    if real is None or bool(real.all()):
        return seen
    rows = masks.keep(real.to(seen.query.device)[:, None, :, None])
    return seen._replace(mask=rows if seen.mask is None else seen.mask & rows)


def _told(seen: Seen, stack: Sequence[Frame], kind: str) -> Tensor | None:
    """bool [batch, query] from the nearest module that was given one; True at tokens."""
    for frame in reversed(stack):
        given = frame.given()
        inside = stack[-1].path.removeprefix(frame.path).split(".")
        # a whole encoder-decoder is given both; its other modules only their own
        names = _OF_DECODER if "decoder" in inside and any(name in frame.names for name in _OF_DECODER) else _OF_INPUT
        for name in (*names, *(_OF_KEYS if kind == "self" else ())):
            real = _real(given.get(name), name in _REAL)
            if real is not None and len(real) == seen.query.shape[0]:
                if real.shape[1] == seen.queries:
                    return real
                if kind == "self" and real.shape[1] == seen.keys:
                    return real[:, seen.keys - seen.queries :]
    return None


def _real(given: object, true_at_tokens: bool) -> Tensor | None:
    if not isinstance(given, Tensor) or given.dim() not in (1, 2):
        return None
    given = given.detach() if given.dim() == 2 else given.detach()[None]
    if true_at_tokens:
        # an additive mask of two dims is no such argument
        return given.bool() if bool(((given == 0) | (given == 1)).all()) else None
    return ~given if given.dtype == torch.bool else given == 0


def _by_rule(seen: Seen) -> Tensor | None:
    """The same from what the mask of a call of regard's own calls padding: [batch, query]."""
    assert seen.mask is not None
    hidden = seen.mask.padding_keys(seen.keys, seen.query.device)
    if hidden is None:
        return None
    offset = seen.keys - seen.queries if seen.offset is None else seen.offset
    at = torch.arange(seen.queries, device=hidden.device) + (
        offset.view(-1, 1) if isinstance(offset, Tensor) else offset
    )
    hidden = hidden.expand(seen.query.shape[0], -1)
    inside = (at >= 0) & (at < seen.keys)
    return ~(hidden.gather(1, at.clamp(0, seen.keys - 1).expand(len(hidden), -1)) & inside)
