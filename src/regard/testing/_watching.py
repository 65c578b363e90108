"""Rules 67 and 68: a watched model gives what it gave, no other model changes, and no call is lost without a word."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.testing._calls import array, expect, largest
from regard.testing._suite import WIDE, Trial, rule

BATCH, HEADS, TOKENS, DIM = 3, 2, 11, 7  # an even number of heads: torch has a fast path for those
WAYS = ("the function", "torch's function", "a softmax written out", "torch's module")


class _Model(nn.Module):
    """Two layers that attend in one of the ways in which code does."""

    def __init__(self, way: str, fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer(way, fn) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class _Layer(nn.Module):
    def __init__(self, way: str, fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.way, self.fn, self.logits = way, fn, torch.empty(0)
        self.projections = nn.Linear(HEADS * DIM, 3 * HEADS * DIM)
        self.module = nn.MultiheadAttention(HEADS * DIM, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "torch's module":
            return self.module(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]
        query, key, value = (
            part.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for part in self.projections(x).chunk(3, -1)
        )
        self.logits = (query @ key.mT).detach() * DIM**-0.5
        if self.way == "the function":
            out = self.fn(query, key, value)
        elif self.way == "torch's function":
            out = F.scaled_dot_product_attention(query, key, value)
        else:
            out = torch.softmax(query @ key.mT * DIM**-0.5, -1) @ value
        return out.transpose(1, 2).flatten(2)


def _model(t: Trial, way: str) -> tuple[_Model, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = _Model(way, t.fn).to(t.device, t.dtype).eval()
    return made, t.normal(BATCH, TOKENS, HEADS * DIM, seed=5)


def _watched(t: Trial, model: nn.Module, x: Tensor, **given: Any) -> tuple[Tensor, Any, list[str]]:
    """The output, the recording, and what was warned of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with t.need("watch")(model, **given) as recording:
            out = model(x)
    return out, recording, [str(one.message) for one in said]


@rule(67, "a watched model's outputs and gradients keep their bits", WAYS, WIDE)
def the_watched_model_stays(t: Trial, way: str) -> str:
    model, x = _model(t, way)
    with torch.no_grad():
        before = model(x)
        during, _, _ = _watched(t, model, x)
        after = model(x)
    # torch's module leaves its fused kernel while it is watched, and says so in the manual: another kernel, other bits
    apart = 0.0 if way != "torch's module" else 1e-5
    for name, out in (("inside the block", during), ("after it", after)):
        error = largest(array(out) - array(before))
        expect(error <= (apart if out is during else 0.0), f"outputs {name} differ by {error:.2e}")
    x.requires_grad_()
    (plain,) = torch.autograd.grad(model(x).square().sum(), x)
    (seen,) = torch.autograd.grad(_watched(t, model, x)[0].square().sum(), x)
    error = largest(array(seen) - array(plain))
    expect(error == 0.0, f"gradients differ by {error:.2e}")
    return "the same bits"


@rule(67, "models that are not watched are never changed", ("on this thread", "on another thread"), WIDE)
def other_models_stay(t: Trial, where: str) -> str:
    watched, x = _model(t, "torch's function")
    others = [_model(t, way)[0] for way in WAYS]
    layer = nn.TransformerEncoderLayer(HEADS * DIM, HEADS, 13, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1).to(t.device, t.dtype).eval()
    padding = torch.arange(TOKENS, device=x.device) >= torch.tensor([[TOKENS], [4], [7]], device=x.device)

    def run() -> list[Tensor]:
        with torch.no_grad():
            return [*(model(x) for model in others), encoder(x, src_key_padding_mask=padding)]

    found: list[list[Tensor]] = []

    def work() -> None:
        found.append(run())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about its fast path
        before = run()
        with t.need("watch")(watched) as recording:
            watched(x)
            if where == "on this thread":
                work()
            else:
                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
    for at, (one, other) in enumerate(zip(before, found[0], strict=True)):
        expect(torch.equal(one, other), f"model {at} gives other bits while another is watched")
    expect(len(recording.calls) == 2, f"{len(recording.calls)} calls were recorded; the watched model makes 2")
    return "the same bits"


@rule(68, "every call is in the recording, with the log-sum-exp that it has", WAYS, WIDE)
def calls_are_recorded(t: Trial, way: str) -> str:
    model, x = _model(t, way)
    with torch.no_grad():
        _, recording, said = _watched(t, model, x)
    if way == "the function" and said and not recording.calls:
        return f"not seen, and said: {said[0]}"  # a function of one's own may show no softmax
    expect(not recording.missed and not said, f"missed {recording.missed}, warned {said}")
    expect(len(recording.calls) == 2, f"{len(recording.calls)} calls were recorded; the model makes 2")
    if way == "torch's module":
        return "2 calls"
    errors = []
    for call, layer in zip(recording.calls, model.layers, strict=True):
        logits: Any = layer.logits
        exact: Any = array(torch.logsumexp(logits.double(), -1))
        errors.append(largest(array(call.lse) - exact))
    expect(max(errors) <= 1e-5, f"log-sum-exp is off by {max(errors):.2e}")
    return f"2 calls; log-sum-exp off by {max(errors):.1e}"


@rule(68, "an empty or partial recording says so", ("partial", "empty", "no attention"), WIDE)
def gaps_are_told(t: Trial, case: str) -> str:
    model, x = _model(t, "torch's function")
    with torch.no_grad():
        if case == "no attention":
            _, recording, said = _watched(t, nn.Linear(HEADS * DIM, 3).to(t.device, t.dtype), x)
            expect(not recording.calls and bool(said), "a model without attention was watched without a warning")
            return said[0]
        _, whole, _ = _watched(t, model, x)
        limit = 1 if case == "partial" else 0
        _, recording, said = _watched(t, model, x, memory_limit=limit)
    calls, missed = len(recording.calls), len(recording.missed)
    expect(calls == limit, f"{calls} calls were recorded under a limit that leaves {limit}")
    expect(calls + missed == len(whole.calls), f"{calls} calls recorded and {missed} missed, of {len(whole.calls)}")
    expect(all("memory limit" in reason for _, reason in recording.missed), f"the reason is {recording.missed}")
    expect(any("memory limit" in line for line in said), f"a gap was told by {said or 'nothing'}")
    return said[0]
