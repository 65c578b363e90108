"""Hugging Face's attention function, by `regard.attention`."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from regard import api, masks
from regard.interop._hf_masks import RuleMask
from regard.masks import Mask
from regard.statistics import Want

# Beyond this many pairs the weights of a layer are worth a word: 4096 queries and 4096 keys.
_MANY_PAIRS = 4096 * 4096
_UNDERSTOOD = frozenset([
    "module", "query", "key", "value", "attention_mask", "scaling", "dropout", "softcap", "position_bias", "s_aux",
    "sliding_window", "is_causal",  # the mask says the same
])  # fmt: skip
# Keywords by which models choose keys: only their own functions follow them.
_CHOOSING = ("indices", "block_indices", "topk_indices")


def regard_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """The output [batch, query, head, dim], and the weights where the model was asked for them."""
    _refuse_unknown(module, more)
    mask, bias, offset = _mask(attention_mask, query, key)
    if attention_mask is None and query.shape[2] > 1:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if causal:
            # without a mask the first query is level with the first key, as it is in torch's function
            mask, offset = masks.causal(), 0
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + bias
    call: dict[str, Any] = {
        "mask": mask,
        "bias": None if bias is None else bias.to(query.dtype),
        "scale": scaling,
        "softcap": softcap,
        "sinks": None if s_aux is None else s_aux.to(query.dtype),
        "dropout": float(dropout),
        "query_offset": offset,
    }
    if not _asks_for_weights(more):
        return api.attention(query, key, value, **call).transpose(1, 2).contiguous(), None
    _warn_of_memory(module, query, key)
    everything = Want(rows=False, key_mass=False, map=None, top_k=0, distance=False, weights=(slice(None), slice(None)))
    seen = api.observe(query, key, value, want=everything, **call)
    return seen.out.transpose(1, 2).contiguous(), seen.weights.to(query.dtype)


def _mask(given: Any, query: Tensor, key: Tensor) -> tuple[Mask | None, Tensor | None, int | None]:
    """What the model's mask hides, what it adds to the logits, and where the first query stands."""
    if given is None:
        return None, None, None
    if isinstance(given, RuleMask):
        if given.shape[2:] != (query.shape[2], key.shape[2]):
            return masks.keep(given.whole()), None, None  # the call refuses it, naming both shapes
        return (None if given.rule == masks.everything() else given.rule), None, given.offset
    if not isinstance(given, Tensor) or given.dim() != 4:
        what = f"a tensor {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise TypeError(
            f'attn_implementation="regard" takes an attention mask as a tensor [batch, head, query, key], got {what}: '
            "this model builds its masks for another implementation"
        )
    if given.dtype == torch.bool:
        return masks.keep(given), None, None
    if not given.is_floating_point():
        raise TypeError(
            f"attention_mask is {given.dtype}, which does not say whether 1 means may attend: pass a boolean tensor "
            "(True = may attend), or a floating-point one, which is added to the logits"
        )
    # Models write the smallest number where they mean "hidden".
    hidden = given <= torch.finfo(given.dtype).min / 2
    rest = given.masked_fill(hidden, 0.0)
    plain = given.device.type == "cpu" and not torch.compiler.is_compiling() and not given.requires_grad
    return masks.drop(hidden), None if plain and not rest.any() else rest, None


def _refuse_unknown(module: nn.Module, more: dict[str, Any]) -> None:
    if more.get("cache") is not None:
        raise ValueError(
            'attn_implementation="regard" does not serve paged caches of continuous batching; generate with '
            "model.generate, whose dynamic, static and sliding caches it serves"
        )
    # a signature cannot be read while a model is compiled; it was, if the model ran before
    own = () if torch.compiler.is_compiling() else _own_keywords(type(module).__module__)
    for name in (*_CHOOSING, *own):
        if more.get(name) is not None:
            raise ValueError(
                f'{type(module).__name__} hands its attention function {name}=, which attn_implementation="regard" '
                'does not know: use "eager", the model\'s own function'
            )


@functools.lru_cache(maxsize=256)
def _own_keywords(module: str) -> tuple[str, ...]:
    """Keywords that the model's own function names and that are not known here: they change what it computes."""
    eager = getattr(sys.modules.get(module), "eager_attention_forward", None)
    if eager is None:
        return ()
    named = inspect.signature(eager).parameters.values()
    return tuple(p.name for p in named if p.kind is not p.VAR_KEYWORD and p.name not in _UNDERSTOOD)


def _asks_for_weights(more: dict[str, Any]) -> bool:
    """Some models hand `output_attentions` down, others only note that somebody wants the weights of their modules."""
    if more.get("output_attentions"):
        return True
    collector: Any = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    wanted = (None if collector is None else collector.get()) or ()
    return any(name.endswith("attentions") for name in wanted)


def _warn_of_memory(module: nn.Module, query: Tensor, key: Tensor) -> None:
    batch, heads, queries, _ = query.shape
    if queries * key.shape[2] <= _MANY_PAIRS:
        return
    each = batch * heads * queries * key.shape[2] * query.element_size()
    layers = getattr(getattr(module, "config", None), "num_hidden_layers", None)
    whole = f", {each * layers / 2**30:.1f} GiB in its {layers} layers" if layers else ""
    warnings.warn(
        f"output_attentions=True returns {each / 2**30:.1f} GiB of weights for each layer of {queries} queries and "
        f"{key.shape[2]} keys{whole}. `with regard.watch(model) as recording:` gives exact statistics of the same "
        "weights without holding them",
        stacklevel=3,
    )
