"""Rules 15 to 24: shapes and refusals."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from regard.testing._calls import array, expect, rounding
from regard.testing._suite import DOUBLE, HALF, WIDE, Trial, rule, within

BAD = (ValueError, TypeError)
EMPTY_SIZES = {"no keys": (2, 3, 5, 0), "no queries": (2, 3, 0, 7), "no batch": (0, 3, 5, 7), "nothing": (0, 3, 0, 0)}


@rule(15, "S = 0 gives zeros, L = 0 and B = 0 give empty outputs, with gradients of the right shape", EMPTY_SIZES)
def empty_sizes(t: Trial, case: str) -> str:
    return t.agrees(t.call(*EMPTY_SIZES[case], 11, Dv=3))


@rule(15, "S = 0 gives zeros, L = 0 and B = 0 give empty outputs, with gradients of the right shape", EMPTY_SIZES)
def empty_sizes_with_everything(t: Trial, case: str) -> str:
    B, H, L, S = EMPTY_SIZES[case]
    bias, sinks = t.normal(H, L, S, seed=4, dtype=t.side), t.normal(H, seed=5, dtype=t.side)
    return t.agrees(t.call(B, H, L, S, 11, tree=("causal",), bias=bias, sinks=sinks, options={"softcap": 2.0}))


@rule(16, "exactly one permitted key: the output is that value, bitwise on CPU", ("one key", "diagonal", "first row"))
def one_permitted_key(t: Trial, case: str) -> str:
    if case == "one key":
        call = t.call(2, 4, 5, 1, 3)
        expected = call.value.expand(2, 4, 5, 3)
        found = call.run(t.fn)
    elif case == "diagonal":
        call = t.call(2, 3, 7, 7, 11, tree=("window", 0, 0), bias=t.normal(7, 7, seed=4, dtype=t.side) * 9)
        found, expected = call.run(t.fn), call.value
    else:
        call = t.call(2, 3, 65, 65, 11, tree=("causal",))
        found, expected = call.run(t.fn)[:, :, 0], call.value[:, :, 0]
    if torch.device(t.device).type == "cpu":
        error = float((found.double() - expected.double()).abs().max())
        expect(torch.equal(found, expected), f"differs from the value by {error:.1e}")
        return "equal bit by bit"
    return within("output", found, array(expected), rounding(array(expected), t.dtype))


@rule(17, "d_v may differ from d_k; the default scale is 1/√d_k", ("d_v > d_k", "d_v < d_k", "d_v = 1", "d_k = 1"))
def value_width(t: Trial, case: str) -> str:
    D, Dv = {"d_v > d_k": (3, 11), "d_v < d_k": (11, 3), "d_v = 1": (7, 1), "d_k = 1": (1, 7)}[case]
    return t.agrees(t.call(2, 3, 5, 7, D, Dv=Dv))


@rule(18, "scale may be 0 or negative, with or without causal", ("0", "-1.5", "0 causal", "-1.5 causal", "-1.5 GQA"))
def scale(t: Trial, case: str) -> str:
    number = float(case.split()[0])
    tree = ("causal",) if "causal" in case else None
    detail = t.agrees(t.call(2, 4, 5, 7, 11, Hkv=2 if "GQA" in case else 4, tree=tree, options={"scale": number}))
    if case == "0":
        call = t.call(2, 4, 5, 7, 11, options={"scale": 0.0})
        mean = array(call.value).mean(2, keepdims=True).repeat(5, 2)
        within("the mean of the values", call.run(t.fn), mean, call.value_budget())
    return detail


@rule(19, "query head h uses kv head ⌊h·Hkv/Hq⌋", ("6 over 3", "6 over 2", "5 over 1", "8 over 4 causal"))
def grouped_heads(t: Trial, case: str) -> str:
    words = case.split()
    tree = ("causal",) if "causal" in case else None
    return t.agrees(t.call(2, int(words[0]), 5, 7, 11, Hkv=int(words[2]), tree=tree))


@rule(19, "query head h uses kv head ⌊h·Hkv/Hq⌋", ("7 over 3", "3 over 5"))
def heads_that_do_not_divide(t: Trial, case: str) -> str:
    first, _, second = case.split()
    q, k, v = t.normal(1, int(first), 4, 8), t.normal(1, int(second), 4, 8), t.normal(1, int(second), 4, 8)
    return t.raises(ValueError, [first, second], lambda: t.fn(q, k, v))


BROADCAST = {
    "query of batch 1": ((1, 2, 4, 8), (3, 2, 5, 8), (3, 2, 5, 8)),
    "key and value of batch 1": ((3, 2, 4, 8), (1, 2, 5, 8), (1, 2, 5, 8)),
    "key of batch 1": ((3, 2, 4, 8), (1, 2, 5, 8), (3, 2, 5, 8)),
    "value of batch 1": ((3, 2, 4, 8), (3, 2, 5, 8), (1, 2, 5, 8)),
    "value with one head": ((3, 4, 4, 8), (3, 4, 5, 8), (3, 1, 5, 8)),
    "key with one head": ((3, 4, 4, 8), (3, 1, 5, 8), (3, 4, 5, 8)),
    "query with one head": ((3, 1, 4, 8), (3, 4, 5, 8), (3, 4, 5, 8)),
}
MALFORMED = {
    "more values than keys": ((2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 6, 8)),
    "more keys than values": ((2, 3, 4, 8), (2, 3, 6, 8), (2, 3, 5, 8)),
    "one value for many keys": ((2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 1, 8)),
    "unequal d_k": ((2, 3, 4, 8), (2, 3, 5, 9), (2, 3, 5, 8)),
    "d_k = 1 against 8": ((2, 3, 4, 8), (2, 3, 5, 1), (2, 3, 5, 8)),
    "d_k = 0": ((2, 3, 4, 0), (2, 3, 5, 0), (2, 3, 5, 8)),
    "rank 2": ((4, 8), (5, 8), (5, 8)),
    "rank 3": ((3, 4, 8), (3, 5, 8), (3, 5, 8)),
    "rank 5": ((1, 2, 3, 4, 8), (1, 2, 3, 5, 8), (1, 2, 3, 5, 8)),
    "ranks mixed": ((2, 3, 4, 8), (3, 5, 8), (3, 5, 8)),
}


@rule(20, "q, k, v never broadcast silently in batch or heads", BROADCAST, WIDE)
def broadcasting(t: Trial, case: str) -> str:
    tensors = [t.normal(*shape) for shape in BROADCAST[case]]
    return t.raises(ValueError, [], lambda: t.fn(*tensors))


@rule(21, "unequal lengths or d_k, wrong rank and d_k = 0 raise before any kernel runs", MALFORMED, WIDE)
def malformed(t: Trial, case: str) -> str:
    tensors = [t.normal(*shape) for shape in MALFORMED[case]]
    with _Operations() as ran:
        detail = t.raises(BAD, [], lambda: t.fn(*tensors))
    expect(not ran.kernels, f"ran {ran.kernels} before raising")
    return detail


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers which products and softmaxes were computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(word in name for word in ("mm", "softmax", "attention", "exp.", "einsum")):
            self.kernels.append(name)
        return func(*args, **(kwargs or {}))


MIXED = ("query", "key", "value")


@rule(22, "mixed dtypes or devices and integer inputs raise TypeError naming both", MIXED)
def mixed_dtype(t: Trial, case: str) -> str:
    other = torch.float32 if t.dtype != torch.float32 else torch.float64
    tensors = {name: t.normal(1, 2, 3, 4) for name in MIXED}
    tensors[case] = tensors[case].to(other)
    words = [str(t.dtype).split(".")[1], str(other).split(".")[1]]
    return t.raises(TypeError, words, lambda: t.fn(*tensors.values()))


@rule(22, "mixed dtypes or devices and integer inputs raise TypeError naming both", MIXED, WIDE)
def mixed_device(t: Trial, case: str) -> str:
    tensors = {name: t.normal(1, 2, 3, 4) for name in MIXED}
    tensors[case] = tensors[case].to("meta")
    words = [torch.device(t.device).type, "meta"]
    return t.raises(TypeError, words, lambda: t.fn(*tensors.values()))


@rule(22, "mixed dtypes or devices and integer inputs raise TypeError naming both", ("int64", "uint8", "bool"), DOUBLE)
def integer_inputs(t: Trial, case: str) -> str:
    tensor = torch.ones(1, 2, 3, 4, device=t.device).to(getattr(torch, case))
    return t.raises(TypeError, [case], lambda: t.fn(tensor, tensor, tensor))


@rule(22, "mixed dtypes or devices and integer inputs raise TypeError naming both", ("bias", "sinks"), HALF)
def float32_beside_half(t: Trial, case: str) -> str:
    call = t.call(2, 3, 5, 7, 11)
    shape = (5, 7) if case == "bias" else (3,)
    return t.agrees(call.but(**{case: t.normal(*shape, seed=4, dtype=torch.float32)}))


@rule(22, "mixed dtypes or devices and integer inputs raise TypeError naming both", ("bias", "sinks"))
def mixed_dtype_beside(t: Trial, case: str) -> str:
    other = torch.float64 if t.dtype != torch.float64 else torch.float32
    call = t.call(2, 3, 5, 7, 11)
    given = t.normal(*((5, 7) if case == "bias" else (3,)), dtype=other)
    words = [case, str(t.dtype).split(".")[1], str(other).split(".")[1]]
    return t.raises(TypeError, words, lambda: call.but(**{case: given}).run(t.fn))


def bad_arguments(t: Trial) -> dict[str, tuple[dict[str, Any], list[str]]]:
    """Keywords that a call of sizes B=2, H=3, L=5, S=7 must refuse, and what the message must mention."""
    return {
        "bias of a wrong shape": ({"bias": t.normal(5, 6, dtype=t.side)}, ["bias", "6", "7"]),
        "bias that enlarges the batch": ({"bias": t.normal(4, 1, 5, 7, dtype=t.side)}, ["bias", "4", "2"]),
        "bias that is boolean": ({"bias": torch.ones(5, 7, dtype=torch.bool, device=t.device)}, ["bias", "bool"]),
        "bias that is a list": ({"bias": [[0.0] * 7] * 5}, ["bias", "list"]),
        "sinks of a wrong shape": ({"sinks": t.normal(4, dtype=t.side)}, ["sinks", "4", "3"]),
        "softcap 0": ({"softcap": 0.0}, ["softcap", "0"]),
        "softcap -2": ({"softcap": -2.0}, ["softcap", "-2"]),
        "softcap NaN": ({"softcap": float("nan")}, ["softcap", "nan"]),
        "scale NaN": ({"scale": float("nan")}, ["scale", "nan"]),
        "scale a string": ({"scale": "0.5"}, ["scale", "0.5"]),
        "dropout 1.5": ({"dropout": 1.5}, ["dropout", "1.5"]),
        "query_offset a float": ({"query_offset": 0.5}, ["query_offset", "float"]),
        "query_offset of a wrong length": ({"query_offset": torch.tensor([1, 2, 3])}, ["query_offset", "3", "2"]),
        "mask a string": ({"mask": "causal"}, ["mask", "str"]),
    }


BAD_ARGUMENTS = tuple(bad_arguments(Trial(torch.add, "cpu", torch.float64, None)))


@rule(23, "every refusal is ValueError or TypeError and names argument, given and expected", BAD_ARGUMENTS, WIDE)
def bad_argument(t: Trial, case: str) -> str:
    given, words = bad_arguments(t)[case]
    call = t.call(2, 3, 5, 7, 11)
    return t.raises(BAD, words, lambda: t.fn(call.query, call.key, call.value, **given))


NAMED: dict[str, tuple[Callable[[Trial], list[Tensor]], list[str]]] = {
    "lengths": (lambda t: [t.normal(1, 2, 3, 4), t.normal(1, 2, 5, 4), t.normal(1, 2, 6, 4)], ["key", "value"]),
    "d_k": (lambda t: [t.normal(1, 2, 3, 4), t.normal(1, 2, 5, 9), t.normal(1, 2, 5, 4)], ["query", "key", "4", "9"]),
    "rank": (lambda t: [t.normal(3, 4), t.normal(5, 4), t.normal(5, 4)], ["query", "batch"]),
    "batch": (lambda t: [t.normal(3, 2, 3, 4), t.normal(1, 2, 5, 4), t.normal(1, 2, 5, 4)], ["key", "3", "1"]),
    "d_k = 0": (lambda t: [t.normal(1, 2, 3, 0), t.normal(1, 2, 5, 0), t.normal(1, 2, 5, 4)], ["query"]),
}


@rule(23, "every refusal is ValueError or TypeError and names argument, given and expected", NAMED, WIDE)
def bad_tensors(t: Trial, case: str) -> str:
    make, words = NAMED[case]
    tensors = make(t)
    return t.raises(BAD, words, lambda: t.fn(*tensors))


@rule(23, "every refusal is ValueError or TypeError and names argument, given and expected", dtypes=WIDE)
def nested_tensor(t: Trial, case: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls nested tensors a prototype
        nested = torch.nested.nested_tensor([t.normal(2, n, 4) for n in (3, 5)], layout=torch.jagged, device=t.device)
    return t.raises(TypeError, ["nested"], lambda: t.fn(nested, nested, nested))


@rule(24, "q, k, v, mask and bias are never modified", ("plain", "everything at once", "with gradients", "poisoned"))
def inputs_unmodified(t: Trial, case: str) -> str:
    call = t.call(2, 4, 5, 7, 11, Hkv=2, tree=None if case == "plain" else ("keep", 3, (2, 1, 5, 7)))
    if case != "plain":
        call.bias, call.sinks = t.normal(4, 5, 7, seed=4, dtype=t.side), t.normal(4, seed=5, dtype=t.side)
    if case == "poisoned":
        t.on_cpu()
        call.tree = ("padding", (3, 6), "right")
        call.key[:, :, 6] = float("nan")
    given = call.keywords()
    held = [x for x in (call.query, call.key, call.value, *given.values()) if isinstance(x, Tensor)]
    held += list(getattr(given.get("mask"), "tensors", ()))
    before = [(x.clone(), x._version) for x in held]
    if case == "with gradients":
        call.differentiate(t.fn)
    t.fn(call.query, call.key, call.value, **given)
    for tensor, (copy, version) in zip(held, before, strict=True):
        same = torch.equal(tensor.nan_to_num(), copy.nan_to_num()) if tensor.is_floating_point() else tensor.equal(copy)
        expect(same and tensor._version == version, f"an input of shape {tuple(tensor.shape)} was written to")
    return f"{len(held)} tensors unchanged"
