from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard import masks

B, H, G, L, S, D = 2, 6, 3, 5, 7, 11


def query() -> Tensor:
    return torch.randn(B, H, L, D)


def key(*shape: int) -> Tensor:
    return torch.randn(*(shape or (B, G, S, D)))


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)


BAD: dict[str, tuple[dict[str, Callable[[], Any]], type[Exception], list[str]]] = {
    "query is an array": ({"query": lambda: np.ones((B, H, L, D))}, TypeError, ["query", "ndarray", "torch.Tensor"]),
    "value is None": ({"value": lambda: None}, TypeError, ["value", "NoneType"]),
    "nested key": ({"key": nested}, TypeError, ["nested", "MultiHeadAttention", "documents"]),
    "sparse key": ({"key": lambda: key().to_sparse()}, TypeError, ["key", "sparse_coo", "to_dense"]),
    "query of rank 3": ({"query": lambda: query()[0]}, ValueError, ["query", "3 dims", "[6, 5, 11]", "unsqueeze"]),
    "key of rank 5": ({"key": lambda: key()[None]}, ValueError, ["key", "5 dims", "expected 4"]),
    "value of rank 0": ({"value": lambda: torch.tensor(1.0)}, ValueError, ["value", "0 dims"]),
    "batch of one is not broadcast": ({"query": lambda: query()[:1]}, ValueError, ["batch", "expand", "[1, 6, 5, 11]"]),
    "value's batch": ({"value": lambda: key(3, G, S, D)}, ValueError, ["batch", "[3, 3, 7, 11]"]),
    "heads of key and value": ({"value": lambda: key(B, 1, S, D)}, ValueError, ["heads", "3 and 1"]),
    "tokens of key and value": ({"value": lambda: key(B, G, 8, D)}, ValueError, ["tokens", "7 and 8"]),
    "head dim": ({"key": lambda: key(B, G, S, 10)}, ValueError, ["head dim", "11 and 10"]),
    "head dim 0": (
        {"query": lambda: torch.zeros(B, H, L, 0), "key": lambda: key(B, G, S, 0)},
        ValueError,
        ["head dim 0", "at least 1"],
    ),
    "no heads": ({"query": lambda: torch.zeros(B, 0, L, D)}, ValueError, ["at least one head", "0 and 3"]),
    "no kv heads": (
        {"key": lambda: key(B, 0, S, D), "value": lambda: key(B, 0, S, D)},
        ValueError,
        ["at least one head", "6 and 0"],
    ),
    "heads that do not divide": (
        {"key": lambda: key(B, 4, S, D), "value": lambda: key(B, 4, S, D)},
        ValueError,
        ["6 heads", "key has 4", "divide"],
    ),
    "integer query": ({"query": lambda: query().long()}, TypeError, ["query", "torch.int64", "float32"]),
    "complex value": ({"value": lambda: key() + 0j}, TypeError, ["value", "complex64"]),
    "mixed dtypes": ({"key": lambda: key().double()}, TypeError, ["query torch.float32", "key torch.float64", ".to"]),
    "mixed devices": ({"key": lambda: key().to("meta")}, TypeError, ["query on cpu", "key on meta"]),
    "scale is a word": ({"scale": lambda: "large"}, TypeError, ["scale", "'large'", "finite number"]),
    "scale is a tensor": ({"scale": lambda: torch.tensor(0.5)}, TypeError, ["scale", "tensor(0.5000)"]),
    "scale is inf": ({"scale": lambda: float("inf")}, ValueError, ["scale", "inf", "finite"]),
    "scale is NaN": ({"scale": lambda: float("nan")}, ValueError, ["scale", "nan", "finite"]),
    "softcap 0": ({"softcap": lambda: 0}, ValueError, ["softcap", "above 0", "got 0"]),
    "softcap negative": ({"softcap": lambda: -3.0}, ValueError, ["softcap", "-3.0"]),
    "softcap inf": ({"softcap": lambda: float("inf")}, ValueError, ["softcap", "inf", "None"]),
    "softcap is a word": ({"softcap": lambda: "c"}, TypeError, ["softcap", "'c'"]),
    "dropout below 0": ({"dropout": lambda: -0.1}, ValueError, ["dropout", "-0.1", "[0, 1]"]),
    "dropout above 1": ({"dropout": lambda: 1.5}, ValueError, ["dropout", "1.5", "[0, 1]"]),
    "dropout NaN": ({"dropout": lambda: float("nan")}, ValueError, ["dropout", "nan"]),
    "dropout None": ({"dropout": lambda: None}, TypeError, ["dropout", "None"]),
    "offset is a float": ({"query_offset": lambda: 2.0}, TypeError, ["query_offset", "float", "int"]),
    "offset is a bool": ({"query_offset": lambda: True}, TypeError, ["query_offset", "bool"]),
    "offset is a list": ({"query_offset": lambda: [0, 1]}, TypeError, ["query_offset", "list", "tensor"]),
    "offset of floats": ({"query_offset": lambda: torch.zeros(B)}, TypeError, ["query_offset", "float32", "int64"]),
    "offset of another batch": (
        {"query_offset": lambda: torch.zeros(3, dtype=torch.int64)},
        ValueError,
        ["query_offset", "[batch] = [2]", "[3]"],
    ),
    "offset of rank 0": (
        {"query_offset": lambda: torch.tensor(2)},
        ValueError,
        ["query_offset", "[batch] = [2]", "[]"],
    ),
    "offset elsewhere": (
        {"query_offset": lambda: torch.zeros(B, dtype=torch.int64, device="meta")},
        TypeError,
        ["query_offset", "meta", "cpu"],
    ),
    "mask is a function": ({"mask": lambda: masks.causal}, TypeError, ["mask", "masks.causal()", "function"]),
    "mask is bool": ({"mask": lambda: True}, TypeError, ["mask", "bool"]),
    "bare bool tensor": (
        {"mask": lambda: torch.ones(L, S, dtype=torch.bool)},
        TypeError,
        ["mask", "torch.bool", "masks.keep", "masks.drop"],
    ),
    "integer tensor": ({"mask": lambda: torch.ones(L, S).int()}, TypeError, ["mask", "int32", ".bool()", "masks.keep"]),
    "float tensor": ({"mask": lambda: torch.zeros(L, S)}, TypeError, ["mask", "float32", "bias=", "from_additive"]),
    "mask for another batch": (
        {"mask": lambda: masks.padding([1, 2, 3])},
        ValueError,
        ["padding", "3 batch items", "2"],
    ),
    "mask elsewhere": (
        {"mask": lambda: masks.keep(torch.ones(L, S, dtype=torch.bool, device="meta"))},
        TypeError,
        ["mask", "keep", "meta", "cpu"],
    ),
    "bias is a list": ({"bias": lambda: [[0.0] * S] * L}, TypeError, ["bias", "list", "floating-point tensor"]),
    "bias is bool": (
        {"bias": lambda: torch.ones(L, S) > 0},
        TypeError,
        ["bias", "torch.bool", "masks.keep", "masks.drop"],
    ),
    "bias of another dtype": ({"bias": lambda: torch.zeros(L, S).double()}, TypeError, ["bias", "float64", "float32"]),
    "bias elsewhere": ({"bias": lambda: torch.zeros(L, S, device="meta")}, TypeError, ["bias", "meta", "cpu"]),
    "bias that enlarges the batch": (
        {"bias": lambda: torch.zeros(3, 1, L, S)},
        ValueError,
        ["bias", "[3, 1, 5, 7]", "[2, 6, 5, 7]"],
    ),
    "bias of rank 5": (
        {"bias": lambda: torch.zeros(1, 1, 1, L, S)},
        ValueError,
        ["bias", "[1, 1, 1, 5, 7]", "broadcast"],
    ),
    "sinks is a list": ({"sinks": lambda: [0.0] * H}, TypeError, ["sinks", "list", "[num_heads]"]),
    "sinks of kv heads": ({"sinks": lambda: torch.zeros(G)}, ValueError, ["sinks", "[num_heads] = [6]", "[3]"]),
    "sinks of another dtype": ({"sinks": lambda: torch.zeros(H).half()}, TypeError, ["sinks", "float16", "float32"]),
    "sinks of integers": ({"sinks": lambda: torch.zeros(H).long()}, TypeError, ["sinks", "int64"]),
    "sinks elsewhere": ({"sinks": lambda: torch.zeros(H, device="meta")}, TypeError, ["sinks", "meta", "cpu"]),
    "unknown backend": ({"backend": lambda: "fast"}, ValueError, ["backend", "'fast'", "auto", "sdpa", "eager"]),
}

if torch.backends.mkldnn.is_available():  # its tensors say that they are contiguous
    BAD["value of oneDNN"] = ({"value": lambda: key().to_mkldnn()}, TypeError, ["value", "mkldnn", "to_dense"])


@pytest.mark.parametrize("call", [regard.attention, regard.observe, regard.explain])
@pytest.mark.parametrize("name", BAD)
def test_a_wrong_argument_is_named_with_what_was_given_and_what_was_expected(name: str, call: Any) -> None:
    changes, kind, words = BAD[name]
    given: dict[str, Any] = {"query": query(), "key": key(), "value": key()}
    given |= {argument: make() for argument, make in changes.items()}
    with pytest.raises(kind) as raised:
        call(given.pop("query"), given.pop("key"), given.pop("value"), **given)
    assert type(raised.value) is kind
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("call", [regard.observe, regard.explain])
@pytest.mark.parametrize("want", [3, "all", regard.Want], ids=str)
def test_a_want_of_another_type_is_refused(call: Any, want: Any) -> None:
    with pytest.raises(TypeError, match=r"want must be a regard.Want\b.* got"):
        call(query(), key(), key(), want=want)


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"map": (0, 4)}, ValueError, ["map", "(0, 4)", "at least 1"]),
        ({"map": [4, 4]}, ValueError, ["map", "[4, 4]"]),
        ({"map": (4,)}, ValueError, ["map", "(4,)"]),
        ({"top_k": -1}, ValueError, ["top_k", "-1"]),
        ({"top_k": 2.5}, ValueError, ["top_k", "2.5", "int"]),
        ({"first": True}, ValueError, ["first", "True"]),
        ({"queries": 3}, TypeError, ["queries", "3", "slice"]),
        ({"queries": slice(0, 9, 2)}, TypeError, ["queries", "step 1"]),
        ({"weights": slice(0, 2)}, TypeError, ["weights", "query slice, key slice"]),
        ({"weights": (slice(0, 2), 3)}, TypeError, ["weights", "3"]),
    ],
    ids=str,
)
def test_a_wrong_want_is_refused_when_it_is_made(fields: dict[str, Any], kind: type, words: list[str]) -> None:
    with pytest.raises(kind) as raised:
        regard.Want(**fields)
    for word in words:
        assert word in str(raised.value)


def test_whole_numbers_stand_for_floats() -> None:
    q, k, v = query(), key(), key()
    same = regard.attention(q, k, v, scale=2.0, softcap=3.0, dropout=0.0)
    assert torch.equal(same, regard.attention(q, k, v, scale=2, softcap=3, dropout=0))


def test_float32_bias_and_sinks_join_half_precision() -> None:
    q, k, v = query().bfloat16(), key().bfloat16(), key().bfloat16()
    out = regard.attention(q, k, v, bias=torch.randn(L, S), sinks=torch.randn(H))
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(), (S,), (L, S), (L, 1), (H, L, S), (1, H, 1, 1), (B, 1, L, S)], ids=str)
def test_a_bias_of_any_rank_up_to_four_broadcasts(shape: tuple[int, ...]) -> None:
    q, k, v, bias = query().double(), key().double(), key().double(), torch.randn(shape, dtype=torch.float64)
    whole = regard.attention(q, k, v, bias=bias.expand(B, H, L, S).contiguous())
    assert torch.allclose(regard.attention(q, k, v, bias=bias), whole, rtol=0, atol=1e-12)


def test_int32_offsets_mean_what_int64_ones_do() -> None:
    q, k, v, offset = query(), key(), key(), torch.tensor([4, -2])
    wide = regard.attention(q, k, v, mask=masks.causal(), query_offset=offset)
    assert torch.equal(regard.attention(q, k, v, mask=masks.causal(), query_offset=offset.int()), wide)


@pytest.mark.parametrize("offset", [2**62, -(2**62)])
@pytest.mark.parametrize("backend", ["eager", "blockwise", "sdpa"])
def test_an_offset_far_beyond_the_keys_sees_all_or_nothing_under_causal(offset: int, backend: str) -> None:
    q, k, v = query(), key(), key()
    out = regard.attention(q, k, v, mask=masks.causal(), query_offset=offset, backend=backend)
    expected = regard.attention(q, k, v, backend=backend) if offset > 0 else torch.zeros_like(q)
    assert torch.allclose(out, expected, rtol=0, atol=1e-6)
    assert not regard.attention(q, k, v, mask=masks.window(left=3), query_offset=offset, backend=backend).any()


@pytest.mark.parametrize("call", [regard.attention, regard.observe, regard.explain], ids=lambda call: call.__name__)
def test_arguments_of_torchs_function_are_refused_with_their_names_here(call: Callable[..., Any]) -> None:
    given = query(), key(), key()
    name = "attention" if call is regard.explain else call.__name__
    for theirs, ours in {
        "attn_mask": ["True = may attend", "mask=masks.keep(tensor)", "bias=tensor"],
        "is_causal": ["mask=masks.causal()", "query_offset=0"],
        "dropout_p": ["give dropout="],
        "enable_gqa": ["leave it out"],
    }.items():
        with pytest.raises(TypeError) as raised:
            call(*given, **{theirs: True})
        said = str(raised.value)
        assert said.startswith(f"{name} has no argument {theirs}; {theirs}: ") and all(part in said for part in ours)
    with pytest.raises(TypeError, match=f"{name} has no argument tempreature; (it takes mask, bias, |explain linear)"):
        call(*given, tempreature=2.0)
