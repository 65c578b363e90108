"""Parts that all models share, besides attention: feed-forward, norms, positions of padded batches, checks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from numbers import Integral
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard import masks
from regard._checks import check_choice, check_field
from regard.masks import Mask
from regard.masks._arguments import plain
from regard.masks._joins import both
from regard.nn import LatentAttention, MultiHeadAttention
from regard.nn._products import product
from regard.positions import LearnedPositions, Rotary

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),  # GPT-2's; Hugging Face calls it gelu_new
    "silu": F.silu,
}


class RMSNormPlusOne(nn.RMSNorm):
    """x / rms(x) · (1 + weight), so that a weight of 0 changes nothing; computed in float32 (Gemma)."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        normed = F.rms_norm(wide, self.normalized_shape, None, self.eps)
        return (normed * (1.0 + self.weight.to(wide.dtype))).to(x.dtype)


Hidden = tuple[Tensor, tuple[Tensor, ...]]  # a result, and the input of the first layer and the output of every layer
Config = TypeVar("Config")


class Model(nn.Module, Generic[Config]):
    """What whole models share: how they are built, run layer by layer, and end.

    `checkpoint_layers = True` saves memory in training: the backward pass computes the inside of each layer again.
    """

    config: Config
    head: nn.Linear | None

    def __init__(
        self, config: Config, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_layers = False
        self._build(config, device=device, dtype=dtype)
        self.reset_parameters()

    def _build(self, config: Any, **made: Any) -> None:
        raise NotImplementedError

    def reset_parameters(self) -> None:
        raise NotImplementedError

    def _through(
        self, layers: Iterable[Any], x: Tensor, given: Iterable[Any], keep: bool, *, cached: bool = False
    ) -> Hidden:
        """`x` through the layers, each with what it is given; with `keep`, the input of the first and every output
        too."""
        checkpointed = self.checkpoint_layers and self.training and not cached and torch.is_grad_enabled()
        hidden = [x] if keep else []
        for layer, more in zip(layers, given, strict=True):
            if checkpointed:
                from torch.utils.checkpoint import checkpoint

                x = checkpoint(layer, x, *more, use_reentrant=False)
            else:
                x = layer(x, *more)
            if keep:
                hidden.append(x)
        return x, tuple(hidden)

    def _make_head(self, words: int, **made: Any) -> nn.Linear | None:
        config: Any = self.config
        alone = config.tied or not getattr(config, "head", True)
        return None if alone else nn.Linear(config.embed_dim, words, bias=False, **made)

    def _predicted(self, states: Tensor, embedding: nn.Embedding) -> Tensor:
        """Logits, by a matrix of its own or by the embedding of the tokens that it predicts."""
        if not getattr(self.config, "head", True):
            raise ValueError("this model was built with head=False: it has states, and no logits")
        if self.head is None:
            return product(F.linear, states, embedding.weight)
        return product(self.head, states)


def _of(config: Any, names: dict[str, str]) -> dict[str, Any]:
    """Keywords, by the names that a configuration has for them; those that it does not have are left out."""
    return {keyword: getattr(config, name) for keyword, name in names.items() if hasattr(config, name)}


class FeedForward(nn.Module):
    """down(act(up(x))), or down(act(gate(x)) · up(x)) where it is gated (SwiGLU with silu), token by token."""

    def __init__(
        self,
        embed_dim: int,
        ff_dim: int,
        *,
        activation: str,
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        inner_dropout: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.activation = activation
        self.dropout, self.inner_dropout = dropout, inner_dropout
        self.gate = nn.Linear(embed_dim, ff_dim, **made) if gated else None
        self.up = nn.Linear(embed_dim, ff_dim, **made)
        self.down = nn.Linear(ff_dim, embed_dim, **made)

    @classmethod
    def of(cls, config: Any, ff_dim: int | None = None, **made: Any) -> FeedForward:
        """As a configuration has it; ``ff_dim`` in place of its own."""
        how = {"gated": "gated", "bias": "ff_bias", "dropout": "dropout", "inner_dropout": "ff_dropout"}
        width = config.ff_dim if ff_dim is None else ff_dim
        return cls(config.embed_dim, width, activation=config.activation, **_of(config, how), **made)

    def forward(self, x: Tensor) -> Tensor:
        act = ACTIVATIONS[self.activation]
        inner = act(product(self.up, x)) if self.gate is None else act(product(self.gate, x)) * product(self.up, x)
        if self.training and self.inner_dropout:
            inner = F.dropout(inner, self.inner_dropout)
        out = product(self.down, inner)
        return F.dropout(out, self.dropout) if self.training else out

    def extra_repr(self) -> str:
        return self.activation


class Residual(nn.Module):
    """A layer of branches, each added to its input, with the norm before the branch (`pre_norm`) or after the sum."""

    pre_norm: bool

    def add(self, x: Tensor, norm: nn.Module, branch: nn.Module, *given: Any, **more: Any) -> Tensor:
        if self.pre_norm:
            return x + branch(norm(x), *given, **more)  # type: ignore[no-any-return]
        return norm(x + branch(x, *given, **more))  # type: ignore[no-any-return]


def norm(config: Any, **made: Any) -> nn.Module:
    """As a configuration has it."""
    rms = config.norm == "rms" or getattr(config, "rms_norm", False)
    kind = nn.RMSNorm if rms else nn.LayerNorm
    kind = RMSNormPlusOne if getattr(config, "norm_plus_one", False) else kind
    return kind(config.embed_dim, eps=config.norm_eps, **made)


_SAME = ("num_kv_heads", "head_dim", "value_head_dim", "qkv_bias", "out_bias", "packed", "qk_norm")
_ATTENTION = {
    **{name: name for name in _SAME},
    "scale": "attention_scale",
    "softcap": "attention_softcap",
    "dropout": "attention_dropout",
    "out_dropout": "dropout",
}


def attention(config: Any, **more: Any) -> MultiHeadAttention:
    """As a configuration has it; `more` are the keywords that it does not say."""
    return MultiHeadAttention(config.embed_dim, config.num_heads, **_of(config, _ATTENTION), **more)


def head_sizes(config: Any) -> tuple[int, int, int]:
    """Heads of key and value, and the widths of a key and of a value, where a configuration leaves them open too."""
    heads, width, value = (getattr(config, name, None) for name in ("num_kv_heads", "head_dim", "value_head_dim"))
    width = config.embed_dim // config.num_heads if width is None else width
    return config.num_heads if heads is None else heads, width, width if value is None else value


def rotary(config: Any, device: Any) -> Rotary:
    """As a configuration has it."""
    dim = config.rope_dim if hasattr(config, "rope_dim") else head_sizes(config)[1]
    how: dict[str, Any] = {"base": config.rotary_base, "interleaved": config.rotary_interleaved}
    return Rotary(dim, scaling=config.rotary_scaling, device=device, **how)


def latent_attention(config: Any, positions: Rotary | None, **more: Any) -> LatentAttention:
    """As a configuration has it; `more` are the keywords that are not called the same there."""
    sizes = ("kv_lora_rank", "nope_dim", "rope_dim", "value_head_dim", "q_lora_rank")
    given = _of(config, {name: name for name in sizes} | {"dropout": "attention_dropout"})
    return LatentAttention(config.embed_dim, config.num_heads, positions=positions, **given, **more)


def padding_mask(mask: Mask | None, lengths: Any, side: str) -> Mask | None:
    """`mask`, with the padding of a batch whose item b has `lengths[b]` tokens."""
    if lengths is None:
        return mask
    return both(mask, masks.padding(lengths, side))  # type: ignore[arg-type]


def first_position(lengths: Any, side: str, x: Tensor) -> int | Tensor:
    """The position of the first token of each row of `x` [batch, token, …]: below 0 where padding stands before 0."""
    if lengths is None or side == "right":
        return 0
    return torch.as_tensor(lengths, device=x.device) - x.shape[1]


def add_positions(table: LearnedPositions, x: Tensor, first: int | Tensor) -> Tensor:
    """`x` plus the vector of each token's position. Padding before position 0 gets that of 0, which nobody sees."""
    if isinstance(first, int):
        return table(x, offset=first)  # type: ignore[no-any-return]
    places = first.to(x.device).unsqueeze(1) + torch.arange(x.shape[1], device=x.device)
    return x + F.embedding(places.clamp_min(0), table.weight)


def embed(name: str, table: nn.Embedding, tokens: Tensor) -> Tensor:
    """The vector of each token; a token that is not in the table is refused where the lookup itself detects it."""
    try:
        return table(tokens)  # type: ignore[no-any-return]
    except IndexError:
        wrong = tokens[(tokens < 0) | (tokens >= table.num_embeddings)]
        raise ValueError(f"{name} holds {int(wrong[0])}; this model has 0 … {table.num_embeddings - 1}") from None


def check_tokens(name: str, tokens: Any, lengths: Any, side: str, named: str = "lengths") -> None:
    """Token numbers, and how many of them each item has."""
    if not isinstance(tokens, Tensor):
        raise TypeError(f"{name} must be an integer tensor [batch, token], got {type(tokens).__name__}")
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must hold token numbers (int64 or int32), got {tokens.dtype}")
    if tokens.dim() != 2:
        raise ValueError(f"{name} must be [batch, token], got shape {list(tokens.shape)}")
    if side not in ("left", "right"):
        raise ValueError(f"side must be 'left' or 'right' (where the padding is), got {side!r}")
    if lengths is None:
        return
    if isinstance(lengths, Tensor):
        items = lengths.shape[0] if lengths.dim() == 1 else -1
        readable = not torch.compiler.is_compiling() and plain(lengths)
        given = lengths.tolist() if readable and items >= 0 else []
    elif isinstance(lengths, Iterable) and not isinstance(lengths, str):
        given = list(lengths)
        items = len(given)
    else:
        raise TypeError(f"{named} must be one int for each item, got {type(lengths).__name__}")
    if items != tokens.shape[0]:
        raise ValueError(f"{named} must be one int for each of the {tokens.shape[0]} items, got {lengths!r}")
    if any(isinstance(length, bool) or not isinstance(length, Integral) for length in given):
        raise TypeError(f"{named} must be ints, one for each item, got {lengths!r}")
    if any(length > tokens.shape[1] for length in given):
        raise ValueError(f"{named} {given} go beyond the {tokens.shape[1]} tokens of each row")


def check_caches(caches: Any, layers: int, pairs: bool = False) -> None:
    """One for each layer, or a pair."""
    if caches is None:
        return
    if not isinstance(caches, Sequence):
        raise TypeError(f"caches must be a list, one for each of the {layers} layers, got {type(caches).__name__}")
    if len(caches) != layers:
        raise ValueError(f"caches must be one for each of the {layers} layers, got {len(caches)}")
    if len({id(cache) for cache in caches}) < layers:
        raise ValueError("caches holds the same cache twice: every layer needs one of its own")
    for cache in caches:
        if pairs and not (isinstance(cache, (tuple, list)) and len(cache) == 2):
            raise TypeError(f"caches must hold a pair for each layer, as model.caches(…) does, got {cache!r}")
        for one in cache if pairs else (cache,):
            if isinstance(one, type) or not hasattr(one, "update"):
                raise TypeError(f"caches must hold those of regard.cache, one for each layer, got {one!r}")


# of a field for which 0 is no size, but says that there are none
OR_NONE = {"zero": True}
# what a number may be, by how the name of its field ends
_NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "dropout": ("in [0, 1)", lambda number: 0.0 <= number < 1.0),
    "_eps": ("finite and at least 0", lambda number: 0.0 <= number < math.inf),
    "_std": ("finite and at least 0", lambda number: 0.0 <= number < math.inf),
    "softcap": ("finite and above 0", lambda number: 0.0 < number < math.inf),
}


def check_fields(config: Any) -> None:
    """Check each field of a configuration by its type: sizes, flags and numbers; None where it is optional."""
    for field in dataclasses.fields(config):
        name, value, least = field.name, getattr(config, field.name), 0 if field.metadata == OR_NONE else 1
        if name == "activation":
            check_choice(name, value, ACTIVATIONS)
        number = next((_NUMBERS[ending] for ending in _NUMBERS if name.endswith(ending)), ())
        check_field(name, str(field.type), value, least, *number)
