"""Option values in words. Everything here raises ValueError with a message fit to be shown as it is."""

from __future__ import annotations

import ast
from typing import Any

import torch

from regard import masks
from regard.masks import Mask

DTYPES = ("float64", "float32", "float16", "bfloat16")
CONSTRUCTORS = (
    "everything",
    "causal",
    "window",
    "padding",
    "documents",
    "prefix",
    "columns",
    "strided",
    "random_blocks",
)


def rules(text: str) -> list[int]:
    """`3,5,7-9` as numbers."""
    found: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise ValueError(f"--rules holds {part.strip()!r}; expected numbers and ranges such as 3,5,7-9")
        found += range(int(low), int(high or low) + 1)
    return found


def dtypes(text: str) -> list[torch.dtype]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in DTYPES:
            raise ValueError(f"--dtype holds {name!r}; expected some of {', '.join(DTYPES)}")
    return [getattr(torch, name) for name in names]


def device(text: str) -> str:
    """A device that exists here."""
    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {text!r} cannot be used here: {reason}") from None
    return text


def shape(text: str, option: str) -> tuple[int, int, int, int]:
    """`2,8,128,64` as four sizes."""
    parts = text.replace("x", ",").split(",")
    if len(parts) != 4 or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"{option} is {text!r}; expected four sizes, batch,head,token,dim, such as 2,8,128,64")
    B, H, T, D = (int(part) for part in parts)
    return B, H, T, D


def mask(text: str) -> Mask:
    """A mask as it is written in Python, `causal() & window(left=256)`; nothing but constructors is looked up."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise ValueError(
            f"--mask {text!r} is not an expression; expected one such as 'causal() & window(256)'"
        ) from None
    found = _evaluate(tree)
    if not isinstance(found, Mask):
        raise ValueError(f"--mask {text!r} is not a mask; expected 'causal() & window(256)' or such")
    return found


def _evaluate(node: ast.expr) -> Any:
    match node:
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _mask(left) & _mask(right)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _mask(left) | _mask(right)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_mask(operand)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))):
            return -number
        case ast.Constant(value=int(number) | str(number)):
            return number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_evaluate(item) for item in items]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=named) if name in CONSTRUCTORS:
            keywords = {word.arg: _evaluate(word.value) for word in named if word.arg}
            try:
                return getattr(masks, name)(*[_evaluate(arg) for arg in args], **keywords)
            except TypeError as error:
                raise ValueError(f"--mask: {error}") from None
    raise ValueError(f"--mask holds {ast.unparse(node)!r}; expected {', '.join(CONSTRUCTORS)}, joined by & | ~")


def _mask(node: ast.expr) -> Mask:
    found = _evaluate(node)
    if not isinstance(found, Mask):
        raise ValueError(f"--mask holds {ast.unparse(node)!r} where a mask is expected")
    return found
