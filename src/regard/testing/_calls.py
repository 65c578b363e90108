"""One call of attention for the suite: its tensors, what the oracle says about it, and the error it may have.

The budget is derived: E is the error that plain arithmetic in the call's own dtype has against the float64 oracle, and
an implementation may have 2E in the output and 3E in gradients, plus the floor that rules 26 to 28 state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard import reference
from regard.testing import _rules_of_bias as bias_rules
from regard.testing import _rules_of_masks as meaning

FLOOR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 1e-5}
INPUTS = ("query", "key", "value", "bias", "sinks")

Array = NDArray[np.float64]
Attention = Callable[..., Tensor]


class Failed(AssertionError):
    """A rule does not hold; the message carries the numbers."""


def gap(first: Tensor, second: Tensor) -> str:
    """The largest difference, in words."""
    return f"{float((first - second).abs().max()):.1e}"


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise Failed(message)


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """N(0, 1), the same numbers for a seed on every device."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(dtype).to(device)


def array(tensor: Tensor) -> Array:
    found: Array = tensor.detach().to("cpu", torch.float64).numpy()
    return found


@dataclass
class Call:
    """Tensors and keywords of one call. The mask is given as a tree, so that the oracle does not ask the object."""

    query: Tensor
    key: Tensor
    value: Tensor
    tree: meaning.Tree | None = None
    masks: Any = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    query_offset: Any = None
    options: dict[str, Any] = field(default_factory=dict)  # scale, softcap
    rule: bias_rules.Rule | None = None  # the bias is then the rule's table
    kept: Array | None = None  # what dropout multiplied each weight by, for the oracle: 0 or 1/(1-p)

    def but(self, **changes: Any) -> Call:
        return replace(self, **changes)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        B, H, L = self.query.shape[:3]
        return B, H, L, self.key.shape[2]

    @property
    def grad_out(self) -> Tensor:
        shape = (*self.query.shape[:3], self.value.shape[-1])
        return normal(shape, 77, self.query.dtype, str(self.query.device))

    def keywords(self) -> dict[str, Any]:
        """Everything that was given, by `attention`'s names; what was not given is left out."""
        given: dict[str, Any] = dict(self.options)
        if self.tree is not None:
            given["mask"] = meaning.build(self.masks, self.tree, self.query.device)
        for name in ("bias", "sinks", "query_offset"):
            if getattr(self, name) is not None:
                given[name] = getattr(self, name)
        if self.rule is not None:
            given["bias"] = bias_rules.build(self.rule, given["bias"])
        return given

    def run(self, fn: Attention) -> Tensor:
        return fn(self.query, self.key, self.value, **self.keywords())

    @cached_property
    def pairs(self) -> NDArray[np.bool_] | None:
        if self.tree is None:
            return None
        offset = self.query_offset
        offset = offset.cpu().numpy() if isinstance(offset, Tensor) else offset
        return meaning.define(self.tree, self.sizes, offset, self.masks)

    @cached_property
    def oracle(self) -> reference.Result:
        found: reference.Result = reference.attention(*self._arrays(), **self._modifiers(), return_weights=True)
        return found

    def oracle_gradients(self, grad_out: Tensor) -> dict[str, Array]:
        found = reference.gradients(*self._arrays(), array(grad_out), **self._modifiers())
        by_name = {name: part for name, part in zip(INPUTS, found, strict=True) if part is not None}
        if self.rule is not None:
            by_name["bias"] = bias_rules.table_gradient(self.rule, by_name["bias"], self.sizes, self.query_offset)
        return by_name

    def differentiate(
        self, fn: Attention, grad_out: Tensor | None = None, wrt: Sequence[str] = INPUTS
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The output, and the gradient of each input among `wrt` that there is."""
        leaves = {name: getattr(self, name).detach().requires_grad_() for name in wrt if self._has(name)}
        out = self.but(**leaves).run(fn)
        found = torch.autograd.grad(out, list(leaves.values()), self.grad_out if grad_out is None else grad_out)
        return out.detach(), dict(zip(leaves, found, strict=True))

    def value_budget(self) -> float:
        """2E + floor, E being the output error of `naive` in this call's dtype."""
        return budget(2, array(self.run(self._naive)), self.oracle.out, self.query.dtype)

    def gradient_budgets(self, grad_out: Tensor) -> dict[str, float]:
        """3E + floor for each input."""
        truth = self.oracle_gradients(grad_out)
        _, rough = self.differentiate(self._naive, grad_out)
        return {name: budget(3, array(rough[name]), truth[name], self.query.dtype) for name in truth}

    def _naive(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        given = {name: option for name, option in given.items() if name not in ("mask", "query_offset")}
        pairs = None if self.pairs is None else torch.from_numpy(self.pairs.copy()).to(query.device)
        if self.rule is not None:
            table = given["bias"].table(query.dtype, query.device)
            given["bias"] = bias_rules.dense_tensor(self.rule, table, self.sizes, self.query_offset)
        return naive(query, key, value, pairs, kept=self.kept, **given)

    def _has(self, name: str) -> bool:
        return getattr(self, name) is not None

    def _arrays(self) -> tuple[Array, Array, Array]:
        return array(self.query), array(self.key), array(self.value)

    def _modifiers(self) -> dict[str, Any]:
        bias = None if self.bias is None else array(self.bias)
        if self.rule is not None and bias is not None:
            bias = bias_rules.dense(self.rule, bias, self.sizes, self.query_offset)
        sinks = None if self.sinks is None else array(self.sinks)
        return {"mask": self.pairs, "bias": bias, "sinks": sinks, "keep": self.kept, **self.options}


def naive(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pairs: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    kept: Array | None = None,
) -> Tensor:
    """The textbook's arithmetic in the inputs' own dtype, logits and weights included: what E is measured on."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    allowed = torch.ones_like(logits, dtype=torch.bool) if pairs is None else pairs
    if bias is not None:
        allowed = allowed & (bias != float("-inf"))
        logits = logits + torch.where(bias == float("-inf"), 0.0, bias).to(logits.dtype)
    some = allowed.any(-1, keepdim=True)
    # An empty row would be NaN, in the gradient as well: it is given all its keys, and its weights are taken away.
    logits = logits.masked_fill(~allowed & some, float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks.to(logits.dtype)[:, None, None].expand(*logits.shape[:3], 1)], -1)
    weights = torch.softmax(logits, -1)[..., : key.shape[2]] * some
    if kept is not None:
        weights = weights * torch.from_numpy(kept).to(weights)
    return weights @ value


def largest(differences: Array) -> float:
    """The largest absolute entry; NaN counts as infinite, an empty array as 0."""
    if differences.size == 0:
        return 0.0
    top = float(np.abs(differences).max())
    return float("inf") if np.isnan(top) else top


def budget(times: int, rough: Array, exact: Array, dtype: torch.dtype) -> float:
    """`times` E + floor. Where plain arithmetic breaks down (overflow), only the rounding of the result is left."""
    error = largest(rough - exact)
    return times * error + FLOOR[dtype] if np.isfinite(error) else rounding(exact, dtype)


def rounding(exact: Array, dtype: torch.dtype) -> float:
    """What storing the exact result in this dtype costs, plus the floor."""
    return torch.finfo(dtype).eps * largest(exact) + FLOOR[dtype]
