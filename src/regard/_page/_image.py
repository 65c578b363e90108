"""The picture that a vision model was given, under the patches that it attends to."""

from __future__ import annotations

import base64
import copy
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._page._png import rgb

if TYPE_CHECKING:
    from regard.recording import Recording

MOST = 448  # pixels of a side in the file


def with_picture(
    recording: Recording, picture: Any, patches: tuple[int, int] | None
) -> tuple[Recording, dict[str, Any]]:
    """The recording with a name for each patch where it has no tokens, and what the page needs of the picture."""
    pixels = _pixels(picture)
    tokens = max((call.keys for call in recording.calls), default=0)
    rows, columns = _grid(tokens, patches)
    first = tokens - rows * columns
    if not recording.tokens:
        # one token before the patches is the one that stands for the whole picture
        names = ["[CLS]"] if first == 1 else [f"[{n}]" for n in range(first)]
        names += [f"{r},{c}" for r in range(rows) for c in range(columns)]
        recording = copy.copy(recording)
        recording._tokens = [names]
    data = base64.b64encode(rgb(_smaller(pixels))).decode()
    return recording, {"picture": {"png": data, "rows": rows, "columns": columns, "first": first}}


def as_seen(given: Any) -> np.ndarray[Any, Any] | None:
    """The picture as a model's preparation left it, cut and resized; its numbers are spread over 0 to 1 again."""
    if given is None or getattr(given, "ndim", 0) != 4 or given.shape[1] != 3:
        return None
    pixels = np.asarray(given[0].detach().float().cpu())
    low, high = float(pixels.min()), float(pixels.max())
    found: np.ndarray[Any, Any] = (pixels - low) / ((high - low) or 1.0)
    return found


def _pixels(picture: Any) -> np.ndarray[Any, Any]:
    """[height, width, 3] bytes of an array, a tensor or a PIL image; floats are from 0 to 1."""
    found = np.asarray(picture.detach().cpu() if hasattr(picture, "detach") else picture)
    if found.ndim == 4 and found.shape[0] == 1:
        found = found[0]
    if found.ndim == 2:
        found = np.stack([found] * 3, -1)
    if found.ndim == 3 and found.shape[0] in (1, 3) and found.shape[2] not in (3, 4):
        found = np.moveaxis(found, 0, -1)
    if found.ndim == 3 and found.shape[2] == 1:
        found = np.repeat(found, 3, 2)
    if found.ndim != 3 or found.shape[2] not in (3, 4) or not found.size:
        raise ValueError(f"picture must be [height, width, 3] or [3, height, width], got {list(found.shape)}")
    found = found[..., :3]
    if found.dtype.kind == "f":
        if found.min() < -1e-3 or found.max() > 1 + 1e-3:
            raise ValueError(
                f"picture has numbers from {found.min():.3g} to {found.max():.3g}; expected 0 to 1: give the picture "
                "itself, not what the model's preparation made of it"
            )
        found = np.rint(found.clip(0, 1) * 255)
    return found.astype(np.uint8)


def _grid(tokens: int, patches: tuple[int, int] | None) -> tuple[int, int]:
    """Rows and columns of patches: as given, else the largest square that the tokens can hold."""
    if patches is None:
        side = math.isqrt(tokens)
        return side, side
    rows, columns = patches
    if rows < 1 or columns < 1 or rows * columns > tokens:
        raise ValueError(f"patches is {patches}, and the model attends to {tokens} tokens; expected (rows, columns)")
    return rows, columns


def _smaller(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    factor = -(-max(pixels.shape[:2]) // MOST)
    if factor == 1:
        return pixels
    high, wide = (size // factor * factor for size in pixels.shape[:2])
    blocks = pixels[:high, :wide].reshape(high // factor, factor, wide // factor, factor, 3)
    found: np.ndarray[Any, Any] = np.rint(blocks.mean((1, 3))).astype(np.uint8)
    return found
