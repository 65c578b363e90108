"""A recording as one PNG: the map of every head, layers from top to bottom."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from regard._page._png import COLOURS, picture

if TYPE_CHECKING:
    from regard.recording import Recording

CELL, GAP = 48, 6
MOST_ROWS, MOST_COLUMNS = 48, 32


def sheet(recording: Recording) -> bytes:
    """The heads of each layer's first call, for the first item of the batch; a layer without a map stays empty."""
    calls = [recording.at(layer)[0] for layer in range(len(recording.sites)) if recording.at(layer)][:MOST_ROWS]
    columns = min(MOST_COLUMNS, max((len(call.heads) for call in calls), default=1))
    step = CELL + GAP
    whole = np.zeros((max(1, len(calls)) * step + GAP, columns * step + GAP))
    for row, call in enumerate(calls):
        if "map" not in call.parts or not call.map.numel():
            continue
        maps = np.nan_to_num(call.map[0].float().numpy()).clip(min=0)
        for column, grid in enumerate(maps[:columns]):
            y, x = GAP + row * step, GAP + column * step
            shown = grid[_nearest(grid.shape[0])][:, _nearest(grid.shape[1])]
            whole[y : y + CELL, x : x + CELL] = np.sqrt(shown / max(float(grid.max(initial=0.0)), 1e-30))
    return picture(whole, COLOURS)


def _nearest(size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return ((np.arange(CELL) + 0.5) * size / CELL).astype(np.int64)
