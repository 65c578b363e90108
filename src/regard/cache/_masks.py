"""Which masks a cache can honour."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from regard import masks
from regard.masks import Mask

# Rules that ask only how far apart query and key are.
_RELATIVE = frozenset(("everything", "causal", "window", "strided"))


def rules_of(structure: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The plain rules that a mask is joined from."""
    if structure[0] in ("and", "or", "not"):
        for part in structure[1:]:
            yield from rules_of(part)
    else:
        yield structure


def only_relative(mask: Mask) -> bool:
    return all(rule[0] in _RELATIVE for rule in rules_of(mask.structure))


def padding_side(mask: object) -> str | None:
    """The side of the first `masks.padding` in a mask."""
    if isinstance(mask, Mask):
        for rule in rules_of(mask.structure):
            if rule[0] == "padding":
                return str(rule[1])
    return None


def check_rolling(mask: object, bias: object, window: int, sinks: int) -> None:
    """Refuse what needs a key that is gone, or means something else once keys are gone."""
    right = f"masks.causal() & (masks.window(left={window}) | masks.columns({sinks}))"
    right = right if sinks else f"masks.causal() & masks.window(left={window})"
    hint = f"pass mask=cache.mask, which is {right}"
    if mask is None:
        raise ValueError(f"mask is None, but a RollingCache forgets keys that would then be seen: {hint}")
    if isinstance(mask, Mask):
        kept = frozenset(("everything", "causal"))
        for rule in rules_of(mask.structure):
            limit = window if rule[0] == "window" else sinks if rule[0] in ("columns", "prefix") else None
            if rule[0] in kept or (limit is not None and rule[1] <= limit) or _of_rows(rule):
                continue
            raise ValueError(
                f"mask {mask!r}: {rule[0]}({', '.join(map(str, rule[1:2]))}…) does not keep its meaning when keys are "
                f"forgotten; a RollingCache(window={window}, sinks={sinks}) takes causal, window(left ≤ {window}), "
                f"columns and prefix (n ≤ {sinks}): {hint}; for padded batches cache.padded(lengths)"
            )
        if not _bounded(mask.structure):
            raise ValueError(f"mask {mask!r} lets a query see keys that a RollingCache has forgotten: {hint}")
    whole = bias is None or (isinstance(bias, Tensor) and (bias.dim() == 0 or bias.shape[-1] == 1))
    if not whole and (sinks or isinstance(bias, Tensor)):
        raise ValueError(
            "bias goes by the positions of keys, and in a RollingCache they move: leave it out"
            + ("" if isinstance(bias, Tensor) else ", or use sinks=0 for a bias that goes by distance alone")
        )


def _of_rows(rule: tuple[Any, ...]) -> bool:
    """A tensor that says the same of all keys."""
    return rule[0] in ("keep", "drop", "from_additive") and len(rule[1]) == 4 and rule[1][3] == 1


def _bounded(structure: tuple[Any, ...]) -> bool:
    """Whether the mask hides every key that is neither a sink nor in the window (the limits are checked already)."""
    kind = structure[0]
    if kind == "and":
        return any(_bounded(part) for part in structure[1:])
    if kind == "or":
        return all(_bounded(part) for part in structure[1:])
    return kind in ("window", "columns", "prefix")


def rolling_mask(window: int, sinks: int) -> Mask:
    near = masks.window(left=window)
    return masks.causal() & (near | masks.columns(sinks) if sinks else near)
