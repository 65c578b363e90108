"""`attn_implementation="regard"` in Hugging Face models."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

NAME = "regard"


def register_hf() -> None:
    """Make ``attn_implementation="regard"`` known to Hugging Face's transformers.

        regard.interop.register_hf()
        model = AutoModel.from_pretrained(folder, attn_implementation="regard")   # or
        model.set_attn_implementation("regard")

    Attention then runs by `regard.attention`: masks stay rules where the model says them as rules (causal, windows,
    padding, packed sequences), softcaps, sinks and position biases go to the same call, and ``output_attentions=True``
    returns the weights (detached, before dropout) without another implementation. Calling this again changes nothing.

    A model whose attention does not go through transformers' attention functions is refused with the reason when the
    implementation is set.

    Raises:
        ImportError: transformers is missing, or older than 5.
    """
    try:
        import transformers
        from transformers.modeling_utils import PreTrainedModel
    except ImportError as error:
        raise ImportError(
            "regard.interop.register_hf needs Hugging Face's transformers: pip install transformers"
        ) from error
    if int(transformers.__version__.split(".")[0]) < 5:
        raise ImportError(f"regard.interop.register_hf needs transformers 5 or newer, found {transformers.__version__}")
    from regard.interop._hf_attention import regard_attention
    from regard.interop._hf_masks import rule_mask

    transformers.AttentionInterface.register(NAME, regard_attention)
    transformers.AttentionMaskInterface.register(NAME, rule_mask)
    _wrap(PreTrainedModel, "get_correct_attn_implementation", _checked_choice)
    _wrap(PreTrainedModel, "set_attn_implementation", _checked_setting)


def _attends(model: Any) -> bool:
    """Whether the file that a class comes from has modules of attention."""
    from torch import nn

    found = vars(sys.modules.get(model.__module__, object)).items()
    return any(isinstance(part, type) and issubclass(part, nn.Module) and "Att" in name for name, part in found)


def _wrap(owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Once, however often it is asked for."""
    real = getattr(owner, name)
    if not getattr(real, "_refuses_for_regard", False):
        wrapped = functools.wraps(real)(wrapper(real))
        wrapped._refuses_for_regard = True  # type: ignore[attr-defined]
        setattr(owner, name, wrapped)


def _checked_choice(real: Callable[..., Any]) -> Callable[..., Any]:
    def get_correct_attn_implementation(self: Any, *args: Any, **given: Any) -> Any:
        chosen = real(self, *args, **given)
        if chosen == NAME:
            _refuse_unservable(type(self))
        return chosen

    return get_correct_attn_implementation


def _checked_setting(real: Callable[..., Any]) -> Callable[..., Any]:
    def set_attn_implementation(self: Any, attn_implementation: Any, *args: Any, **given: Any) -> Any:
        # transformers would only log that nothing changed, for the model or for one inside it
        wanted = _configs(self.config, attn_implementation)
        for part in self.modules():
            if hasattr(type(part), "_can_set_attn_implementation") and _asked(part, self, wanted, attn_implementation):
                _refuse_unservable(type(part))
        return real(self, attn_implementation, *args, **given)

    return set_attn_implementation


def _configs(config: Any, given: Any) -> dict[int, bool]:
    """By identity, whether each configuration inside another is set to this implementation: one for all, or a dict
    by their names ("" is the configuration itself), as transformers reads it."""
    found = {}
    for name in config.sub_configs:
        inside = getattr(config, name, None)
        if inside is not None:
            its = given.get(name) if isinstance(given, dict) else given
            found[id(inside)] = (its.get("") if isinstance(its, dict) else its) == NAME
            found |= _configs(inside, its)
    return found


def _asked(part: Any, model: Any, wanted: dict[int, bool], given: Any) -> bool:
    top = (given.get("") if isinstance(given, dict) else given) == NAME
    return top if part is model else wanted.get(id(part.config), top)


def _refuse_unservable(model: Any) -> None:
    if not _attends(model):
        return  # a convolutional part, say: there is nothing to serve
    if not model._can_set_attn_implementation():
        reason = "its code computes attention by itself and calls no attention function"
    elif not (model._supports_sdpa or model._supports_flash_attn):
        reason = "transformers declares that no attention function but the model's own computes what it does"
    else:
        return
    raise ValueError(f'{model.__name__} cannot run with attn_implementation="{NAME}": {reason}. It runs with "eager"')
