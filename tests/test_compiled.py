from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import regard
from core_calls import every_mask, tensors
from regard import masks, nn

B, H, G, L, S, D = 2, 4, 2, 13, 37, 8


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    found: Callable[..., Any] = torch.compile(function, fullgraph=True, backend="aot_eager", **options)
    return found


def agree(function: Callable[..., Tensor], *inputs: Tensor, tolerance: float = 1e-12) -> None:
    """The function and its compiled form, output and gradients."""
    plain, made = function(*inputs), compiled(function)(*inputs)
    assert torch.allclose(plain, made, rtol=0, atol=tolerance)
    leaves = [t for t in inputs if t.requires_grad]
    pairs = [torch.autograd.grad(out.square().sum(), leaves) for out in (plain, made)]
    for a, b in zip(*pairs, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=tolerance * 100)


@pytest.mark.parametrize("kind", list(every_mask(B, H, L, S)))
def test_a_mask_built_outside_agrees(kind: str) -> None:
    mask = every_mask(B, H, L, S)[kind]
    agree(lambda q, k, v: regard.attention(q, k, v, mask=mask), *tensors(B, H, G, L, S, D, grad=True))


ALLOWED = torch.arange(L * S).view(L, S) % 5 > 1
INSIDE: dict[str, Callable[[], masks.Mask]] = {
    "band": lambda: (masks.causal() & masks.window(left=4)) | masks.columns(2),
    "list of documents": lambda: masks.documents(lengths=[11, 26]) & masks.causal(),
    "list of lengths": lambda: masks.padding([30, 0]),
    "tensor": lambda: masks.keep(ALLOWED) | masks.prefix(9),
    "rules": lambda: masks.strided(3) | masks.random_blocks(1, 8, seed=2),
}


CASES = [(kind, "auto") for kind in INSIDE] + [("tensor", name) for name in ("eager", "blockwise", "sdpa")]


@pytest.mark.parametrize(("kind", "backend"), CASES)
def test_a_mask_built_inside_agrees(kind: str, backend: str) -> None:
    inputs = tensors(B, H, G, L, S, D, grad=True)
    agree(lambda q, k, v: regard.attention(q, k, v, mask=INSIDE[kind](), backend=backend), *inputs)


@pytest.mark.parametrize("backend", ["auto", "eager", "blockwise"])
def test_all_modifiers_agree(backend: str) -> None:
    inputs = tensors(B, H, G, L, S, D, V=5, grad=True)
    bias = torch.randn(H, 1, S, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(H, dtype=torch.float64, requires_grad=True)
    offset = torch.tensor([4, 20])

    def run(q: Tensor, k: Tensor, v: Tensor, b: Tensor, s: Tensor) -> Tensor:
        given: dict[str, Any] = {"bias": b, "sinks": s, "softcap": 2.0, "scale": -0.3, "query_offset": offset}
        return regard.attention(q, k, v, mask=masks.causal(), backend=backend, **given)

    agree(run, *inputs, bias, sinks)


@pytest.mark.parametrize("backend", ["auto", "eager", "blockwise"])
def test_dropout_draws_as_it_does_uncompiled_and_anew_at_every_call(backend: str) -> None:
    inputs = tensors(B, H, G, L, S, D, grad=True)

    def run(*given: Tensor) -> Tensor:
        return regard.attention(*given, dropout=0.5, mask=masks.causal(), backend=backend)

    made = compiled(run)
    results = []
    for function in (run, made, made):
        torch.manual_seed(7)
        out = function(*inputs)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for found in results[1:]:
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(results[0], found, strict=True))
    assert not torch.equal(made(*inputs), made(*inputs))


def counted(function: Callable[..., Tensor], **options: Any) -> tuple[Callable[..., Tensor], list[int]]:
    graphs: list[int] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(len(inputs))
        return module

    return torch.compile(function, fullgraph=True, backend=backend, **options), graphs


@pytest.mark.parametrize(
    "mask",
    [None, masks.causal(), masks.causal() & masks.window(left=5), masks.padding([3, 5])],
    ids=str,
)
def test_lengths_that_vary_are_one_graph(mask: masks.Mask | None) -> None:
    made, graphs = counted(lambda q, k, v: regard.attention(q, k, v, mask=mask))
    for rows, keys in ((5, 7), (63, 111), (111, 63), (300, 411)):
        inputs = tensors(B, H, G, rows, keys, D)
        for tensor in inputs:
            torch._dynamo.mark_dynamic(tensor, 2)
        assert torch.allclose(made(*inputs), regard.attention(*inputs, mask=mask), rtol=0, atol=1e-12)
    assert len(graphs) == 1


def test_offsets_and_masks_given_as_arguments_do_not_recompile_for_every_value() -> None:
    made, graphs = counted(lambda q, k, v, m, n: regard.attention(q, k, v, mask=m, query_offset=n))
    inputs = tensors(B, H, G, 1, S, D)
    for n in range(5):
        mask = masks.causal() & masks.padding(torch.tensor([n, 2 * n]))
        assert torch.equal(made(*inputs, mask, n), regard.attention(*inputs, mask=mask, query_offset=n))
    assert len(graphs) <= 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dropout": 1.5}, "dropout must be a probability"),
        ({"backend": "fast"}, "backend must be"),
        ({"backend": "reference"}, "reference"),
        ({"backend": "sdpa", "softcap": 2.0}, "softcap"),
    ],
    ids=str,
)
def test_bad_arguments_raise_what_they_raise_uncompiled(given: dict[str, Any], words: str) -> None:
    inputs = tensors(grad=True)
    for function in (regard.attention, compiled(lambda q, k, v: regard.attention(q, k, v, **given))):
        keywords = given if function is regard.attention else {}
        with pytest.raises(Exception, match=words):
            function(*inputs, **keywords)


def test_the_operator_keeps_torchs_rules_for_operators() -> None:
    q, k, v = tensors(grad=True)
    mask = masks.causal() & masks.padding([2, 7])
    regard.attention(q, k, v, mask=mask)
    compiled(lambda q, k, v: regard.attention(q, k, v, mask=mask))(q, k, v)  # registers it
    numbers = (mask.code, 2, 0.5, None, 0.0, "auto", True, False, "")
    arguments = (q, k, v, None, None, None, None, list(mask.tensors), *numbers)
    torch.library.opcheck(torch.ops.regard.attention.default, arguments)


def test_nothing_is_read_while_compiling_or_from_tensors_without_values() -> None:
    torch.compile(lambda q, k, v: regard.attention(q, k, v), backend="eager")(*tensors())  # registers the operator
    with FakeTensorMode():
        q, k, v = tensors()
        for mask in (masks.causal(), masks.padding([3, 5]), masks.keep(torch.ones(5, 7, dtype=torch.bool))):
            code, held = mask.code, list(mask.tensors)
            out, lse = torch.ops.regard.attention(
                q, k, v, None, None, None, None, held, code, 2, 0.5, None, 0.0, "auto", False, False, ""
            )
            assert out.shape == (2, 4, 5, 3) and lse.shape == (2, 4, 5)


def test_autocast_inside_a_compiled_function_gives_its_dtype() -> None:
    def run(*given: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return regard.attention(*given, mask=masks.causal())

    inputs = tensors(B, H, G, L, S, D, dtype=torch.float32)
    out = compiled(run)(*inputs)
    assert out.dtype == torch.bfloat16 and torch.equal(out, run(*inputs))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiHeadAttention(12, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.attention(tokens, mask=masks.causal() & masks.window(left=6))
        return found


@pytest.mark.parametrize("strict", [True, False])
def test_a_module_is_exported_with_free_sizes(strict: bool) -> None:
    layer = Layer().eval()
    free = {0: torch.export.Dim("batch", min=2), 1: torch.export.Dim("tokens", min=2, max=512)}
    program = torch.export.export(layer, (torch.randn(3, 5, 12),), dynamic_shapes=(free,), strict=strict)
    for batch, tokens in ((2, 11), (5, 300)):
        given = torch.randn(batch, tokens, 12)
        assert torch.allclose(program.module()(given), layer(given), rtol=0, atol=1e-6)


def test_vmap_over_anything_agrees_with_a_loop() -> None:
    n = 3
    q, k, v = (torch.randn(n, *t.shape, dtype=torch.float64) for t in tensors(B, H, G, L, S, D))
    allowed, offset = torch.rand(n, L, S) > 0.4, torch.randint(0, 20, (n, B))
    bias, lengths = torch.randn(n, L, S, dtype=torch.float64), torch.randint(0, S, (n, B))

    def run(q: Tensor, k: Tensor, v: Tensor, a: Tensor, o: Tensor, b: Tensor, m: Tensor) -> Tensor:
        mask = masks.causal() | (masks.keep(a) & masks.padding(m))
        return regard.attention(q, k, v, mask=mask, bias=b, query_offset=o)

    given = (q, k, v, allowed, offset, bias, lengths)
    loop = torch.stack([run(*each) for each in zip(*given, strict=True)])
    assert torch.allclose(torch.func.vmap(run)(*given), loop, rtol=0, atol=1e-12)
    one_key = torch.func.vmap(lambda q: regard.attention(q, k[0], v[0], mask=masks.causal()))(q)
    again = torch.stack([regard.attention(each, k[0], v[0], mask=masks.causal()) for each in q])
    assert torch.allclose(one_key, again, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.padding([3, 0])], ids=str)
def test_functional_derivatives_agree_with_autograd(mask: masks.Mask | None) -> None:
    q, k, v = tensors(2, 2, 1, 3, 4, 2)

    def loss(q: Tensor) -> Tensor:
        return regard.attention(q, k, v, mask=mask).square().sum()

    leaf = q.clone().requires_grad_()
    (plain,) = torch.autograd.grad(loss(leaf), leaf)
    functional = torch.func.grad(loss)(q)
    assert torch.allclose(functional, plain, rtol=0, atol=1e-12)
    hessian = torch.autograd.functional.hessian(loss, q)
    assert torch.allclose(torch.func.hessian(loss)(q), hessian, rtol=0, atol=1e-12)
    _, pull = torch.func.vjp(lambda x: regard.attention(x, k, v, mask=mask), q)
    rows = torch.func.jacrev(lambda x: regard.attention(x, k, v, mask=mask))(q)
    columns = torch.func.jacfwd(lambda x: regard.attention(x, k, v, mask=mask))(q)
    assert torch.allclose(rows, columns, rtol=0, atol=1e-12)
    ones = torch.ones_like(q)
    assert torch.allclose(pull(ones)[0], torch.tensordot(ones, rows, 4), rtol=0, atol=1e-12)


def test_transforms_inside_a_compiled_function_agree_with_those_outside() -> None:
    q, k, v = tensors(2, 2, 1, 3, 4, 2)

    def attend(q: Tensor) -> Tensor:
        return regard.attention(q, k, v, mask=masks.causal() & masks.window(2))

    functions = [
        torch.func.grad(lambda q: attend(q).square().sum()),
        torch.func.jacrev(attend),
        torch.func.vmap(lambda one: attend(one.expand(2, 2, 3, 2))),
    ]
    for function in functions:
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        assert torch.allclose(compiled(q), function(q), rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["blockwise", "sdpa", "reference"])
def test_a_named_backend_refuses_transforms_by_name(backend: str) -> None:
    q, k, v = tensors()
    with pytest.raises(regard.Refused, match=f"{backend!r} cannot run this call.*(transform|vmap)"):
        torch.func.vmap(lambda q: regard.attention(q[None], k[:1], v[:1], backend=backend))(q)


@pytest.mark.parametrize("given", [{"softcap": 2.0}, {"dropout": 0.5}, {"backend": "blockwise"}, {"backend": "sdpa"}])
def test_a_call_without_queries_compiles(given: dict[str, Any]) -> None:
    query = torch.randn(2, 2, 0, 8, requires_grad=True)
    key = torch.randn(2, 2, 5, 8, requires_grad=True)
    out = compiled(lambda q, k: regard.attention(q, k, k, mask=masks.causal(), **given))(query, key)
    out.sum().backward()
    assert out.shape == query.grad.shape == (2, 2, 0, 8)
    assert not key.grad.any()
