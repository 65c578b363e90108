"""A plain, slow and correct attention in torch, in small steps that a mutant can replace one at a time.

It forms every product `[..., L, S, D]` with what a row may not see taken out first, so that nothing can leak.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import regard
from regard import masks, reference
from regard.bias import Bias

HALF = (torch.float16, torch.bfloat16)
NAMES = ("query", "key", "value")


class Plain:
    """Call it like `regard.attention`; `surface()` gives what else the suite can look at."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Any = None,
        bias: Any = None,
        scale: Any = None,
        softcap: Any = None,
        sinks: Any = None,
        dropout: float = 0.0,
        query_offset: Any = None,
        backend: str = "auto",
    ) -> Tensor:
        if backend not in ("auto", "plain"):
            raise ValueError(f"backend is {backend!r}; expected 'auto' or 'plain'")
        query, key, value = self.autocast(query, key, value)
        bias = self.written_out(bias, query, key, query_offset)
        self.check(query, key, value, bias, sinks)
        self.check_options(query, key, mask, scale, softcap, dropout, query_offset)
        weights, _, allowed = self.weights(query, key, mask, bias, scale, softcap, sinks, query_offset)
        weights = self.drop(weights, dropout)
        out = self.combine(weights, allowed, self.share(value, query))
        return self.finish(out, query)

    def written_out(self, bias: Any, query: Tensor, key: Tensor, offset: Any) -> Any:
        """A bias by rule as a tensor."""
        if not isinstance(bias, Bias):
            return bias
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        return bias.dense(query.shape[2], key.shape[2], query_offset=offset, dtype=wide)

    def observe(self, query: Tensor, key: Tensor, value: Tensor, *, want: Any = None, **given: Any) -> Any:
        out = self(query, key, value, **given)
        names = ("mask", "bias", "scale", "softcap", "sinks", "query_offset")
        weights, lse, _ = self.weights(query, key, *(given.get(name) for name in names))
        return SimpleNamespace(out=out, weights=weights.detach(), lse=lse.detach())

    def explain(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        return Plan()

    def surface(self) -> Any:
        return SimpleNamespace(
            masks=masks,
            reference=reference,
            observe=self.observe,
            explain=self.explain,
            nn=regard.nn,
            cache=regard.cache,
            latent_attention=regard.latent_attention,
            linear_attention=regard.linear_attention,
            watch=regard.watch,
            backend="plain",
        )

    def autocast(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if torch.is_autocast_enabled("cpu"):
            return tuple(x.to(torch.get_autocast_dtype("cpu")) for x in tensors)
        return tensors

    def check(self, query: Tensor, key: Tensor, value: Tensor, bias: Any, sinks: Any) -> None:
        tensors = dict(zip(NAMES, (query, key, value), strict=True))
        for name, x in tensors.items():
            if x.is_nested:
                raise TypeError(f"{name} is a nested tensor; expected a plain one")
            if x.ndim != 4:
                raise ValueError(f"{name} has shape {list(x.shape)}; expected [batch, head, token, dim]")
            if not x.is_floating_point():
                raise TypeError(f"{name} is {x.dtype}; expected a floating dtype")
            if x.dtype != query.dtype or x.device != query.device:
                raise TypeError(
                    f"{name} is {x.dtype} on {x.device}, query is {query.dtype} on {query.device}; expected the same"
                )
        self.check_heads(query, key, value)
        self.check_lengths(query, key, value)
        self.check_beside(query, key, bias, sinks)

    def check_heads(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if key.shape[0] != query.shape[0] or value.shape[0] != query.shape[0]:
            raise ValueError(
                f"key and value have batch {key.shape[0]} and {value.shape[0]}; expected query's {query.shape[0]}"
            )
        if key.shape[1] != value.shape[1]:
            raise ValueError(f"value has {value.shape[1]} heads; expected key's {key.shape[1]}")
        if query.shape[1] % key.shape[1]:
            raise ValueError(f"key has {key.shape[1]} heads, which do not divide query's {query.shape[1]}")

    def check_lengths(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if key.shape[2] != value.shape[2]:
            raise ValueError(f"value holds {value.shape[2]} tokens; expected key's {key.shape[2]}")
        if query.shape[3] != key.shape[3] or query.shape[3] == 0:
            raise ValueError(f"query has dim {query.shape[3]}, key {key.shape[3]}; expected the same, above 0")

    def check_beside(self, query: Tensor, key: Tensor, bias: Any, sinks: Any) -> None:
        beside = (query.dtype, torch.float32) if query.dtype in HALF else (query.dtype,)
        for name, given in (("bias", bias), ("sinks", sinks)):
            if given is None:
                continue
            if not isinstance(given, Tensor) or given.dtype not in beside:
                kind = given.dtype if isinstance(given, Tensor) else type(given)
                raise TypeError(f"{name} is {kind}; expected a tensor of {query.dtype}")
        if sinks is not None and sinks.shape != query.shape[1:2]:
            raise ValueError(f"sinks has shape {list(sinks.shape)}; expected [{query.shape[1]}]")
        if bias is not None:
            sizes = (*query.shape[:3], key.shape[2])
            if bias.ndim > 4 or any(n not in (1, m) for n, m in zip(bias.shape[::-1], sizes[::-1], strict=False)):
                raise ValueError(f"bias has shape {list(bias.shape)}; expected one that broadcasts to {list(sizes)}")
            self.check_bias_values(bias)

    def check_bias_values(self, bias: Tensor) -> None:
        if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(bias):
            return
        if bool((torch.isnan(bias) | torch.isposinf(bias)).any()):
            raise ValueError("bias holds NaN or +inf; expected finite numbers or -inf")

    def check_options(
        self, query: Tensor, key: Tensor, mask: Any, scale: Any, softcap: Any, dropout: Any, offset: Any
    ) -> None:
        if mask is not None and not isinstance(mask, masks.Mask):
            raise TypeError(f"mask is a {type(mask).__name__}; expected a Mask, such as masks.keep(tensor)")
        for name, number in (("scale", scale), ("softcap", softcap)):
            if number is not None and (not isinstance(number, (int, float)) or math.isnan(number)):
                raise TypeError(f"{name} is {number!r}, a {type(number).__name__}; expected a number")
        if softcap is not None and softcap <= 0:
            raise ValueError(f"softcap is {softcap}; expected a number above 0")
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout is {dropout}; expected a number in [0, 1]")
        if isinstance(offset, Tensor) and offset.shape != query.shape[:1]:
            raise ValueError(f"query_offset has shape {list(offset.shape)}; expected [{query.shape[0]}]")
        if isinstance(offset, float):
            raise TypeError(f"query_offset is {offset}, a float; expected an int")
        if mask is not None:
            mask.check(*query.shape[:3], key.shape[2])

    def share(self, x: Tensor, query: Tensor) -> Tensor:
        """Key or value heads, one for each query head."""
        return x.repeat_interleave(query.shape[1] // x.shape[1], 1)

    def offset(self, L: int, S: int, given: Any) -> Any:
        return S - L if given is None else given

    def allowed(self, query: Tensor, key: Tensor, mask: Any, bias: Tensor | None, offset: Any) -> Tensor:
        """Which pairs are permitted, `[B, H, L, S]`."""
        B, H, L, S = *query.shape[:3], key.shape[2]
        found = torch.ones(B, H, L, S, dtype=torch.bool, device=query.device)
        if mask is not None:
            found = found & mask.dense(L, S, query_offset=self.offset(L, S, offset), device=query.device)
        if bias is not None:
            found = found & (bias != -math.inf)
        return found

    def scale(self, query: Tensor, given: float | None) -> float:
        return 1 / math.sqrt(query.shape[-1]) if given is None else given

    def logits(self, query: Tensor, key: Tensor, allowed: Tensor, scale: Any, softcap: Any, bias: Any) -> Tensor:
        """[B, H, L, S]; 0 where not permitted, so that nothing of a hidden key is left in it."""
        seen = torch.where(allowed[..., None], key[:, :, None], 0.0)
        logits = (query[:, :, :, None] * seen).sum(-1) * self.scale(query, scale)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if bias is not None:
            logits = logits + torch.where(bias == -math.inf, 0.0, bias)
        return torch.where(allowed, logits, 0.0)

    def normalise(self, logits: Tensor, allowed: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weights and log-sum-exp."""
        # One more entry, the smallest number there is, so that there is a maximum without keys too.
        floor = torch.full((*logits.shape[:3], 1), torch.finfo(logits.dtype).min, dtype=logits.dtype)
        top = torch.cat([torch.where(allowed, logits, floor), floor], -1).amax(-1, keepdim=True).detach()
        if sinks is not None:
            top = torch.maximum(top, sinks.detach()[:, None, None])
        # The inner where keeps an overflowing exponential of a hidden pair out of the derivative.
        exponentials = torch.where(allowed, torch.exp(torch.where(allowed, logits - top, 0.0)), 0.0)
        total = exponentials.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks[:, None, None] - top)
        some = allowed.any(-1, keepdim=True)
        total = torch.where(some, total, 1.0)
        lse = torch.where(some, top + torch.log(total), -math.inf)
        return exponentials / total, lse[..., 0]

    def weights(
        self, query: Tensor, key: Tensor, mask: Any, bias: Any, scale: Any, softcap: Any, sinks: Any, offset: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        allowed = self.allowed(query, key, mask, bias, offset)
        key = self.share(key, query)
        wide = torch.float32 if query.dtype in HALF else query.dtype
        bias = None if bias is None else bias.to(wide)
        sinks = None if sinks is None else sinks.to(wide)
        logits = self.logits(query.to(wide), key.to(wide), allowed, scale, softcap, bias)
        weights, lse = self.normalise(logits, allowed, sinks)
        return weights, lse, allowed

    def drop(self, weights: Tensor, p: float) -> Tensor:
        if p == 0:
            return weights
        kept = torch.rand(weights.shape, device=weights.device) >= p
        return weights * kept / (1 - p) if p < 1 else weights * 0

    def combine(self, weights: Tensor, allowed: Tensor, value: Tensor) -> Tensor:
        seen = torch.where(allowed[..., None], value[:, :, None].to(weights.dtype), 0.0)
        return (weights[..., None] * seen).sum(-2)

    def finish(self, out: Tensor, query: Tensor) -> Tensor:
        return out.to(query.dtype)


class Plan:
    backend = "plain"
    reason = "there is no other"

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"
