"""Reading and writing the safetensors format strictly: every length is checked before anything is allocated.

A file is an 8-byte little-endian length, that many bytes of JSON {name: {dtype, shape, data_offsets}, "__metadata__":
{str: str}}, and the tensors' bytes end to end.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

MOST_HEADER = 64 << 20
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def pieces(tensors: dict[str, Tensor], metadata: dict[str, str]) -> Iterator[bytes | memoryview]:
    """The bytes of a file, tensor by tensor."""
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header, ensure_ascii=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MOST_HEADER:
        raise ValueError(f"the header would take {len(text)} bytes; at most {MOST_HEADER} are read back")
    yield len(text).to_bytes(8, "little")
    yield text
    for tensor in tensors.values():
        if tensor.numel():
            # as bytes, which every dtype has in NumPy
            yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def read(path: Path, dtypes: Container[torch.dtype] = tuple(_NAMES)) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a file; ValueError says what is wrong with it, such as another dtype."""
    with path.open("rb") as file:
        header, found = _header(file)
        first = file.tell()
        places = _places(header, os.fstat(file.fileno()).st_size - first, dtypes)
        tensors = {}
        for name, (dtype, shape, start, stop) in places.items():
            file.seek(first + start)
            data = bytearray(stop - start)
            if file.readinto(data) != stop - start:
                raise ValueError("it ends early")
            flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            tensors[name] = flat.reshape(shape)
    return tensors, found


def metadata(path: Path) -> dict[str, str]:
    """The metadata of a file alone: none of its tensors is read."""
    with path.open("rb") as file:
        return _header(file)[1]


def _header(file: BinaryIO) -> tuple[dict[str, Any], dict[str, str]]:
    """What the header says of the tensors, and the metadata; the file is left where the tensors begin."""
    size = os.fstat(file.fileno()).st_size
    if size < 8:
        raise ValueError("it is too short")
    length = int.from_bytes(file.read(8), "little")
    if length > min(size - 8, MOST_HEADER):
        beyond = f", and the file has {size}: it is no safetensors file" if length > size else ""
        raise ValueError(f"its header claims {length} bytes{beyond}")
    header = parse(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is not a table")
    return header, _metadata(header.pop("__metadata__", {}))


def parse(text: bytes | str) -> Any:
    """JSON without duplicate keys, NaN, or nesting without end."""
    try:
        return json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constants)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("its header is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"its header is not JSON ({error.msg} at {error.pos})") from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("its header names something twice")
    return found


def _no_constants(name: str) -> Any:
    raise ValueError(f"its header holds {name}")


def _metadata(given: Any) -> dict[str, str]:
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise ValueError("its metadata is not a table of strings")
    return given


def _places(
    header: dict[str, Any], size: int, dtypes: Container[torch.dtype]
) -> dict[str, tuple[torch.dtype, list[int], int, int]]:
    """Where each tensor lies. Together they cover the data exactly, without gap or overlap."""
    places = {}
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"its entry {name[:60]!r} is malformed")
        dtype, shape, span = _DTYPES.get(str(entry["dtype"])), entry["shape"], entry["data_offsets"]
        if (
            dtype is None
            or dtype not in dtypes
            or not _sizes(shape)
            or not _sizes(span)
            or len(shape) > 8
            or len(span) != 2
        ):
            raise ValueError(f"its entry {name[:60]!r} is malformed")
        if span[1] - span[0] != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"its entry {name[:60]!r} has another size than its shape says")
        places[name] = (dtype, shape, span[0], span[1])
    at = 0
    for _, _, start, stop in sorted(places.values(), key=lambda place: place[2:]):
        if start != at or stop > size:
            raise ValueError("its tensors overlap, leave gaps or go past its end")
        at = stop
    if at != size:
        raise ValueError("it is longer or shorter than its header says")
    return places


def _sizes(given: Any) -> bool:
    return isinstance(given, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in given)
