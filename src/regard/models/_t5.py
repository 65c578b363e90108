"""T5 (Raffel et al., 2019): the Transformer with positions as a learned bias by distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from regard.bias import T5Bias
from regard.models import _parts
from regard.models._transformer import Transformer, TransformerConfig


@dataclass(frozen=True, kw_only=True)
class T5Config(TransformerConfig):
    """Configuration of a `T5`: a `TransformerConfig` with the defaults of T5 small, and the sizes of its bias.

    Args:
        buckets, max_distance: `num_buckets` and `max_distance` of the two `regard.bias.T5Bias`.
        scaled_output: divide states by √embed_dim before the output layer (the first T5, whose layers are tied).
        head: whether there is an output layer; without one, the model returns states.
    """

    vocab_size: int = 32_128
    norm: str = "pre"
    rms_norm: bool = True
    scale: str = "none"
    head_dim: int | None = 64
    attention_scale: float | None = 1.0
    ff_bias: bool = False
    buckets: int = 32
    max_distance: int = 128
    scaled_output: bool = True
    head: bool = True


class T5(Transformer):
    """Source and target token numbers in, logits of the next target token out, or states if the model has no output
    layer; all else as in `Transformer`."""

    config: T5Config

    def make_embeddings(self, config: TransformerConfig, **made: Any) -> None:
        assert isinstance(config, T5Config)
        super().make_embeddings(config, **made)
        sizes: dict[str, Any] = {"num_buckets": config.buckets, "max_distance": config.max_distance}
        self.encoder_bias = T5Bias(config.num_heads, **sizes, **made)
        self.decoder_bias = T5Bias(config.num_heads, **sizes, bidirectional=False, **made)

    def reset_parameters(self) -> None:
        """As published: every matrix by its width, embeddings of deviation 1."""
        width, each = self.config.embed_dim, _parts.head_sizes(self.config)[1]
        for name, parameter in self.named_parameters():
            if "norm" in name:
                continue
            std = width**-0.5
            if "embedding" in name or name.startswith("head"):
                std = 1.0
            elif name.endswith("q_proj.weight"):
                std = (width * each) ** -0.5
            elif name.endswith("out_proj.weight"):
                std = (self.config.num_heads * each) ** -0.5
            elif name.endswith("down.weight"):
                std = self.config.ff_dim**-0.5
            nn.init.normal_(parameter, std=std)

    def _embed(self, name: str, embedding: nn.Embedding, tokens: Tensor, first: int | Tensor) -> Tensor:
        return _parts.embed(name, embedding, tokens)  # positions are in the bias

    def logits(self, states: Tensor) -> Tensor:
        """The output layer."""
        return super().logits(states * self.config.embed_dim**-0.5 if self.config.scaled_output else states)

    def states(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_lengths: Any = None,
        target_lengths: Any = None,
        side: str = "right",
    ) -> Tensor:
        """The input of `logits`, `[batch, target token, embed_dim]`; arguments as in `forward`."""
        memory = self.encode(source, lengths=source_lengths, side=side)
        return self.decode(target, memory, memory_lengths=source_lengths, target_lengths=target_lengths, side=side)
