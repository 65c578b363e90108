"""Attention on sequences that lie in parts, by tokens, on several processes (context parallelism).

DTensors say themselves how they lie; plain tensors inside torch's `context_parallel` are such parts too. This file asks
whether a call is one of these; what runs it is loaded by the first that is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import functional

from regard.spec import Refused

if TYPE_CHECKING:
    from regard._sharded._block import Block

SDPA = functional.scaled_dot_product_attention  # as it is outside of torch's context_parallel


def of(*tensors: object) -> Any:
    """What makes a call (`attention`, `observe`, `explain`) whose tokens lie on several processes; None for a call of
    this process alone."""
    if any(hasattr(each, "device_mesh") for each in tensors):
        from regard._sharded import _calls

        return _calls
    return None if functional.scaled_dot_product_attention is SDPA else _torchs_block()


def is_torchs_block() -> bool:
    """By the name that torch gives its function; others may have put theirs in the place of torch's too."""
    return getattr(functional.scaled_dot_product_attention, "__name__", None) == "inner_fn"


def _torchs_block() -> Block | None:
    """The `context_parallel` block that a call is made in."""
    if not is_torchs_block():
        return None
    from regard._sharded import _block

    return _block.current()


def refuse_compiled() -> None:
    if _torchs_block() is not None:
        raise Refused("inside context_parallel, regard.attention cannot be compiled: call it outside torch.compile")


# as torch.compiler.disable marks what it makes; that function itself would load the compiler here
refuse_compiled._torchdynamo_disable = True  # type: ignore[attr-defined]


def refuse_padding() -> None:
    """Modules ask which of their tokens are padding; inside torch's `context_parallel` they have a part of them."""
    if functional.scaled_dot_product_attention is not SDPA and _torchs_block() is not None:
        raise Refused("inside context_parallel a module cannot tell which of its tokens are padding: leave it out")


def outside_block() -> Any:
    """While inside, calls are what they are outside of torch's `context_parallel`."""
    from regard._sharded import _block

    return _block.alone()
