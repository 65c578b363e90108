"""A call in words: the options by which `regard explain` and `regard bench` describe one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli import complete

if TYPE_CHECKING:
    import torch

Query = Annotated[str, typer.Argument(help="Shape of query: batch,head,token,dim, such as 2,8,128,64.")]
Key = Annotated[str | None, typer.Option(help="Shape of key (default: the shape of query).")]
Value = Annotated[str | None, typer.Option(help="Shape of value (default: the shape of key).")]
Mask = Annotated[
    str | None,
    typer.Option(
        help="Mask, such as 'causal() & window(left=256)'; combine with &, | and ~.",
        autocompletion=complete.one_of(complete.MASKS),
    ),
]
Softcap = Annotated[float | None, typer.Option(help="Softcap of the logits.")]
Dtype = Annotated[
    str,
    typer.Option(
        help="Data type: float64, float32, float16 or bfloat16.", autocompletion=complete.one_of(complete.DTYPES)
    ),
]
Device = Annotated[str, typer.Option(help="Device of the tensors.", autocompletion=complete.one_of(complete.DEVICES))]


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
