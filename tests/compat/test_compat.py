from __future__ import annotations

import copy
import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from regard.compat import scaled_dot_product_attention as ours

theirs = F.scaled_dot_product_attention


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def agree(*shapes: tuple[int, ...], **keywords) -> None:
    """Both functions give the same values and the same gradients, of a float mask too."""
    inputs = [random(*shape) for shape in shapes]
    mask = keywords.get("attn_mask")
    leaves = inputs + ([mask] if mask is not None and mask.requires_grad else [])
    outs = [f(*inputs, **keywords) for f in (ours, theirs)]
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=1e-12)
    pull = torch.randn_like(outs[0])
    for a, b in zip(*(torch.autograd.grad((out * pull).sum(), leaves) for out in outs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_the_signature_is_pytorchs():
    schema = torch.ops.aten.scaled_dot_product_attention.default._schema
    parameters = inspect.signature(ours).parameters
    assert list(parameters) == [argument.name for argument in schema.arguments]
    for argument in schema.arguments:
        parameter = parameters[argument.name]
        keyword_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert keyword_only == argument.kwarg_only
        has_default = parameter.default is not inspect.Parameter.empty
        assert has_default == argument.has_default_value()
        assert not has_default or parameter.default == argument.default_value


RANKS = [
    ((3, 4), (5, 4), (5, 6)),
    ((2, 3, 4), (2, 5, 4), (2, 5, 6)),
    ((2, 7, 3, 4), (2, 7, 5, 4), (2, 7, 5, 6)),
    ((2, 11, 7, 3, 4), (2, 11, 7, 5, 4), (2, 11, 7, 5, 6)),
    ((2, 1, 3, 7, 5, 4), (2, 1, 3, 7, 3, 4), (2, 1, 3, 7, 3, 4)),
]
BROADCASTS = [
    ((2, 7, 3, 4), (1, 7, 5, 4), (2, 1, 5, 6)),
    ((2, 7, 3, 4), (2, 1, 5, 4), (2, 1, 5, 6)),
    ((2, 1, 3, 4), (2, 7, 5, 4), (2, 7, 5, 6)),
    ((2, 7, 3, 4), (5, 4), (5, 6)),
    ((3, 4), (2, 7, 5, 4), (7, 5, 6)),
    ((1, 3, 4), (7, 5, 4), (7, 5, 6)),
    ((2, 1, 7, 3, 4), (11, 1, 5, 4), (2, 1, 1, 5, 6)),
]


@pytest.mark.parametrize("shapes", RANKS + BROADCASTS, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_ranks_and_broadcasting(shapes, is_causal):
    agree(*shapes, is_causal=is_causal)


@pytest.mark.parametrize("lengths", [(3, 5), (5, 3), (5, 5), (1, 5), (5, 1)])
def test_causal_is_aligned_to_the_top_left(lengths):
    queries, keys = lengths
    agree((2, 3, queries, 4), (2, 3, keys, 4), (2, 3, keys, 4), is_causal=True)


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (5, 1), (3, 5, 7), (1, 1, 7), (2, 1, 5, 7), (2, 3, 1, 1)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float", "learned float"])
def test_masks_of_both_kinds_broadcast(shape, kind):
    if kind == "bool":
        mask = torch.rand(shape) < 0.6
        mask[..., 0] = True
    else:
        mask = torch.randn(shape, dtype=torch.float64)
        if kind == "learned float":
            mask.requires_grad_()
        elif shape[-1] > 1:
            mask[..., 1] = -math.inf
    agree((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4), attn_mask=mask)


@pytest.mark.parametrize("shape", [(5, 7), (3, 5, 7), (11, 1, 5, 7), (2, 1, 3, 1, 7), (1, 11, 1, 5, 1)], ids=str)
def test_masks_of_calls_with_several_batch_dims(shape):
    mask = torch.rand(shape) < 0.6
    mask[..., 0] = True
    agree((2, 11, 3, 5, 4), (2, 11, 3, 7, 4), (2, 11, 3, 7, 6), attn_mask=mask)


@pytest.mark.parametrize("shape", [(5, 7), (1, 7)], ids=str)
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_masks_of_calls_with_few_dims(batch, shape):
    agree((*batch, 5, 4), (*batch, 7, 4), (*batch, 7, 6), attn_mask=torch.ones(shape, dtype=torch.bool).tril(1))


@pytest.mark.parametrize("scale", [None, 0.3, 0.0, -0.7, 2])
@pytest.mark.parametrize("is_causal", [False, True])
def test_scale(scale, is_causal):
    inputs = [random(2, 3, 5, 4) for _ in range(3)]
    weights = inputs[0] @ inputs[1].transpose(-1, -2) * (0.5 if scale is None else scale)
    if is_causal:  # torch gives NaN for a causal call whose scale is not positive: compare with the formula
        weights = weights.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -math.inf)
    expected = weights.softmax(-1) @ inputs[2]
    torch.testing.assert_close(ours(*inputs, scale=scale, is_causal=is_causal), expected, rtol=0, atol=1e-12)


GROUPED = [
    ((2, 6, 3, 4), (2, 2, 5, 4), (2, 2, 5, 6)),
    ((2, 6, 3, 4), (2, 6, 5, 4), (2, 6, 5, 6)),
    ((2, 6, 3, 4), (2, 1, 5, 4), (2, 1, 5, 6)),
    ((2, 6, 3, 4), (2, 3, 5, 4), (2, 2, 5, 6)),
    ((6, 3, 4), (2, 5, 4), (2, 5, 6)),
    ((2, 6, 3, 4), (1, 2, 5, 4), (1, 2, 5, 6)),
    ((2, 11, 6, 3, 4), (2, 11, 2, 5, 4), (2, 11, 2, 5, 6)),
]


@pytest.mark.parametrize("shapes", GROUPED, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_grouped_heads(shapes, is_causal):
    agree(*shapes, enable_gqa=True, is_causal=is_causal)


def test_grouped_heads_with_a_mask_for_each_query_head():
    mask = torch.ones(6, 3, 5, dtype=torch.bool).tril(1)
    agree((2, 6, 3, 4), (2, 2, 5, 4), (2, 2, 5, 6), enable_gqa=True, attn_mask=mask)


@pytest.mark.parametrize(
    ("bias", "queries", "keys"),
    [(causal_upper_left, 3, 5), (causal_upper_left, 5, 3), (causal_lower_right, 3, 5), (causal_lower_right, 5, 5)],
)
def test_torchs_causal_bias_objects(bias, queries, keys):
    inputs = [random(2, 3, n, 4) for n in (queries, keys, keys)]
    out = ours(*inputs, attn_mask=bias(queries, keys))
    diagonal = 0 if bias is causal_upper_left else keys - queries
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(diagonal)
    torch.testing.assert_close(out, theirs(*inputs, attn_mask=seen), rtol=0, atol=1e-12)


def test_empty_rows_give_zeros_and_no_gradient():
    inputs = [random(2, 3, 5, 4) for _ in range(3)]
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    added = torch.zeros(5, 5, dtype=torch.float64).masked_fill(~mask, -math.inf)
    for given in (mask, added):
        out = ours(*inputs, attn_mask=given)
        assert not out[:, :, 2].any()
        grads = torch.autograd.grad(out.sum(), inputs)
        assert all(torch.isfinite(g).all() for g in grads) and not grads[0][:, :, 2].any()


@pytest.mark.parametrize(
    "shapes",
    [((2, 3, 0, 4), (2, 3, 5, 4)), ((0, 3, 5, 4), (0, 3, 7, 4)), ((2, 3, 5, 4), (2, 3, 0, 4)), ((3, 0), (5, 0))],
    ids=str,
)
def test_empty_axes(shapes):
    query, key = shapes
    agree(query, key, (*key[:-1], 6))


def test_dropout_is_applied_as_given():
    inputs = [random(2, 3, 63, 4) for _ in range(2)] + [torch.ones(2, 3, 63, 1, dtype=torch.float64)]
    assert not ours(*inputs, dropout_p=1.0).any()
    torch.testing.assert_close(ours(*inputs, dropout_p=0.0), theirs(*inputs), rtol=0, atol=1e-12)
    torch.manual_seed(3)
    first = ours(*inputs, dropout_p=0.3, is_causal=True)
    torch.manual_seed(3)
    assert torch.equal(ours(*inputs, dropout_p=0.3, is_causal=True), first)
    even = [torch.zeros(2, 3, 63, 4, dtype=torch.float64)] * 2 + inputs[2:]
    kept = ours(*even, dropout_p=0.3).mean().item() * 0.7
    assert abs(kept - 0.7) < 5 * (0.3 * 0.7 / (6 * 63 * 63)) ** 0.5


def test_dtypes_and_autocast():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        inputs = [torch.randn(2, 3, 5, 8).to(dtype) for _ in range(3)]
        for mask in (None, torch.randn(5, 5), torch.randn(5, 5).to(dtype)):
            out = ours(*inputs, attn_mask=mask)
            assert out.dtype == dtype
            expected = theirs(*(x.double() for x in inputs), attn_mask=None if mask is None else mask.double())
            torch.testing.assert_close(out.double(), expected, rtol=0, atol=8 * torch.finfo(dtype).eps)
    double = [x.double() for x in inputs]
    torch.testing.assert_close(ours(*double, attn_mask=torch.ones(5, 5)), theirs(*double, attn_mask=torch.ones(5, 5)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(*[x.float() for x in inputs]).dtype == torch.bfloat16
        assert ours(inputs[0].bfloat16(), inputs[1].float(), inputs[2].float()).dtype == torch.bfloat16


def shaped(*shapes, dtype=torch.float32):
    return [torch.ones(shape, dtype=dtype) for shape in shapes]


PLAIN = ((2, 6, 3, 4), (2, 6, 5, 4), (2, 6, 5, 4))
REFUSED = {
    "one dim": (shaped((4,), (4,), (4,)), {}),
    "mask beside is_causal": (
        shaped(*PLAIN[:2], (2, 6, 5, 7)),
        {"attn_mask": torch.ones(3, 5, dtype=torch.bool), "is_causal": True},
    ),
    "integer mask": (shaped(*PLAIN), {"attn_mask": torch.ones(3, 5, dtype=torch.int64)}),
    "byte mask": (shaped(*PLAIN), {"attn_mask": torch.ones(3, 5, dtype=torch.uint8)}),
    "float mask of another dtype": (shaped(*PLAIN), {"attn_mask": torch.ones(3, 5, dtype=torch.float64)}),
    "mask that does not fit": (shaped(*PLAIN), {"attn_mask": torch.ones(3, 7, dtype=torch.bool)}),
    "mask that enlarges the batch": (
        shaped((1, 6, 3, 4), (1, 6, 5, 4), (1, 6, 5, 6)),
        {"attn_mask": torch.ones(3, 1, 3, 5, dtype=torch.bool)},
    ),
    "mask that enlarges the queries": (
        shaped((2, 6, 1, 4), (2, 6, 5, 4), (2, 6, 5, 6)),
        {"attn_mask": torch.ones(3, 5, dtype=torch.bool)},
    ),
    "fewer heads without enable_gqa": (shaped((2, 6, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4)), {}),
    "heads that do not divide": (shaped((2, 6, 3, 4), (2, 4, 5, 4), (2, 4, 5, 4)), {"enable_gqa": True}),
    "batches that do not broadcast": (shaped((2, 6, 3, 4), (3, 6, 5, 4), (3, 6, 5, 4)), {}),
    "unequal widths": (shaped((2, 6, 3, 4), (2, 6, 5, 7), (2, 6, 5, 4)), {}),
    "unequal lengths": (shaped((2, 6, 3, 4), (2, 6, 5, 4), (2, 6, 7, 6)), {}),
    "integers": (shaped(*PLAIN, dtype=torch.int64), {}),
    "mixed dtypes": ([torch.ones(PLAIN[0]), *shaped(*PLAIN[1:], dtype=torch.float64)], {}),
    "mixed devices": ([torch.ones(PLAIN[0]), *(torch.ones(s, device="meta") for s in PLAIN[1:])], {}),
    "dropout above one": (shaped(*PLAIN), {"dropout_p": 1.5}),
    "dropout below zero": (shaped(*PLAIN), {"dropout_p": -1.0}),
    "dropout that is NaN": (shaped(*PLAIN), {"dropout_p": math.nan}),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_pytorch_refuses_is_refused_with_its_kind_of_error(case):
    inputs, keywords = case
    for function in (theirs, ours):
        with pytest.raises(RuntimeError):
            function(*inputs, **keywords)


def test_calls_that_pytorch_does_not_accept_are_type_errors():
    inputs = shaped(*PLAIN)
    for function in (theirs, ours):
        with pytest.raises(TypeError):
            function(*inputs, None, 0.0, False, 1.0)
        with pytest.raises(TypeError):
            function(*inputs, attn_mask=[[True]])
    for function in (theirs, ours):
        with pytest.raises((IndexError, RuntimeError)):
            function(*inputs, attn_mask=torch.ones(5, dtype=torch.bool))
        with pytest.raises((IndexError, RuntimeError)):
            function(*[x[0, 0] for x in inputs], enable_gqa=True)


@pytest.mark.parametrize(
    ("keywords", "error", "words"),
    [
        ({"dropout_p": -1.0}, RuntimeError, r"dropout_p must be a probability in \[0, 1\], got -1.0"),
        ({"dropout_p": "much"}, TypeError, "dropout_p must be a number, got str"),
        ({"attn_mask": torch.full((3, 5), math.nan)}, ValueError, "attn_mask holds NaN"),
        ({"attn_mask": torch.full((3, 5), math.inf)}, ValueError, r"attn_mask holds .*inf"),
        ({"attn_mask": torch.ones(3, 5, device="meta")}, RuntimeError, "attn_mask is on meta but query is on cpu"),
        ({"attn_mask": torch.ones(3, 5, dtype=torch.bool, device="meta")}, RuntimeError, "attn_mask is on meta"),
    ],
)
def test_refusals_name_the_argument_as_the_caller_wrote_it(keywords, error, words):
    with pytest.raises(error, match=words):
        ours(*shaped(*PLAIN), **keywords)


@pytest.mark.parametrize("is_causal", [False, True])
def test_meta_tensors_give_the_shape_of_the_result(is_causal):
    inputs = [torch.empty(shape, device="meta") for shape in ((2, 6, 3, 4), (2, 6, 5, 4), (2, 6, 5, 7))]
    out = ours(*inputs, is_causal=is_causal)
    assert out.is_meta and out.shape == (2, 6, 3, 7)
    mask = torch.empty(3, 5, dtype=torch.bool, device="meta")
    assert ours(*inputs, attn_mask=mask).shape == (2, 6, 3, 7)
    assert ours(*inputs, attn_mask=causal_lower_right(3, 5)).shape == (2, 6, 3, 7)


class TestNested:
    @staticmethod
    def heads(lengths, width=8):
        items = [torch.randn(n, 3 * width, dtype=torch.float64) for n in lengths]
        nested = torch.nested.nested_tensor(items, layout=torch.jagged, requires_grad=True)
        return nested, nested.unflatten(-1, [3, width]).transpose(1, 2)

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # from inside torch's own function
    def test_self_and_cross_attention_equal_pytorchs(self):
        (x, q), (_, k) = self.heads((5, 7, 3)), self.heads((3, 11, 1))
        for inputs in ((q, q, q), (q, k, k)):
            found, expected = ours(*inputs), theirs(*inputs)
            assert found.shape == expected.shape
            pairs = zip(found.unbind(), expected.unbind(), strict=True)
            assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in pairs)
            losses = [out.transpose(1, 2).values().square().sum() for out in (found, expected)]
            grads = [torch.autograd.grad(loss, x, retain_graph=True)[0] for loss in losses]
            torch.testing.assert_close(grads[0].values(), grads[1].values(), rtol=0, atol=1e-12)

    def test_causal_equals_each_item_alone(self):
        _, q = self.heads((5, 7, 3))
        for out, item in zip(ours(q, q, q, is_causal=True).unbind(), q.unbind(), strict=True):
            torch.testing.assert_close(out, theirs(item, item, item, is_causal=True), rtol=0, atol=1e-12)

    def test_a_mask_and_padded_input_are_refused_as_by_pytorch(self):
        _, q = self.heads((5, 7, 3))
        for function in (theirs, ours):
            with pytest.raises(ValueError):
                function(q, q, q, attn_mask=torch.ones(7, 7, dtype=torch.bool))
            with pytest.raises(ValueError):
                function(q, q, torch.ones(3, 3, 7, 8, dtype=torch.float64))


class TestReplacing:
    """Code written for PyTorch's function runs unchanged when ours takes its place."""

    @pytest.fixture
    def replaced(self, monkeypatch):
        calls = []

        def counted(*arguments, **keywords):
            calls.append(arguments)
            return ours(*arguments, **keywords)

        def replace():
            monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
            return calls

        return replace

    def test_the_examples_of_its_documentation(self, replaced):
        def plain():
            query, key, value = (torch.rand(32, 8, 128, 64, dtype=torch.float16) for _ in range(3))
            with sdpa_kernel(backends=[SDPBackend.FLASH_ATTENTION]):
                return F.scaled_dot_product_attention(query, key, value)

        def grouped():
            query = torch.rand(32, 32, 128, 64, dtype=torch.float16)
            key, value = (torch.rand(32, 8, 128, 64, dtype=torch.float16) for _ in range(2))
            with sdpa_kernel(backends=[SDPBackend.MATH]):
                return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

        def run():
            torch.manual_seed(0)
            return plain(), grouped()

        expected = run()
        calls = replaced()
        found = run()
        assert len(calls) == 2
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)

    def test_the_formula_of_its_documentation(self, replaced):
        replaced()
        query, key, value = random(2, 6, 5, 4), random(2, 2, 7, 4), random(2, 2, 7, 6)
        attn_bias = torch.zeros(5, 7, dtype=torch.float64)
        attn_bias.masked_fill_(torch.ones(5, 7, dtype=torch.bool).tril(diagonal=0).logical_not(), float("-inf"))
        weight = query @ key.repeat_interleave(3, -3).transpose(-2, -1) * (1 / math.sqrt(4)) + attn_bias
        expected = torch.softmax(weight, dim=-1) @ value.repeat_interleave(3, -3)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)

    def test_a_pretrained_style_model(self, replaced):
        model = TinyGPT().double()
        tokens = torch.randint(0, 31, (3, 11))
        results = []
        for setup in (list, replaced):
            calls = setup()
            twin = copy.deepcopy(model)
            logits = twin(tokens)
            F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
            results.append([logits, *(p.grad for p in twin.parameters())])
        assert len(calls) == 2
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)

    def test_torchs_own_multihead_attention(self, replaced):
        module = nn.MultiheadAttention(44, 4, batch_first=True, dtype=torch.float64)
        x = random(3, 7, 44)
        keywords = {
            "attn_mask": torch.ones(7, 7, dtype=torch.bool).triu(1),
            "key_padding_mask": torch.arange(7) >= torch.tensor([7, 3, 5])[:, None],
            "need_weights": False,
        }
        expected = module(x, x, x, **keywords)[0]
        calls = replaced()
        found = module(x, x, x, **keywords)[0]
        assert len(calls) == 1
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)

    def test_torchs_encoder_in_training(self, replaced):
        layer = nn.TransformerEncoderLayer(44, 4, 63, dropout=0.0, batch_first=True, dtype=torch.float64)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        x = random(3, 7, 44)
        mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
        expected = model(x, mask=mask, is_causal=True)
        calls = replaced()
        found = model(x, mask=mask, is_causal=True)
        assert len(calls) == 2
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        wanted = [x, *model.parameters()]
        grads = [torch.autograd.grad(out.square().sum(), wanted) for out in (found, expected)]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


class TinyGPT(nn.Module):
    """A decoder as people write them: packed projection, causal flag, pre-norm, tied head."""

    def __init__(self, vocabulary=31, context=11, width=44, heads=4, layers=2):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens):
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 63), nn.GELU(), nn.Linear(63, width))

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


def test_it_compiles_as_one_graph():
    inputs = [random(2, 3, 5, 4), random(2, 3, 7, 4), random(2, 3, 7, 4)]
    mask = torch.ones(5, 7, dtype=torch.bool).tril()
    found = torch.compile(ours, fullgraph=True, backend="aot_eager")(*inputs, attn_mask=mask)
    torch.testing.assert_close(found, theirs(*inputs, attn_mask=mask), rtol=0, atol=1e-12)
