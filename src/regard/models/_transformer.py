"""The Transformer of 2017 (Vaswani et al.): an encoder reads the source, a decoder writes the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional as F

from regard import masks
from regard._checks import check_choice
from regard.cache import KVCache, TokenCache
from regard.masks import Mask
from regard.models import _parts
from regard.models._parts import FeedForward, Hidden, Model
from regard.nn import MultiHeadAttention
from regard.positions import sinusoidal

if TYPE_CHECKING:
    from regard.models._search import Hypothesis

LayerCaches = tuple[TokenCache, TokenCache]  # of the decoder's self attention, and of its attention to the source


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Configuration of a `Transformer`. The defaults are the paper's base model, except for the vocabulary.

    Args:
        vocab_size: vocabulary size of source and target, which then share their embedding.
        target_vocab_size: vocabulary size of the target, if it has a vocabulary and an embedding of its own.
        num_layers: of the encoder; `decoder_layers` of the decoder, the same when not given.
        norm: "post", LayerNorm(x + f(x)), as in the paper; or "pre", x + f(LayerNorm(x)), with one at the end.
        rms_norm: norms without mean and bias.
        activation: relu, gelu, gelu_tanh or silu; with `gated`, of the gate. `ff_bias`: of those layers.
        attention_scale: `scale` of `regard.nn.MultiHeadAttention`.
        attention_bias: of the four projections; `key_bias=False` omits it for keys, where it changes nothing.
        tied: the output layer is the target's embedding.
        dropout: on embeddings and on the output of every sub-layer; `attention_dropout`: on the weights;
            `ff_dropout`: inside feed-forward layers, after the activation.
        head_dim, value_head_dim: widths of a query or key head and of a value head; `embed_dim / num_heads`, and
            `head_dim`, when not given.
        scale: "embedding" multiplies embeddings by √embed_dim, as in the paper; "output" divides logits by it instead;
            "none" does neither.
        embedding_norm: a LayerNorm after embedding, positions and dropout, in encoder and decoder.
    """

    vocab_size: int
    target_vocab_size: int | None = None
    embed_dim: int = 512
    num_layers: int = 6
    decoder_layers: int | None = None
    num_heads: int = 8
    ff_dim: int = 2048
    norm: str = "post"
    norm_eps: float = 1e-6
    rms_norm: bool = False
    activation: str = "relu"
    gated: bool = False
    ff_bias: bool = True
    attention_scale: float | None = None
    attention_bias: bool = False
    key_bias: bool = True
    tied: bool = True
    dropout: float = 0.1
    attention_dropout: float = 0.0
    ff_dropout: float = 0.0
    head_dim: int | None = None
    value_head_dim: int | None = None
    scale: str = "embedding"
    embedding_norm: bool = False

    @property
    def target_layers(self) -> int:
        """Layers of the decoder."""
        return self.num_layers if self.decoder_layers is None else self.decoder_layers

    @property
    def target_words(self) -> int:
        """The target's vocabulary size."""
        return self.vocab_size if self.target_vocab_size is None else self.target_vocab_size

    def __post_init__(self) -> None:
        _parts.check_fields(self)
        check_choice("scale", self.scale, ("embedding", "output", "none"))
        check_choice("norm", self.norm, ("post", "pre"))


class _Layer(_parts.Residual):
    """What the layers of encoder and decoder share: sub-layers, each with its residual and norm."""

    def __init__(self, config: TransformerConfig, **made: Any) -> None:
        super().__init__()
        self.pre_norm = config.norm == "pre"
        self.attention = _attention(config, **made)
        self.attention_norm = _parts.norm(config, **made)
        self.feed_forward = FeedForward.of(config, **made)
        self.feed_forward_norm = _parts.norm(config, **made)


class EncoderLayer(_Layer):
    """Every source token attends to all of them; then the feed-forward."""

    def forward(self, x: Tensor, mask: Mask | None, bias: Any = None) -> Tensor:
        x = self.add(x, self.attention_norm, self.attention, mask=mask, bias=bias)
        return self.add(x, self.feed_forward_norm, self.feed_forward)


class DecoderLayer(_Layer):
    """A target token attends to those before it, then to the source (`memory`); then the feed-forward."""

    def __init__(self, config: TransformerConfig, **made: Any) -> None:
        super().__init__(config, **made)
        self.cross_attention = _attention(config, **made)
        self.cross_attention_norm = _parts.norm(config, **made)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        mask: Mask | None,
        memory_mask: Mask | None,
        cache: Any = None,
        memory_cache: Any = None,
        bias: Any = None,
    ) -> Tensor:
        x = self.add(x, self.attention_norm, self.attention, mask=mask, bias=bias, cache=cache)
        x = self.add(x, self.cross_attention_norm, self.cross_attention, memory, mask=memory_mask, cache=memory_cache)
        return self.add(x, self.feed_forward_norm, self.feed_forward)


def _attention(config: TransformerConfig, **made: Any) -> MultiHeadAttention:
    attention = _parts.attention(config, qkv_bias=config.attention_bias, out_bias=config.attention_bias, **made)
    if not config.key_bias:
        attention.k_proj.register_parameter("bias", None)
    return attention


def _input_norm(config: TransformerConfig, **made: Any) -> nn.LayerNorm | None:
    return nn.LayerNorm(config.embed_dim, eps=config.norm_eps, **made) if config.embedding_norm else None


class Transformer(Model[TransformerConfig]):
    """Source and target token numbers in, logits of the next target token out.

        model = Transformer(models.config("transformer-base", vocab_size=8000))
        logits = model(source, target[:, :-1], source_lengths=lengths)      # [batch, token, vocab_size]
        loss = models.label_smoothed_loss(logits, target[:, 1:], ignore=pad)
        best = model.eval().generate(source, source_lengths=lengths, start=2, stop=3, max_new_tokens=50, beams=4)

    `checkpoint_layers = True` saves memory in training: the backward pass computes the inside of each layer again.
    """

    def _build(self, config: TransformerConfig, **made: Any) -> None:
        self.encoder_bias: nn.Module | None = None  # of the self attention; see `T5`
        self.decoder_bias: nn.Module | None = None
        self.make_embeddings(config, **made)
        self.encoder_layers = nn.ModuleList(EncoderLayer(config, **made) for _ in range(config.num_layers))
        self.decoder_layers = nn.ModuleList(DecoderLayer(config, **made) for _ in range(config.target_layers))
        pre = config.norm == "pre"  # nothing else would norm the sum of the branches
        self.encoder_norm = _parts.norm(config, **made) if pre else None
        self.decoder_norm = _parts.norm(config, **made) if pre else None
        self.encoder_input_norm = _input_norm(config, **made)
        self.decoder_input_norm = _input_norm(config, **made)
        self.head = self._make_head(config.target_words, **made)

    def make_embeddings(self, config: TransformerConfig, **made: Any) -> None:
        if config.target_vocab_size is None:
            self.token_embedding = nn.Embedding(config.vocab_size, config.embed_dim, **made)
        else:
            self.source_embedding = nn.Embedding(config.vocab_size, config.embed_dim, **made)
            self.target_embedding = nn.Embedding(config.target_vocab_size, config.embed_dim, **made)

    def reset_parameters(self) -> None:
        """As in the paper's code: Xavier uniform; embeddings of deviation 1/√embed_dim, which `embed` multiplies away.

        The output layer starts as the embeddings do, tied or not.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "embedding" in name or name.startswith("head"):
                nn.init.normal_(parameter, std=self.config.embed_dim**-0.5)
            elif "norm" not in name:
                nn.init.xavier_uniform_(parameter)

    @property
    def output_embedding(self) -> nn.Embedding:
        """The target's embedding."""
        return self.token_embedding if self.config.target_vocab_size is None else self.target_embedding

    def embed_source(self, source: Tensor, lengths: Any, side: str) -> Tensor:
        _parts.check_tokens("source", source, lengths, side, "source_lengths")
        embedding = self.token_embedding if self.config.target_vocab_size is None else self.source_embedding
        return self._embed("source", embedding, source, _parts.first_position(lengths, side, source))

    def embed_target(self, target: Tensor, first: int | Tensor) -> Tensor:
        return self._embed("target", self.output_embedding, target, first)

    def _embed(self, name: str, embedding: nn.Embedding, tokens: Tensor, first: int | Tensor) -> Tensor:
        x = _parts.embed(name, embedding, tokens)
        x = x * self.config.embed_dim**0.5 if self.config.scale == "embedding" else x
        return x + sinusoidal(tokens.shape[1], x.shape[2], offset=first, device=x.device, dtype=x.dtype)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_lengths: Any = None,
        target_lengths: Any = None,
        side: str = "right",
        hidden_states: bool = False,
    ) -> Tensor | tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Logits `[batch, token, vocab]` of the next token at each target token; those at padding are undefined.

        Args:
            source, target: `[batch, token]`; the target begins with a start token, without its last token.
            source_lengths, target_lengths, side: number of tokens per item, and the side of its padding.
            hidden_states: return `(logits, encoder states, decoder states)`: of both, the input of the first layer and
                the output of every layer.
        """
        memory, seen = self._encode(source, source_lengths, side, hidden_states)
        states, written = self._decode(target, memory, source_lengths, target_lengths, side, None, hidden_states)
        found = self.logits(states) if getattr(self.config, "head", True) else states  # a T5 may have none
        return (found, seen, written) if hidden_states else found

    def encode(self, source: Tensor, *, lengths: Any = None, side: str = "right") -> Tensor:
        """The encoder's output, which the decoder reads, `[batch, source token, embed_dim]`."""
        return self._encode(source, lengths, side, False)[0]

    def decode(
        self,
        target: Tensor,
        memory: Tensor,
        *,
        memory_lengths: Any = None,
        target_lengths: Any = None,
        side: str = "right",
        caches: Sequence[LayerCaches] | None = None,
    ) -> Tensor:
        """States `[batch, token, embed_dim]`, for `logits`.

        Args:
            target: `[batch, token]`; with caches, only the new ones.
            memory: from `encode`; with caches, read in the first call only.
            memory_lengths: lengths of the source.
            caches: from `model.caches(…)`.
        """
        return self._decode(target, memory, memory_lengths, target_lengths, side, caches, False)[0]

    def logits(self, states: Tensor) -> Tensor:
        """The output layer."""
        found = self._predicted(states, self.output_embedding)
        return found * self.config.embed_dim**-0.5 if self.config.scale == "output" else found

    def _encode(self, source: Tensor, lengths: Any, side: str, keep: bool) -> Hidden:
        x = F.dropout(self.embed_source(source, lengths, side), self.config.dropout, self.training)
        x = x if self.encoder_input_norm is None else self.encoder_input_norm(x)
        mask = _parts.padding_mask(None, lengths, side)
        given = [(mask, self.encoder_bias)] * len(self.encoder_layers)
        x, hidden = self._through(self.encoder_layers, x, given, keep)
        return x if self.encoder_norm is None else self.encoder_norm(x), hidden

    def _decode(
        self,
        target: Tensor,
        memory: Tensor,
        memory_lengths: Any,
        lengths: Any,
        side: str,
        caches: Sequence[LayerCaches] | None,
        keep: bool,
    ) -> Hidden:
        _parts.check_tokens("target", target, lengths, side, "target_lengths")
        _parts.check_caches(caches, len(self.decoder_layers), pairs=True)
        mask = _parts.padding_mask(masks.causal(), lengths, side)
        memory_mask = _parts.padding_mask(None, memory_lengths, side)
        first = _parts.first_position(lengths, side, target)
        pairs: Sequence[tuple[Any, Any]] = [(None, None)] * len(self.decoder_layers)
        if caches is not None:
            if lengths is not None:
                raise ValueError("target_lengths together with caches: give every row the same number of new tokens")
            first, memory_mask = caches[0][0].position, None  # what is padding, the caches know
            pairs, memory = _with_memory(caches, memory, memory_lengths, side)
            mask = None if target.shape[1] == 1 else mask  # the newest token sees all that is held
        x = F.dropout(self.embed_target(target, first), self.config.dropout, self.training)
        x = x if self.decoder_input_norm is None else self.decoder_input_norm(x)
        given = [(memory, mask, memory_mask, *pair, self.decoder_bias) for pair in pairs]
        x, hidden = self._through(self.decoder_layers, x, given, keep, cached=caches is not None)
        return x if self.decoder_norm is None else self.decoder_norm(x), hidden

    def caches(self, capacity: int, memory_tokens: int) -> list[LayerCaches]:
        """Caches for each decoder layer, for `capacity` target tokens and for those of the source."""
        return [(KVCache(capacity), KVCache(max(memory_tokens, 1))) for _ in self.decoder_layers]

    def generate(
        self,
        source: Tensor,
        *,
        start: int | Sequence[int],
        stop: int,
        max_new_tokens: int,
        source_lengths: Any = None,
        side: str = "right",
        beams: int = 1,
        length_penalty: float = 0.6,
        best: int = 1,
        use_cache: bool = True,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | Sequence[int] | None = None,
    ) -> list[list[Hypothesis]]:
        """The best continuations of each item, best first, with their scores.

        Args:
            source: as in `forward`; with `source_lengths` and `side`.
            start: the token or tokens that the target begins with.
            stop: the token that ends it.
            max_new_tokens: maximum number of tokens to generate, including the stop token.
            beams: 1 takes the likeliest token each time; more keep that many partial targets in parallel.
            length_penalty: α of log P / ((5 + length) / 6)^α, by which targets are ranked (Wu et al., 2016).
            best: number of targets to return per item, at most `beams`.
            use_cache: False recomputes everything for every token.
            temperature: above 0, tokens are sampled, with one beam, from the `top_k` likeliest and the `top_p` nucleus.
            seed: the same seed gives the same samples; one int, or one per item.
        """
        from regard.models._sampling import Sampling
        from regard.models._search import Asked, search

        sampling = Sampling(temperature, top_k, top_p, seed)
        asked = Asked(start, stop, max_new_tokens, beams, length_penalty, best, use_cache, sampling)
        return search([self], (source, source_lengths, side), asked)


def _with_memory(
    caches: Sequence[LayerCaches], memory: Tensor, lengths: Any, side: str
) -> tuple[Sequence[tuple[Any, Any]], Tensor]:
    """The caches for one call, and what of the source they have yet to read: all of it once, without its padding."""
    if any(caches[0][1].lengths):
        return caches, memory[:, :0]
    if lengths is None:
        return caches, memory
    return [(own, cross.padded(lengths, side=side, tokens=memory.shape[1])) for own, cross in caches], memory
