"""The backward kernels of `backend="triton"` against float64 arithmetic on dense logits: masks, modifiers, dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests._triton.calls import DEVICE, placed, sample
from tests._triton.inside import attend, gradients
from tests.core_calls import every_mask, prepare, uniform
from torch import Tensor

import regard
from regard import bias, masks

SIZES = {"B": 2, "H": 4, "G": 2, "L": 37, "S": 71}
NAMES = ("query", "key", "value", "bias", "sinks")


def tensors(B: int, H: int, G: int, L: int, S: int, D: int = 11, E: int = 5, dtype: Any = None) -> dict[str, Tensor]:
    shapes = {"query": (B, H, L, D), "key": (B, G, S, D), "value": (B, G, S, E)}
    made = {name: torch.randn(shape, device=DEVICE) for name, shape in shapes.items()}
    return {name: tensor.to(dtype or torch.float32) for name, tensor in made.items()}


def exact(given: dict[str, Tensor], grad_out: Tensor, more: dict[str, Any], seed: int | None) -> dict[str, Tensor]:
    """Gradients by float64 operations on all pairs; with dropout, of the draw that the kernels make."""
    leaves = {n: t.detach().double().requires_grad_() for n, t in given.items()}
    query, key, value = (leaves[name] for name in NAMES[:3])
    heads, (L, S) = query.shape[1], (query.shape[2], key.shape[2])
    key, value = (t.repeat_interleave(heads // key.shape[1], 1) for t in (key, value))
    logits = query @ key.mT * more.get("scale", query.shape[-1] ** -0.5)
    if "softcap" in more:
        logits = torch.tanh(logits / more["softcap"]) * more["softcap"]
    offset = more.get("query_offset")
    if isinstance(more.get("bias"), regard.bias.Bias):
        made = more["bias"]
        table = leaves["bias"]
        logits = logits + made.rule.tile(table, range(L), range(S), S - L if offset is None else offset)
    elif "bias" in leaves:
        logits = logits + leaves["bias"]
    if "mask" in more:
        place = offset.cpu() if isinstance(offset, Tensor) else offset
        seen = more["mask"].dense(L, S, query_offset=place).to(DEVICE)
        logits = logits.masked_fill(~seen, -torch.inf)
    everything = logits
    if "sinks" in leaves:
        sink = leaves["sinks"].view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        everything = torch.cat([logits, sink], -1)
    top = everything.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    total = (everything - top).exp().sum(-1, keepdim=True)
    weights = (logits - top).exp() / torch.where(total == 0, 1.0, total)
    if more.get("dropout"):
        element = torch.arange(weights.numel(), device=DEVICE).view(weights.shape)
        kept = uniform(torch.tensor(seed, device=DEVICE), element) >= more["dropout"]
        weights = weights * kept / (1 - more["dropout"])
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    out = (weights @ value).masked_fill(empty, 0.0)
    grads = torch.autograd.grad(out, list(leaves.values()), grad_out.double(), allow_unused=True)
    return {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(leaves.items(), grads, strict=True)}


def wrong(given: dict[str, Tensor], tolerance: float = 3e-5, **more: Any) -> list[str]:
    """In which gradients ``backend="triton"`` differs from ``exact``. Keywords as of ``regard.attention``."""
    if "mask" in more:
        more["mask"] = placed(more["mask"])
    leaves = {n: t.detach().clone().requires_grad_() for n, t in given.items()}
    extra = {n: leaves[n] for n in ("bias", "sinks") if n in leaves}
    if isinstance(more.get("bias"), regard.bias.Bias):
        extra["bias"] = more["bias"]
        leaves["bias"] = more["bias"].table(torch.float32, torch.device(DEVICE))
    torch.manual_seed(5)
    seed = int(torch.randint(0, 2**31 - 1, (), device=DEVICE)) if more.get("dropout") else None
    torch.manual_seed(5)
    out = regard.attention(*(leaves[n] for n in NAMES[:3]), **{**more, **extra}, backend="triton")
    grad_out = torch.randn(out.shape, device=DEVICE).to(out.dtype)
    wanted = [t for t in leaves.values() if t.requires_grad]
    made = dict(zip(leaves, torch.autograd.grad(out, wanted, grad_out), strict=False))
    meant = exact(leaves, grad_out, more, seed)
    bad = []
    for name, grad in made.items():
        error = (grad.double() - meant[name]).abs().max().item()
        size = meant[name].abs().max().item()
        if grad.shape != meant[name].shape or not error <= tolerance * (1 + size):
            bad.append(f"{name}: off by {error:.2e} of {size:.2e}")
    return bad


@pytest.mark.parametrize("kind", every_mask(2, 4, 37, 71))
def test_every_mask_gives_the_gradients_of_its_dense_form(kind: str) -> None:
    assert wrong(tensors(**SIZES), mask=every_mask(2, 4, 37, 71)[kind]) == []


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"softcap": 1.5, "mask": masks.causal()},
        {"scale": -0.7, "mask": masks.causal()},
        {"scale": 0.0},
        {"query_offset": torch.tensor([3, 50]), "mask": masks.causal() & masks.window(left=20)},
        {"query_offset": -20, "mask": masks.causal()},
        {"mask": masks.padding([0, 71]) & masks.causal()},
        {"mask": masks.padding([5, 64], side="left") & masks.window(left=9, right=3)},
        {"dropout": 0.3, "mask": masks.padding([17, 71])},
        {"dropout": 0.3, "softcap": 2.0},
    ],
    ids=lambda more: "-".join(more) or "plain",
)
def test_every_modifier_enters_the_gradients(more: dict[str, Any]) -> None:
    more = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in more.items()}
    assert wrong(tensors(**SIZES), **more) == []


SHAPES = [(2, 4, 37, 71), (1, 4, 37, 71), (2, 1, 37, 71), (1, 1, 37, 71), (2, 1, 1, 71), (1, 4, 37, 1), (1, 1, 1, 1)]
SEEN = [None, masks.causal(), masks.strided(3)]
OFFSETS = [None, 5, torch.tensor([3, 50])]
POISONS = [torch.nan, torch.inf, 1e38]


# every third pair: each shape, each mask, and no pair twice
@pytest.mark.parametrize(
    ("shape", "mask"),
    sample([(shape, SEEN[(i + j) % 3]) for j in range(3) for i, shape in enumerate(SHAPES)], slice(len(SHAPES))),
    ids=str,
)
def test_a_bias_receives_the_gradient_summed_over_what_shares_it(shape: tuple[int, ...], mask: Any) -> None:
    given = {**tensors(**SIZES), "bias": torch.randn(shape, device=DEVICE)}
    assert wrong(given, **({} if mask is None else {"mask": mask})) == []


@pytest.mark.parametrize(
    ("offset", "mask"),
    sample([(o, [masks.causal(), None][(i + j) % 2]) for j in range(2) for i, o in enumerate(OFFSETS)], slice(3)),
    ids=lambda given: "each" if isinstance(given, Tensor) else str(given),
)
def test_the_table_of_a_rule_receives_its_gradient(offset: Any, mask: Any) -> None:
    more: dict[str, Any] = {} if mask is None else {"mask": mask}
    if offset is not None:
        more["query_offset"] = offset.to(DEVICE) if isinstance(offset, Tensor) else offset
    t5 = bias.T5Bias(4, num_buckets=8, max_distance=20).to(DEVICE)
    assert wrong(tensors(**SIZES), bias=t5, **more) == []
    slopes = torch.rand(4, device=DEVICE).requires_grad_()
    assert wrong(tensors(**SIZES), bias=bias.alibi(4, slopes=slopes), **more) == []


def test_sinks_receive_their_gradient() -> None:
    given = {**tensors(**SIZES), "sinks": torch.randn(4, device=DEVICE)}
    assert wrong(given, mask=masks.causal(), query_offset=-3) == []


def test_many_tiles_in_every_direction() -> None:
    every = [masks.padding([290, 100]), masks.window(left=70, right=20), masks.causal(), masks.documents([150, 150])]
    for mask in sample(every, slice(2)):
        B = 2 if mask.marks_padding else 1
        assert wrong(tensors(B, 2, 1, 300, 300, D=32, E=16), mask=mask, tolerance=1e-4) == []


def test_half_precision_gradients_are_near() -> None:
    half = torch.float16 if DEVICE == "cpu" else torch.bfloat16  # the interpreter has no bfloat16 products
    given = tensors(**{**SIZES, "L": 131, "S": 131}, D=64, E=64, dtype=half)
    assert wrong(given, mask=masks.causal(), tolerance=2e-2) == []


def test_the_draw_of_dropout_is_that_of_the_other_backends() -> None:
    given = tensors(**SIZES)
    outs = []
    for backend in ("triton", "blockwise"):
        torch.manual_seed(3)
        outs.append(regard.attention(*given.values(), mask=masks.causal(), dropout=0.4, backend=backend))
    assert (outs[0] - outs[1]).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("side", "poison"),
    sample([(["right", "left"][(i + j) % 2], poison) for j in range(2) for i, poison in enumerate(POISONS)], slice(3)),
)
def test_padding_may_hold_anything(side: str, poison: float) -> None:
    """The kernels read zeros there: nothing has to be cleaned before."""
    given = tensors(2, 4, 2, 70, 70, D=16, E=16)
    lengths = torch.tensor([23, 64], device=DEVICE)
    mask = masks.padding(lengths, side=side)
    hidden = mask.hidden_keys(70, DEVICE)
    assert hidden is not None
    bad = {name: tensor.clone() for name, tensor in given.items()}
    for name in ("key", "value"):
        bad[name] = bad[name].masked_fill(hidden[:, None, :, None], poison)
    found = []
    for each in (given, bad):
        call = prepare(*each.values(), mask, None, None, None, None, 0.0, None)
        done = attend.attend(call, rows=False)
        torch.manual_seed(1)
        grad_out = torch.randn(done.out.shape, device=DEVICE)
        found.append(
            (done.out, done.lse, *gradients.gradients(call, grad_out, done.out, done.lse, (True,) * 3 + (False,)))
        )
    for clean, same in zip(*found, strict=True):
        assert clean is None or torch.equal(clean, same)
