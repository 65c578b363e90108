"""Deliberately broken implementations, each wrong in one way and to be caught by the rule it is listed under.

`MUTANTS` maps a rule to its mutants. A mutant is `Plain` with one step replaced, or one other surface of it.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tests.testing.plain import HALF, Plain, Plan
from torch import Tensor

import regard
from regard import cache, masks, reference

MUTANTS: dict[int, list[type[Plain]]] = {}


def breaks(*rules: int) -> Callable[[type[Plain]], type[Plain]]:
    def register(mutant: type[Plain]) -> type[Plain]:
        for rule in rules:
            MUTANTS.setdefault(rule, []).append(mutant)
        return mutant

    return register


@breaks(1)
class TrueMeansForbidden(Plain):
    def allowed(self, query, key, mask, bias, offset):
        found = super().allowed(query, key, mask, bias, offset)
        return found if mask is None else ~found


@breaks(2)
class TakesIntegerMasks(Plain):
    def check_options(self, query, key, mask, *rest):
        super().check_options(query, key, None if isinstance(mask, Tensor) else mask, *rest)

    def allowed(self, query, key, mask, bias, offset):
        mask = masks.keep(mask.bool()) if isinstance(mask, Tensor) else mask
        return super().allowed(query, key, mask, bias, offset)


@breaks(2)
class MasksTakeIntegers(Plain):
    def surface(self):
        loose = SimpleNamespace(**vars(masks))
        loose.keep = lambda tensor: masks.keep(tensor.bool())
        return _with(super().surface(), masks=loose)


@breaks(3, 5)
class NanOnEmptyRows(Plain):
    def normalise(self, logits, allowed, sinks):
        weights, lse = super().normalise(logits, allowed, sinks)
        return torch.where(allowed.any(-1, keepdim=True), weights, math.nan), lse

    def combine(self, weights, allowed, value):
        return (weights[..., None] * value[:, :, None].to(weights.dtype)).sum(-2)


@breaks(3)
class EmptyRowsAverage(Plain):
    def allowed(self, query, key, mask, bias, offset):
        found = super().allowed(query, key, mask, bias, offset)
        return found | ~found.any(-1, keepdim=True)


@breaks(3)
class LseOfAnEmptyRowIsTheSink(Plain):
    def normalise(self, logits, allowed, sinks):
        weights, lse = super().normalise(logits, allowed, sinks)
        return weights, lse if sinks is None else torch.where(lse == -math.inf, sinks[:, None], lse)


@breaks(4)
class NanGradientOnEmptyRows(Plain):
    """The classic: zeros are put in after a softmax of -inf, whose derivative is NaN."""

    def normalise(self, logits, allowed, sinks):
        _, lse = super().normalise(logits, allowed, sinks)
        weights = torch.softmax(logits.masked_fill(~allowed, -math.inf), -1)
        return torch.where(allowed.any(-1, keepdim=True), weights, 0.0), lse


@breaks(5)
class EmptyByBiasIsAverage(Plain):
    """-inf in a bias is replaced by a large finite number."""

    def allowed(self, query, key, mask, bias, offset):
        return super().allowed(query, key, mask, None, offset)

    def logits(self, query, key, allowed, scale, softcap, bias):
        bias = None if bias is None else bias.clamp(min=-1e4)
        return super().logits(query, key, allowed, scale, softcap, bias)


@breaks(5)
class NoKeysNoOutput(Plain):
    def combine(self, weights, allowed, value):
        out = super().combine(weights, allowed, value)
        return out if value.shape[2] else out + math.nan


@breaks(6)
class LeaksThroughZeroWeights(Plain):
    """0 · NaN is NaN."""

    def combine(self, weights, allowed, value):
        return (weights[..., None] * value[:, :, None].to(weights.dtype)).sum(-2)


@breaks(6)
class AddsTheMask(Plain):
    """NaN - inf is NaN."""

    def logits(self, query, key, allowed, scale, softcap, bias):
        everywhere = torch.ones_like(allowed)
        return super().logits(query, key, everywhere, scale, softcap, bias) + torch.where(allowed, 0.0, -1e9)

    def normalise(self, logits, allowed, sinks):
        return super().normalise(logits, torch.ones_like(allowed), sinks)


@breaks(7)
class PoisonInTheGradient(Plain):
    """The output is cleaned, the derivative is not."""

    def combine(self, weights, allowed, value):
        value = value[:, :, None].to(weights.dtype)
        return torch.where(allowed[..., None], weights[..., None] * value, 0.0).sum(-2)


@breaks(8)
class HidesNan(Plain):
    def finish(self, out, query):
        return super().finish(out.nan_to_num(0.0), query)


@breaks(72)
class TakesRowsOfNanForEmptyOnes(Plain):
    """A maximum that skips NaN finds none among nothing but NaN, as in a row without keys."""

    def normalise(self, logits, allowed, sinks):
        weights, lse = super().normalise(logits, allowed, sinks)
        lost = torch.isnan(logits).all(-1)
        return weights.masked_fill(lost[..., None], 0.0), lse.masked_fill(lost, 0.0)


@breaks(8)
class SpreadsNan(Plain):
    def finish(self, out, query):
        return super().finish(out + 0 * query.sum(2, keepdim=True).sum(-1, keepdim=True).to(out.dtype), query)


@breaks(9)
class FillsWithMinusOneBillion(Plain):
    fill = -1e9

    def normalise(self, logits, allowed, sinks):
        filled = torch.where(allowed, logits, torch.full_like(logits, self.fill))
        return super().normalise(filled, torch.ones_like(allowed), sinks)


@breaks(3, 9)
class FillsWithTheSmallestFloat(FillsWithMinusOneBillion):
    def normalise(self, logits, allowed, sinks):
        self.fill = torch.finfo(logits.dtype).min
        return super().normalise(logits, allowed, sinks)

    def combine(self, weights, allowed, value):
        return super().combine(weights, torch.ones_like(allowed), value)


@breaks(10)
class TopLeftCausal(Plain):
    def offset(self, L, S, given):
        return 0 if given is None else given


@breaks(10, 49)
class IgnoresQueryOffset(Plain):
    def offset(self, L, S, given):
        return S - L


@breaks(10)
class OneKeyTooMany(Plain):
    """The window is off by one."""

    def offset(self, L, S, given):
        return super().offset(L, S, given) + 1


@breaks(11)
class IgnoresMaskBesideBias(Plain):
    def allowed(self, query, key, mask, bias, offset):
        return super().allowed(query, key, mask if bias is None else None, bias, offset)


@breaks(11)
class CausalDropsTheRest(Plain):
    def allowed(self, query, key, mask, bias, offset):
        mask = masks.causal() if mask is not None and "causal" in repr(mask) else mask
        return super().allowed(query, key, mask, bias, offset)


@breaks(12)
class MasksEnlarge(Plain):
    def check_options(self, query, key, mask, *rest):
        super().check_options(query, key, mask if isinstance(mask, (masks.Mask, type(None))) else None, *rest)

    def __call__(self, query, key, value, *, mask=None, **given):
        if mask is not None and mask.batch > query.shape[0]:
            query, key, value = (x.expand(mask.batch, *x.shape[1:]) for x in (query, key, value))
        return super().__call__(query, key, value, mask=mask, **given)


@breaks(13)
class OrIsAnd(Plain):
    def surface(self):
        return _with(super().surface(), masks=_dense_masks(join=lambda a, b: a & b))


@breaks(14)
class WindowIsOneTooWide(Plain):
    def surface(self):
        wrong = SimpleNamespace(**vars(masks))
        wrong.window = lambda left, right=0: masks.window(left + 1, right)
        return _with(super().surface(), masks=wrong)


@breaks(14)
class DocumentsSeePadding(Plain):
    def surface(self):
        wrong = SimpleNamespace(**vars(masks))
        wrong.documents = lambda lengths=None, ids=None: (
            masks.documents(lengths=lengths) if ids is None else masks.documents(ids=ids.abs())
        )
        return _with(super().surface(), masks=wrong)


@breaks(15)
class RaisesOnNothing(Plain):
    def check_lengths(self, query, key, value):
        if key.shape[2] == 0 or query.shape[2] == 0:
            raise RuntimeError("cannot take the maximum of nothing")
        super().check_lengths(query, key, value)


@breaks(16)
class TinyNumberInTheDenominator(Plain):
    def normalise(self, logits, allowed, sinks):
        weights, lse = super().normalise(logits, allowed, sinks)
        return weights / (1 + 1e-2), lse


@breaks(17)
class ScaleOfTheValues(Plain):
    def __call__(self, query, key, value, *, scale=None, **given):
        width = value.shape[-1]
        return super().__call__(query, key, value, scale=1 / math.sqrt(width) if scale is None else scale, **given)


@breaks(18)
class ZeroScaleIsDefault(Plain):
    def scale(self, query, given):
        return super().scale(query, given or None)


@breaks(18)
class ScaleInTwoRoots(Plain):
    def scale(self, query, given):
        return math.sqrt(abs(super().scale(query, given))) ** 2


@breaks(19)
class HeadsModulo(Plain):
    def share(self, x, query):
        return x.repeat(1, query.shape[1] // x.shape[1], 1, 1)


@breaks(19)
class HeadsThatDoNotDivide(Plain):
    def check_heads(self, query, key, value):
        if key.shape[1] <= query.shape[1] and query.shape[1] % key.shape[1]:
            return
        super().check_heads(query, key, value)

    def share(self, x, query):
        index = torch.arange(query.shape[1]) * x.shape[1] // query.shape[1]
        return x[:, index]


@breaks(20)
class Broadcasts(Plain):
    def check_heads(self, query, key, value):
        pass


@breaks(21)
class CutsToTheShorter(Plain):
    def __call__(self, query, key, value, **given):
        if key.ndim == 4 and value.ndim == 4:
            n = min(key.shape[2], value.shape[2])
            key, value = key[:, :, :n], value[:, :, :n]
        return super().__call__(query, key, value, **given)


@breaks(21)
class ChecksTooLate(Plain):
    def __call__(self, query, key, value, **given):
        torch.softmax(key, -1)
        return super().__call__(query, key, value, **given)


@breaks(22)
class PromotesDtypes(Plain):
    def __call__(self, query, key, value, **given):
        return super().__call__(query, key.to(query.dtype), value.to(query.dtype), **given)


@breaks(23)
class SaysNothing(Plain):
    def check(self, *given):
        try:
            super().check(*given)
        except (ValueError, TypeError):
            raise RuntimeError("bad input") from None


@breaks(23)
class NamesNothing(Plain):
    def check_options(self, *given):
        try:
            super().check_options(*given)
        except (ValueError, TypeError):
            raise ValueError("bad input") from None


@breaks(24)
class ScalesTheQueryInPlace(Plain):
    def combine(self, weights, allowed, value):
        value.detach().mul_(1)
        return super().combine(weights, allowed, value)

    def check_options(self, query, *rest):
        super().check_options(query, *rest)
        query.detach().mul_(1.0)


@breaks(25)
class OracleInFloat32(Plain):
    def surface(self):
        def attention(query, key, value, **given):
            return reference.attention(*(np.float32(x) for x in (query, key, value)), **given)

        return _with(super().surface(), reference=SimpleNamespace(attention=attention, __name__="regard.reference"))


@breaks(25)
class OracleImportsTorch(Plain):
    def surface(self):
        return _with(super().surface(), reference=SimpleNamespace(attention=reference.attention, __name__="torch"))


@breaks(26)
class Float32Inside(Plain):
    def logits(self, query, key, allowed, *rest):
        return super().logits(query.float(), key.float(), allowed, *rest).to(query.dtype)


@breaks(27)
class Float16Inside(Plain):
    def logits(self, query, key, allowed, *rest):
        return super().logits(query.half().float(), key.half().float(), allowed, *rest).to(query.dtype)


@breaks(28)
class FewerBits(Plain):
    def combine(self, weights, allowed, value):
        return super().combine((weights * 64).round() / 64, allowed, value)


@breaks(29)
class LogitsInHalf(Plain):
    def logits(self, query, key, allowed, scale, softcap, bias):
        return super().logits(query.half(), key.half(), allowed, scale, softcap, bias).to(query.dtype)


@breaks(29)
class NoMaximumTakenOff(Plain):
    def normalise(self, logits, allowed, sinks):
        _, lse = super().normalise(logits, allowed, sinks)
        exponentials = torch.where(allowed, torch.exp(logits), 0.0)
        return exponentials / exponentials.sum(-1, keepdim=True).clamp(min=1e-30), lse


@breaks(30)
class OneInTheDenominator(Plain):
    """Softmax with a one added below: it has a preferred level of logits."""

    def normalise(self, logits, allowed, sinks):
        return super().normalise(logits, allowed, torch.zeros(logits.shape[1], dtype=logits.dtype))


@breaks(31, 32)
class ObservesExponentials(Plain):
    def observe(self, query, key, value, **given):
        seen = super().observe(query, key, value, **given)
        return _with(seen, weights=seen.weights * 1.01)


@breaks(32)
class LseInBase2(Plain):
    def observe(self, query, key, value, **given):
        seen = super().observe(query, key, value, **given)
        return _with(seen, lse=seen.lse / math.log(2))


@breaks(33)
class TakesNanBias(Plain):
    def check_bias_values(self, bias):
        pass


@breaks(34)
class AssumesContiguous(Plain):
    def __call__(self, query, key, value, **given):
        return super().__call__(query, _as_if_contiguous(key), value, **given)


@breaks(35)
class SoftcapLostUnderAMask(Plain):
    def logits(self, query, key, allowed, scale, softcap, bias):
        return super().logits(query, key, allowed, scale, softcap if bool(allowed.all()) else None, bias)


@breaks(35)
class BiasRuleByRows(Plain):
    """Distances are measured between rows and columns, wherever the queries stand."""

    def written_out(self, bias, query, key, offset):
        return super().written_out(bias, query, key, 0)


@breaks(35)
class AnyBackendName(Plain):
    def __call__(self, query, key, value, *, backend="auto", **given):
        return super().__call__(query, key, value, **given)


@breaks(36)
class PlanWithoutReason(Plain):
    def explain(self, query, key, value, **given):
        plan = Plan()
        plan.reason = ""
        return plan


@breaks(71)
class PlansByHabit(Plain):
    """What ran last is chosen again."""

    last = "plain"

    def __call__(self, query, key, value, **given):
        self.last = "short" if query.shape[2] == 1 else "long"
        return super().__call__(query, key, value, **given)

    def explain(self, query, key, value, **given):
        plan = Plan()
        plan.reason = f"as the last one, which was {self.last}"
        return plan


@breaks(71)
class PlansWhatCannotBeLaunched(Plain):
    """The heads do not fit into shared memory, which shows when the kernel is started."""

    def __call__(self, query, key, value, **given):
        if query.shape[3] > 256:
            raise RuntimeError("out of resource: shared memory")
        return super().__call__(query, key, value, **given)


@breaks(37)
class AlwaysFloat32(Plain):
    def finish(self, out, query):
        return out.float()


@breaks(38)
class RoughWithoutGradient(Plain):
    def finish(self, out, query):
        out = super().finish(out, query)
        return out if torch.is_grad_enabled() else out.bfloat16().to(out.dtype) * 0.99


@breaks(38)
class AutocastIsIgnored(Plain):
    def finish(self, out, query):
        return super().finish(out + 0.1 if torch.is_autocast_enabled("cpu") else out, query)


@breaks(39)
class LooksAtValues(Plain):
    def finish(self, out, query):
        return super().finish(out if bool(torch.isfinite(out).all()) else out * 1, query)


@breaks(40)
class ForgetsTheScaleInTheGradient(Plain):
    def logits(self, query, key, allowed, scale, softcap, bias):
        return _WrongGradient.apply(super().logits(query, key, allowed, scale, softcap, bias))


@breaks(41, 42)
class OnceDifferentiable(Plain):
    def finish(self, out, query):
        return super().finish(_Once.apply(out), query)


@breaks(42)
class WrongTangent(Plain):
    def finish(self, out, query):
        return super().finish(_WrongTangent.apply(out), query)


@breaks(43)
class AsksForGradients(Plain):
    def check_options(self, query, key, *rest):
        super().check_options(query, key, *rest)
        if key.is_leaf:
            key.requires_grad_()


@breaks(43)
class DetachesKeys(Plain):
    def share(self, x, query):
        return super().share(x.detach(), query)


@breaks(44)
class BiasGradientNotSummed(Plain):
    def logits(self, query, key, allowed, scale, softcap, bias):
        bias = None if bias is None else _MeanGradient.apply(bias, allowed.shape)
        return super().logits(query, key, allowed, scale, softcap, bias)


@breaks(45)
class Noisy(Plain):
    def finish(self, out, query):
        return super().finish(out * (1 + 0.01 * torch.rand(out.shape)), query)


@breaks(46)
class LooksAtOtherItems(Plain):
    def combine(self, weights, allowed, value):
        out = super().combine(weights, allowed, value)
        return out + 0.1 * out.mean(0, keepdim=True)


@breaks(46)
class CountsThreads(Plain):
    def finish(self, out, query):
        return super().finish(out + 0.1 * torch.get_num_threads(), query)


@breaks(47)
class PrefersEarlyKeys(Plain):
    def logits(self, query, key, allowed, *rest):
        found = super().logits(query, key, allowed, *rest)
        return found - 0.1 * torch.arange(found.shape[-1], dtype=found.dtype)


@breaks(48)
class ScaleGrowsWithTheKeys(Plain):
    def logits(self, query, key, allowed, *rest):
        return super().logits(query, key, allowed, *rest) * math.log(1 + key.shape[2])


@breaks(49)
class LooksAtOtherQueries(Plain):
    def combine(self, weights, allowed, value):
        out = super().combine(weights, allowed, value)
        return out - 0.1 * out.mean(2, keepdim=True)


@breaks(50)
class SlopeOfTheHead(Plain):
    def combine(self, weights, allowed, value):
        out = super().combine(weights, allowed, value)
        return out * (1 + 0.1 * torch.arange(out.shape[1], dtype=out.dtype)[:, None, None])


@breaks(55)
class NanAtOne(Plain):
    def drop(self, weights, p):
        kept = torch.rand(weights.shape) >= p
        return weights * kept / (1 - p) if p < 1 else weights * (kept / torch.zeros(()))


@breaks(55)
class AnyProbability(Plain):
    def check_options(self, query, key, mask, scale, softcap, dropout, offset):
        super().check_options(query, key, mask, scale, softcap, 0.0, offset)


@breaks(55)
class DropoutInEval(Plain):
    def surface(self):
        class Module(torch.nn.Dropout):
            def __init__(self, *sizes, **given):
                super().__init__(0.5)

            def forward(self, x):
                return torch.nn.functional.dropout(x, 0.5, training=True)

        return _with(super().surface(), nn=SimpleNamespace(MultiHeadAttention=Module))


@breaks(56)
class DropoutNotRescaled(Plain):
    def drop(self, weights, p):
        return super().drop(weights, p) * (1 - p)


@breaks(56)
class DropsTooMuch(Plain):
    def drop(self, weights, p):
        kept = torch.rand(weights.shape) >= p + 0.05
        return weights * kept / (1 - p)


@breaks(56)
class OneDrawForAllHeads(Plain):
    def drop(self, weights, p):
        kept = torch.rand(weights.shape[-2:]) >= p
        return weights * kept / (1 - p)


@breaks(56)
class SameDrawAlways(Plain):
    def drop(self, weights, p):
        kept = torch.rand(weights.shape, generator=torch.Generator().manual_seed(3)) >= p
        return weights * kept / (1 - p)


@breaks(57)
class WeightsAfterDropout(Plain):
    def observe(self, query, key, value, **given):
        seen = super().observe(query, key, value, **given)
        return _with(seen, weights=self.drop(seen.weights, given.get("dropout", 0.0)))


@breaks(57)
class ObservingChangesTheDraw(Plain):
    def observe(self, query, key, value, **given):
        torch.rand(1)
        return super().observe(query, key, value, **given)


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1.5


def _caches(**changes: type) -> Any:
    """A surface's caches, with some of them replaced."""
    return SimpleNamespace(**{**vars(cache), **changes})


class _BrokenCache(Plain):
    """Each kind of cache with one thing changed."""

    def surface(self):
        kinds = {}
        for kind in (cache.KVCache, cache.RollingCache, cache.PagedCache):
            kinds[kind.__name__] = type(kind.__name__, (kind,), dict(self.changed(kind)))
        return _with(super().surface(), cache=_caches(**kinds))

    def changed(self, kind: Any) -> dict[str, Any]:
        raise NotImplementedError


@breaks(51)
class NewTokensSeeOneMore(_BrokenCache):
    """The new tokens are said to stand one place later than they do."""

    def changed(self, kind):
        def update(self, key, value):
            keys, values, offset = kind.update(self, key, value)
            return keys, values, offset + 1

        return {"update": update}


@breaks(51)
class ForgetsTheWindow(Plain):
    """The rolling cache keeps one token too few."""

    def surface(self):
        class RollingCache(cache.RollingCache):
            def _forget(self, memory):
                self.window -= 1
                super()._forget(memory)
                self.window += 1

        return _with(super().surface(), cache=_caches(RollingCache=RollingCache))


@breaks(51)
class ReadsAnotherBlock(Plain):
    """The paged cache finds its blocks in another order once there are a few."""

    def surface(self):
        class PagedCache(cache.PagedCache):
            def _read(self, start, stop):
                self._table[:, 1:] = self._table[:, 1:].roll(1, 1) if self.lengths[0] > 20 else self._table[:, 1:]
                return super()._read(start, stop)

        return _with(super().surface(), cache=_caches(PagedCache=PagedCache))


@breaks(52)
class UnusedSlotsAreSeen(_BrokenCache):
    def changed(self, kind):
        return {"filled": None}


@breaks(53)
class CountsBeforeItRefuses(_BrokenCache):
    def changed(self, kind):
        def update(self, key, value):
            try:
                return kind.update(self, key, value)
            except ValueError:
                self._held = self._view = self._held.plus(1)
                raise

        return {"update": update}


@breaks(53)
class TruncateKeepsOneMore(_BrokenCache):
    def changed(self, kind):
        return {"truncate": lambda self, length: kind.truncate(self, length + 1)}


@breaks(54)
class PaddingIsKept(_BrokenCache):
    def changed(self, kind):
        return {"padded": lambda self, lengths, side="right", tokens=None: self}


@breaks(54)
class LeftIsTakenForRight(_BrokenCache):
    def changed(self, kind):
        return {"padded": lambda self, lengths, side="right", tokens=None: kind.padded(self, lengths, "right", tokens)}


@breaks(59)
class ScaledByThePlainPartAlone(Plain):
    def surface(self):
        def attend(q_nope, *rest, **given):
            return regard.latent_attention(q_nope, *rest, scale=q_nope.shape[-1] ** -0.5, **given)

        return _with(super().surface(), latent_attention=attend)


class _BrokenSum(Plain):
    """Linear attention with one thing changed."""

    def surface(self):
        return _with(super().surface(), linear_attention=self.linear)

    def linear(self, query, key, value, **given):
        raise NotImplementedError


@breaks(58)
class SumsInHalfTheDigits(_BrokenSum):
    def linear(self, query, key, value, **given):
        return regard.linear_attention(query.float(), key.float(), value.float(), **given).double()


@breaks(58)
class TheTokenItselfIsLeftOut(_BrokenSum):
    def linear(self, query, key, value, mask=None, **given):
        later = torch.nn.functional.pad(key, (0, 0, 1, 0))[:, :, :-1]
        return regard.linear_attention(query, later, value, mask=mask, **given)


@breaks(58)
class DocumentsRunIntoEachOther(_BrokenSum):
    def linear(self, query, key, value, mask=None, **given):
        return regard.linear_attention(query, key, value, mask=masks.causal(), **given)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _WrongTangent(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent * 2


@breaks(67)
class WatchingChangesWhatIsWatched(Plain):
    def surface(self):
        @contextlib.contextmanager
        def watch(model, **given):
            with regard.watch(model, **given) as recording:
                hook = model.register_forward_hook(lambda module, inputs, out: out * (1 + 1e-7))
                try:
                    yield recording
                finally:
                    hook.remove()

        return _with(super().surface(), watch=watch)


@breaks(67)
class WatchingReplacesTorchsFunctionForEverybody(Plain):
    def surface(self):
        @contextlib.contextmanager
        def watch(model, **given):
            plain = torch.nn.functional.scaled_dot_product_attention
            with regard.watch(model, **given) as recording:
                torch.nn.functional.scaled_dot_product_attention = self
                try:
                    yield recording
                finally:
                    torch.nn.functional.scaled_dot_product_attention = plain

        return _with(super().surface(), watch=watch)


@breaks(68)
class WatchingLosesACall(Plain):
    def surface(self):
        @contextlib.contextmanager
        def watch(model, **given):
            with regard.watch(model, **given) as recording:
                yield recording
                del recording.calls[1:]

        return _with(super().surface(), watch=watch)


@breaks(68)
class WatchingIsSilentAboutGaps(Plain):
    def surface(self):
        @contextlib.contextmanager
        def watch(model, **given):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with regard.watch(model, **given) as recording:
                    yield recording

        return _with(super().surface(), watch=watch)


class _MeanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Any) -> Tensor:
        ctx.small = x.shape
        return x.expand(shape).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        small = grad.sum_to_size(ctx.small)
        return small * small.numel() / grad.numel(), None


class _Dense:
    """A mask by its array alone, whose `|` can be made wrong."""

    def __init__(self, inner: masks.Mask, join: Callable[[Any, Any], Any]) -> None:
        self.inner, self.join = inner, join

    def __and__(self, other: _Dense) -> _Dense:
        return _Dense(self.inner & other.inner, self.join)

    def __or__(self, other: _Dense) -> _Dense:
        return _Dense(self.join(self.inner, other.inner), self.join)

    def __invert__(self) -> _Dense:
        return _Dense(~self.inner, self.join)

    def dense(self, *sizes: int, **given: Any) -> Tensor:
        return self.inner.dense(*sizes, **given)


def _dense_masks(join: Callable[[Any, Any], Any]) -> Any:
    def wrap(name: str) -> Callable[..., _Dense]:
        return lambda *given, **named: _Dense(getattr(masks, name)(*given, **named), join)

    names = ("everything", "causal", "window", "padding", "documents", "prefix", "columns", "strided", "blocks")
    more = ("random_blocks", "keep", "drop", "from_additive")
    return SimpleNamespace(**{name: wrap(name) for name in names + more})


def _with(surface: Any, **changes: Any) -> Any:
    return SimpleNamespace(**{**vars(surface), **changes})


def _as_if_contiguous(x: Tensor) -> Tensor:
    strides, step = [], 1
    for size in reversed(x.shape):
        strides.insert(0, step)
        step *= size
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return x if room < step or x.dtype not in (*HALF, torch.float32, torch.float64) else x.as_strided(x.shape, strides)
