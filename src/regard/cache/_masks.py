"""Which masks a cache can honour."""

from __future__ import annotations

from torch import Tensor

from regard import masks
from regard.masks import Mask


def check_rolling(mask: object, bias: object, window: int, sinks: int) -> None:
    """Refuse what needs a key that is gone, or means something else once keys are gone."""
    right = f"masks.causal() & (masks.window(left={window}) | masks.columns({sinks}))"
    right = right if sinks else f"masks.causal() & masks.window(left={window})"
    hint = f"pass mask=cache.mask, which is {right}"
    if mask is None:
        raise ValueError(f"mask is None, but a RollingCache forgets keys that would then be seen: {hint}")
    if isinstance(mask, Mask):
        for rule in mask.leaves:
            if not rule.survives(window, sinks):
                raise ValueError(
                    f"mask {mask!r}: {rule!r} does not keep its meaning when keys are forgotten; a "
                    f"RollingCache(window={window}, sinks={sinks}) takes causal, window(left ≤ {window}), columns and "
                    f"prefix (n ≤ {sinks}): {hint}; for padded batches cache.padded(lengths)"
                )
        if not mask.bounded:
            raise ValueError(f"mask {mask!r} lets a query see keys that a RollingCache has forgotten: {hint}")
    whole = bias is None or (isinstance(bias, Tensor) and (bias.dim() == 0 or bias.shape[-1] == 1))
    if not whole and (sinks or isinstance(bias, Tensor)):
        raise ValueError(
            "bias goes by the positions of keys, and in a RollingCache they move: leave it out"
            + ("" if isinstance(bias, Tensor) else ", or use sinks=0 for a bias that goes by distance alone")
        )


def rolling_mask(window: int, sinks: int) -> Mask:
    near = masks.window(left=window)
    return masks.causal() & (near | masks.columns(sinks) if sinks else near)
