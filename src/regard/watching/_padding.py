"""Which queries of a call are padding, by what the model was told: such queries say nothing about the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.masks import Mask
from regard.watching._modules import Frame, is_cross
from regard.watching._read import Read

if TYPE_CHECKING:
    from regard.watching._in_memory import InMemory
    from regard.watching._seen import Seen

# Arguments [batch, token] that say which tokens are real: Hugging Face's are true at tokens, torch's at padding.
_REAL = ("attention_mask", "decoder_attention_mask")
_OF_DECODER = ("decoder_attention_mask", "tgt_key_padding_mask")
_OF_INPUT = ("attention_mask", "src_key_padding_mask")
_OF_KEYS = ("key_padding_mask",)
_NAMES = (*_OF_DECODER, *_OF_INPUT, *_OF_KEYS)
_NAMES_OF_DECODER, _NAMES_OF_INPUT = frozenset(_OF_DECODER), frozenset(_OF_INPUT)


_read = Read()


def real_queries(seen: Seen | InMemory, stack: Sequence[Frame], kind: str) -> Tensor | None:
    """bool [batch, query], True at tokens; None where nothing says that any is padding."""
    real = seen.real
    if real is None:
        real = _declared(seen, stack, kind)
    mask = getattr(seen, "mask", None)
    if real is None and kind == "self" and mask is not None and mask.tensors:  # a rule alone calls no token padding
        real = _by_rule(seen, mask)
    return None if real is None or _read.once(real, "all", lambda: bool(real.all())) else real


def _declared(seen: Seen | InMemory, stack: Sequence[Frame], kind: str) -> Tensor | None:
    """From the nearest module that was given one; a module that was handed no mask at all is not concerned by those
    of the modules around it (the images of a model that reads text too). One that was handed what its queries look at
    has no mask of its own queries to be handed: there the module around it is asked."""
    concerned = kind != "cross"
    for depth in range(len(stack) - 1, -1, -1):
        inner = stack[depth + 1] if depth + 1 < len(stack) else None
        if inner is not None and inner.has_weights:
            if inner.handed_a_mask:
                concerned = True
            elif concerned or not is_cross([inner], seen.queries, seen.keys):
                return None
        if concerned or inner is None:
            real = _of_frame(stack[depth], stack, seen, kind)
            if real is not None:
                return real
    return None


def _of_frame(frame: Frame, stack: Sequence[Frame], seen: Seen | InMemory, kind: str) -> Tensor | None:
    given = frame.given()
    if not any([given.get(name) is not None for name in _NAMES]):
        return None
    names = frame.names
    inside = stack[-1].path.removeprefix(frame.path).split(".")
    # a whole encoder-decoder is given both; its other modules only their own
    of_decoder = not _NAMES_OF_DECODER.isdisjoint(names)
    own: tuple[str, ...] = _OF_INPUT
    if of_decoder and ("decoder" in inside or _NAMES_OF_INPUT.isdisjoint(names)):
        own = _OF_DECODER
    # what a module with cross attention is given says which of the *keys* are padding; unless it reads tokens itself,
    # of which there are as many as queries, and not as many as keys
    of_keys = kind == "cross" and own is _OF_INPUT and "encoder_hidden_states" not in given
    if of_keys and (of_decoder or not _reads(given.get("input_ids"), seen.queries) or seen.queries == seen.keys):
        own = ()
    for name in (*own, *(_OF_KEYS if kind == "self" else ())):
        real = None if given.get(name) is None else _real(given[name], name in _REAL)
        if real is not None and len(real) == seen.shape[0]:
            if real.shape[1] == seen.queries:
                return real
            if kind == "self" and real.shape[1] == seen.keys > seen.queries:
                return real[:, seen.keys - seen.queries :]
    return None


def _reads(ids: object, tokens: int) -> bool:
    return isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] == tokens


def _real(given: object, true_at_tokens: bool) -> Tensor | None:
    if not isinstance(given, Tensor) or given.dim() not in (1, 2) or given.is_nested:
        return None
    found: Tensor | None = _read.once(given, ("real", true_at_tokens), lambda: _tokens(given.detach(), true_at_tokens))
    return found


def _tokens(given: Tensor, true_at_tokens: bool) -> Tensor | None:
    given = given if given.dim() == 2 else given[None]
    if true_at_tokens:
        # an additive mask of two dims is no such argument
        return given.bool() if bool(((given == 0) | (given == 1)).all()) else None
    return ~given if given.dtype == torch.bool else given == 0


def _by_rule(seen: Seen | InMemory, mask: Mask) -> Tensor | None:
    """The same from what the mask of a call of regard's own calls padding: [batch, query]."""
    hidden = mask.padding_keys(seen.keys, seen.device)
    if hidden is None:
        return None
    offset = seen.keys - seen.queries if seen.offset is None else seen.offset
    at = torch.arange(seen.queries, device=hidden.device) + (
        offset.view(-1, 1) if isinstance(offset, Tensor) else offset
    )
    hidden = hidden.expand(seen.shape[0], -1)
    inside = (at >= 0) & (at < seen.keys)
    return ~(hidden.gather(1, at.clamp(0, seen.keys - 1).expand(len(hidden), -1)) & inside)
