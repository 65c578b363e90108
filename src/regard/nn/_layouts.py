"""Projections in a state dict: one packed matrix, or three, under our names or those that tutorials give them."""

from __future__ import annotations

from typing import Any

import torch

_NAMES = ("q_proj", "k_proj", "v_proj")
# of the module MultiHeadAttention(heads, d_model, dropout) that many tutorials write
_TUTORIAL = {"q_linear": "q_proj", "k_linear": "k_proj", "v_linear": "v_proj", "out": "out_proj"}


def convert_projections(state_dict: dict[str, Any], prefix: str, *, packed: bool, widths: tuple[int, int, int]) -> None:
    """Rewrite the entries under `prefix` to the layout wanted, in place; leave them where they are in it already.

    What does not fit (a missing part, rows that do not add up) is left for `load_state_dict` to report.
    """
    for kind in ("weight", "bias"):
        for theirs, ours in _TUTORIAL.items():
            if f"{prefix}{theirs}.{kind}" in state_dict and f"{prefix}{ours}.{kind}" not in state_dict:
                state_dict[f"{prefix}{ours}.{kind}"] = state_dict.pop(f"{prefix}{theirs}.{kind}")
        whole, parts = f"{prefix}qkv_proj.{kind}", [f"{prefix}{name}.{kind}" for name in _NAMES]
        if packed and whole not in state_dict and all(name in state_dict for name in parts):
            rows = [state_dict.pop(name) for name in parts]
            state_dict[whole] = torch.cat(rows)
        elif not packed and whole in state_dict and state_dict[whole].shape[0] == sum(widths):
            state_dict.update(zip(parts, state_dict.pop(whole).split(widths), strict=True))
