"""Attention compared with what came before it: one layer of each kind on the same sequence."""

from __future__ import annotations

from dataclasses import dataclass

from regard.cost import _given


@dataclass(frozen=True)
class LayerKind:
    """What one layer costs and how far it reaches.

    Args:
        flops: of matrix products and convolutions, forward, one item.
        scores: numbers that the plain computation holds between queries and keys; 0 where there are none.
        steps: operations that must wait for each other, whatever the machine.
        path: layers, or steps of one, until an output depends on both of two tokens that are farthest apart; None
            where none ever does.
    """

    flops: int
    scores: int
    steps: int
    path: int | None


def layer_kinds(length: int, dim: int, *, heads: int = 1, kernel: int = 3) -> dict[str, LayerKind]:
    """Self attention, a recurrent layer and a convolution of the same width (Vaswani et al., 2017, table 1).

    Attention is 8·L·d² for its four projections and 4·L²·d for scores and weighted values, each head L²·d/h of them, in
    all the same for any number of heads. The recurrent layer is tanh(W x + U h), the convolution has `kernel` taps.

    Args:
        length: tokens L.
        dim: width d of a token.
        heads: of attention; a divisor of `dim`.
        kernel: tokens that a convolution sees at once.
    """
    _given.check_counts(length=length, dim=dim, heads=heads, kernel=kernel)
    if dim % heads:
        raise ValueError(f"heads={heads} must divide dim={dim}")
    width = dim // heads
    attention = 8 * length * dim**2 + heads * 4 * length**2 * width
    # a stack of convolutions one wide never joins two tokens
    reach = None if kernel == 1 and length > 1 else max(1, -(-(length - 1) // max(kernel - 1, 1)))
    return {
        "attention": LayerKind(attention, heads * length**2, 1, 1),
        "recurrent": LayerKind(4 * length * dim**2, 0, length, length),
        "convolution": LayerKind(2 * kernel * length * dim**2, 0, 1, reach),
    }
