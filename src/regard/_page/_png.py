"""Heatmaps as PNG bytes, without a picture library."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np

# viridis at nine places; what lies between is interpolated
COLOURS = np.array(
    [
        (68, 1, 84), (71, 44, 122), (59, 81, 139), (44, 113, 142), (33, 144, 141),
        (39, 173, 129), (92, 200, 99), (170, 220, 50), (253, 231, 37),
    ],
    dtype=np.float64,
)  # fmt: skip


def heatmap(values: np.ndarray[Any, Any], least: int = 1) -> bytes:
    """A palette image, one pixel per cell; the largest value is the brightest, NaN is 0. Cells grow until the longer
    side has at least this many pixels."""
    cells = np.nan_to_num(np.asarray(values, dtype=np.float64), nan=0.0, posinf=0.0, neginf=0.0).clip(min=0.0)
    top = cells.max(initial=0.0)
    # square roots: weights spread over orders of magnitude, and small ones should still be seen
    levels = np.sqrt(cells / top) if top > 0 else cells
    size = max(1, -(-least // max(1, *levels.shape)))
    return picture(levels.repeat(size, 0).repeat(size, 1), COLOURS)


def picture(levels: np.ndarray[Any, Any], colours: np.ndarray[Any, Any]) -> bytes:
    """A palette image of levels from 0 to 1; `colours` are those at equal steps of the way, as red, green and blue."""
    indices = np.rint(levels * 255).astype(np.uint8)
    rows, columns = indices.shape
    raw = b"".join(b"\0" + row.tobytes() for row in indices)
    header = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"PLTE", _palette(colours)), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)


def rgb(pixels: np.ndarray[Any, Any]) -> bytes:
    """A picture of bytes [height, width, 3]."""
    rows, columns, _ = pixels.shape
    raw = b"".join(b"\0" + np.ascontiguousarray(row).tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)


def _palette(colours: np.ndarray[Any, Any]) -> bytes:
    at = np.linspace(0, len(colours) - 1, 256)
    channels = [np.interp(at, np.arange(len(colours)), colours[:, channel]) for channel in range(3)]
    return np.stack(channels, 1).round().astype(np.uint8).tobytes()


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
