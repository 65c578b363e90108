"""Option values in words. Everything here raises ValueError with a message fit to be shown as it is."""

from __future__ import annotations

import ast
import math
from collections.abc import Collection
from typing import Any

import torch

from regard import masks
from regard._display.texts import reason
from regard.masks import Mask

DTYPES = ("float64", "float32", "float16", "bfloat16")
EXAMPLE = "write masks as in Python and join them with & | ~, such as 'causal() & (window(left=256) | columns(4))'"
KINDS = f"There are {', '.join(masks.IN_WORDS)}"


def rules(text: str, known: Collection[int]) -> list[int]:
    """`3,5,7-9` as numbers of rules that have a check."""
    found: list[int] = []
    for part in (part.strip() for part in text.split(",")):
        low, dash, high = part.partition("-")
        if not _small(low) or (dash and not _small(high)):
            raise ValueError(f"--rules holds {part!r}; expected numbers and ranges such as 3,5,7-9")
        if int(high or low) < int(low):
            raise ValueError(f"--rules holds the range {part!r}, which is empty; expected the lower number first")
        found += range(int(low), int(high or low) + 1)
    if unknown := sorted(set(found) - set(known)):
        raise ValueError(f"--rules holds {unknown}, which have no check; expected some of {min(known)}-{max(known)}")
    return found


def _small(digits: str) -> bool:
    return digits.isdecimal() and len(digits) <= 4  # a longer one is no rule's number, and its range has no end


def dtypes(text: str) -> list[torch.dtype]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in DTYPES:
            raise ValueError(f"--dtype holds {name!r}; expected some of {', '.join(DTYPES)}")
    return [getattr(torch, name) for name in names]


def one_dtype(text: str | None) -> torch.dtype | None:
    kinds = [None] if text is None else dtypes(text)
    if len(kinds) > 1:
        raise ValueError(f"--dtype is {text!r}; expected one dtype")
    return kinds[0]


def device(text: str) -> str:
    """A device that exists here."""
    try:
        if torch.empty(0, device=text).is_meta:
            raise ValueError(f"--device {text!r} cannot be used here: it has shapes and no numbers")
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {text!r} cannot be used here: {reason(error)}") from None
    return text


def shape(text: str, option: str) -> tuple[int, int, int, int]:
    """`2,8,128,64` as four sizes."""
    parts = text.replace("x", ",").split(",")
    if len(parts) != 4 or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"{option} is {text!r}; expected four sizes, batch,head,token,dim, such as 2,8,128,64")
    if any(len(part.strip()) > 19 for part in parts) or math.prod(int(part) for part in parts) >= 2**63:
        raise ValueError(f"{option} is {text!r}; no tensor has as many elements (2**63 or more)")
    B, H, T, D = (int(part) for part in parts)
    return B, H, T, D


def mask(text: str) -> Mask:
    """A mask as it is written in Python, `causal() & window(left=256)`; nothing but constructors is looked up."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"--mask {text!r} is not an expression; {EXAMPLE}") from None
    return _mask(tree)


def _mask(node: ast.expr) -> Mask:
    match node:
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _mask(left) & _mask(right)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _mask(left) | _mask(right)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_mask(operand)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=named) if name in masks.IN_WORDS:
            try:
                given = {str(word.arg): _literal(word.value) for word in named}
                found: Mask = getattr(masks, name)(*[_literal(arg) for arg in args], **given)
            except (TypeError, ValueError) as error:
                raise ValueError(f"--mask holds {ast.unparse(node)!r}: {error}; {EXAMPLE}") from None
            return found
        case ast.Name(id=name) if name in masks.IN_WORDS:
            raise ValueError(f"--mask holds {name!r} without its parentheses; {EXAMPLE}")
    raise ValueError(f"--mask holds {ast.unparse(node)!r} where a mask is expected; {EXAMPLE}. {KINDS}")


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"{ast.unparse(node)!r} is no number, string or list") from None
