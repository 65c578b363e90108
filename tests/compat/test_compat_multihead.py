"""`compat.MultiheadAttention` in the place of `torch.nn.MultiheadAttention`."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import masks
from regard.compat import MultiheadAttention


def pair(*given: Any, **options: Any) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    """Torch's and ours with the same weights, in float64."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(*given, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours = MultiheadAttention(*given, dtype=torch.float64, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def check_equal(theirs: nn.Module, ours: nn.Module, inputs: tuple[Tensor, ...], **given: Any) -> None:
    """Outputs, weights, and the gradients of inputs and parameters through both."""
    found, expected = [], []
    for module, results in ((ours, found), (theirs, expected)):
        leaves = [x.detach().requires_grad_() for x in inputs]
        if all(x is inputs[0] for x in inputs):
            leaves = [leaves[0]] * 3
        out, weights = module(*leaves, **given)
        total = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()
        if weights is not None:
            total = total + (weights * torch.linspace(-1, 1, weights.numel(), dtype=out.dtype).view_as(weights)).sum()
        wanted = [*dict.fromkeys(leaves), *module.parameters()]
        results += [out, weights, *torch.autograd.grad(total, wanted, allow_unused=True)]
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_the_signatures_are_torchs() -> None:
    for name in ("__init__", "forward"):
        ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (MultiheadAttention, nn.MultiheadAttention))
        assert [(p.name, p.kind) for p in ours.parameters.values()] == [
            (p.name, p.kind) for p in theirs.parameters.values()
        ]
        defaults = [p.default for p in ours.parameters.values()]
        assert [d for d in defaults if d is not None] == [
            p.default for p in theirs.parameters.values() if p.default is not None
        ]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"kdim": 7, "vdim": 5},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    {"batch_first": True, "kdim": 9},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_and_mask_gives_torchs_outputs_weights_and_gradients(options: dict[str, Any]) -> None:
    theirs, ours = pair(12, 3, **options)
    batch, queries, keys = 2, 5, 7
    widths = (12, options.get("kdim") or 12, options.get("vdim") or 12)
    lengths = (queries, keys, keys)
    inputs = tuple(torch.randn(batch, n, width, dtype=torch.float64) for n, width in zip(lengths, widths, strict=True))
    if not options.get("batch_first"):
        inputs = tuple(x.transpose(0, 1).contiguous() for x in inputs)
    padding = torch.zeros(batch, keys, dtype=torch.bool)
    padding[1, -3:] = True
    square = torch.rand(queries, keys) < 0.3
    square[:, 0] = False
    per_head = (torch.rand(batch * 3, queries, keys) < 0.3) & ~padding.repeat_interleave(3, 0)[:, None]
    per_head[..., 0] = False
    added = torch.randn(queries, keys, dtype=torch.float64)
    floats = torch.zeros(batch, keys, dtype=torch.float64).masked_fill(padding, float("-inf"))
    masks = [
        {},
        {"attn_mask": square},
        {"attn_mask": per_head},
        {"attn_mask": added},
        {"key_padding_mask": padding},
        {"key_padding_mask": floats},
        {"key_padding_mask": padding, "attn_mask": square},
        {"key_padding_mask": floats, "attn_mask": added},
    ]
    for given, need, mean in itertools.product(masks, (True, False), (True, False)):
        check_equal(theirs, ours, inputs, **given, need_weights=need, average_attn_weights=mean)
    alone = tuple(x[0] if options.get("batch_first") else x[:, 0] for x in inputs)
    for given in ({}, {"attn_mask": square}, {"key_padding_mask": padding[1]}, {"attn_mask": per_head[:3]}):
        check_equal(theirs, ours, alone, **given)


def test_self_attention_and_the_causal_hint() -> None:
    theirs, ours = pair(12, 4, batch_first=True)
    x = torch.randn(3, 6, 12, dtype=torch.float64)
    causal = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    padding = torch.arange(6)[None] >= torch.tensor([6, 4, 1])[:, None]
    for need in (True, False):
        check_equal(theirs, ours, (x, x, x), need_weights=need)
        check_equal(theirs, ours, (x, x, x), need_weights=need, attn_mask=causal, is_causal=True)
        check_equal(theirs, ours, (x, x, x), need_weights=need, attn_mask=causal.isinf(), is_causal=True)
        check_equal(
            theirs,
            ours,
            (x, x, x),
            need_weights=need,
            attn_mask=causal.isinf(),
            key_padding_mask=padding,
            is_causal=True,
        )
    with pytest.raises(RuntimeError, match="attn_mask"):
        ours(x, x, x, is_causal=True)


def test_what_torch_turns_into_nan_is_zero_and_what_is_padding_reaches_nobody() -> None:
    _, ours = pair(12, 4, batch_first=True, bias=False)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    padding = torch.tensor([[False] * 3 + [True] * 2, [True] * 5])
    for need in (True, False):
        out, weights = ours(x, x, x, key_padding_mask=padding, need_weights=need)
        assert out.isfinite().all() and not out[1].any()
        assert weights is None or (weights.isfinite().all() and not weights[1].any())
        bad = x.clone()
        bad[0, 3:] = float("nan")
        rows, again = ours(x, bad, bad, key_padding_mask=padding, need_weights=need)
        torch.testing.assert_close(rows, out, rtol=0, atol=1e-12)
        assert need == (again is not None)
        if again is not None and weights is not None:
            torch.testing.assert_close(again, weights, rtol=0, atol=1e-12)
    ours.train().dropout = 0.5
    out, weights = ours(x, bad, bad, key_padding_mask=padding)
    assert out.isfinite().all() and weights is not None and weights.isfinite().all()


def test_dropout_only_in_training_and_the_weights_are_those_that_were_used() -> None:
    _, ours = pair(12, 4, dropout=0.4, batch_first=True)
    x = torch.randn(2, 31, 12, dtype=torch.float64)
    assert torch.equal(ours.eval()(x, x, x)[0], ours(x, x, x)[0])
    ours.train()
    out, weights = ours(x, x, x, average_attn_weights=False)
    assert weights is not None and 0.3 < (weights == 0).double().mean() < 0.5
    values = ours._split(ours._project(x, x, x)[2])
    torch.testing.assert_close(ours.out_proj((weights @ values).transpose(1, 2).flatten(2)), out)
    torch.manual_seed(1)
    first = ours(x, x, x, need_weights=False)[0]
    assert not torch.equal(first, ours(x, x, x, need_weights=False)[0])
    torch.manual_seed(1)
    assert torch.equal(first, ours(x, x, x, need_weights=False)[0])


def swapped(model: nn.Module) -> nn.Module:
    """A copy in which every attention of torch's is ours."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.MultiheadAttention:
                ours = MultiheadAttention(
                    child.embed_dim, child.num_heads, child.dropout, batch_first=child.batch_first, dtype=torch.float64
                )
                ours.load_state_dict(child.state_dict())
                setattr(parent, name, ours.train(child.training))
    return model


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [True, False])
def test_it_drops_into_the_transformer_of_torch(norm_first: bool, batch_first: bool) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about nested tensors that it cannot use
        theirs = nn.Transformer(
            12, 4, 2, 2, 17, 0.0, norm_first=norm_first, batch_first=batch_first, dtype=torch.float64
        )
    ours = swapped(theirs)
    assert sum(isinstance(module, MultiheadAttention) for module in ours.modules()) == 6
    source, target = torch.randn(3, 7, 12, dtype=torch.float64), torch.randn(3, 5, 12, dtype=torch.float64)
    if not batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    padding = torch.arange(7)[None] >= torch.tensor([7, 4, 2])[:, None]
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    given = {"tgt_mask": causal, "src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for training, grad in itertools.product((True, False), (True, False)):
            theirs.train(training), ours.train(training)
            with torch.set_grad_enabled(grad):
                torch.testing.assert_close(
                    ours(source, target, **given), theirs(source, target, **given), rtol=0, atol=1e-11
                )


class Counted(MultiheadAttention):
    calls = 0

    def forward(self, *given: Any, **more: Any) -> Any:
        Counted.calls += 1
        return super().forward(*given, **more)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_the_fast_path_of_the_encoder_does_not_go_round_it() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 4, 17, 0.0, batch_first=True)
    theirs = nn.TransformerEncoder(layer, 2).eval()
    ours = copy.deepcopy(theirs)
    for one in ours.layers:
        weights = one.self_attn.state_dict()
        one.self_attn = Counted(12, 4, batch_first=True)
        one.self_attn.load_state_dict(weights)
    ours.eval()
    x = torch.randn(3, 7, 12)
    padding = torch.arange(7)[None] >= torch.tensor([7, 4, 2])[:, None]
    for given in ({}, {"src_key_padding_mask": padding}, {"mask": torch.ones(7, 7).triu(1).bool()}):
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            Counted.calls = 0
            with mode():
                found, expected = ours(x, **given), theirs(x, **given)
            assert Counted.calls >= 2
            real = ~given.get("src_key_padding_mask", torch.zeros(3, 7, dtype=torch.bool))
            torch.testing.assert_close(found[real], expected[real], rtol=0, atol=2e-6)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors() -> None:
    _, ours = pair(12, 4, batch_first=True)
    items = [torch.randn(n, 12, dtype=torch.float64) for n in (5, 1, 3)]
    alone = [ours(x, x, x)[0] for x in items]
    for layout in (torch.jagged, torch.strided):
        x = torch.nested.nested_tensor(items, layout=layout)
        out, weights = ours(x, x, x)
        assert out.layout == layout and weights is not None and weights.shape == (3, 5, 5)
        for one, other in zip(out.unbind(), alone, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
        (x + out).unbind()  # a residual fits
    with pytest.raises(AssertionError, match="cannot be given with a nested tensor"):
        ours(x, x, x, attn_mask=torch.ones(5, 5))
    with pytest.raises(AssertionError, match="self attention"):
        ours(x, items[0], items[0])


def test_it_is_saved_copied_converted_and_watched_as_torchs() -> None:
    theirs, ours = pair(12, 4, batch_first=True)
    assert isinstance(ours, nn.MultiheadAttention)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    out = ours(x, x, x, need_weights=False)[0]
    kept = io.BytesIO()
    torch.save(ours, kept)
    kept.seek(0)
    for again in (copy.deepcopy(ours), torch.load(kept, weights_only=False)):
        assert torch.equal(again(x, x, x, need_weights=False)[0], out)
    torch.testing.assert_close(regard.interop.from_torch(ours)(x), out, rtol=0, atol=1e-12)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, x, x, need_weights=False)[0], out, rtol=0, atol=1e-12)
    with regard.watch(ours) as recording:
        assert torch.equal(ours(x, x, x, need_weights=False)[0], out)
    assert len(recording.calls) == 1 and not recording.missed


def test_what_torch_refuses_is_refused_as_there() -> None:
    theirs, ours = pair(12, 4, batch_first=True)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    wrong: list[tuple[Any, dict[str, Any]]] = [
        ((x, x, x[:, :3]), {}),
        ((x, x[..., :7], x), {}),
        ((x[..., :7], x, x), {}),
        ((x[0], x, x), {}),
        ((x[None], x[None], x[None]), {}),
        ((x, x, x), {"attn_mask": torch.ones(5, 4, dtype=torch.bool)}),
        ((x, x, x), {"attn_mask": torch.ones(7, 5, 5, dtype=torch.bool)}),
        ((x, x, x), {"key_padding_mask": torch.ones(2, 4, dtype=torch.bool)}),
        ((x, x, x), {"attn_mask": torch.ones(5, 5, dtype=torch.int64)}),
    ]
    for given, more in wrong:
        for module in (theirs, ours):
            with pytest.raises((AssertionError, RuntimeError, ValueError)):
                module(*given, **more)
    with pytest.raises(AssertionError, match="divisible"):
        MultiheadAttention(13, 4)
    for given, more, complaint in (
        ((x, None, x), {}, "key must be a Tensor, got NoneType"),
        ((x, x, x), {"attn_mask": [[0]]}, "attn_mask must be a Tensor, got list"),
        ((x, x, x), {"key_padding_mask": [5, 3]}, "key_padding_mask must be a Tensor, got list"),
        ((x, x, x), {"attn_mask": masks.causal()}, r"attn_mask must be a Tensor, got Causal; call \.dense\(L, S\)"),
    ):
        with pytest.raises(TypeError, match=complaint):
            ours(*given, **more)


def test_what_the_error_says_to_give_for_a_mask_hides_what_the_mask_hides() -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(2, 5, 12), masks.causal() & masks.window(left=2)
    module = MultiheadAttention(12, 4, batch_first=True).eval()
    with pytest.raises(TypeError, match=r"call \.dense\(L, S\) of ~mask, as True means hidden here"):
        module(x, x, x, attn_mask=mask)  # type: ignore[arg-type]
    _, weights = module(x, x, x, attn_mask=(~mask).dense(5, 5))
    assert weights is not None
    assert ((weights > 0) == mask.dense(5, 5)).all()
    lengths = torch.tensor([5, 3])
    with pytest.raises(TypeError, match=r"True = padding: of lengths, torch\.arange\(S\) >= lengths\[:, None\]"):
        module(x, x, x, key_padding_mask=masks.padding(lengths))  # type: ignore[arg-type]
    _, weights = module(x, x, x, key_padding_mask=torch.arange(5) >= lengths[:, None])
    assert weights is not None
    assert ((weights > 0) == masks.padding(lengths).dense(5, 5)[:, 0]).all()
