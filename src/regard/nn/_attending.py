"""How a module attends, with or without a cache: what `MultiHeadAttention` and `LatentAttention` share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard import _sharded, api
from regard._checks import MODULE_NAMES, is_exporting, unknown_names
from regard.masks import Mask
from regard.nn import _cached, _checks, _inputs
from regard.nn._heads import Call, check_inputs, finish
from regard.nn._inputs import Inputs
from regard.nn._protocols import Cache, Positions
from regard.statistics import Want


class Attending(nn.Module):
    """Projects its inputs, attends by `regard.attention` or lets a cache do it, and finishes the result."""

    positions: Positions | None
    dropout: float
    # as in `regard.attention`, for calls that give no other
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    backend: str
    _finish = finish

    def _project(self, inputs: Inputs, positions: Any, first: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value `[batch, head, token, dim]`, the first query at the position `first`."""
        raise NotImplementedError

    def _output(self, call: Call) -> Tensor:
        """The matrix that reads the heads side by side."""
        raise NotImplementedError

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | None = None,
        bias: Any = None,
        cache: Cache | None = None,
        **how: Any,
    ) -> Tensor:
        """Attend from `query` to `key` and `value`.

        Args:
            query: `[batch, L, embed_dim]`, padded or nested (`torch.nested`, layout jagged).
            key: `[batch, S, key_dim]`; `query` when not given (self-attention).
            value: `[batch, S, value_dim]`; `key` when not given.
            mask: from `regard.masks`. In self-attention, rows that are padding by `masks.padding` (or a document id of
                −1) are exactly 0 in the output, and nothing in them reaches another row or any gradient.
            bias: added to the logits, as in `regard.attention`.
            cache: keys and values of earlier tokens (`regard.nn.Cache`).
            how: `scale`, `softcap`, `sinks` (a tensor `[num_heads]`), `backend`, as in `regard.attention`: they replace
                the module's own.

        Nested input runs as one packed sequence in which an item sees only itself; or as a padded batch, if the mask, a
        bias or `positions` depend on a token's position. In both cases positions start at 0 in each item, `masks.keep`
        and a bias index rows and columns of the padded batch, and the result is nested as `query` is.
        """
        if cache is not None and torch.compiler.is_compiling() and not is_exporting():
            return self._forward_aside(query, key, value, mask=mask, bias=bias, cache=cache, **how)
        call = self._prepare(query, key, value, mask, bias, cache, how)
        if cache is None:
            return self._finish(api.attention(*call.tensors, **call.keywords), call)
        if call.how is not None and _cached.can_attend(cache, call.keywords):
            found: Any = cache
            keywords = call.keywords
            out = found.attend(*call.tensors, mask=keywords["mask"], bias=keywords["bias"], **call.how)
            return self._finish(out, call)
        call = self._through(cache, call)
        return self._finish(api.attention(*call.tensors, **call.keywords), call)

    _forward_aside = _cached.aside(forward)

    def observe(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | None = None,
        bias: Any = None,
        cache: Cache | None = None,
        want: Want | None = None,
        differentiable: bool = False,
        **how: Any,
    ) -> Any:
        """`forward` with statistics of the heads: a `regard.Observation` whose `.out` is the module's output.

        For nested input the statistics are those of the packed or padded call (see `forward`). With
        `Want(value_mass=True)`, values are measured after the module's output projection. `differentiable`, as in
        `regard.observe`, gives some statistics gradients, for a penalty on them.
        """
        api.check_want(want)  # a cache keeps the tokens of a call that goes on
        call = self._prepare(query, key, value, mask, bias, cache, how)
        call = call if cache is None else self._through(cache, call)
        output = self._output(call) if want is not None and want.value_mass else None
        seen = api.observe(*call.tensors, want=want, output=output, differentiable=differentiable, **call.keywords)
        seen.out = self._finish(seen.out, call)
        return seen

    def explain(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | None = None,
        bias: Any = None,
        cache: Cache | None = None,
        want: Want | None = None,
        **how: Any,
    ) -> Any:
        """Say how `forward` (or `observe`, with `want`) would run this call, as a `regard.Plan`.

        Only the projections run; a cache does not change.
        """
        call = self._prepare(query, key, value, mask, bias, cache, how)
        _cached.check_call(cache, call.tensors, call.keywords)
        if call.how is None:  # of an empty cache
            cache, call = None, self._read(call)
        return _cached.explain(cache, call, want)

    def _prepare(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        mask: Mask | None,
        bias: Any,
        cache: Cache | None,
        how: dict[str, Any],
    ) -> Call:
        how = self._how(how)
        itself = key is None or key is query
        positions = self.positions
        inputs = _inputs.arrange(query, key, value, mask, may_pack=bias is None and positions is None)
        check_inputs(self, inputs, cache is not None)
        if cache is not None:
            _checks.check_cache(cache, with_positions=positions is not None)
            _cached.claim(cache, self)
        keys, offset = inputs.key, inputs.query_offset
        pads = _inputs.padding(mask, keys.shape[1], keys.device) if cache is None else _cached.pads_of(cache, keys)
        if pads is not None:
            _sharded.refuse_padding()
            inputs = _inputs.without_padding(inputs, pads, itself)
        first = keys.shape[1] - inputs.query.shape[1] if offset is None else offset
        if cache is not None and positions is not None:
            first = _cached.position_of(cache, keys)
        try:
            tensors = self._project(inputs, positions, first)
        except RuntimeError:
            _checks.check_dtypes(self, *inputs[:3])  # says it better, where dtypes are the reason
            raise
        seen = inputs.mask
        if pads is not None and cache is not None and itself:
            seen = _cached.without_rows(seen, pads)
        dropout = self.dropout if self.training else 0.0
        keywords = {"mask": seen, "bias": bias, "dropout": dropout, "query_offset": offset, **how}
        return Call(inputs, tensors, keywords, pads, itself, how)

    def _how(self, given: dict[str, Any]) -> dict[str, Any]:
        """What says how to attend, of the call or else of the module; what is as usual is left out."""
        if not given and self.scale is None and self.softcap is None and self.backend == "auto" and self.sinks is None:
            return {}  # the usual call
        own = {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks, "backend": self.backend}
        if unknown := given.keys() - own.keys():
            otherwise = f"{', '.join(own)} say how to attend, mask and bias to what"
            hints = unknown_names(unknown, MODULE_NAMES, otherwise)
            raise TypeError(f"{', '.join(sorted(unknown))}: no such keyword; {hints}")
        merged = {name: own[name] if given.get(name) is None else given[name] for name in own}
        return {name: value for name, value in merged.items() if value is not None and value != "auto"}

    def _through(self, cache: Cache, call: Call) -> Call:
        """The call over all keys and values that the cache gives back."""
        _cached.check_call(cache, call.tensors, call.keywords)
        tensors, keywords = _cached.update(cache, call.tensors, call.keywords)
        pads = call.pads
        if pads is None:
            pads = _inputs.padding_of_new_rows(call.inputs.mask, *tensors[:2], keywords["query_offset"])
        return self._read(call._replace(tensors=tensors, keywords=keywords, pads=pads))

    def _read(self, call: Call) -> Call:
        """The call over keys and values, made of what a cache gave."""
        return call
