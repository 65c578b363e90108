from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from tests.nn.helpers import build, close, random

import regard
from regard import masks
from regard.nn import AttentionSublayer, MultiHeadAttention

KEYWORDS = {
    "separate": {},
    "packed": {"packed": True},
    "grouped with norm": {"num_kv_heads": 2, "qk_norm": True, "value_head_dim": 7},
}


@pytest.mark.parametrize("keywords", KEYWORDS.values(), ids=KEYWORDS)
@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_gives_the_same_and_shares_nothing(keywords, how):
    module, x = build(44, 4, **keywords), random(3, 7, 44)
    twin = how(module)
    expected = module(x, mask=masks.causal())
    assert torch.equal(twin(x, mask=masks.causal()), expected)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert torch.equal(twin(x, mask=masks.causal()), expected)


def test_it_saves_and_loads_as_weights_only():
    module, x = build(44, 4, packed=True), random(3, 7, 44)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = build(44, 4, packed=True)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), module(x))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_state_dicts_of_either_layout_load_into_the_other(packed, bias):
    keywords = {"num_kv_heads": 2, "value_head_dim": 7, "qkv_bias": bias}
    old, new = build(44, 4, packed=packed, **keywords), build(44, 4, packed=not packed, **keywords)
    state = old.state_dict()
    names = list(state)
    new.load_state_dict(state)
    assert list(state) == names
    x, memory = random(3, 7, 44), random(3, 11, 44)
    assert close(new(x), old(x)) and close(new(x, memory), old(x, memory))
    old.load_state_dict(new.state_dict())


def test_layouts_convert_inside_a_larger_model():
    models = [
        torch.nn.ModuleDict({"deep": AttentionSublayer(44, 4, packed=p, dtype=torch.float64)}) for p in (True, False)
    ]
    models[1].load_state_dict(models[0].state_dict())
    x = random(3, 7, 44)
    assert close(models[1]["deep"](x), models[0]["deep"](x))


def test_a_state_dict_that_does_not_fit_is_reported_by_torch():
    module = build(44, 4)
    state = build(44, 4, packed=True, num_kv_heads=2).state_dict()
    with pytest.raises(RuntimeError, match=r"Missing.*q_proj\.weight(.|\n)*Unexpected.*qkv_proj\.weight"):
        module.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"qkv_proj\.weight"):
        build(44, 4, packed=True).load_state_dict({k: v for k, v in module.state_dict().items() if "v_proj" not in k})


class Causal(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x, lengths):
        return self.module(x, mask=masks.causal() & masks.padding(lengths))


@pytest.mark.parametrize("keywords", KEYWORDS.values(), ids=KEYWORDS)
def test_it_exports(keywords):
    model = Causal(build(44, 4, **keywords)).eval()
    x, lengths = random(3, 7, 44), torch.tensor([7, 3, 5])
    exported = torch.export.export(model, (x, lengths))
    other, shorter = random(3, 7, 44), torch.tensor([1, 7, 2])
    assert close(exported.module()(other, shorter), model(other, shorter))


def test_it_exports_with_free_batch_and_length():
    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = build(44, 4, packed=True)

        def forward(self, x):
            return self.module(x, mask=masks.causal())

    model = Plain().eval()
    free = {0: torch.export.Dim("batch", min=2, max=63), 1: torch.export.Dim("tokens", min=2, max=111)}
    exported = torch.export.export(model, (random(3, 7, 44),), dynamic_shapes=(free,))
    x = random(5, 11, 44)
    assert close(exported.module()(x), model(x))


def test_it_works_under_vmap_and_functional_gradients():
    module, x = build(44, 4, packed=True, num_kv_heads=2), random(3, 7, 44)
    parameters = dict(module.named_parameters())

    def loss(parameters, item):
        out = torch.func.functional_call(module, parameters, (item[None],), {"mask": masks.causal()})
        return out.square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for b, item in enumerate(x):
        expected = torch.autograd.grad(loss(parameters, item), list(parameters.values()))
        assert all(close(found[name][b], e, 1e-10) for name, e in zip(parameters, expected, strict=True))


def test_nested_input_compiles_as_one_graph():
    module = build(44, 4)
    nested = torch.nested.nested_tensor([random(n, 44) for n in (5, 1, 7)], layout=torch.jagged)
    compiled = torch.compile(lambda x: module(x, mask=masks.causal()), fullgraph=True, backend="aot_eager")
    assert close(compiled(nested).values(), module(nested, mask=masks.causal()).values())


def test_it_compiles_as_one_graph_with_gradients():
    model = Causal(build(44, 4, packed=True, num_kv_heads=2))
    x, lengths = random(3, 7, 44, grad=True), torch.tensor([7, 3, 5])
    expected = model(x, lengths)
    found = torch.compile(model, fullgraph=True, backend="aot_eager")(x, lengths)
    assert close(found, expected)
    wanted = [x, *model.parameters()]
    pairs = zip(*(torch.autograd.grad(out.square().sum(), wanted) for out in (found, expected)), strict=True)
    assert all(close(a, b, 1e-10) for a, b in pairs)


def test_it_is_readable_when_printed():
    module = MultiHeadAttention(44, 4, num_kv_heads=2, key_dim=9, dropout=0.1)
    first = repr(module).splitlines()[1].strip()
    assert first == "embed_dim=44, num_heads=4, head_dim=11, num_kv_heads=2, key_dim=9, dropout=0.1"
    assert "norm=pre" in repr(AttentionSublayer(44, 4, norm="pre"))


def test_it_works_on_the_meta_device():
    assert MultiHeadAttention(44, 4, device="meta").q_proj.weight.is_meta


class TestObserve:
    def test_out_is_the_output_of_the_module_and_weights_are_those_of_the_heads(self):
        module, x = build(44, 4, num_kv_heads=2), random(3, 7, 44)
        seen = module.observe(x, mask=masks.causal(), want=regard.Want.all())
        assert torch.equal(seen.out, module(x, mask=masks.causal()))
        assert seen.weights.shape == (3, 4, 7, 7)
        q, k = (f(x).unflatten(-1, (-1, 11)).transpose(1, 2) for f in (module.q_proj, module.k_proj))
        logits = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / 11**0.5
        expected = logits.masked_fill(~masks.causal().dense(7, 7), -torch.inf).softmax(-1)
        assert close(seen.weights, expected.detach())

    def test_asking_changes_nothing_in_training(self):
        module, x = build(44, 4, dropout=0.3, out_dropout=0.2), random(3, 7, 44)
        torch.manual_seed(3)
        expected = module(x)
        torch.manual_seed(3)
        assert torch.equal(module.observe(x).out, expected)

    def test_out_of_nested_input_is_nested(self):
        module = build(44, 4)
        nested = torch.nested.nested_tensor([random(n, 44) for n in (5, 1, 7)], layout=torch.jagged)
        seen = module.observe(nested, mask=masks.causal())
        assert close(seen.out.values(), module(nested, mask=masks.causal()).values())

    def test_out_of_the_sublayer_is_the_sublayers(self):
        layer, x = AttentionSublayer(44, 4, dtype=torch.float64), random(3, 7, 44)
        assert torch.equal(layer.observe(x, mask=masks.causal()).out, layer(x, mask=masks.causal()))
