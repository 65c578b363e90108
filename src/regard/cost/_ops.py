"""What single operations cost: parameters, FLOPs, and the tensors that autograd keeps for the backward pass.

FLOPs are those of matrix products and convolutions, two for each multiplication and its addition, as
`torch.utils.flop_counter` counts them. Norms, softmax, activations and sums are left out: they cost memory traffic,
not arithmetic. Bytes are those of our own models: each tensor stands with the operation that keeps it, once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

EMBEDDINGS = "embeddings"
NORMS = "norms"
PROJECTIONS = "attention projections"
ATTENTION = "attention"
FEED_FORWARD = "feed-forward"
HEAD = "head"
LOSS = "loss"
PARTS = (EMBEDDINGS, NORMS, PROJECTIONS, ATTENTION, FEED_FORWARD, HEAD, LOSS)


class Numbers(NamedTuple):
    """How numbers are kept."""

    size: int  # bytes of one
    cuda: bool

    @property
    def wide(self) -> int:
        """Bytes of a number where half precision is worked on in float32."""
        return max(4, self.size)

    @property
    def statistic(self) -> int:
        """Bytes of a mean, or of a deviation, that a LayerNorm keeps."""
        return self.wide if self.cuda else self.size


class Op(NamedTuple):
    part: str
    parameters: int = 0
    forward: int = 0
    backward: int = 0
    again: int = 0  # what the backward pass of a fused kernel computes a second time: the scores
    kept_pairs: tuple[int, int, int] | None = None  # the same three over the pairs that the mask keeps; None: as above
    eager: int = 0  # bytes kept
    fused: int = 0
    repeated: bool = True  # False: after the last kept tensor of its layer, where computing it again stops

    @property
    def kept(self) -> tuple[int, int, int]:
        return (self.forward, self.backward, self.again) if self.kept_pairs is None else self.kept_pairs


def keep(part: str, size: int) -> Op:
    """Tensors that stay for the backward pass, however attention is computed."""
    return Op(part, eager=size, fused=size)


def linear(part: str, tokens: int, fan_in: int, fan_out: int, *, bias: bool, first: bool = False) -> Op:
    """x Wᵀ + b. Backwards one product gives the weight's gradient and one the input's, which the `first` need not."""
    forward = 2 * tokens * fan_in * fan_out
    return Op(part, (fan_in + bias) * fan_out, forward, forward if first else 2 * forward)


class Stream(NamedTuple):
    """The vectors that go through a model: how many, how wide, and how their numbers are kept."""

    tokens: int
    dim: int
    numbers: Numbers

    @property
    def bytes(self) -> int:
        return self.tokens * self.dim * self.numbers.size

    def kept(self, part: str, times: int = 1) -> Op:
        return keep(part, times * self.bytes)

    def to(self, part: str, width: int, *, bias: bool) -> Op:
        return linear(part, self.tokens, self.dim, width, bias=bias)

    def back(self, part: str, width: int, *, bias: bool) -> Op:
        """From vectors of another width."""
        return linear(part, self.tokens, width, self.dim, bias=bias)

    def norm(self, kind: str) -> Op:
        """LayerNorm keeps its input, mean and deviation; RMSNorm, outside CUDA, also what it makes before the gain."""
        tokens, dim, numbers = self
        if kind == "layer":
            size = tokens * (dim * numbers.size + 2 * numbers.statistic)
        elif numbers.cuda:
            size = tokens * (dim * numbers.size + numbers.wide)
        else:
            size = tokens * (2 * dim + 1) * numbers.wide
        return Op(NORMS, dim * (2 if kind == "layer" else 1), eager=size, fused=size)

    def feed_forward(self, inner: int, *, activation: str, gated: bool, bias: bool, ends: bool) -> list[Op]:
        """Keeps its input, what goes into the activation, and what goes into the last matrix. ReLU needs its result
        only; a gate's two factors are kept for each other. `ends`: nothing of its layer comes after it."""
        widths = (1 if activation == "relu" else 2) + 2 * gated
        return [
            keep(FEED_FORWARD, self.tokens * (self.dim + widths * inner) * self.numbers.size),
            *(self.to(FEED_FORWARD, inner, bias=bias) for _ in range(2 if gated else 1)),
            self.back(FEED_FORWARD, inner, bias=bias)._replace(repeated=not ends),
        ]

    def mixture(self, inner: int, experts: Experts, **how: Any) -> list[Op]:
        """A router, and `experts.active` of `experts.all` feed-forwards for each token."""
        one = self._replace(tokens=self.tokens * experts.active).feed_forward(inner, **how)
        kept = keep(FEED_FORWARD, self.tokens * (self.dim + experts.all) * self.numbers.size)
        router = self.to(FEED_FORWARD, experts.all, bias=False)
        return [kept, router, *(op._replace(parameters=op.parameters * experts.all) for op in one)]


class Experts(NamedTuple):
    """Feed-forwards of which a router chooses some for each token."""

    all: int
    active: int


class Heads(NamedTuple):
    """One attention call: sizes, and what of its layout decides which tensors are kept."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    key_dim: int
    value_dim: int
    pairs: int  # of query and key that the mask keeps, in one head
    masked: bool
    windowed: bool = False
    rotary: int = 0  # entries of a head that are turned
    packed: bool = False  # query, key and value are views of one tensor
    normed: bool = False  # query and key, head by head
    capped: bool = False  # logits


def attention(call: Heads, numbers: Numbers) -> Op:
    """Scores and weighted values: two products forward, four backward, and in a fused kernel the scores once more."""
    lead = 2 * call.batch * call.heads
    dense, kept = call.queries * call.keys, call.pairs
    scores, both = call.key_dim, call.key_dim + call.value_dim
    kept_pairs = (lead * kept * both, 2 * lead * kept * both, lead * kept * scores)
    tables = 2 * call.queries * (call.rotary // 2) * numbers.wide
    return Op(
        ATTENTION,
        0,
        lead * dense * both,
        2 * lead * dense * both,
        lead * dense * scores,
        kept_pairs,
        eager=_eager_bytes(call, numbers) + tables,
        fused=_fused_bytes(call, numbers) + tables,
    )


def _fused_bytes(call: Heads, numbers: Numbers) -> int:
    """Query, key, value, output and log-sum-exp; and the output again where the projection after it needs a copy."""
    rows, columns = call.batch * call.queries, call.batch * call.keys
    query = rows * call.heads * call.key_dim
    key, value = (columns * call.kv_heads * dim for dim in (call.key_dim, call.value_dim))
    inputs = query + key + value
    if call.packed and call.rotary and not call.normed:
        inputs += query + key  # the value is a view, which keeps what was turned alive
    out = rows * call.heads * call.value_dim
    half_in_float32 = numbers.size == 2 and not numbers.cuda
    # kernels lay their output out as the query is, or token by token; what is put together of tiles, head by head
    copied = call.rotary or (call.normed and (call.packed or numbers.cuda))
    copied = copied or (not numbers.cuda and (call.windowed or half_in_float32))
    shared = call.key_dim == call.value_dim and not copied
    return (
        inputs * numbers.size
        + out * (numbers.wide if half_in_float32 else numbers.size)
        + (0 if shared else out * numbers.size)
        + rows * call.heads * numbers.wide
    )


def _eager_bytes(call: Heads, numbers: Numbers) -> int:
    """The exponentials, the weights, the tangents of a softcap, and where a logit was -inf, for every pair; and query,
    key, value, output."""
    rows, columns = call.batch * call.queries, call.batch * call.keys
    query = rows * call.heads * call.key_dim
    inputs = query + columns * call.kv_heads * (call.key_dim + call.value_dim)
    views = call.packed and call.batch == 1 and numbers.size > 2
    if call.normed:
        # what is normed keeps the rest of its tensor alive, in which the value lies
        inputs += columns * call.kv_heads * call.value_dim if call.packed and not views else 0
    elif views:
        # the value is a view, and where nothing is turned the key too: they keep the rest of their tensor alive
        inputs += query + (columns * call.kv_heads * call.key_dim if call.rotary else 0)
    matrix = rows * call.heads * call.keys * ((3 if call.capped else 2) * numbers.wide + 1)
    mask = call.queries * call.keys if call.masked else 0
    sums = rows * call.heads * (numbers.wide + 2)
    return inputs * numbers.wide + matrix + mask + sums + rows * call.heads * call.value_dim * numbers.size
