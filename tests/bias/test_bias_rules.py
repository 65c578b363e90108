from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from tests.memory import peak_bytes
from tests.nn.helpers import build, close, random
from torch import nn
from transformers.models.bloom import modeling_bloom
from transformers.models.t5 import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

import regard
from regard import bias, masks, reference
from regard.bias import T5Bias, alibi

BACKENDS = ["auto", "eager", "blockwise", "sdpa"]
OFFSETS = [None, 3, torch.tensor([0, 9])]


def rules(heads, grad=True):
    """One of each kind, in float64, with the tensor that is learned."""
    slopes = torch.rand(heads, dtype=torch.float64, requires_grad=grad)
    found = {"alibi": (alibi(heads, slopes=slopes), slopes)}
    for name, both in (("t5", True), ("t5, causal", False)):
        made = T5Bias(heads, num_buckets=12, max_distance=40, bidirectional=both, std=1.0, dtype=torch.float64)
        made.weight.requires_grad_(grad)
        found[name] = (made, made.weight)
    return found


def tensors(*sizes, grad=True, dtype=torch.float64):
    B, H, Hkv, L, S, D = sizes
    shapes = ((B, H, L, D), (B, Hkv, S, D), (B, Hkv, S, D))
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


def distances(L, S, offset, batch):
    """Key position − query position, [batch, L, S]."""
    offset = S - L if offset is None else offset
    offset = offset.numpy() if isinstance(offset, torch.Tensor) else np.full(batch, offset)
    return np.arange(S) - (np.arange(L)[:, None] + offset[:, None, None])


def definition(name, table, L, S, offset, batch):
    """The bias written out from the papers, NumPy float64 [batch, H, L, S], and each pair's row of the T5 table."""
    far, numbers = distances(L, S, offset, batch), table.detach().numpy()
    if name == "alibi":
        return -numbers[:, None, None] * np.abs(far)[:, None], None
    found = np.vectorize(lambda d: t5_bucket(d, 12, 40, name == "t5"), otypes=[int])(far)
    return np.moveaxis(numbers[found], -1, 1), found


def t5_bucket(distance, count, largest, both):
    shift = 0
    if both:
        count //= 2
        shift = count if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(0, -distance)
    exact = count // 2
    if distance < exact:
        return shift + distance
    grown = np.log(np.float64(distance) / exact) / np.log(largest / exact) * (count - exact)
    return shift + min(count - 1, exact + int(grown))


@pytest.mark.parametrize("heads", [1, 3, 5, 8, 12, 16, 20, 40])
def test_slopes_are_the_published_ones(heads):
    theirs = modeling_bloom._get_alibi_slopes(heads, torch.device("cpu"))
    ours = -alibi(heads).dense(1, 2)[:, 0, 0]
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    if heads == 8:
        assert torch.equal(ours, 2.0 ** -torch.arange(1.0, 9.0))


def test_causal_attention_with_alibi_is_blooms():
    query, key, value = tensors(2, 5, 5, 7, 7, 8, grad=False)
    theirs = modeling_bloom.build_alibi_tensor(torch.ones(2, 7), 5, torch.float64).reshape(2, 5, 1, 7)
    # they add slope · j, which differs from −slope · (i − j) by what softmax does not see
    wanted = regard.attention(query, key, value, mask=masks.causal(), bias=theirs)
    assert close(regard.attention(query, key, value, mask=masks.causal(), bias=alibi(5)), wanted, 1e-7)


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize(("count", "largest"), [(32, 128), (12, 40), (64, 256), (32, 1000), (6, 7)])
def test_buckets_equal_hugging_faces_exactly(both, count, largest):
    distance = torch.arange(-1100, 1100)
    made = T5Bias(3, num_buckets=count, max_distance=largest, bidirectional=both)
    theirs = T5Attention._relative_position_bucket(distance, both, count, largest)
    assert torch.equal(made.buckets(distance), theirs)


@pytest.mark.parametrize("decoder", [False, True])
def test_the_bias_equals_that_of_hugging_faces_t5(decoder):
    config = T5Config(d_model=24, d_kv=8, num_heads=3, is_decoder=decoder)
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = T5Bias(3, bidirectional=not decoder)
    ours.load_state_dict({"weight": theirs.relative_attention_bias.weight})
    assert torch.equal(ours(63, 111, query_offset=0), theirs.compute_bias(63, 111)[0])
    assert torch.equal(ours(7, 111, query_offset=90), theirs.compute_bias(7, 111, past_seen_tokens=90)[0])


@pytest.mark.parametrize("name", ["alibi", "t5", "t5, causal"])
@pytest.mark.parametrize("offset", OFFSETS, ids=["end", "int", "per item"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("L", "S", "mask"), [(5, 7, None), (63, 111, masks.causal()), (7, 5, masks.window(2, 1))])
def test_values_and_gradients_equal_the_oracle(name, offset, backend, L, S, mask):
    learned = backend != "sdpa"  # the fused kernels give no gradient of a bias
    rule, table = rules(6, learned)[name]
    query, key, value = tensors(2, 6, 3, L, S, 8)
    given = {"mask": mask, "bias": rule, "query_offset": offset, "backend": backend}
    out = regard.attention(query, key, value, **given)
    grad_out = random(*out.shape)
    pairs = None if mask is None else mask.dense(L, S, query_offset=offset).numpy()
    added, buckets = definition(name, table, L, S, offset, 2)
    arrays = [x.detach().numpy() for x in (query, key, value)]
    assert close(out, torch.from_numpy(reference.attention(*arrays, mask=pairs, bias=added)))
    truth = reference.gradients(*arrays, grad_out.numpy(), mask=pairs, bias=added)
    wrt = [query, key, value, table] if learned else [query, key, value]
    found = torch.autograd.grad(out, wrt, grad_out)
    for ours, wanted in zip(found[:3], truth[:3], strict=True):
        assert close(ours, torch.from_numpy(wanted))
    if learned:
        assert close(found[3], torch.from_numpy(by_table(truth.bias, distances(L, S, offset, 2), buckets)), 1e-11)


def by_table(by_pair, far, buckets):
    """The gradient of the slopes, or of T5's table, from that of every pair."""
    if buckets is None:
        return -(by_pair * np.abs(far)[:, None]).sum((0, 2, 3))
    total = np.zeros((12, by_pair.shape[1]))
    np.add.at(total, buckets, np.moveaxis(by_pair, 1, -1))
    return total


@pytest.mark.parametrize("name", ["alibi", "t5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_computes_the_bias_in_float32(name, dtype):
    query, key, value = tensors(2, 3, 3, 63, 111, 8, grad=False, dtype=dtype)
    rule = alibi(3) if name == "alibi" else T5Bias(3, std=1.0).requires_grad_(False)
    wanted = regard.attention(query.double(), key.double(), value.double(), bias=rule.dense(63, 111).double())
    tolerance = 2e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    for backend in BACKENDS:
        out = regard.attention(query, key, value, bias=rule, backend=backend)
        assert out.dtype == dtype and close(out.double(), wanted, tolerance)


@pytest.mark.parametrize("name", ["alibi", "t5"])
def test_derivatives_of_both_orders_and_forward_mode(name):
    rule, table = rules(3)[name]
    query, key, value = (x.detach().requires_grad_() for x in tensors(2, 3, 3, 5, 7, 4))

    def run(query, key, value, table):
        return regard.attention(query, key, value, bias=bias.TableBias(rule.rule, table), mask=masks.causal())

    inputs = (query, key, value, table)
    torch.autograd.gradcheck(run, inputs, check_forward_ad=True, fast_mode=True)
    torch.autograd.gradgradcheck(run, inputs, fast_mode=True)
    by_func = torch.func.grad(lambda table: run(query, key, value, table).sin().sum())(table)
    (by_autograd,) = torch.autograd.grad(run(*inputs).sin().sum(), table)
    assert close(by_func.detach(), by_autograd)
    stacked = torch.stack([query.detach(), query.detach() * 2])
    mapped = torch.func.vmap(lambda q: run(q, key, value, table))(stacked)
    assert close(mapped[1].detach(), run(stacked[1], key, value, table).detach())


@pytest.mark.parametrize("name", ["alibi", "t5", "t5, causal"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_one_graph_with_gradients(name, dynamic):
    rule, table = rules(4)[name]

    def run(query, key, value, offset):
        return regard.attention(query, key, value, mask=masks.causal(), bias=rule, query_offset=offset)

    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for L, offset in ((5, None), (7, torch.tensor([2, 9]))):
        inputs = tensors(2, 4, 2, L, 11, 8)
        grad_out = random(2, 4, L, 8)
        out, wanted = compiled(*inputs, offset), run(*inputs, offset)
        assert close(out, wanted)
        found = torch.autograd.grad(out, (*inputs, table), grad_out)
        for ours, theirs in zip(found, torch.autograd.grad(wanted, (*inputs, table), grad_out), strict=True):
            assert close(ours, theirs)


def test_the_published_slopes_compile_and_survive_inference_mode():
    query, key, value = tensors(2, 4, 2, 5, 7, 8, dtype=torch.float32)
    with torch.inference_mode():
        regard.attention(query, key, value, bias=alibi(4))
    out = regard.attention(query, key, value, bias=alibi(4), backend="blockwise")
    out.sum().backward()
    compiled = torch.compile(lambda *x: regard.attention(*x, bias=alibi(4)), fullgraph=True, backend="aot_eager")
    assert close(compiled(query, key, value), out, 1e-6)


@pytest.mark.parametrize("name", ["alibi", "t5"])
def test_statistics_are_those_of_the_dense_bias(name):
    rule, _ = rules(4)[name]
    query, key, value = tensors(2, 4, 2, 63, 111, 8, grad=False)
    for offset in OFFSETS:
        dense = rule.dense(63, 111, query_offset=offset, dtype=torch.float64).detach()
        given = {"mask": masks.causal(), "query_offset": offset, "want": regard.Want.all()}
        ours = regard.observe(query, key, value, bias=rule, **given)
        theirs = regard.observe(query, key, value, bias=dense, **given)
        for statistic in ("out", "lse", "entropy", "key_mass", "map", "top_weights", "distance", "first_mass"):
            assert torch.allclose(getattr(ours, statistic), getattr(theirs, statistic), atol=1e-11, equal_nan=True)
        assert torch.equal(ours.top_keys, theirs.top_keys)


def test_a_watched_model_shows_the_weights_of_its_bias():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = build(48, 4)
            self.relative = T5Bias(4, std=1.0, dtype=torch.float64)

        def forward(self, x):
            return self.attend(x, bias=self.relative)

    model, x = Layer().eval(), random(2, 7, 48)
    with torch.no_grad(), regard.watch(model) as recording:
        model(x)
    seen = model.attend.observe(x, bias=model.relative)
    assert torch.allclose(recording.calls[0].entropy.double(), seen.entropy, atol=1e-6)


@pytest.mark.parametrize("name", ["alibi", "t5"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e200])
def test_poison_that_the_mask_hides_does_not_leak_beside_a_rule(name, poison):
    rule, table = rules(4)[name]
    query, key, value = tensors(2, 4, 2, 7, 11, 8)
    for offset in (None, torch.tensor([4, 2])):
        given = {"mask": masks.causal(), "bias": rule, "query_offset": offset}
        clean = regard.attention(query, key, value, **given)
        grad_out = random(*clean.shape)
        grad_out[:, :, 4:] = 0  # what sees the poison is not used
        wanted = torch.autograd.grad(clean, (query, table), grad_out)
        with torch.no_grad():
            bad_key, bad_value = key.clone(), value.clone()
            bad_key[:, :, 8], bad_value[:, :, 8] = poison, poison
        dirty = regard.attention(query, bad_key.requires_grad_(), bad_value, **given)
        assert torch.equal(dirty[:, :, :4], clean[:, :, :4])
        for ours, theirs in zip(torch.autograd.grad(dirty, (query, table), grad_out), wanted, strict=True):
            assert close(ours, theirs)


def test_a_t5_table_may_hide_distances_and_leaves_empty_rows_zero():
    made = T5Bias(3, num_buckets=8, max_distance=11, dtype=torch.float64)
    with torch.no_grad():
        made.weight[:, 1] = -torch.inf
        made.weight[0, 2] = -torch.inf
    query, key, value = tensors(2, 3, 3, 7, 7, 8)
    dense = made.dense(7, 7, dtype=torch.float64).detach()
    for backend in ("auto", "eager", "blockwise"):
        out = regard.attention(query, key, value, bias=made, backend=backend)
        assert not out[:, 1].any() and close(out, regard.attention(query, key, value, bias=dense))
        assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(out.sum(), (query, key, value)))


def test_twenty_thousand_tokens_make_no_matrix():
    L = 20_000
    query, key, value = (torch.randn(1, 1, L, 4) for _ in range(3))
    given = {"mask": masks.causal() & masks.window(left=300), "bias": alibi(1)}
    assert peak_bytes(lambda: regard.attention(query, key, value, **given)) < L * L // 20
    plan = regard.explain(query, key, value, **given)
    assert plan.cost.bytes < 5 * query.numel() * 4 and plan.cost.peak_bytes < L * L // 20
    assert "alibi: a rule, evaluated in the tile" in str(plan)


@pytest.mark.parametrize("name", ["alibi", "t5"])
def test_gradients_make_no_matrix(name):
    L = 3001
    query, key, value = (torch.randn(1, 2, L, 4, requires_grad=True) for _ in range(3))
    rule = alibi(2) if name == "alibi" else T5Bias(2)

    def run():
        out = regard.attention(query, key, value, bias=rule)
        return torch.autograd.grad(out.sum(), [query, key, value, *(rule.parameters() if name == "t5" else ())])

    assert peak_bytes(run) < 2 * L * L  # bytes: a quarter of one float32 matrix for each head


@pytest.mark.parametrize("backend", ["sdpa", "blockwise"])
@pytest.mark.parametrize("mask", [None, masks.causal()])
def test_the_plan_foresees_the_memory_of_a_rule(backend, mask):
    query, key, value = tensors(2, 4, 4, 1511, 1511, 16, grad=False, dtype=torch.float32)
    given = {"mask": mask, "bias": alibi(4), "backend": backend}
    peak = peak_bytes(lambda: regard.attention(query, key, value, **given))
    assert 0.5 * peak < regard.explain(query, key, value, **given).cost.peak_bytes < 2.5 * peak


def test_without_a_mask_the_fused_kernel_is_given_a_few_rows_at_a_time():
    query, key, value = tensors(1, 2, 2, 3001, 3001, 4, grad=False, dtype=torch.float32)
    assert regard.explain(query, key, value, bias=alibi(2)).backend == "sdpa"
    assert peak_bytes(lambda: regard.attention(query, key, value, bias=alibi(2))) < 3001 * 3001


def test_the_module_takes_rules_with_a_cache_and_nested_input():
    class Growing:
        position, kept = 0, None

        def update(self, key, value):
            pair = (key, value) if self.kept is None else tuple(map(cat, self.kept, (key, value)))
            start, self.kept, self.position = self.position, pair, pair[0].shape[2]
            return *pair, start

    def cat(*parts):
        return torch.cat(parts, 2)

    module, x = build(48, 4).eval(), random(3, 11, 48)
    for rule, _ in rules(4).values():
        whole, cache = module(x, mask=masks.causal(), bias=rule), Growing()
        parts = [module(part, mask=masks.causal(), bias=rule, cache=cache) for part in x.split([5, 1, 5], dim=1)]
        assert close(torch.cat(parts, 1), whole)
        nested = torch.nested.nested_tensor([x[0, :5], x[1]], layout=torch.jagged)
        for out, item in zip(module(nested, bias=rule).unbind(), (x[0, :5], x[1]), strict=True):
            assert close(out, module(item[None], bias=rule)[0])


def test_t5_bias_is_a_module_like_others():
    made = T5Bias(4, num_buckets=8, max_distance=11, bidirectional=False)
    assert list(made.state_dict()) == ["weight"] and made.weight.shape == (8, 4)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(other(5, 7), made(5, 7))
    assert repr(made) == "T5Bias(4, num_buckets=8, max_distance=11, bidirectional=False)"
    assert made.half().weight.dtype == torch.float16
    assert repr(alibi(3)) == "alibi(3)" and "slopes=(1.0, 2.0)" in repr(alibi(2, slopes=[1, 2]))
    with torch.device("meta"):
        assert T5Bias(4).weight.device.type == "meta"
    with torch._subclasses.fake_tensor.FakeTensorMode():
        query = torch.zeros(2, 4, 5, 8)
        assert regard.attention(query, query, query, bias=T5Bias(4, num_buckets=10)).shape == (2, 4, 5, 8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: alibi(0), ValueError, "num_heads must be at least 1, got 0"),
        (lambda: alibi(2.0), TypeError, "num_heads must be an int, got 2.0"),
        (lambda: alibi(2, slopes=[1.0]), ValueError, "slopes must be 2 numbers, one per head, got 1"),
        (lambda: alibi(2, slopes=[1.0, float("nan")]), ValueError, "slopes must be finite numbers"),
        (
            lambda: alibi(2, slopes=torch.ones(3)),
            ValueError,
            r"slopes must have shape \[num_heads\] = \[2\], got \[3\]",
        ),
        (lambda: alibi(2, slopes=torch.tensor([1, 2])), TypeError, "slopes must be floating point, got torch.int64"),
        (lambda: alibi(1, slopes=torch.tensor([torch.inf])), ValueError, "the slopes of alibi must be finite"),
        (lambda: T5Bias(2, num_buckets=7), ValueError, "num_buckets must be even when bidirectional"),
        (lambda: T5Bias(2, max_distance=8), ValueError, "max_distance must be at least 9, got 8"),
        (lambda: alibi(2) + torch.ones(2), TypeError, "a bias rule cannot be added to a Tensor"),
        (lambda: torch.ones(2) + alibi(2), TypeError, "a bias rule cannot be added to a Tensor"),
    ],
)
def test_refusals_of_a_rule(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_refusals_of_a_call_with_a_rule():
    query, key, value = tensors(2, 4, 4, 5, 7, 8, grad=False)
    with pytest.raises(ValueError, match=r"bias alibi\(3\) is for 3 heads, but query has 4"):
        regard.attention(query, key, value, bias=alibi(3))
    with pytest.raises(ValueError, match=r"\[num_buckets, num_heads\] = \[32, 4\]"):
        regard.attention(query, key, value, bias=T5Bias(3, dtype=torch.float64))
    with pytest.raises(TypeError, match="bias has dtype torch.float32 but query has torch.float64"):
        regard.attention(query, key, value, bias=T5Bias(4))
    with pytest.raises(TypeError, match="or of regard.bias"):
        regard.attention(query, key, value, bias=[1.0])
    broken = T5Bias(4, dtype=torch.float64)
    with torch.no_grad():
        broken.weight[3, 1] = torch.nan
    with pytest.raises(ValueError, match="bias T5Bias holds NaN"):
        regard.attention(query, key, value, bias=broken)
    with pytest.raises(regard.Refused, match="the bias requires grad, which the fused kernels do not give"):
        regard.attention(query, key, value, bias=T5Bias(4, dtype=torch.float64), backend="sdpa")
    refusals = regard.explain(query, key, value, bias=alibi(4)).refusals["flex"]
    assert any("the bias is a rule, alibi, and it takes tensors" in reason for reason in refusals)
