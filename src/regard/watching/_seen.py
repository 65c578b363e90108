"""An attention call as it was met, in regard's terms: whatever function it was made with."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard import api, masks
from regard._arguments import prepare
from regard.bias import TableBias
from regard.masks._joins import both
from regard.observation._lengths import value_lengths
from regard.observation._observe import observe_call
from regard.recording._calls import AXES
from regard.statistics import Want
from regard.watching._index import index_of

if TYPE_CHECKING:
    from regard.masks import Mask
    from regard.observation import Observation
    from regard.spec import Call

STATISTICS = frozenset(AXES) - {"lse"}
# numbers in the rows of a mask that are alive at once
_NUMBERS = 1 << 24


class Unseen(Exception):
    """A call that cannot be observed, and why."""


class Seen(NamedTuple):
    """[batch, head, token, dim] tensors and what joins them."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None = None
    bias: Tensor | TableBias | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    offset: int | Tensor | None = None
    placed: bool = False  # whether the offset is the call's own, not the end-aligned guess
    lse: Tensor | None = None  # as the model's own kernel computed it
    real: Tensor | None = None  # bool [batch, query], where the call itself says which queries are no padding
    written_out: bool = False
    result: Tensor | None = None  # what the call gave, as the model goes on with it, [batch, head, query, value dim]
    by_token: bool = False  # whether that is [batch, query, head, value dim] instead

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch, heads, queries, keys."""
        return (*self.query.shape[:3], self.key.shape[2])

    @property
    def placeless(self) -> bool:
        """Whether the place of the queries among the keys changes no weight."""
        return (self.mask is None or self.mask.placeless) and not isinstance(self.bias, TableBias)

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def queries(self) -> int:
        return self.query.shape[2]

    @property
    def keys(self) -> int:
        return self.key.shape[2]

    def only(self, heads: list[int]) -> Seen:
        """The same call with some of its heads; the mask must not depend on the head."""
        group = self.query.shape[1] // self.key.shape[1]
        of_heads = index_of(tuple(heads), self.device)
        of_keys = index_of(tuple(head // group for head in heads), self.device)
        bias, sinks = self.bias, self.sinks
        if isinstance(bias, TableBias):
            bias = bias.of_heads(heads)
        elif bias is not None and bias.shape[1] > 1:
            bias = bias[:, of_heads]
        return self._replace(
            query=self.query[:, of_heads],
            key=self.key[:, of_keys],
            value=self.value[:, of_keys],
            bias=bias,
            sinks=None if sinks is None else sinks[of_heads],
            lse=None if self.lse is None else self.lse[:, of_heads],
        )

    def can_take_heads(self) -> bool:
        """Whether some of the heads can be observed without the others."""
        return self.mask is None or self.mask.heads == 1

    def without(self, real: Tensor) -> Seen:
        """The call with the rows of queries that are not real [batch, query] empty."""
        rows = masks.keep(real.to(self.device)[:, None, :, None])
        lse = None if self.lse is None else self.lse.masked_fill(~real.to(self.device)[:, None], -torch.inf)
        return self._replace(mask=both(self.mask, rows), lse=lse)

    def statistics(self, want: Want, permitted: Tensor, lengths: Tensor | None = None) -> dict[str, Tensor]:
        """The wanted statistics by name, with ``lse``; ``lengths`` [batch, head, key] are those of the values."""
        if self.lse is None:
            seen = self.observe(want, lengths)
            return {"lse": seen.lse, **{name: part for name, part in vars(seen).items() if name in STATISTICS}}
        # the model's kernel was the forward pass: what is left to do is to look
        exact = torch.float64 if self.query.dtype == torch.float64 else torch.float32
        lse = self.lse.to(exact, copy=True)  # what is written down is nobody else's
        if permitted.device.type != "cpu" or bool((permitted == 0).any()):
            lse = lse.masked_fill(permitted.to(self.device) == 0, -torch.inf)
        return {"lse": lse, **(observe_call(self.call(), lse, want, lengths) if want.asks else {})}

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def keywords(self) -> dict[str, Any]:
        """What ``regard.attention`` is told next to the tensors."""
        told = {"mask": self.mask, "bias": self.bias, "scale": self.scale, "softcap": self.softcap}
        return {**told, "sinks": self.sinks, "query_offset": self.offset}

    def given(self, offset: int | Tensor | None, dropout: float = 0.0) -> tuple[Any, ...]:
        """All that a call takes, in the order in which it is prepared."""
        return (*self[:5], self.scale, self.softcap, self.sinks, dropout, offset)

    def call(self, dropout: float = 0.0) -> Call:
        """The same as a call of regard's own."""
        given = self.given(self.offset, dropout)
        return prepare(*given) if dropout else api.described(given)

    def detached(self) -> Seen:
        given = self._asdict()
        found: dict[str, Any] = {name: part.detach() for name, part in given.items() if isinstance(part, Tensor)}
        return self._replace(**found)

    def lengths(self, output: Tensor | None) -> Tensor | None:
        """The length of each value, through the output projection where that is known, [batch, head, key]."""
        return value_lengths(self.call(), None, output)

    def observe(self, want: Want, lengths: Tensor | None = None) -> Observation:
        return api.observe(*self.tensors, want=want, value_norms=lengths, **self.keywords)

    def permitted(self) -> Tensor:
        """How many keys each query may see, int32 [batch or 1, head or 1, L or 1]."""
        rows, keys = self.queries, self.keys
        if self.mask is None and self.bias is None:
            return torch.full((1, 1, 1), keys, dtype=torch.int32)
        offset = keys - rows if self.offset is None else self.offset
        if self.mask is not None and self.bias is None:
            alike = not self.mask.tensors and isinstance(offset, int)
            count = _permitted_by_rule if alike else _permitted_by_rule.__wrapped__
            by_rule = count(self.mask, rows, keys, offset, self.query.shape[0])
            if by_rule is not None:
                return by_rule
        found = []
        for start in range(0, rows, max(1, _NUMBERS // max(1, keys))):
            some = range(start, min(rows, start + max(1, _NUMBERS // max(1, keys))))
            seen = None if self.bias is None else self._bias_rows(some) != -torch.inf
            if self.mask is not None:
                tile = self.mask.tile(some, range(keys), rows, keys, offset=offset, device=self.query.device)
                seen = tile if seen is None else tile & seen
            assert seen is not None
            found.append(seen.expand(-1, -1, len(some), keys).sum(-1, dtype=torch.int32))
        return torch.cat(found, 2) if found else torch.zeros(1, 1, 0, dtype=torch.int32)

    def last_key(self, of: range) -> Tensor | None:
        """The last key that any of some queries may see, [batch], or None when everything may be seen."""
        if self.mask is None and self.bias is None:
            return None
        rows, keys = self.queries, self.keys
        seen = torch.ones(1, 1, 1, keys, dtype=torch.bool, device=self.query.device)
        if self.mask is not None:
            seen = seen & self.mask.tile(of, range(keys), rows, keys, offset=keys - rows, device=self.query.device)
        if self.bias is not None:
            seen = seen & (self._bias_rows(of) != -torch.inf)
        return furthest(seen).expand(self.query.shape[0])

    def _bias_rows(self, rows: range) -> Tensor:
        assert self.bias is not None
        if isinstance(self.bias, TableBias):
            keys, offset = self.keys, self.keys - self.queries if self.offset is None else self.offset
            return self.bias.tile(rows, range(keys), self.queries, keys, offset=offset, device=self.query.device)
        return self.bias if self.bias.shape[2] == 1 else self.bias[:, :, rows.start : rows.stop]


def furthest(seen: Tensor) -> Tensor:
    """The last key that any head of any query sees, [batch]; −1 where none sees any."""
    by_item = seen.any(2).any(1)
    last: Tensor = (by_item * torch.arange(1, by_item.shape[1] + 1, device=seen.device)).amax(-1) - 1
    return last


@functools.lru_cache(32)
def _permitted_by_rule(mask: Mask, rows: int, keys: int, offset: int | Tensor, batch: int) -> Tensor | None:
    """How many keys each row may see; the same for all layers."""
    spans = mask.rows(rows, keys, offset, batch)
    with torch.inference_mode(False):
        return None if spans is None else torch.from_numpy((spans.hi - spans.lo).sum(1)[:, None]).to(torch.int32)


def of_call(call: Call) -> Seen:
    """A call of regard's own, with its gradients."""
    spec = call.spec
    bias: Tensor | TableBias | None = call.bias
    if isinstance(bias, Tensor) and spec.bias is not None and spec.bias.rule is not None:
        bias = TableBias(spec.bias.rule, bias)
    three = (call.query, call.key, call.value)
    return Seen(*three, call.mask, bias, spec.scale, spec.softcap, call.sinks, call.offset, placed=True)


def from_call(call: Call, lse: Tensor, out: Tensor) -> Seen:
    """A call of regard's own that has run."""
    bare = call if call.bias is None else call.replace(bias=call.bias.detach())
    return of_call(bare).detached()._replace(lse=lse.detach(), result=out)


def from_interface(
    name: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    given: dict[str, Any],
    out: Any = None,
) -> Seen:
    """A call of an attention function of Hugging Face's interface; ``name`` is the implementation's."""
    q, k, v = query.detach(), key.detach(), value.detach()
    mask, bias = _interface_mask(attention_mask, q, k)
    dense = bias is not None or (isinstance(attention_mask, Tensor) and attention_mask.dim() == 4)
    if name != "eager" and not dense and not hasattr(attention_mask, "mask_mod"):
        mask = _implied(mask, module, given, q.shape[2])
    position = given.get("position_bias")
    if position is not None:
        bias = position.detach() if bias is None else bias + position.detach()
    sinks = given.get("s_aux")
    result = out[0] if isinstance(out, tuple) else out
    return Seen(
        q,
        k,
        v,
        mask,
        hiding(bias),
        given.get("scaling"),
        given.get("softcap"),
        None if sinks is None else sinks.detach().to(q.dtype),
        result=result if isinstance(result, Tensor) and result.dim() == 4 else None,
        by_token=True,
    )


def _interface_mask(given: Any, q: Tensor, k: Tensor) -> tuple[Mask | None, Tensor | None]:
    queries, keys = q.shape[2], k.shape[2]
    if given is None:
        return None, None
    if hasattr(given, "mask_mod"):  # FlexAttention's BlockMask
        from torch.nn.attention.flex_attention import create_mask

        dense = create_mask(given.mask_mod, q.shape[0], q.shape[1], queries, keys, device=q.device.type)
        return masks.keep(dense), None
    if not isinstance(given, Tensor) or given.dim() not in (2, 4):
        raise Unseen(f"a mask that is {type(given).__name__}, not a tensor of 2 or 4 dims")
    given = given.detach()[..., :keys]
    if given.dim() == 2:  # flash attention's: which keys are no padding
        return masks.keep(given.bool()[:, None, None]), None
    if given.dtype == torch.bool:
        return recognised(masks.keep(given), queries, keys, q.device), None
    return None, given.to(q.dtype)


def recognised(mask: Mask, queries: int, keys: int, device: torch.device) -> Mask:
    """A dense mask that is only padding, or causal with padding, as a rule: observing then skips what is hidden.

    Reading it costs little compared with the observation on a CPU; elsewhere it would wait for the device."""
    if device.type != "cpu" or queries != keys or not keys or len(mask.tensors) != 1 or mask.tensors[0].dim() != 4:
        return mask
    dense = mask.tensors[0]
    if dense.shape[2:] != (queries, keys):
        return mask
    used = dense.any(2, keepdim=True)
    if bool((dense == used).all()):
        return masks.keep(used)
    causal = torch.ones(queries, keys, dtype=torch.bool).tril()
    return masks.causal() & masks.keep(used) if bool((dense == (used & causal)).all()) else mask


def _implied(mask: Mask | None, module: Any, given: dict[str, Any], queries: int) -> Mask | None:
    """Flash kernels are told by flags what eager is told by a mask."""
    causal = given.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    window = given.get("sliding_window")
    if causal and (queries > 1 or window):
        rule = masks.causal() if not window else masks.window(left=int(window) - 1, right=0)
        return both(mask, rule)
    return mask


def hiding(bias: Tensor | None) -> Tensor | None:
    """Models write the smallest number where they mean "hidden"; added to a logit it hides all the same."""
    if bias is None:
        return None
    return bias.masked_fill(bias <= torch.finfo(bias.dtype).min / 2, -torch.inf)


def check_same(seen: Seen, out: Any, heads: list[int] | None) -> None:
    """A model's own function may do more than its arguments say (ALiBi inside, say). Then its output is another one,
    and the statistics would be wrong."""
    found = seen.observe(Want.none())
    theirs = (out[0] if isinstance(out, tuple) else out).detach()  # [batch, token, head, dim]
    ours = found.out.transpose(1, 2)
    if theirs.dim() == 3:
        theirs = theirs.unflatten(-1, (-1, ours.shape[-1]))
    if theirs.shape[2] != ours.shape[2] and heads is not None:
        theirs = theirs[:, :, heads]
    if theirs.shape != ours.shape:
        raise Unseen(f"its attention function gave {list(theirs.shape)} where {list(ours.shape)} was expected")
    apart = (theirs - ours).abs().masked_fill((found.lse == -torch.inf).transpose(1, 2).unsqueeze(-1), 0.0)
    allowed = (1e-4 if ours.dtype in (torch.float32, torch.float64) else 3e-2) * (seen.value.abs().amax() + 1e-6)
    if not bool((apart <= allowed).all()):
        raise Unseen("its attention function does more than its arguments say")
