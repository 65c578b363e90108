"""The public call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from regard.linear import _forms
from regard.linear._plan import LinearPlan, choose
from regard.linear._request import make_request
from regard.linear._state import LinearState
from regard.masks import Mask


def linear_attention(
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
    form: str = "auto",
) -> Tensor:
    """Σ_j w_ij v_j / Σ_j w_ij over the keys that the mask permits, with w_ij = φ(q_i)·φ(k_j): time O(L), no softmax.

    Shapes as in ``regard.attention``: query [batch, head, L, dim]; key [batch, kv head, S, dim]; value [batch, kv head,
    S, value dim]; result [batch, head, L, value dim]. A row that may attend to nothing gives zeros.

    Args:
        mask: ``masks.causal()``, masks that hide keys from all rows (``padding``, ``columns``, ``keep`` of keys) and
            ``masks.documents``, joined by ``&``. Others are refused with the reason: all rows read one sum over keys.
        feature_map: φ: "elu" (elu + 1), "relu", "identity", a ``regard.linear.RandomFeatures`` (then the result
            approximates softmax attention), or a function of a tensor [batch, head, token, dim].
        scale: of "identity" and RandomFeatures, 1/sqrt(dim) when None; the others have none.
        normalize: False leaves out the denominator.
        decay: [head] (or [kv head]), in (0, 1]: with each token, what came before counts that much (retention).
            Needs a causal mask. Tokens that the mask hides are no tokens here.
        log_gate: [batch, head (or kv head), S], logs ≤ 0 of such a factor for each token (``logsigmoid`` gives them);
            token j's factor fades what came before j. Joins ``decay``.
        query_offset: position of the first query among the keys; S - L when None.
        state: a ``regard.linear.LinearState`` to go on from and to leave behind the last token: query and key are then
            the new tokens only, and the mask speaks about all keys, those before included.
        form: "auto", or "whole", "fused", "chunked", "recurrent", "quadratic": all give the same; a named one runs or
            ``regard.Refused`` is raised.

    Raises:
        TypeError, ValueError: as ``regard.attention``; ``regard.Refused`` for a mask or form that cannot be.
    """
    request = make_request(
        query, key, value, mask=mask, feature_map=feature_map, scale=scale, normalize=normalize, decay=decay,
        log_gate=log_gate, query_offset=query_offset, state=state,
    )  # fmt: skip
    chosen, _, _ = choose(request, form)
    return _forms.run(request, chosen)


def explain_linear(query: Tensor, key: Tensor, value: Tensor, *, form: str = "auto", **keywords: Any) -> LinearPlan:
    """How ``linear_attention`` would run this call; runs nothing and leaves a state as it is."""
    known = make_request.__kwdefaults__ or {}
    if unknown := keywords.keys() - known.keys():
        raise TypeError(
            f"linear_attention has no argument {', '.join(sorted(unknown))}; it has {', '.join(known)}, form"
        )
    return LinearPlan(make_request(query, key, value, **keywords), form)
