"""Checks a call's arguments and describes it, so that a form can be chosen and run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard._arguments import prepare
from regard.backends._base import accumulation
from regard.linear import _masking
from regard.linear._features import Features
from regard.linear._masking import Reading
from regard.linear._state import LinearState
from regard.masks import Mask
from regard.spec import CallSpec


class Request(NamedTuple):
    """One call, checked. The keys are the last S of ``total``: a state stands for those before them."""

    spec: CallSpec
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None
    reading: Reading
    features: Features
    normalize: bool
    gates: Tensor | None  # [B or 1, K, S] logs of what is left of the sums when a token comes
    offset: int
    state: LinearState | None

    @property
    def first(self) -> int:
        """How many tokens came before these keys."""
        return 0 if self.state is None else self.state.position

    @property
    def total(self) -> int:
        return self.first + self.spec.keys

    @property
    def work(self) -> torch.dtype:
        return accumulation(self.spec.dtype)

    @property
    def state_heads(self) -> int:
        return self.spec.kv_heads if self.gates is None else int(self.gates.shape[1])


def make_request(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | None = None,
    feature_map: Any = "elu",
    scale: float | None = None,
    normalize: bool = True,
    decay: Tensor | Sequence[float] | None = None,
    log_gate: Tensor | None = None,
    query_offset: int | Tensor | None = None,
    state: LinearState | None = None,
) -> Request:
    for name, given in (("query", query), ("key", key), ("value", value)):
        if isinstance(given, Tensor) and given.is_nested:
            raise TypeError(
                f"{name} is nested; regard.linear_attention takes padded [batch, head, token, dim] tensors. "
                "regard.nn.LinearAttention takes nested ones, or pack the items into one row and use masks.documents."
            )
    mode = "compile" if torch.compiler.is_compiling() else None
    plain_mask = mask if state is None else None  # with a state, the mask is about the keys before too
    call = prepare(query, key, value, plain_mask, None, scale, None, None, 0.0, query_offset, mode=mode)
    spec = call.spec
    if not isinstance(normalize, bool):
        raise TypeError(f"normalize must be True or False, got {normalize!r}")
    mask = mask.sized(spec.batch, spec.heads) if isinstance(mask, Mask) else mask
    first = 0 if state is None else _check_state(state, spec, query_offset)
    total = first + spec.keys
    if state is not None and mask is not None:
        if not isinstance(mask, Mask):
            raise TypeError(f"mask must be a regard mask such as masks.causal(), got {type(mask).__name__}")
        mask.check(spec.batch, spec.heads, spec.queries, total)
    offset = call.offset if state is None else first
    reading = _masking.read(mask, spec.queries, total, offset)
    if state is not None and not reading.causal:
        raise ValueError("state= goes on from earlier tokens, which only a causal call does: pass mask=masks.causal()")
    if isinstance(offset, Tensor):
        if reading.causal or reading.documents is not None or reading.refusals:
            raise ValueError(
                "query_offset must be an int here: items that begin at different positions cannot share the chunks of "
                "linear attention; call it item by item"
            )
        offset = 0  # no part of the mask asks where a query stands
    gates = _gates(decay, log_gate, spec, call.query)
    if log_gate is not None and spec.mode == "plain" and log_gate.device.type == "cpu":
        _check_gate_values(log_gate.detach(), reading, spec, first)
    if gates is not None and not reading.causal:
        raise ValueError(
            "decay= and log_gate= let the weight of a key fade with each token after it, which needs an order: pass "
            "mask=masks.causal()"
        )
    features = Features(feature_map, None if scale is None else spec.scale, spec.head_dim, normalize)
    return Request(
        spec, call.query, call.key, call.value, mask, reading, features, normalize, gates, offset - first, state
    )


def _check_state(state: object, spec: CallSpec, query_offset: object) -> int:
    if not isinstance(state, LinearState):
        raise TypeError(f"state must be a regard.linear.LinearState, got {type(state).__name__}")
    if query_offset is not None:
        raise ValueError("query_offset was given with a state, which knows where the new tokens stand; leave it out")
    if spec.queries != spec.keys:
        raise ValueError(
            f"with a state, query and key are the same new tokens; got {spec.queries} queries and {spec.keys} keys"
        )
    if state.batch is not None and state.batch != spec.batch:
        raise ValueError(f"the state is of {state.batch} batch items, but the call has {spec.batch}")
    return state.position


def _gates(
    decay: Tensor | Sequence[float] | None, log_gate: Tensor | None, spec: CallSpec, query: Tensor
) -> Tensor | None:
    """Logs in float64, where the device has it: they are summed over many tokens, and then subtracted."""
    wide = torch.float32 if query.device.type == "mps" else torch.float64
    logs = []
    if decay is not None:
        rates = _rates(decay)
        if not rates.is_floating_point():
            raise TypeError(f"decay must hold floats in (0, 1], got {rates.dtype}")
        if rates.shape not in ((spec.heads,), (spec.kv_heads,)):
            raise ValueError(
                f"decay must be [num_heads] = [{spec.heads}], one number per head, got {list(rates.shape)}"
            )
        if spec.mode == "plain" and rates.device.type == "cpu" and not bool(((rates > 0) & (rates <= 1)).all()):
            raise ValueError(f"decay must be above 0 and at most 1, got {rates.tolist()}")
        logs.append(rates.to(query.device, wide).log()[None, :, None].expand(1, -1, spec.keys))
    if log_gate is not None:
        logs.append(_checked_gate(log_gate, spec, query.device).to(wide))
    if len(logs) == 2 and logs[0].shape[1] != logs[1].shape[1]:
        logs = [log.repeat_interleave(spec.heads // log.shape[1], 1) for log in logs]
    return None if not logs else logs[0] if len(logs) == 1 else logs[0] + logs[1]


def _rates(decay: object) -> Tensor:
    if isinstance(decay, Tensor):
        return decay
    numbers = list(decay) if isinstance(decay, Iterable) and not isinstance(decay, (str, bytes)) else [None]
    if not all(isinstance(number, Real) and not isinstance(number, bool) for number in numbers):
        raise TypeError(f"decay must be a tensor or a sequence of one number in (0, 1] per head, got {decay!r}")
    return torch.tensor([float(number) for number in numbers], dtype=torch.float64)  # type: ignore[arg-type]


def _checked_gate(log_gate: object, spec: CallSpec, device: torch.device) -> Tensor:
    if not isinstance(log_gate, Tensor) or not log_gate.is_floating_point():
        raise TypeError(f"log_gate must be a float tensor [batch, num_heads, key], got {_kind(log_gate)}")
    if log_gate.device != device:
        raise TypeError(f"log_gate is on {log_gate.device} but query is on {device}; move one of them")
    shapes = [(spec.batch, heads, spec.keys) for heads in (spec.heads, spec.kv_heads)]
    if tuple(log_gate.shape) not in shapes:
        raise ValueError(
            f"log_gate must be [batch, num_heads, key] = {list(shapes[0])}, one number per head and key, "
            f"got {list(log_gate.shape)}"
        )
    return log_gate


def _check_gate_values(log_gate: Tensor, reading: Reading, spec: CallSpec, first: int) -> None:
    """Refuse what is no logarithm of a factor. The gates of tokens that the mask hides are not used, nor looked at."""
    if not log_gate.numel():
        return
    low, top = (float(bound) for bound in torch.aminmax(log_gate))
    if top <= 0 and low > -torch.inf:  # NaN is neither
        return
    hidden = _masking.visible(reading, spec.queries, first + spec.keys, first, log_gate.device).hidden
    wrong = ~((log_gate <= 0) & (log_gate > -torch.inf))
    if hidden is not None:
        wrong = wrong & ~hidden[:, None]
    if bool(wrong.any()):
        raise ValueError(
            f"log_gate holds logarithms of factors in (0, 1], finite and at most 0 (such as logsigmoid gives); "
            f"got {float(log_gate[wrong][0])}"
        )


def _kind(given: object) -> str:
    return str(given.dtype) if isinstance(given, Tensor) else type(given).__name__
