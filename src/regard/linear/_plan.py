"""Which form runs a call, what it costs, and why the others do not."""

from __future__ import annotations

import torch

from regard._display.units import flop, size
from regard.linear import _forms, _fused
from regard.linear._request import Request
from regard.plan import Cost, Plan
from regard.plan._table import call_in_words, in_lines, not_chosen
from regard.spec import Refused

FORMS = {
    "whole": "one sum over all keys, read by every query",
    "fused": "the chunks by our Triton kernels, their sums in float32",
    "chunked": "products inside chunks, sums between them: time O(L)",
    "recurrent": "one token after another: O(1) per token",
    "quadratic": "all L × S weights at once: any mask",
}


def refuse(form: str, request: Request) -> list[str]:
    """Why a form cannot run the request."""
    reading = request.reading
    if form == "quadratic":
        return [] if request.state is None else ["it has no state to go on from or to leave behind"]
    if reading.refusals:
        return list(reading.refusals)
    if form == "whole":
        reasons = ["the mask is causal"] if reading.causal else []
        return reasons + (["the mask has documents"] if reading.documents is not None else [])
    if form == "fused":
        return _fused.refuse(request)
    if form == "recurrent" and not reading.causal:
        return ["rows see keys that come after them: only a causal call can go token by token"]
    return []


def choose(request: Request, form: object) -> tuple[str, str, dict[str, list[str]]]:
    """The form, why it, and the refusals of the others."""
    if not isinstance(form, str):
        raise TypeError(f'form must be "auto" or one of {", ".join(FORMS)}, got {type(form).__name__}')
    if form != "auto" and form not in FORMS:
        raise ValueError(f'form must be "auto" or one of {", ".join(FORMS)}, got {form!r}')
    answers = {name: refuse(name, request) for name in FORMS}
    refusals = {name: reasons for name, reasons in answers.items() if reasons}
    if form != "auto":
        if form in refusals:
            able = ", ".join(name for name in FORMS if name not in refusals)
            raise Refused(f"form {form!r} cannot run this call: {'; '.join(refusals[form])}. Able: {able or 'none'}")
        return form, "it was named", refusals
    if request.reading.refusals:
        raise Refused(f"linear attention cannot honour the mask: {'; '.join(request.reading.refusals)}")
    if "whole" not in refusals:
        return "whole", f"every row sees the same keys: {FORMS['whole']}", refusals
    if "recurrent" not in refusals and request.spec.queries == request.spec.keys == 1:
        return "recurrent", f"a single token: {FORMS['recurrent']}", refusals
    return next((name, FORMS[name], refusals) for name in ("fused", "chunked") if name not in refusals)


class LinearPlan(Plan):
    """How a call of linear attention runs. ``backend`` is the form; ``state_bytes`` what a state of it holds."""

    def __init__(self, request: Request, form: object) -> None:
        chosen, reason, refusals = choose(request, form)
        self.spec = request.spec
        self.backend = chosen
        self.reason = reason
        self.refusals = refusals
        self.observer = None
        self.features = request.features.name
        self.num_features = request.features.count(request.query)
        itemsize = 8 if request.work == torch.float64 else 4
        self.state_bytes = (
            request.spec.batch * request.state_heads * self.num_features * (request.spec.value_dim + 1) * itemsize
        )
        self._cost = None
        self._make_cost = lambda: _cost(request, chosen, self.num_features, self.state_bytes)

    def __repr__(self) -> str:
        return f"LinearPlan(form={self.backend!r}, reason={self.reason!r})"

    def __str__(self) -> str:
        spec, cost = self.spec, self.cost
        whole = self.backend == "quadratic"
        pairs = f"{'' if cost.kept_exact else 'at most '}{cost.kept_pairs:,}"
        pairs += f" of {spec.pairs:,}, all of them computed" if whole else ", none of them computed one by one"
        lines = [
            ("call", f"linear attention {call_in_words(spec)}"),
            ("form", f"{self.backend}: {self.reason}"),
            ("features", f"{self.features}, {self.num_features} per head"),
            ("pairs meant", pairs),
            ("state", f"{size(self.state_bytes)}, whatever the length"),
            ("flops", f"{flop(cost.flops)}   bytes {size(cost.bytes)}   peak memory {size(cost.peak_bytes)}"),
            *not_chosen(self, (name for name in FORMS if name != self.backend)),
        ]
        return in_lines(lines)


def _cost(request: Request, form: str, features: int, state_bytes: int) -> Cost:
    spec = request.spec
    itemsize = 8 if request.work == torch.float64 else 4
    kept, exact = spec.pairs, True
    if request.mask is not None:
        sizes = (spec.queries, request.total, request.offset + request.first, spec.batch, spec.heads)
        kept, exact = request.mask.kept_pairs(*sizes)
    rows, keys = spec.batch * spec.heads * spec.queries, spec.batch * request.state_heads * spec.keys
    moved = (rows + spec.batch * spec.kv_heads * spec.keys) * (spec.head_dim + spec.value_dim) * spec.dtype.itemsize
    width = features + spec.value_dim
    sums = 2 * (rows + keys) * features * spec.value_dim
    at_once = min(spec.queries, max(_forms.CHUNK, _forms.AT_ONCE // max(1, spec.batch * spec.heads)))
    alive = spec.batch * spec.heads * at_once
    out = rows * spec.value_dim * spec.dtype.itemsize
    if form == "quadratic":
        return Cost(2 * spec.pairs * width, moved, kept, out + 2 * spec.pairs * itemsize, exact)
    if form == "chunked":
        passes = 1 if request.reading.causal else 2
        flops = passes * (2 * rows * min(_forms.CHUNK, spec.queries) * width + sums)
        buffers = alive * (2 * width + 2 * min(_forms.CHUNK, spec.queries)) * itemsize
        if request.gates is not None:  # what is left between the tokens of a chunk: two in float64, one as used
            buffers += alive * min(_forms.CHUNK, spec.queries) * (16 + itemsize)
        states = state_bytes * (2 + at_once // _forms.CHUNK)
        return Cost(flops, moved, kept, out * passes + buffers + states, exact)
    buffers = (rows + keys) * width * itemsize
    return Cost(sums, moved, kept, out + buffers + 2 * state_bytes, exact)
