"""The ``.regard`` file: safetensors, whose metadata holds one JSON text under "regard"."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from regard._files import safetensors_files
from regard._files.write import write_atomically
from regard.recording._calls import AXES, KINDS, PHASES, Recorded, Site
from regard.statistics import RELATIONS

if TYPE_CHECKING:
    from torch import Tensor

    from regard.recording import Recording

VERSION = 1
DTYPES = (torch.float64, torch.float32, torch.int64, torch.int32)
# Names are made for every key of a call, and keys need not be in the file: a number alone must not cost much.
MOST_KEYS = 1 << 24


def _count(given: Any) -> bool:
    return type(given) is int and 0 <= given < 1 << 40


def _flag(given: Any) -> bool:
    return isinstance(given, bool)


class _Field(NamedTuple):
    """A field of a call in the file: its name in `Recorded`, which values it may have, and what stands for none."""

    ours: str
    fits: Callable[[Any], bool]
    missing: Any = None


# Files of older versions lack the last four, and what is as those had it is not written.
_CALL = {
    "layer": _Field("layer", _count),
    "pass": _Field("number", _count),
    "kind": _Field("kind", KINDS.__contains__),
    "phase": _Field("phase", PHASES.__contains__),
    "keys": _Field("keys", _count),
    "written_out": _Field("written_out", _flag, False),
    "first_key": _Field("first_key", _count, 0),
    "projection": _Field("projection", lambda given: given is None or isinstance(given, str)),
    "of_text": _Field("of_text", _flag, True),
}


def save(recording: Recording, path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    calls = []
    for index, call in enumerate(recording.calls):
        parts = {**call.parts, "positions": call.positions, "permitted": call.permitted}
        tensors |= {f"{index}.{name}": part.detach().cpu() for name, part in parts.items()}
        written = {name: getattr(call, field.ours) for name, field in _CALL.items()}
        written = {name: value for name, value in written.items() if value != _CALL[name].missing}
        calls.append({**written, "heads": list(call.heads), "parts": list(call.parts)})
    header = {
        "version": VERSION,
        "title": recording.title,
        "sites": [list(site) for site in recording.sites],
        "tokens": recording.tokens,
        "source_tokens": recording.source_tokens,
        "missed": [list(entry) for entry in recording.missed],
        "origin": recording.origin,
        "calls": calls,
    }
    write_atomically(path, safetensors_files.pieces(tensors, {"regard": json.dumps(header)}))


def load(path: Path) -> Recording:
    try:
        tensors, metadata = safetensors_files.read(path, DTYPES)
        if "regard" not in metadata:
            raise ValueError("it holds no recording")
        return _rebuilt(safetensors_files.parse(metadata["regard"]), tensors)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not a recording that can be read: {error}") from None


def title(path: Path) -> str:
    """What a recording is called, from the first bytes of its file; empty where that is not a recording."""
    with contextlib.suppress(OSError, ValueError):
        header = safetensors_files.parse(safetensors_files.metadata(path).get("regard", ""))
        return _text(header, "title") if isinstance(header, dict) else ""
    return ""


def _rebuilt(header: Any, tensors: dict[str, Tensor]) -> Recording:
    from regard.recording import Recording

    _need(isinstance(header, dict), "its header is not a table")
    version = header.get("version")
    _need(version == VERSION, f"it has version {str(version)[:20]!r}, and this regard reads {VERSION}")
    recording = Recording(_text(header, "title"))
    for entry in _list(header, "sites"):
        _need(isinstance(entry, list) and len(entry) == 2, "a layer is malformed")
        _need(isinstance(entry[0], str) and _count(entry[1]), "a layer is malformed")
        recording.sites.append(Site(*entry))
    for entry in _list(header, "missed"):
        _need(isinstance(entry, list) and len(entry) == 2 and all(isinstance(x, str) for x in entry), "a note is wrong")
        recording.missed.append((entry[0], entry[1]))
    for name in ("tokens", "source_tokens"):
        lists = _list(header, name)
        whole = all(isinstance(item, list) and all(isinstance(token, str) for token in item) for item in lists)
        _need(whole, "its tokens are not text")
        setattr(recording, f"_{name}", lists)
    origin = header.get("origin", {})  # files of older versions have none
    whole = isinstance(origin, dict) and (not origin or set(origin) == {"model", "text"})
    _need(whole and all(isinstance(value, str) for value in origin.values()), "its origin is malformed")
    recording.origin = origin
    for index, entry in enumerate(_list(header, "calls")):
        _need(isinstance(entry, dict), "a call is malformed")
        recording.calls.append(_call(entry, index, tensors, recording.sites))
    _need(not tensors, "it holds tensors that no call names")
    return recording


def _call(entry: dict[str, Any], index: int, tensors: dict[str, Tensor], sites: list[Site]) -> Recorded:
    names, heads = _list(entry, "parts"), _list(entry, "heads")
    read = {name: entry.get(name, field.missing) for name, field in _CALL.items()}
    for name, value in read.items():
        words = "is of no known kind" if name in ("kind", "phase") else "is malformed"
        _need(_CALL[name].fits(value), f"a call {words}")
    _need(all(map(_count, heads)), "a call is malformed")
    layer, keys = read["layer"], read["keys"]
    _need(layer < len(sites), "a call names a layer that is not there")
    _need(0 < keys <= MOST_KEYS, f"a call has {keys} keys, and at most {MOST_KEYS} are read")
    _need(len(set(heads)) == len(heads), "a call names a head twice")
    _need("lse" in names and set(names) <= set(AXES) and len(set(names)) == len(names), "a call is malformed")
    wanted = [*names, "positions", "permitted"]
    _need(all(f"{index}.{name}" in tensors for name in wanted), "a call's tensors are missing")
    parts = {name: tensors.pop(f"{index}.{name}") for name in wanted}
    positions, permitted = parts.pop("positions"), parts.pop("permitted")
    _check_parts(parts, positions, permitted, len(heads), keys)
    given = {field.ours: read[name] for name, field in _CALL.items()}
    return Recorded(
        site=sites[layer], heads=tuple(heads), positions=positions, permitted=permitted, parts=parts, **given
    )


def _check_parts(parts: dict[str, Tensor], positions: Tensor, permitted: Tensor, heads: int, keys: int) -> None:
    """Shapes agree with each other, so that nothing that reads a recording meets a surprise."""
    lse = parts["lse"]
    _need(lse.dim() == 3 and lse.shape[1] == heads and lse.numel() > 0, "its lse is malformed")
    batch, _, queries = lse.shape
    known = {"L": queries, "S": keys}
    for name, part in parts.items():
        axes = AXES[name]
        sized = [known.setdefault(axis, n) == n for axis, n in zip(axes, part.shape[2:], strict=False)]
        fits = part.dim() == 2 + len(axes) and part.shape[:2] == lse.shape[:2] and all(sized)
        _need(fits, f"its {name} is malformed")
        whole = name in ("top_keys", "value_top_keys")
        _need(part.is_floating_point() != whole, f"its {name} has the wrong dtype")
    _need(known.get("buckets", 32) == 32, "its distance is malformed")
    _need(known.get("relations", 2) in (2, len(RELATIONS)), "its relations are malformed")
    for where, best in (("top_keys", "top_weights"), ("value_top_keys", "value_top_lengths")):
        _need((where in parts) == (best in parts), "its top keys are incomplete")
        if where in parts and parts[where].numel():
            top = parts[where]
            _need(int(top.min()) >= -1 and int(top.max()) < keys, "its top keys point past the keys")
    _need(positions.dtype == torch.int64 and positions.shape in ((1,), (batch,)), "its positions are malformed")
    fits = permitted.dim() == 3 and all(
        n in (1, most) for n, most in zip(permitted.shape, (batch, heads, queries), strict=True)
    )
    _need(fits and permitted.dtype == torch.int32, "its counts are malformed")
    _need(bool((positions.abs() < 1 << 40).all()), "its positions are malformed")


def _need(good: bool, otherwise: str) -> None:
    if not good:
        raise ValueError(otherwise)


def _list(table: dict[str, Any], name: str) -> list[Any]:
    found = table.get(name)
    if not isinstance(found, list):
        raise ValueError(f"its {name} are not a list")
    return found


def _text(table: dict[str, Any], name: str) -> str:
    found = table.get(name)
    if not isinstance(found, str):
        raise ValueError(f"its {name} is not text")
    return found
