"""`scale`, `softcap`, `sinks` and `backend` of the module, as the call has them (FACTS M12)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard
from regard import masks, reference
from regard.cache import BlockPool, KVCache, PagedCache, RollingCache
from regard.nn import MultiHeadAttention

HOWS: list[dict[str, Any]] = [
    {"scale": 0.37},
    {"scale": 0.0},
    {"softcap": 1.5},
    {"sinks": True},
    {"scale": 1.3, "softcap": 2.0, "sinks": True, "backend": "eager"},
]


def made(**how: Any) -> MultiHeadAttention:
    torch.manual_seed(0)
    module = MultiHeadAttention(12, 4, num_kv_heads=2, dtype=torch.float64, **how)
    if module.sinks is not None:
        torch.nn.init.normal_(module.sinks)
    return module


def by_hand(module: MultiHeadAttention, x: torch.Tensor, mask: Any, **how: Any) -> torch.Tensor:
    """The oracle on the projected heads."""
    q, k, v = (
        projection(x).detach().unflatten(-1, (-1, 3)).transpose(1, 2).numpy()
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    dense = None if mask is None else mask.dense(x.shape[1], x.shape[1]).numpy()
    sinks = how.pop("sinks", None)
    how |= {} if sinks is None else {"sinks": sinks.detach().numpy()}
    heads = torch.from_numpy(reference.attention(q, k, v, mask=dense, **how))
    return module.out_proj(heads.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["", "causal"])
def test_the_module_attends_as_the_call_does(how: dict[str, Any], mask: Any) -> None:
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    module = made(**how)
    given = {name: value for name, value in how.items() if name not in ("sinks", "backend")}
    if module.sinks is not None:
        given["sinks"] = module.sinks
    expected = by_hand(module, x, mask, **given)
    out = module(x, mask=mask)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(module.observe(x, mask=mask).out, out, rtol=0, atol=1e-12)
    if "backend" in how:
        assert module.explain(x, mask=mask).backend == "eager"
    # one call may say it for itself
    plain = MultiHeadAttention(12, 4, num_kv_heads=2, dtype=torch.float64)
    plain.load_state_dict(module.state_dict(), strict=module.sinks is None)
    torch.testing.assert_close(plain(x, mask=mask, **given), out, rtol=0, atol=1e-12)
    out.sum().backward()
    assert module.sinks is None or bool(module.sinks.grad.any())


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("kind", [lambda: KVCache(7), lambda: PagedCache(BlockPool(9, 2))], ids=["flat", "paged"])
def test_a_cache_attends_likewise(how: dict[str, Any], kind: Any) -> None:
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    module = made(**how).eval()
    cache = kind()
    with torch.no_grad():
        whole = module(x, mask=masks.causal())
        steps = [module(x[:, a:b], mask=masks.causal(), cache=cache) for a, b in ((0, 4), (4, 5), (5, 7))]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0, atol=1e-12)


def test_a_rolling_cache_too() -> None:
    x = torch.randn(1, 9, 12, dtype=torch.float64)
    module = made(scale=0.4, sinks=True).eval()
    cache = RollingCache(3)
    with torch.no_grad():
        whole = module(x, mask=cache.mask)
        steps = [module(x[:, i : i + 1], mask=cache.mask, cache=cache) for i in range(9)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0, atol=1e-12)


def test_what_cannot_be_is_refused() -> None:
    x = torch.randn(1, 3, 12, dtype=torch.float64)
    with pytest.raises(TypeError, match="sinks must be True or False"):
        MultiHeadAttention(12, 4, sinks=torch.zeros(4))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tempreature: no such keyword; scale, softcap, sinks, backend"):
        made()(x, tempreature=2.0)
    with pytest.raises(ValueError, match="softcap"):
        made(softcap=-1.0)(x)
    with pytest.raises(ValueError, match="backend"):
        made(backend="fastest")(x)
    for how in ({"scale": 0.5}, {"softcap": 3.0}, {"sinks": True}):
        with pytest.raises(ValueError, match=next(iter(how))):
            regard.interop.to_torch(MultiHeadAttention(12, 4, **how))
    assert "scale=0.5" in repr(made(scale=0.5))
    assert "sinks=True" in repr(made(sinks=True)) and "sinks" not in repr(made())


@pytest.mark.parametrize("name", ["forward", "observe"])
def test_keywords_of_torchs_module_are_refused_with_their_names_here(name: str) -> None:
    x = torch.randn(1, 3, 12, dtype=torch.float64)
    for theirs, ours in {
        "attn_mask": ["True = hidden", "mask=masks.drop(tensor)", "bias=tensor"],
        "key_padding_mask": ["masks.drop(tensor[:, None, None, :])", "masks.padding(lengths)", "mask="],
        "is_causal": ["mask=masks.causal()"],
        "need_weights": ["leave it out, and call observe"],
        "average_attn_weights": ["call observe"],
    }.items():
        with pytest.raises(TypeError) as raised:
            getattr(made(), name)(x, **{theirs: None})
        assert str(raised.value).startswith(f"{theirs}: no such keyword; {theirs}: ")
        assert all(part in str(raised.value) for part in ours)
