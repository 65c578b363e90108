"""A call in words: the options by which `regard explain` and `regard bench` describe one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli import complete, options
from regard.cli.options import about

if TYPE_CHECKING:
    import torch

# Arguments of a call that are options here: errors of the library say them as such.
OPTIONS = ("key", "value", "mask", "bias", "softcap", "scale", "dropout", "sinks", "query_offset", "dtype", "backend")

Query = Annotated[str, typer.Argument(help="Shape of query: batch,head,token,dim, such as 2,8,128,64.")]
Key = Annotated[str | None, about("Shape of key (default: the shape of query).")]
Value = Annotated[str | None, about("Shape of value (default: the shape of key).")]
Mask = Annotated[
    str | None,
    options.one_of(complete.MASKS, "Mask, such as 'causal() & window(left=256)'; combine with &, | and ~."),
]
Softcap = Annotated[float | None, about("Softcap of the logits.")]
Dtype = Annotated[str, options.one_of(complete.DTYPES, "Data type: float64, float32, float16 or bfloat16.")]
Device = Annotated[str, options.one_of(complete.DEVICES, "Device of the tensors.")]


def backends(given: str | None, device: str) -> list[str]:
    """The backends named, comma-separated; all that the device has, and auto, where none is."""
    import regard

    there = ["auto", *regard.backends.available(device)]
    names = there if given is None else [name.strip() for name in given.split(",")]
    for name in names:
        if name not in there:
            raise ValueError(f"--backend holds {name!r}; expected some of {', '.join(there)} on {device}")
    return names


@dataclass(frozen=True)
class Call:
    """Shapes of query, key and value, and what else a call of this description is given."""

    shapes: tuple[tuple[int, int, int, int], ...]
    dtype: torch.dtype
    device: str
    mask: Any


def read(query: str, key: str | None, value: str | None, mask: str | None, dtype: str, device: str) -> Call:
    """The call that the options describe; ValueError with a message fit to be shown."""
    from regard.cli import parse

    where, (kind, *more) = parse.device(device), parse.dtypes(dtype)
    if more:
        raise ValueError(f"--dtype is {dtype!r}; expected one dtype")
    first = parse.shape(query, "the shape of query")
    second = first if key is None else parse.shape(key, "--key")
    third = second if value is None else parse.shape(value, "--value")
    return Call((first, second, third), kind, where, None if mask is None else parse.mask(mask))
