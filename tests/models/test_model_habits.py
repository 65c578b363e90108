"""What every model does: padding, caches, dropout, checkpoints, compilation, names of weights, refusals."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from typing import Any

import pytest
import torch
from tests.interop.hub import Unrounded
from tests.models import small
from torch import Tensor, nn
from torch.nn import functional as F

from regard import masks, models
from regard.cache import BlockPool, KVCache, PagedCache, RollingCache

EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-11}
DECODERS = [small.gpt, small.llama]


KINDS = ["gpt", "llama", "bert", "vit", "transformer", "pre-norm", "whisper"]


def call(kind: str, **changes: Any) -> tuple[Any, tuple[Tensor, ...], dict[str, Any]]:
    """A model of this kind, and what it is called with."""
    images, sound = torch.randn(2, 3, 21, 21).double(), torch.randn(2, 7, 30).double()
    ids, target = small.tokens(2, 11), small.tokens(2, 7)
    if kind == "pre-norm":
        return small.translator(norm="pre", tied=True, **changes), (ids, target), {}
    make = {"transformer": small.translator}.get(kind) or getattr(small, kind)
    given = {"vit": (images,), "transformer": (ids, target), "whisper": (sound, target)}.get(kind, (ids,))
    return make(**changes), given, {"bert": {"head": "masked-lm"}, "vit": {"head": "classes"}}.get(kind, {})


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_acts_in_training_and_not_in_eval(kind: str) -> None:
    model, inputs, how = call(kind)
    wet = type(model)(_changed(model, dropout=0.3, attention_dropout=0.2)).double()
    wet.load_state_dict(model.state_dict())
    once, again = wet(*inputs, **how), wet(*inputs, **how)
    assert not torch.equal(once, again)
    assert torch.equal(wet.eval()(*inputs, **how), model(*inputs, **how))


def _changed(model: Any, **changes: Any) -> Any:
    return dataclasses.replace(model.config, **changes)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_layers_give_the_same_gradients_and_keep_less(kind: str) -> None:
    model, inputs, how = call(kind)
    dry = type(model)(_changed(model, dropout=0.0, attention_dropout=0.0)).double()
    dry.load_state_dict(model.state_dict())

    def gradients(checkpointed: bool) -> tuple[list[Tensor], int]:
        dry.checkpoint_layers = checkpointed
        dry.zero_grad()
        kept = 0

        def keep(x: Tensor) -> Tensor:
            nonlocal kept
            kept += x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = dry(*inputs, **how)
        out.square().mean().backward()
        return [p.grad for p in dry.parameters() if p.grad is not None], kept

    plain, all_kept = gradients(False)
    again, fewer = gradients(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert fewer < all_kept / 2


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "pre-norm"])
def test_a_compiled_model_gives_the_same(kind: str) -> None:
    model, inputs, how = call(kind, num_layers=1, **({"decoder_layers": 1} if kind in KINDS[4:] else {}))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs, **how), model(*inputs, **how), **EXACT)


def test_a_compiled_model_takes_padding_on_either_side_and_checkpoints() -> None:
    model, ids = small.llama(num_layers=1), small.tokens(3, 11)
    lengths = torch.tensor([7, 11, 3])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for side in ("right", "left"):
        torch.testing.assert_close(
            compiled(ids, lengths=lengths, side=side), model(ids, lengths=lengths, side=side), **EXACT
        )
    model.checkpoint_layers = True
    model.train()
    model(ids).square().mean().backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    compiled(ids).square().mean().backward()
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, grad, **EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_are_the_first_input_and_every_layers_output(kind: str) -> None:
    model, inputs, _ = call(kind)
    seen: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _, given, out: seen.extend([given[0], out]))
        for name, layer in model.named_modules()
        if name.split(".")[0].endswith("layers") and name.count(".") == 1
    ]
    _, *states = model(*inputs, hidden_states=True)
    found = [state for stack in states for state in stack]
    wanted = [seen[0]]
    for given, out in zip(seen[::2], seen[1::2], strict=True):
        if given is not wanted[-1]:  # the second stack begins
            wanted.append(given)
        wanted.append(out)
    assert len(hooks) + len(states) == len(found)
    assert all(a is b for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_copied_and_saved_whole(kind: str) -> None:
    model, inputs, how = call(kind)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = type(model)(model.config, dtype=torch.float64).eval()
    fresh.load_state_dict(torch.load(file, weights_only=True))
    for other in (fresh, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(*inputs, **how), model(*inputs, **how))
    pointers = [tensor.data_ptr() for tensor in model.state_dict().values()]
    assert len(set(pointers)) == len(pointers)  # nothing is saved under two names


def test_names_of_weights_are_plain() -> None:
    def once(model: nn.Module) -> list[str]:
        return [name for name in model.state_dict() if "layers" not in name or "layers.0." in name]

    assert once(small.llama()) == [
        "token_embedding.weight",
        "layers.0.attention_norm.weight",
        "layers.0.attention.q_proj.weight",
        "layers.0.attention.k_proj.weight",
        "layers.0.attention.v_proj.weight",
        "layers.0.attention.out_proj.weight",
        "layers.0.feed_forward_norm.weight",
        "layers.0.feed_forward.gate.weight",
        "layers.0.feed_forward.up.weight",
        "layers.0.feed_forward.down.weight",
        "norm.weight",
        "head.weight",
    ]
    attention = ["q_proj", "k_proj", "v_proj", "out_proj"]
    assert [name for name in once(small.translator()) if "decoder" in name] == [
        *(f"decoder_layers.0.attention.{name}.weight" for name in attention),
        *(f"decoder_layers.0.attention_norm.{kind}" for kind in ("weight", "bias")),
        *(f"decoder_layers.0.feed_forward.{name}.{kind}" for name in ("up", "down") for kind in ("weight", "bias")),
        *(f"decoder_layers.0.feed_forward_norm.{kind}" for kind in ("weight", "bias")),
        *(f"decoder_layers.0.cross_attention.{name}.weight" for name in attention),
        *(f"decoder_layers.0.cross_attention_norm.{kind}" for kind in ("weight", "bias")),
    ]
    assert [name for name in once(small.whisper()) if "k_proj" in name] == [
        f"{stack}_layers.0.{which}.k_proj.weight"
        for stack, which in (("encoder", "attention"), ("decoder", "attention"), ("decoder", "cross_attention"))
    ]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("make", [*DECODERS, small.bert])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_a_padded_batch_gives_what_each_item_gives_alone(make: Any, side: str, as_tensor: bool) -> None:
    model, ids, lengths = make(), small.tokens(3, 11), [7, 11, 3]
    how = {"head": "masked-lm"} if make is small.bert else {}
    given = torch.tensor(lengths) if as_tensor else lengths
    # rotary angles are float32 in every model, and those of a row padded on the left are those of later positions
    with Unrounded():
        together = model(ids, lengths=given, side=side, **how)
        for item, length in enumerate(lengths):
            where = slice(0, length) if side == "right" else slice(11 - length, 11)
            torch.testing.assert_close(together[item, where], model(ids[item : item + 1, where], **how)[0], **EXACT)


def test_the_first_real_token_is_pooled_wherever_the_padding_is() -> None:
    model, ids, lengths = small.bert(), small.tokens(3, 11), [7, 11, 3]
    for side in ("right", "left"):
        pooled = model(ids, lengths=lengths, side=side, head="pooled")
        for item, length in enumerate(lengths):
            where = slice(0, length) if side == "right" else slice(11 - length, 11)
            alone = model(ids[item : item + 1, where], head="pooled")
            torch.testing.assert_close(pooled[item], alone[0], **EXACT)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_padded_pair_gives_what_each_item_gives_alone(norm: str, side: str) -> None:
    model = small.translator(norm=norm, target_vocab_size=41, attention_bias=True)
    source, target = small.tokens(3, 11), small.tokens(3, 7, 41)
    lengths, target_lengths = [7, 11, 3], [5, 3, 7]
    together = model(source, target, source_lengths=lengths, target_lengths=target_lengths, side=side)
    assert together.shape == (3, 7, 41)
    for item, (length, written) in enumerate(zip(lengths, target_lengths, strict=True)):
        left = side == "left"
        ids = source[item : item + 1, 11 - length :] if left else source[item : item + 1, :length]
        where = slice(7 - written, 7) if left else slice(0, written)
        alone = model(ids, target[item : item + 1, where])
        torch.testing.assert_close(together[item, where], alone[0], **EXACT)


def caches(kind: str, layers: int) -> list[Any]:
    makers = {
        "all": lambda: KVCache(40),
        "rolling": lambda: RollingCache(window=5),
        "paged": lambda: PagedCache(BlockPool(33, block_size=3)),
    }
    return [makers[kind]() for _ in range(layers)]


@pytest.mark.parametrize("kind", ["all", "rolling", "paged"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("make", DECODERS)
def test_chunks_with_caches_give_what_one_forward_gives(make: Any, side: str, kind: str) -> None:
    model = make(window=5 if kind == "rolling" else None)
    ids, lengths = small.tokens(3, 23), [7, 11, 3]
    held = caches(kind, 3)
    padded = torch.zeros(3, 11, dtype=torch.long)
    for item, length in enumerate(lengths):
        padded[item, slice(0, length) if side == "right" else slice(11 - length, 11)] = ids[item, :length]
    found = [model(padded, lengths=lengths, side=side, caches=held)]
    for step in range(3):
        chunk = torch.stack(
            [ids[item, length + 3 * step : length + 3 * step + 3] for item, length in enumerate(lengths)]
        )
        found.append(model(chunk, caches=held))
    for item, length in enumerate(lengths):
        whole = model(ids[item : item + 1, : length + 9])[0]
        first = found[0][item, slice(0, length) if side == "right" else slice(11 - length, 11)]
        torch.testing.assert_close(torch.cat([first, *(out[item] for out in found[1:])]), whole, **EXACT)


@pytest.mark.parametrize("lengths", [None, [7, 11, 3]])
@pytest.mark.parametrize("make", [small.translator, small.whisper])
def test_a_target_in_chunks_with_caches_is_what_one_forward_gives(make: Any, lengths: Any) -> None:
    if make is small.whisper:
        model, source, lengths = make(), torch.randn(3, 7, 30).double(), None
    else:
        model, source = make(), small.tokens(3, 11)
    target = small.tokens(3, 13)
    memory = model.encode(source, lengths=lengths)
    held = model.caches(13, memory.shape[1])
    parts = target.split([5, 1, 7], 1)
    states = [model.decode(part, memory, memory_lengths=lengths, caches=held) for part in parts]
    wanted = model(source, target, source_lengths=lengths)
    torch.testing.assert_close(model.logits(torch.cat(states, 1)), wanted, **EXACT)


def test_a_decoder_sees_no_later_token_and_no_further_than_its_window() -> None:
    model, ids = small.gpt(num_layers=1, window=3), small.tokens(1, 11)
    x = model.token_embedding(ids).detach().requires_grad_()
    hook = model.token_embedding.register_forward_hook(lambda *_: x)
    model(ids)[0, 7].sum().backward()
    hook.remove()
    assert x.grad is not None
    assert x.grad[0].abs().sum(-1).nonzero().flatten().tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_the_transformers_layers_are_those_of_torch(norm: str) -> None:
    model = small.translator(norm=norm, attention_bias=True)
    how = {"dropout": 0.0, "batch_first": True, "norm_first": norm == "pre", "layer_norm_eps": 1e-6}
    read = nn.TransformerEncoderLayer(30, 5, 35, **how).double().eval()
    write = nn.TransformerDecoderLayer(30, 5, 35, **how).double().eval()
    for theirs, ours in ((read, model.encoder_layers[1]), (write, model.decoder_layers[1])):
        _load(theirs, ours)
    x, y = torch.randn(2, 11, 30).double(), torch.randn(2, 7, 30).double()
    torch.testing.assert_close(model.encoder_layers[1](x, None), read(x), **EXACT)
    causal = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    wanted = write(y, x, tgt_mask=causal)
    torch.testing.assert_close(model.decoder_layers[1](y, x, masks.causal(), None), wanted, **EXACT)


def _load(theirs: nn.Module, ours: Any) -> None:
    names = {"self_attn": "attention", "multihead_attn": "cross_attention", "linear1": "feed_forward.up"}
    names |= {"linear2": "feed_forward.down", "norm1": "attention_norm"}
    crossed = hasattr(ours, "cross_attention")
    names |= {"norm3": "feed_forward_norm", "norm2": "cross_attention_norm" if crossed else "feed_forward_norm"}
    state = {}
    for name in theirs.state_dict():
        first, *rest = name.split(".")
        module = ours.get_submodule(names[first])
        kind = rest[-1].removeprefix("in_proj_")
        if "in_proj" in name:
            parts = [getattr(getattr(module, f"{each}_proj"), kind) for each in "qkv"]
            state[name] = torch.cat(parts)
        else:
            state[name] = getattr(module.get_submodule(".".join(rest[:-1])), kind)
    theirs.load_state_dict(state)


def test_source_and_target_share_scaled_embeddings_with_sinusoidal_positions() -> None:
    model, ids = small.translator(), small.tokens(2, 5)
    _, seen, written = model(ids, ids, hidden_states=True)
    positions = torch.arange(5).unsqueeze(1) / 10_000 ** (torch.arange(0, 30, 2).double() / 30)
    waves = torch.stack([positions.sin(), positions.cos()], -1).flatten(1)
    wanted = model.token_embedding.weight[ids] * 30**0.5 + waves
    torch.testing.assert_close(seen[0], wanted, **EXACT)
    torch.testing.assert_close(written[0], wanted, **EXACT)


def test_the_label_smoothed_loss_is_its_formula() -> None:
    logits, targets = torch.randn(3, 5, 7).double(), torch.randint(0, 7, (3, 5))
    targets[1, 2:] = 0
    log_p = logits.log_softmax(-1)
    wanted = F.one_hot(targets, 7) * 0.8 + 0.2 / 7
    each = -(wanted * log_p).sum(-1)
    found = models.label_smoothed_loss(logits, targets, smoothing=0.2, ignore=0)
    torch.testing.assert_close(found, each[targets != 0].mean())
    with pytest.raises(ValueError, match=r"smoothing must be in \[0, 1\), got 1.0"):
        models.label_smoothed_loss(logits, targets, smoothing=1.0)
    with pytest.raises(ValueError, match=r"targets \[3, 4\] must be the leading dims of logits \[3, 5, 7\]"):
        models.label_smoothed_loss(logits, targets[:, 1:])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: small.gpt()(torch.rand(2, 3)), "tokens must hold token numbers"),
        (lambda: small.gpt()([[1, 2]]), "tokens must be an integer tensor"),
        (lambda: small.gpt()(small.tokens(2, 3).byte()), "token numbers .int64 or int32., got torch.uint8"),
        (lambda: small.gpt()(small.tokens(2, 3)[0]), r"tokens must be \[batch, token\], got shape \[3\]"),
        (lambda: small.gpt()(small.tokens(2, 65)), "positions 0 … 64 were asked for"),
        (lambda: small.gpt()(torch.tensor([[5, 37]])), "tokens holds 37; this model has 0 … 36"),
        (lambda: small.bert()(torch.tensor([[5, -1]])), "inputs holds -1; this model has 0 … 36"),
        (
            lambda: small.bert()(small.tokens(1, 2), token_types=torch.tensor([[0, 7]])),
            "token_types holds 7; this model has 0 … 1",
        ),
        (lambda: small.translator()(small.tokens(1, 2), torch.tensor([[99]])), "target holds 99"),
        (lambda: small.gpt()(small.tokens(2, 3), lengths=[2]), "lengths must be one int for each of the 2 items"),
        (lambda: small.gpt()(small.tokens(2, 3), lengths=[2, 4]), "go beyond the 3 tokens of each row"),
        (lambda: small.gpt()(small.tokens(2, 3), lengths=torch.tensor([2, 4])), "go beyond the 3 tokens of each row"),
        (lambda: small.gpt()(small.tokens(2, 3), lengths=[2.0, 3]), "lengths must be ints, one for each item"),
        (lambda: small.gpt()(small.tokens(2, 3), lengths="23"), "lengths must be one int for each item, got str"),
        (lambda: small.bert(token_types=-1), "token_types must be at least 0, got -1"),
        (lambda: small.gpt(activation=["gelu"]), "activation must be one of relu"),
        (lambda: small.gpt(tied="yes"), "tied must be True or False, got 'yes'"),
        (lambda: small.bert(norm_eps=float("nan")), "norm_eps must be finite and at least 0, got nan"),
        (lambda: small.llama(init_std="x"), "init_std must be a number, got 'x'"),
        (lambda: small.gpt()(small.tokens(2, 3), lengths=3), "lengths must be one int for each item, got int"),
        (lambda: small.gpt()(small.tokens(2, 3), lengths=[2, 3], side="top"), "side must be 'left' or 'right'"),
        (lambda: small.gpt()(small.tokens(2, 3), caches=[KVCache(3)]), "one for each of the 3 layers, got 1"),
        (
            lambda: small.gpt()(small.tokens(2, 3), caches=[object(), KVCache(3), KVCache(3)]),
            "caches must hold those of regard.cache, one for each layer, got <object",
        ),
        (
            lambda: small.translator().decode(
                small.tokens(2, 3), torch.rand(2, 5, 30), caches=[KVCache(3) for _ in small.translator().decoder_layers]
            ),
            r"a pair for each layer, as model.caches\(…\) does, got KVCache",
        ),
        (lambda: small.bert()(small.tokens(2, 3), head="classes"), r"built with \(pooled, masked-lm\), got 'classes'"),
        (lambda: small.bert(token_types=0)(*[small.tokens(2, 3)], token_types=small.tokens(2, 3, 2)), "token_types=0"),
        (lambda: small.vit()(small.tokens(2, 3)), r"inputs must be images \[batch, 3, 21, 21\], got \[2, 3\]"),
        (lambda: small.vit()(torch.rand(2, 3, 21, 21), lengths=[1, 2]), "this model was built for images"),
        (lambda: small.whisper()(torch.rand(2, 5, 30), small.tokens(2, 3)), r"a spectrogram \[batch, 7, frame\]"),
        (
            lambda: small.whisper()(torch.rand(2, 7, 30).double(), small.tokens(2, 3), source_lengths=[3, 4]),
            "source_lengths are for words",
        ),
        (
            lambda: small.translator().decode(
                small.tokens(2, 3),
                torch.rand(2, 5, 30).double(),
                target_lengths=[2, 3],
                caches=small.translator().caches(9, 5),
            ),
            "target_lengths together with caches",
        ),
    ],
)
def test_what_a_model_cannot_read_is_refused(wrong: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        wrong()


def test_dropout_inside_the_feed_forward() -> None:
    """Of the activations, scaled so that their mean stays; none in evaluation."""
    sizes = {"vocab_size": 9, "embed_dim": 8, "num_layers": 1, "num_heads": 2, "ff_dim": 4000}
    model = models.Transformer(models.TransformerConfig(**sizes, dropout=0.0, ff_dropout=0.25))
    layer = model.encoder_layers[0].feed_forward
    with torch.no_grad():
        layer.up.weight.zero_()
        layer.up.bias.fill_(1.0)
        layer.down.weight.fill_(1 / 4000)
        layer.down.bias.zero_()
    torch.manual_seed(2)
    x = torch.randn(1, 3, 8)
    kept = layer.train()(x).detach()
    assert 0 < kept.std(1).max() < 0.05 and abs(float(kept.mean()) - 1) < 0.05
    assert float(layer.eval()(x).detach().sub(1).abs().max()) < 1e-4
    with pytest.raises(ValueError, match="ff_dropout"):
        models.TransformerConfig(vocab_size=9, ff_dropout=1.5)
