"""Which token each key of a call is, from the integers that the model was given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from regard.recording import Site
    from regard.watching._in_memory import InMemory
    from regard.watching._modules import Frame
    from regard.watching._seen import Seen

# what names of integers [batch, token] say that are no tokens
_OTHERS = ("position", "mask", "type", "segment", "cache", "label", "length")
# what modules call the texts, and the images and sounds, that they are given
_TEXT = ("input_ids", "decoder_input_ids")
_NO_TEXT = ("pixel_values", "pixel_values_videos", "input_features", "input_values")


def reads_text(stack: list[Frame]) -> bool:
    """Whether the model's tokens can be what a call attends to: not in the part that was given the image or the sound
    of a model that reads both (CLIP), or that writes (Whisper)."""
    whole = stack[0]
    if not whole.path and not _was_given(whole, _TEXT):
        return True  # it was given nothing else: whoever names its tokens means these
    return not any(frame.path and _was_given(frame, _NO_TEXT) and not _was_given(frame, _TEXT) for frame in stack)


def _was_given(frame: Frame, names: tuple[str, ...]) -> bool:
    given = frame.given()
    return any(isinstance(given.get(name), Tensor) for name in names)


class Tokens:
    """What each place that attends has read so far: a cache holds keys of earlier calls."""

    def __init__(self) -> None:
        self._read: dict[str, Tensor] = {}

    def of(self, seen: Seen | InMemory, stack: list[Frame], site: Site, what: tuple[str, str, int]) -> bool | Tensor:
        """What ``Want(scores=...)`` takes: tokens [batch, key], −1 where there is none; True where nobody knows, as in
        cross attention, whose keys are other tokens than its queries."""
        kind, _, first_key = what
        if kind == "cross":
            return True
        batch, _, queries, keys = seen.shape
        new = _given(stack, batch, queries)
        if new is None:
            self._read.pop(str(site), None)
            return True
        before = self._read.get(str(site))
        if queries < keys and before is not None and len(before) == batch:
            new = torch.cat([before, new], 1)
        elif queries < keys:
            return True
        self._read[str(site)] = new
        tokens = new[:, first_key:]
        if tokens.shape[1] > keys:
            return True
        return torch.nn.functional.pad(tokens, (0, keys - tokens.shape[1]), value=-1)


def _given(stack: list[Frame], batch: int, queries: int) -> Tensor | None:
    """The integers [batch, query] that the nearest module around the call was handed."""
    for frame in reversed(stack):
        for name, given in frame.given().items():
            if not isinstance(given, Tensor) or given.is_floating_point() or given.dtype == torch.bool:
                continue
            if any(word in name for word in _OTHERS) or given.is_nested:
                continue
            if tuple(given.shape) == (batch, queries):
                return given.detach().to("cpu", torch.int64)
            if batch == 1 and tuple(given.shape) == (queries,):
                return given.detach().to("cpu", torch.int64)[None]
    return None
