"""A stack of layers in which every token sees every other: BERT on words, ViT on patches of images."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._checks import check_choice
from regard.masks import Mask
from regard.models import _parts
from regard.models._parts import FeedForward, Hidden, Model
from regard.positions import LearnedPositions


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Configuration of an `Encoder`. The defaults are BERT's; those of ViT are in `models.config("vit-base")`.

    Args:
        vocab_size, max_tokens, token_types: for words; None, None and 0 for images.
        image_size, patch_size, channels: for square images; a first token (cls) comes before the patches.
        norm: "post", LayerNorm(x + f(x)), with one after the embeddings (BERT); or "pre", x + f(LayerNorm(x)), with
            one at the end (ViT).
        activation: relu, gelu, gelu_tanh or silu.
        dropout: on embeddings and on the outputs of attention and feed-forward; `attention_dropout`: on the weights.
        position_offset: rows of the position table before that of the first token (2 in RoBERTa, never read there).
        pooler: a linear layer on the first token, then `pooler_activation`, tanh or relu.
        masked_lm: a head that predicts every token, its last matrix the token embedding.
        classes: a linear layer on the pooler's output, or on the first token if there is no pooler.
        head_dropout: on the input of that layer from a pooler; `dropout` when None.
        init: "normal", truncated at two `init_std` (BERT), or "xavier" (ViT).
    """

    embed_dim: int
    num_layers: int
    num_heads: int
    ff_dim: int
    vocab_size: int | None = None
    max_tokens: int | None = None
    token_types: int = field(default=0, metadata=_parts.OR_NONE)
    position_offset: int = field(default=0, metadata=_parts.OR_NONE)
    image_size: int | None = None
    patch_size: int | None = None
    channels: int = 3
    norm: str = "post"
    norm_eps: float = 1e-12
    activation: str = "gelu"
    qkv_bias: bool = True
    dropout: float = 0.1
    attention_dropout: float = 0.1
    pooler: bool = False
    pooler_activation: str = "tanh"
    masked_lm: bool = False
    classes: int | None = None
    head_dropout: float | None = None
    init: str = "normal"
    init_std: float = 0.02

    def __post_init__(self) -> None:
        _parts.check_fields(self)
        check_choice("norm", self.norm, ("post", "pre"))
        check_choice("init", self.init, ("normal", "xavier"))
        check_choice("pooler_activation", self.pooler_activation, ("tanh", "relu"))
        words = (self.vocab_size, self.max_tokens)
        images = (self.image_size, self.patch_size)
        if (None in words and None in images) or (any(words) and any(images)):
            raise ValueError(
                "give vocab_size and max_tokens (words), or image_size and patch_size (images); got "
                f"vocab_size={self.vocab_size}, max_tokens={self.max_tokens}, image_size={self.image_size}, "
                f"patch_size={self.patch_size}"
            )
        if self.image_size is not None and self.image_size % self.patch_size:  # type: ignore[operator]
            raise ValueError(f"patch_size={self.patch_size} must divide image_size={self.image_size}")
        if self.image_size is not None and (self.token_types or self.masked_lm or self.position_offset):
            raise ValueError(
                "token_types, position_offset and masked_lm are for words, and this configuration is for images"
            )


class WordInput(nn.Module):
    """Token embedding + position + token type."""

    def __init__(self, config: EncoderConfig, **made: Any) -> None:
        super().__init__()
        assert config.vocab_size is not None and config.max_tokens is not None
        self.token_embedding = nn.Embedding(config.vocab_size, config.embed_dim, **made)
        self.first_row = config.position_offset
        self.position_embedding = LearnedPositions(config.max_tokens + self.first_row, config.embed_dim, **made)
        types = config.token_types
        self.type_embedding = nn.Embedding(types, config.embed_dim, **made) if types else None

    def forward(self, tokens: Tensor, token_types: Tensor | None, lengths: Any, side: str) -> Tensor:
        _parts.check_tokens("inputs", tokens, lengths, side)
        x = _parts.add_positions(
            self.position_embedding,
            _parts.embed("inputs", self.token_embedding, tokens),
            _parts.first_position(lengths, side, tokens) + self.first_row,
        )
        if self.type_embedding is None:
            if token_types is not None:
                raise ValueError("token_types was given, but the model was built with token_types=0")
            return x
        types = torch.zeros_like(tokens) if token_types is None else token_types
        return x + _parts.embed("token_types", self.type_embedding, types)


class PatchInput(nn.Module):
    """A linear map of every patch, a learned first token, and a position for each."""

    def __init__(self, config: EncoderConfig, **made: Any) -> None:
        super().__init__()
        assert config.image_size is not None and config.patch_size is not None
        self.shape = (config.channels, config.image_size, config.image_size)
        patches = (config.image_size // config.patch_size) ** 2
        self.patch_embedding = nn.Conv2d(
            config.channels, config.embed_dim, config.patch_size, stride=config.patch_size, **made
        )
        self.first_token = nn.Parameter(torch.empty(1, 1, config.embed_dim, **made))
        self.position_embedding = LearnedPositions(1 + patches, config.embed_dim, **made)

    def forward(self, images: Tensor, token_types: Tensor | None, lengths: Any, side: str) -> Tensor:
        if token_types is not None or lengths is not None:
            raise ValueError("token_types and lengths are for words, and this model was built for images")
        if not isinstance(images, Tensor) or images.dim() != 4 or images.shape[1:] != self.shape:
            given = list(images.shape) if isinstance(images, Tensor) else type(images).__name__
            raise ValueError(f"inputs must be images [batch, {', '.join(map(str, self.shape))}], got {given}")
        patches = self.patch_embedding(images).flatten(2).transpose(1, 2)  # [batch, patch, embed_dim], row by row
        first = self.first_token.expand(images.shape[0], -1, -1)
        return self.position_embedding(torch.cat([first, patches], dim=1))  # type: ignore[no-any-return]


class EncoderLayer(_parts.Residual):
    """Attention, then feed-forward."""

    def __init__(self, config: EncoderConfig, **made: Any) -> None:
        super().__init__()
        self.pre_norm = config.norm == "pre"
        self.attention = _parts.attention(config, **made)
        self.attention_norm = _parts.norm(config, **made)
        self.feed_forward = FeedForward.of(config, **made)
        self.feed_forward_norm = _parts.norm(config, **made)

    def forward(self, x: Tensor, mask: Mask | None) -> Tensor:
        x = self.add(x, self.attention_norm, self.attention, mask=mask)
        return self.add(x, self.feed_forward_norm, self.feed_forward)


class MaskedLM(nn.Module):
    """BERT's head: which token stands at each place."""

    def __init__(self, config: EncoderConfig, **made: Any) -> None:
        super().__init__()
        assert config.vocab_size is not None
        self.activation = config.activation
        self.dense = nn.Linear(config.embed_dim, config.embed_dim, **made)
        self.norm = _parts.norm(config, **made)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size, **made))

    def forward(self, states: Tensor, embedding: Tensor) -> Tensor:
        return F.linear(self.norm(_parts.ACTIVATIONS[self.activation](self.dense(states))), embedding, self.bias)


class Encoder(Model[EncoderConfig]):
    """Words or images in, one vector per token out; or the output of a task head.

        bert = Encoder(models.config("bert-base", masked_lm=True))
        states = bert(tokens, lengths=[7, 3])                        # [batch, token, embed_dim]
        logits = bert(tokens, head="masked-lm")                      # [batch, token, vocab_size]
        vit = Encoder(models.config("vit-base", pooler=False, classes=1000))
        logits = vit(images, head="classes")                         # [batch, 1000]

    `checkpoint_layers = True` saves memory in training: the backward pass computes the inside of each layer again.
    """

    def _build(self, config: EncoderConfig, **made: Any) -> None:
        dim = config.embed_dim
        self.embedding = WordInput(config, **made) if config.image_size is None else PatchInput(config, **made)
        self.layers = nn.ModuleList(EncoderLayer(config, **made) for _ in range(config.num_layers))
        self.norm = _parts.norm(config, **made)  # after the embeddings, or at the end
        self.pooler = nn.Linear(dim, dim, **made) if config.pooler else None
        self.masked_lm = MaskedLM(config, **made) if config.masked_lm else None
        self.classifier = None if config.classes is None else nn.Linear(dim, config.classes, **made)

    def reset_parameters(self) -> None:
        """As published: Devlin et al., 2018; Dosovitskiy et al., 2020, and its released code."""
        _init_normal(self, self.config.init_std) if self.config.init == "normal" else _init_vit(self)

    def forward(
        self,
        inputs: Tensor,
        *,
        token_types: Tensor | None = None,
        lengths: Any = None,
        side: str = "right",
        mask: Mask | None = None,
        head: str | None = None,
        hidden_states: bool = False,
    ) -> Tensor | Hidden:
        """States `[batch, token, embed_dim]`, or the output of a head; at padding they are undefined.

        Args:
            inputs: token numbers `[batch, token]`, or images `[batch, channel, height, width]`.
            token_types: of words, `[batch, token]`; all 0 when not given.
            lengths, side: item b has `lengths[b]` tokens, and padding on this side. Positions count real tokens.
            mask: which tokens may attend to which; everything when not given.
            head: "pooled" `[batch, embed_dim]`, "masked-lm" or "classes", if the model has it.
            hidden_states: return `(result, states)`: the input of the first layer and the output of every layer.
        """
        x = self.embedding(inputs, token_types, lengths, side)
        if self.config.norm == "post":
            x = self.norm(x)
        x = F.dropout(x, self.config.dropout, self.training)
        given = [(_parts.padding_mask(mask, lengths, side),)] * len(self.layers)
        x, hidden = self._through(self.layers, x, given, hidden_states)
        if self.config.norm == "pre":
            x = self.norm(x)
        if head is not None:
            first = _parts.first_position(lengths, side, x)
            x = self.read(x, head, first=0 if isinstance(first, int) else -first)
        return (x, hidden) if hidden_states else x

    def read(self, states: Tensor, head: str, *, first: int | Tensor = 0) -> Tensor:
        """The output of a head for states from `forward`; `first` is where each item begins (`[batch]`)."""
        if head == "masked-lm" and self.masked_lm is not None:
            return self.masked_lm(states, self.embedding.token_embedding.weight)  # type: ignore[union-attr, no-any-return]
        if head in ("pooled", "classes"):
            items = torch.arange(len(states), device=states.device)
            x = states[items, first]
            if self.pooler is not None:
                x = self.pooler(x)
                x = torch.tanh(x) if self.config.pooler_activation == "tanh" else F.relu(x)
            if head == "pooled" and self.pooler is not None:
                return x
            if head == "classes" and self.classifier is not None:
                dropout = self.config.dropout if self.config.head_dropout is None else self.config.head_dropout
                x = x if self.pooler is None else F.dropout(x, dropout, self.training)
                return self.classifier(x)  # type: ignore[no-any-return]
        built = {"pooled": self.pooler, "masked-lm": self.masked_lm, "classes": self.classifier}
        there = [name for name, module in built.items() if module is not None]
        raise ValueError(
            f"head must be one that the model was built with ({', '.join(there) or 'none'}), got {head!r}; "
            "EncoderConfig has pooler=True, masked_lm=True and classes=…"
        )


def _init_normal(model: Encoder, std: float) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif "norm" not in name:
            nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std)


def _init_vit(model: Encoder) -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name:
            continue
        if ".feed_forward." in name and name.endswith("bias"):
            nn.init.normal_(parameter, std=1e-6)
        elif name.endswith("bias") or "first_token" in name or "classifier" in name:
            nn.init.zeros_(parameter)
        elif "position_embedding" in name:
            nn.init.normal_(parameter, std=0.02)
        elif "patch_embedding" in name or "pooler" in name:
            _init_lecun(parameter)
        else:
            nn.init.xavier_uniform_(parameter)


def _init_lecun(weight: Tensor) -> None:
    """Variance 1/fan-in after truncation at two deviations, which takes a normal one's deviation to 0.8796."""
    std = (weight[0].numel() ** -0.5) / 0.87962566103423978
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
