"""Calls that the tests of the core share: random tensors, masks of every kind, and the oracle's answer."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard import masks, reference
from regard._arguments import prepare as prepare  # the one door to a call's description, for all tests
from regard._hash import uniform as uniform

FUSED = ("blockwise", "sdpa")
BACKENDS = ("eager", *FUSED)


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    """An error where the host waits for a GPU."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*prototype feature.*")  # torch says so of this mode
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


class Operators(TorchDispatchMode):
    """The names of the operators that run inside, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def tensors(
    B: int = 2,
    H: int = 4,
    G: int = 2,
    L: int = 5,
    S: int = 7,
    D: int = 3,
    V: int | None = None,
    dtype: torch.dtype = torch.float64,
    grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (B, H, L, D), (B, G, S, D), (B, G, S, D if V is None else V)
    query, key, value = (torch.randn(shape, dtype=dtype).requires_grad_(grad) for shape in shapes)
    return query, key, value


def every_mask(B: int, H: int, L: int, S: int, seed: int = 0) -> dict[str, masks.Mask]:
    """One of each kind for a call of these sizes, and some joined ones; the seed governs the contents of tensors."""
    draw = np.random.default_rng(seed)

    def booleans(*shape: int) -> Tensor:
        return torch.from_numpy(draw.random(shape) < 0.6)

    cut = int(draw.integers(0, S + 1))
    ids = torch.from_numpy(np.sort(draw.integers(-1, 4, (B, S)), axis=1))
    lengths = [int(n) for n in draw.integers(0, S + 1, B)]
    table = booleans(-(-L // 16) + -(-S // 16), -(-S // 16))
    return {
        "everything": masks.everything(),
        "causal": masks.causal(),
        "window": masks.window(left=S // 5, right=3),
        "padding": masks.padding(lengths),
        "left padding": masks.padding(lengths, side="left"),
        "documents": masks.documents(lengths=[cut, S - cut]),
        "ids": masks.documents(ids=ids),
        "prefix": masks.prefix(S // 2),
        "columns": masks.columns(S // 3),
        "strided": masks.strided(3),
        "blocks": masks.blocks(table, 16),
        "random blocks": masks.random_blocks(2, 16, seed=seed),
        "keep": masks.keep(booleans(L, S)),
        "keep by head": masks.keep(booleans(B, H, L, S)),
        "drop keys": masks.drop(booleans(B, 1, 1, S)),
        "additive": masks.from_additive(torch.where(booleans(L, S), 0.0, -torch.inf)),
        "causal documents": masks.causal() & masks.documents(lengths=[cut, S - cut]),
        "band and columns": (masks.causal() & masks.window(left=S // 7)) | masks.columns(2),
        "not a band": ~masks.window(left=S // 4, right=S // 4),
        "causal or prefix": masks.causal() | masks.prefix(S // 2),
        "causal padding": masks.causal() & masks.padding(lengths),
    }


def bias_with_holes(B: int, H: int, L: int, S: int) -> Tensor:
    """A bias that forbids pairs too, and one row whole."""
    draw = torch.Generator().manual_seed(1)
    made = torch.randn(B, H, L, S, dtype=torch.float64, generator=draw)
    made[torch.rand(B, H, L, S, generator=draw) < 0.4] = -torch.inf
    made[0, 1, 3] = -torch.inf
    return made


def permitted(mask: masks.Mask | None, B: int, H: int, L: int, S: int, offset: Any = None) -> np.ndarray | None:
    """The mask as the oracle takes it, [B, H, L, S]."""
    if mask is None:
        return None
    return mask.dense(L, S, query_offset=offset).expand(B, H, L, S).numpy()


def kept_by_dropout(query: Tensor, key: Tensor, p: float) -> np.ndarray:
    """What the next call would multiply each weight by; the generator is put back as it was."""
    state = torch.get_rng_state()
    seed = torch.randint(0, 2**31 - 1, ())
    torch.set_rng_state(state)
    shape = (*query.shape[:3], key.shape[2])
    index = torch.arange(int(np.prod(shape))).view(shape)
    return (uniform(seed, index) >= p).double().numpy() / (1 - p)


def oracle(
    query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor | None = None, *, keep: Any = None, **given: Any
) -> tuple[reference.Result, Any]:
    """(result, gradients or None) of a call, in float64."""
    given.pop("backend", None)
    given.pop("dropout", None)
    sizes = (*query.shape[:3], key.shape[2])
    pairs = permitted(given.pop("mask", None), *sizes, offset=given.pop("query_offset", None))
    arrays = [array(t) for t in (query, key, value)]
    for name in ("bias", "sinks"):
        if given.get(name) is not None:
            given[name] = array(given[name])
    found = reference.attention(*arrays, mask=pairs, keep=keep, return_weights=True, **given)
    if grad_out is None:
        return found, None
    return found, reference.gradients(*arrays, array(grad_out), mask=pairs, keep=keep, **given)


def array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def differ(found: Tensor, exact: Any) -> float:
    """The largest difference; infinite where one is NaN and the other is not."""
    found_array, exact_array = array(found), np.asarray(exact)
    assert found_array.shape == exact_array.shape
    if (np.isnan(found_array) != np.isnan(exact_array)).any():
        return float("inf")
    same = (found_array == exact_array) | np.isnan(exact_array)
    return float(np.abs(np.where(same, 0.0, found_array - np.where(same, 0.0, exact_array))).max(initial=0.0))


def check_against_oracle(backend: str, inputs: tuple[Tensor, ...], tolerance: float = 1e-11, **given: Any) -> None:
    """Output and all gradients of one call, compared with the oracle's."""
    query, key, value = inputs
    keep = kept_by_dropout(query, key, given["dropout"]) if given.get("dropout") else None
    out = regard.attention(query, key, value, backend=backend, **given)
    grad_out = torch.randn(out.shape, dtype=out.dtype)
    named = {"query": query, "key": key, "value": value, "bias": given.get("bias"), "sinks": given.get("sinks")}
    exact, gradients = oracle(query, key, value, grad_out, keep=keep, **given)
    assert differ(out, exact.out) < tolerance
    wanted = {name: t for name, t in named.items() if t is not None and t.requires_grad}
    made = torch.autograd.grad(out, list(wanted.values()), grad_out)
    truth = dict(zip(named, gradients, strict=True))
    for name, grad in zip(wanted, made, strict=True):
        assert differ(grad, truth[name]) < tolerance * max(1.0, np.abs(truth[name]).max(initial=0.0)), name
