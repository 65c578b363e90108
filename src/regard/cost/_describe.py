"""A configuration as blocks of operations, in the order in which the model runs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from regard.cost import _ops
from regard.cost._ops import EMBEDDINGS, HEAD, LOSS, PROJECTIONS, Experts, Heads, Numbers, Op, Stream
from regard.models import DecoderConfig, EncoderConfig, LatentConfig, T5Config, TransformerConfig, WhisperConfig
from regard.models._parts import head_sizes

INDEX = 8  # bytes of a token's number


@dataclass(frozen=True)
class Run:
    """What goes through the model."""

    batch: int
    length: int
    source: int  # tokens that an encoder reads as well
    numbers: Numbers
    latent: LatentConfig | None = None  # takes the place of each layer's attention
    experts: Experts | None = None  # each layer has several feed-forwards, of which a token sees some

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def stream(self, dim: int) -> Stream:
        return Stream(self.tokens, dim, self.numbers)


@dataclass(frozen=True)
class Block:
    """`count` equal pieces of a model, one after another."""

    name: str
    ops: list[Op]
    count: int = 1
    layer_input: int | None = None  # bytes kept of a layer whose inside is computed again; None: always kept whole


def blocks_of(config: Any, run: Run) -> list[Block]:
    match config:
        case DecoderConfig():
            return _decoder(config, run)
        case EncoderConfig():
            return _encoder(config, run)
        case WhisperConfig() | TransformerConfig():
            return _transformer(config, run)
        case LatentConfig():
            return [Block("layer", [run.stream(config.embed_dim).kept(PROJECTIONS), *_latent(config, run)])]
    raise TypeError(f"config must be a name or a configuration of regard.models, got {type(config).__name__}")


def causal_pairs(length: int, window: int | None = None) -> int:
    """Pairs with 0 ≤ i − j ≤ window among `length` tokens."""
    seen = length if window is None else min(length, window + 1)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def _decoder(config: DecoderConfig, run: Run) -> list[Block]:
    dim, tokens, x = config.embed_dim, run.tokens, run.stream(config.embed_dim)
    learned = config.max_tokens * dim if config.positions == "learned" else 0
    embeddings = Op(EMBEDDINGS, config.vocab_size * dim + learned, eager=tokens * INDEX, fused=tokens * INDEX)
    how: dict[str, Any] = {"activation": config.activation, "gated": config.gated, "bias": config.ff_bias}
    if run.experts is None:
        forward = x.feed_forward(config.ff_dim, ends=not config.post_norms, **how)
    else:
        forward = x.mixture(config.ff_dim, run.experts, ends=not config.post_norms, **how)
    norm = x.norm("plus one" if config.norm_plus_one else config.norm)
    norms = [norm] * (4 if config.post_norms else 2)

    def layers(name: str, window: int | None, count: int) -> Block:
        attention = _decoder_attention(config, run, window) if run.latent is None else _latent(run.latent, run)
        return Block(name, [*norms, x.kept(PROJECTIONS), *attention, *forward], count, x.bytes)

    windowed = sum(config.windowed or [True] * config.num_layers) if config.window is not None else 0
    name = "layer" if windowed == config.num_layers else "windowed layer"
    blocks = [layers("layer", None, config.num_layers - windowed), layers(name, config.window, windowed)]
    head = [x.kept(HEAD), _words(config, x, config.vocab_size), _loss(tokens, config.vocab_size, run.numbers)]
    if config.logit_softcap is not None:  # its tangents
        head.append(run.stream(config.vocab_size).kept(HEAD))
    return [
        Block("embeddings", [embeddings]),
        *(block for block in blocks if block.count),
        Block("head", [norm, *(head if config.head else [])]),
    ]


def _words(config: DecoderConfig | TransformerConfig, x: Stream, words: int) -> Op:
    """The output layer; where it is the token embedding, its parameters are counted there."""
    head = x.to(HEAD, words, bias=False)
    return head._replace(parameters=0) if config.tied else head


def _decoder_attention(config: DecoderConfig, run: Run, window: int | None) -> list[Op]:
    call = _heads(config, run, run.length, run.length, causal=True, window=window)
    rotary = call.key_dim if config.positions == "rotary" else 0
    capped = config.attention_softcap is not None
    call = call._replace(rotary=rotary, packed=config.packed, normed=config.qk_norm, capped=capped)
    biases = (config.qkv_bias, config.qkv_bias, config.qkv_bias, config.out_bias)
    return _projected(call, config.embed_dim, biases, run.numbers)


def _latent(config: LatentConfig, run: Run) -> list[Op]:
    """Expanded, as in training and for a prompt: keys and values are made of the latents. The input is not counted."""
    tokens, numbers, heads, x = run.tokens, run.numbers, config.num_heads, run.stream(config.embed_dim)
    rank, rope, plain = config.kv_lora_rank, config.rope_dim, config.nope_dim
    value = plain if config.value_head_dim is None else config.value_head_dim
    key = plain + rope
    if config.q_lora_rank is None:
        queries = [x.to(PROJECTIONS, heads * key, bias=False)]
    else:
        q = run.stream(config.q_lora_rank)
        queries = [
            x.to(PROJECTIONS, q.dim, bias=config.bias),
            q.norm("rms"),
            q.kept(PROJECTIONS),
            q.to(PROJECTIONS, heads * key, bias=False),
        ]
    call = Heads(
        run.batch, heads, heads, run.length, run.length, key, value,
        pairs=causal_pairs(run.length), masked=True, rotary=rope,
    )  # fmt: skip
    # the norm's input is a part of [latent, rotary key]; what it gives is put next to the turned key again; and the
    # matrix that expands is kept once more, in the order in which the product wants it
    copied = numbers.size == 2 and not numbers.cuda  # the norm works on a copy in float32
    rotary = 0 if copied else tokens * rope * numbers.size
    joined = tokens * (rank + rope) * numbers.size
    expanded = rank * heads * (plain + value)
    latent = run.stream(rank)
    return [
        *queries,
        x.to(PROJECTIONS, rank + rope, bias=config.bias),
        latent.norm("rms"),
        _ops.keep(PROJECTIONS, rotary + joined + expanded * numbers.size),
        latent.to(PROJECTIONS, heads * (plain + value), bias=False),
        _ops.attention(call, numbers),
        x.back(PROJECTIONS, heads * value, bias=config.bias),
    ]


def _loss(tokens: int, words: int, numbers: Numbers) -> Op:
    """Cross entropy keeps the log-probability of every word, and the targets."""
    return _ops.keep(LOSS, tokens * (words * numbers.size + INDEX))


def _encoder(config: EncoderConfig, run: Run) -> list[Block]:
    x, is_pre = run.stream(config.embed_dim), config.norm == "pre"
    call = _heads(config, run, run.length, run.length, causal=False)
    biases = (config.qkv_bias, config.qkv_bias, config.qkv_bias, True)
    layer = [x.norm("layer"), x.norm("layer"), x.kept(PROJECTIONS), *_projected(call, x.dim, biases, run.numbers)]
    layers = Block("layer", [*layer, *_forward(config, x)], config.num_layers, x.bytes)
    final = Block("norm", [x.norm("layer")])
    first = Block("embeddings", _encoder_input(config, run))
    heads = Block("heads", _encoder_heads(config, run))
    return [first, layers, final, heads] if is_pre else [first, final, layers, heads]


def _encoder_input(config: EncoderConfig, run: Run) -> list[Op]:
    dim, size = config.embed_dim, run.numbers.size
    if config.image_size is None:
        assert config.vocab_size is not None and config.max_tokens is not None
        table = (config.vocab_size + config.position_offset + config.max_tokens + config.token_types) * dim
        kept = run.tokens * INDEX * (2 if config.token_types else 1)
        return [Op(EMBEDDINGS, table, eager=kept, fused=kept)]
    assert config.patch_size is not None
    patches = (config.image_size // config.patch_size) ** 2
    fan_in = config.channels * config.patch_size**2
    image = run.batch * config.channels * config.image_size**2 * size
    return [
        _ops.keep(EMBEDDINGS, image),
        _ops.linear(EMBEDDINGS, run.batch * patches, fan_in, dim, bias=True, first=True),
        Op(EMBEDDINGS, (2 + patches) * dim),  # the first token, and a position for each
    ]


def _encoder_heads(config: EncoderConfig, run: Run) -> list[Op]:
    """Every head that the configuration has; the pooler and the classes read the first token only."""
    x, first = run.stream(config.embed_dim), Stream(run.batch, config.embed_dim, run.numbers)
    ops = []
    if config.pooler:
        ops += [_ops.keep(HEAD, 2 * (first.bytes + run.batch * INDEX)), first.to(HEAD, x.dim, bias=True)]
    if config.classes is not None:
        kept = 0 if config.pooler else first.bytes + 2 * run.batch * INDEX
        ops += [_ops.keep(HEAD, kept), first.to(HEAD, config.classes, bias=True)]
    if config.masked_lm:
        assert config.vocab_size is not None
        ahead = 1 if config.activation == "relu" else 2
        # the norm keeps what the activation gives
        ops += [
            x.kept(HEAD, ahead + 1),
            x.to(HEAD, x.dim, bias=True),
            x.norm("layer")._replace(part=HEAD),
            x.to(HEAD, config.vocab_size, bias=False)._replace(parameters=config.vocab_size),
            _loss(x.tokens, config.vocab_size, run.numbers),
        ]
    return ops


def _heads(config: Any, run: Run, queries: int, keys: int, *, causal: bool, window: int | None = None) -> Heads:
    kv_heads, key, value = head_sizes(config)
    pairs = causal_pairs(queries, window) if causal else queries * keys
    return Heads(run.batch, config.num_heads, kv_heads, queries, keys, key, value, pairs, causal, window is not None)


def _projected(call: Heads, dim: int, biases: tuple[bool, bool, bool, bool], numbers: Numbers) -> list[Op]:
    """Attention between its four projections: of queries, keys, values, and of what comes out."""
    rows, columns = call.batch * call.queries, call.batch * call.keys
    key, value = call.kv_heads * call.key_dim, call.kv_heads * call.value_dim
    made = ((rows, call.heads * call.key_dim), (columns, key), (columns, value))
    ops = [_ops.linear(PROJECTIONS, n, dim, width, bias=bias) for (n, width), bias in zip(made, biases, strict=False)]
    if call.normed:
        ops += [Stream(n * width // call.key_dim, call.key_dim, numbers).norm("rms") for n, width in made[:2]]
    out = _ops.linear(PROJECTIONS, rows, call.heads * call.value_dim, dim, bias=biases[3])
    return [*ops, _ops.attention(call, numbers), out]


def _forward(config: EncoderConfig | TransformerConfig, x: Stream) -> list[Op]:
    gated, bias = getattr(config, "gated", False), getattr(config, "ff_bias", True)
    how: dict[str, Any] = {"activation": config.activation, "gated": gated, "bias": bias}
    return x.feed_forward(config.ff_dim, ends=config.norm == "pre", **how)


def _transformer(config: TransformerConfig, run: Run) -> list[Block]:
    dim, is_pre = config.embed_dim, config.norm == "pre"
    source, target = Stream(run.batch * run.source, dim, run.numbers), run.stream(dim)
    bias, norm = config.attention_bias, "rms" if config.rms_norm else "layer"
    biases = (bias, bias and config.key_bias, bias, bias)

    def layer(name: str, x: Stream, calls: list[Heads], count: int) -> Block:
        ops = [*(x.norm(norm) for _ in range(1 + len(calls))), *_forward(config, x)]
        for call in calls:
            # the source that a decoder's layer reads is kept once for all of them
            ops += [x.kept(PROJECTIONS), *_projected(call, dim, biases, run.numbers)]
        return Block(name, ops, count, x.bytes)

    own = _heads(config, run, run.source, run.source, causal=False)
    itself = _heads(config, run, run.length, run.length, causal=True)
    across = _heads(config, run, run.length, run.source, causal=False)
    inputs = [source.norm("layer"), target.norm("layer")] if config.embedding_norm else []
    ends = [source.norm(norm), target.norm(norm)] if is_pre else []
    words = config.target_words
    head = [target.kept(HEAD), _words(config, target, words), _loss(target.tokens, words, run.numbers)]
    return [
        Block("embeddings", [*_transformer_input(config, run), *inputs]),
        layer("encoder layer", source, [own], config.num_layers),
        layer("decoder layer", target, [itself, across], config.target_layers),
        Block("head", [*ends, source.kept(PROJECTIONS)]),
        Block("head", head if getattr(config, "head", True) else []),
    ]


def _transformer_input(config: TransformerConfig, run: Run) -> list[Op]:
    dim, size, target = config.embed_dim, run.numbers.size, run.tokens * INDEX
    if not isinstance(config, WhisperConfig):
        tables = (config.vocab_size + (config.target_vocab_size or 0)) * dim
        tables += 2 * config.buckets * config.num_heads if isinstance(config, T5Config) else 0
        kept = run.batch * run.source * INDEX + target
        return [Op(EMBEDDINGS, tables, eager=kept, fused=kept)]
    frames = run.batch * run.source
    # sound has two frames for each token of the encoder; both convolutions are three wide
    return [
        Op(EMBEDDINGS, (config.max_frames + config.vocab_size + config.max_tokens) * dim, eager=target, fused=target),
        _ops.keep(EMBEDDINGS, frames * (2 * config.mel_bins + 5 * dim) * size),
        _ops.linear(EMBEDDINGS, 2 * frames, 3 * config.mel_bins, dim, bias=True, first=True),
        _ops.linear(EMBEDDINGS, frames, 3 * dim, dim, bias=True),
    ]
