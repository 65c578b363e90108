"""Reading a Hugging Face configuration field by field: what is not understood is refused by name."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Sequence
from typing import Any

from regard._checks import is_int
from regard.positions import DynamicNTK, Linear, Llama3, Scaling, YaRN

# Fields that say nothing about what a forward pass computes.
_IGNORED = frozenset([
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal", "_commit_hash",
    "_model_name_or_path", "_name_or_path", "_num_labels", "architectures", "attn_implementation", "auto_map",
    "bos_token_id", "chunk_size_feed_forward", "cls_token_id", "decoder_start_token_id", "dtype", "eos_token_id",
    "experts_implementation", "finetuning_task", "gradient_checkpointing", "id2label", "initializer_factor",
    "initializer_range", "is_encoder_decoder", "label2id", "language", "mask_token_id",
    "model_type", "name_or_path", "num_labels",
    "output_attentions", "output_hidden_states", "pad_token_id", "prefix", "problem_type", "return_dict",
    "sep_token_id", "task_specific_params", "tokenizer_class", "torch_dtype", "torchscript",
    "transformers.js_config", "transformers_version", "unk_token_id", "use_bfloat16", "use_cache", "use_return_dict",
])  # fmt: skip
# Of generate, which older files keep next to the model's own.
_OF_GENERATION = frozenset([
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_decoder_ids", "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
    "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature",
    "top_k", "top_p", "typical_p",
])  # fmt: skip
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


class Fields:
    """The fields of a configuration, each taken once; `close` refuses those that nobody took."""

    def __init__(self, given: dict[str, Any], ignore: Sequence[str] = ()) -> None:
        self.given, self._ignore = given, ignore
        self._taken: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """A field, by default what Hugging Face's own class has there."""
        self._taken.add(name)
        return self.given.get(name, default)

    def size(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self.take(name, default)
        if not is_int(value) or value < least:
            raise ValueError(f"config field {name} is {value!r}; expected a whole number of at least {least}")
        return value

    def size_or_none(self, name: str, default: int | None = None) -> int | None:
        """A size for which null stands for another field's."""
        return None if self.take(name, default) is None else self.size(name, default)

    def number(self, name: str, default: float) -> float:
        return _number(f"config field {name}", self.take(name, default))

    def number_or_none(self, name: str, default: float) -> float | None:
        return None if self.take(name, default) is None else self.number(name, default)

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"config field {name} is {value!r}; expected true or false")
        return value

    def only(self, name: str, *allowed: Any) -> None:
        """A field that changes what is computed, and of which only these values have a counterpart; the first is the
        default."""
        value = self.take(name, allowed[0])
        if value not in allowed:
            raise ValueError(
                f"config field {name} is {value!r}, which regard.models has no counterpart of; "
                f"only {' or '.join(map(repr, allowed))} can be converted"
            )

    def equal(self, name: str, other: str, value: Any, default: Any) -> None:
        """A field that must agree with another, because one number stands for both here."""
        if self.take(name, default) != value:
            raise ValueError(
                f"config fields {name} = {self.given.get(name, default)!r} and {other} = {value!r} differ, and one "
                "number stands for both in regard.models"
            )

    def activation(self, name: str, default: str, **meant: str) -> str:
        """Ours, of theirs; `meant`: what some of their names stand for in this family."""
        value = self.take(name, default)
        value = meant.get(value, value) if isinstance(value, str) else value
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise ValueError(
                f"config field {name} is {value!r}; of the activations {', '.join(ACTIVATIONS)} can be converted"
            )
        return ACTIVATIONS[value]

    def rotary(self) -> tuple[float, Scaling | None]:
        """Base and scaling, from `rope_parameters` or from the older `rope_theta` and `rope_scaling`."""
        base = self.take("rope_theta", 10_000.0)
        older, newer = self.take("rope_scaling"), self.take("rope_parameters")
        self.only("partial_rotary_factor", 1.0)
        given = newer if newer is not None else older or {}
        if not isinstance(given, dict):
            raise ValueError(f"config field rope_parameters is {given!r}; expected an object")
        rope = dict(given)
        base = _number("config field rope_theta", rope.pop("rope_theta", base))
        older_kind = rope.pop("type", "default")
        kind = rope.pop("rope_type", older_kind)
        if rope.pop("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError("config field partial_rotary_factor is not 1: heads that turn in part are not converted")
        longest = self.given.get("max_position_embeddings", 2048)
        return base, _scaling(kind, rope, longest)

    def close(self, *ignored: str) -> None:
        self.only("quantization_config", None)
        self.only("pruned_heads", None, {})
        self.only("per_layer_config", None)
        known = self._taken | _IGNORED | _OF_GENERATION | set(ignored)
        unknown = sorted(name for name, value in self.given.items() if name not in known and value is not None)
        unknown = [name for name in unknown if not any(fnmatch.fnmatchcase(name, each) for each in self._ignore)]
        if unknown:
            raise ValueError(
                f"config has fields that are not known here, and may change what is computed: {listed(unknown)}. What "
                "does not can be left out with ignore=[…]"
            )


def _number(what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{what} is {value!r}; expected a number")
    return float(value)


def _scaling(kind: str, rope: dict[str, Any], longest: int) -> Scaling | None:
    def needed(name: str) -> float:
        if rope.get(name) is None:
            raise ValueError(f"rotary positions of type {kind!r} need {name}, which the config lacks")
        return _number(f"config field {name} of the rotary positions", rope.pop(name))

    made: Scaling | None = None
    if kind == "linear":
        made = Linear(needed("factor"))
    elif kind == "dynamic":
        made = DynamicNTK(needed("factor"), longest)
        rope.pop("original_max_position_embeddings", None)  # Hugging Face's function does not read it
    elif kind == "llama3":
        original = rope.pop("original_max_position_embeddings", longest)
        low, high = needed("low_freq_factor"), needed("high_freq_factor")
        made = Llama3(needed("factor"), original, low, high)
    elif kind == "yarn":
        original = rope.pop("original_max_position_embeddings", longest)
        factor = rope.pop("factor", None) or longest / original
        names = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
        given = {name: rope.pop(name, None) for name in names}
        made = YaRN(factor, original, **{name: value for name, value in given.items() if value is not None})
    elif kind != "default":
        raise ValueError(
            f"rotary positions of type {kind!r} cannot be converted; default, linear, dynamic, yarn and llama3 can"
        )
    if left := sorted(name for name, value in rope.items() if value is not None):
        raise ValueError(f"rotary positions of type {kind!r} have fields that are not known here: {listed(left)}")
    return made


def rope_parameters(config: Any) -> dict[str, Any]:
    """The way back of `Fields.rotary`."""
    scaling: Scaling | None = config.rotary_scaling
    given: dict[str, Any] = {"rope_theta": config.rotary_base}
    match scaling:
        case None:
            return {**given, "rope_type": "default"}
        case Linear():
            return {**given, "rope_type": "linear", "factor": scaling.factor}
        case DynamicNTK() if scaling.original_length == config.max_tokens:
            return {**given, "rope_type": "dynamic", "factor": scaling.factor}
        case Llama3() | YaRN():
            fields = dataclasses.asdict(scaling)
            fields["original_max_position_embeddings"] = fields.pop("original_length")
            kind = "llama3" if isinstance(scaling, Llama3) else "yarn"
            return {**given, "rope_type": kind, **{name: value for name, value in fields.items() if value is not None}}
    raise ValueError(f"Hugging Face's models cannot express rotary_scaling={scaling!r}")


def listed(names: list[str], most: int = 4) -> str:
    """The first few, and how many more."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
