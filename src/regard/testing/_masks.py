"""Rules 1 to 14: the meaning of masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import regard
from regard.testing import _rules_of_masks as meaning
from regard.testing._calls import Call, array, expect, rounding
from regard.testing._suite import DOUBLE, Trial, rule, within

Tree = meaning.Tree


def trees(L: int, S: int) -> dict[str, Tree]:
    """One of every constructor, for two batch items and three heads."""
    half = max(S // 2, 0)
    return {
        "everything": ("everything",),
        "causal": ("causal",),
        "window": ("window", 2, 1),
        "padding": ("padding", (half, S), "right"),
        "left padding": ("padding", (S, half), "left"),
        "documents by length": ("documents_lengths", (half, S - half)),
        "documents by id": ("documents_ids", tuple(0 if j < half else -1 if j % 4 == 3 else 1 for j in range(S))),
        "documents an item": (
            "documents_ids",
            tuple(tuple((j + b) // 3 for j in range(S)) for b in range(2)),
        ),
        "prefix": ("prefix", 3),
        "columns": ("columns", 2),
        "strided": ("strided", 3),
        "blocks": ("blocks", 5, (3, 4), 2),
        "blocks by head": ("blocks", 6, (2, 3, 3, 4), 3),
        "random blocks": ("random_blocks", 2, 2, 9),
        "keep": ("keep", 7, (L, S)),
        "keep an item": ("keep", 8, (2, 3, L, S)),
        "drop": ("drop", 9, (2, 1, 1, S)),
        "additive": ("from_additive", 10, (1, 3, L, S)),
    }


@rule(1, "a boolean mask is True where attention is permitted", ("keep", "drop", "from_additive"))
def true_means_may_attend(t: Trial, case: str) -> str:
    return t.agrees(t.call(2, 3, 5, 7, 11, tree=(case, 3, (5, 7))))


@rule(2, "integer, uint8 and float masks raise TypeError naming the mask", ("int64", "uint8", "float32", "bool"))
def bare_tensor_as_mask(t: Trial, case: str) -> str:
    call = t.call(1, 2, 3, 5, 7)
    given = torch.ones(3, 5, dtype=getattr(torch, case), device=t.device)
    return t.raises(TypeError, ["mask"], lambda: t.fn(call.query, call.key, call.value, mask=given))


@rule(2, "integer, uint8 and float masks raise TypeError naming the mask", ("keep", "drop"), DOUBLE)
def constructors_take_booleans_only(t: Trial, case: str) -> str:
    constructor = getattr(t.need("masks"), case)
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.float32):
        given = torch.ones(3, 5, dtype=dtype)
        t.raises(TypeError, [case], lambda given=given: constructor(given))  # type: ignore[misc]
    return "int64, int32, uint8 and float32 raise TypeError"


EMPTY = "a row with no permitted key gives output 0, weights 0 and lse -inf"


@rule(3, EMPTY, ("", "with sinks", "with softcap and bias"))
def output_of_an_empty_row(t: Trial, case: str) -> str:
    call = _with_empty_row(t, case)
    out = call.run(t.fn)
    empty = ~call.pairs.any(-1) if call.pairs is not None else np.zeros(0)
    expect(bool((array(out)[empty] == 0).all()), f"output of an empty row holds {array(out)[empty].ravel()[:3]}")
    return within("output", out, call.oracle.out, call.value_budget())


@rule(3, EMPTY, ("", "with sinks", "with softcap and bias"))
def weights_and_lse_of_an_empty_row(t: Trial, case: str) -> str:
    call = _with_empty_row(t, case)
    seen = t.observe(call)
    empty = np.isneginf(call.oracle.lse)
    weights, lse = array(seen.weights), array(seen.lse)
    expect(bool((weights[empty] == 0).all()), f"weights of an empty row hold {weights[empty].max()}")
    expect(bool(np.isneginf(lse[empty]).all()), f"lse of an empty row is {lse[empty]}")
    expect(bool(np.isfinite(lse[~empty]).all()), "lse of another row is not finite")
    return f"{int(empty.sum())} empty rows"


@rule(4, "gradients through an empty row are 0, every other gradient is unchanged", ("", "with sinks"))
def gradient_of_an_empty_row(t: Trial, case: str) -> str:
    call = _with_empty_row(t, case)
    empty = np.isneginf(call.oracle.lse)
    out, found = call.differentiate(t.fn)
    rows = array(found["query"])[empty]
    expect(bool((rows == 0).all()), f"gradient of an empty row's query holds {rows.ravel()[:3]}")
    silent = call.grad_out.clone()
    silent[torch.from_numpy(empty).to(t.device)] = 0
    _, without = call.differentiate(t.fn, silent)
    for name, gradient in found.items():
        expect(torch.equal(gradient, without[name]), f"an empty row's grad_out reaches the gradient of {name}")
    return t.agrees(call)


def _with_empty_row(t: Trial, case: str) -> Call:
    call = t.call(2, 4, 5, 7, 11, tree=("and", ("keep", 4, (5, 7)), ("blocks", 2, (2, 1, 7, 9), 1)))
    if "sinks" in case:
        call.sinks = t.normal(4, seed=5, dtype=t.side)
    if "bias" in case:
        call.bias = t.normal(1, 4, 5, 7, seed=6, dtype=t.side)
        call.options = {"softcap": 3.0}
    call.tree = ("and", call.tree, ("causal",))
    call.query_offset = -1  # the first row is before every key
    return call


def empty_routes(t: Trial) -> dict[str, Call]:
    """Calls in which some row is empty, one for each way it can come about."""
    inf = float("-inf")
    row = torch.zeros(5, 7, dtype=t.side, device=t.device)
    row[2] = inf
    some = torch.zeros(5, 7, dtype=t.side, device=t.device)
    some[:, 3:] = inf
    combined = t.call(2, 3, 5, 7, 3, tree=("not", ("columns", 3)), bias=some)
    return {
        "boolean": t.call(2, 3, 5, 7, 3, tree=("and", ("keep", 1, (5, 7)), ("not", ("keep", 1, (5, 7))))),
        "-inf bias": t.call(2, 3, 5, 7, 3, bias=row),
        "causal with more queries than keys": t.call(2, 3, 7, 5, 3, tree=("causal",)),
        "window": t.call(2, 3, 7, 5, 3, tree=("window", 1, 0), query_offset=2),
        "padding of length 0": t.call(2, 3, 5, 7, 3, tree=("padding", (0, 4), "right")),
        "left padding and causal": t.call(2, 3, 7, 7, 3, tree=("and", ("causal",), ("padding", (3, 7), "left"))),
        "no keys": t.call(2, 3, 5, 0, 3),
        "no keys, causal": t.call(2, 3, 5, 0, 3, tree=("causal",)),
        "documents": t.call(2, 3, 7, 7, 3, tree=("documents_ids", (0, 0, -1, 1, 1, -1, -1))),
        "blocks": t.call(2, 3, 7, 7, 3, tree=("blocks", 1, (2, 4), 2)),
        "mask and bias only together": combined,
        "disjoint masks": t.call(2, 3, 7, 7, 3, tree=("and", ("window", 2, 0), ("columns", 2))),
        "query_offset an item": t.call(
            2, 3, 3, 7, 3, tree=("causal",), query_offset=torch.tensor([-2, 3], device=t.device)
        ),
    }


ROUTES = tuple(empty_routes(Trial(regard.reference.attention, "cpu", torch.float64, object())))


@rule(5, "rules 3 and 4 hold however the row became empty", ROUTES)
def empty_by(t: Trial, case: str) -> str:
    call = empty_routes(t)[case]
    empty = np.isneginf(call.oracle.lse)
    expect(bool(empty.any()), "the case holds no empty row")
    out, found = call.differentiate(t.fn)
    expect(bool((array(out)[empty] == 0).all()), f"output of an empty row holds {array(out)[empty].ravel()[:3]}")
    expect(bool((array(found["query"])[empty] == 0).all()), "gradient of an empty row's query is not 0")
    return t.agrees(call)


@rule(9, "a mask beats every finite logit", ("permitted at the minimum", "hidden at the maximum", "far apart"))
def mask_beats_logits(t: Trial, case: str) -> str:
    limits = torch.finfo(t.side)
    call = t.call(2, 3, 5, 7, 11, tree=("keep", 3, (5, 7)), options={"scale": 0.0})
    permitted = torch.from_numpy(meaning.bits(3, (5, 7))).to(t.device)
    low, high = {
        "permitted at the minimum": (limits.min, 0.0),
        "hidden at the maximum": (0.0, limits.max),
        "far apart": (-1e30, 1e30),
    }[case]
    call.bias = torch.full((5, 7), high, dtype=t.side, device=t.device).masked_fill(permitted, low)
    return within("output", call.run(t.fn), call.oracle.out, rounding(call.oracle.out, t.dtype))


CAUSAL: dict[str, dict[str, Any]] = {
    "as many queries as keys": {"L": 7, "S": 7},
    "more keys": {"L": 5, "S": 11},
    "more queries": {"L": 11, "S": 5},
    "one query": {"L": 1, "S": 7},
    "query_offset 0": {"L": 5, "S": 11, "query_offset": 0},
    "query_offset 3": {"L": 5, "S": 11, "query_offset": 3},
    "query_offset -2": {"L": 5, "S": 11, "query_offset": -2},
    "query_offset an item": {"L": 5, "S": 11, "query_offset": [6, 1]},
    "window, more keys": {"L": 5, "S": 11, "tree": ("window", 2, 0)},
    "window to the right, more queries": {"L": 11, "S": 5, "tree": ("window", 1, 3)},
}


@rule(10, "causal: query i sees key j iff j ≤ i + query_offset, by default S - L", CAUSAL)
def alignment(t: Trial, case: str) -> str:
    given = {"tree": ("causal",), **CAUSAL[case]}
    if isinstance(given.get("query_offset"), list):
        given["query_offset"] = torch.tensor(given["query_offset"], device=t.device)
    return t.agrees(t.call(2, 3, given.pop("L"), given.pop("S"), 7, **given))


JOINED: dict[str, Tree] = {
    "causal & padding": ("and", ("causal",), ("padding", (7, 4), "right")),
    "padding & causal": ("and", ("padding", (7, 4), "right"), ("causal",)),
    "keep & causal & window": ("and", ("keep", 3, (5, 7)), ("and", ("causal",), ("window", 3, 0))),
    "window & padding & documents": (
        "and",
        ("window", 3, 1),
        ("and", ("padding", (3, 7), "left"), ("documents_lengths", (3, 4))),
    ),
    "everything & causal": ("and", ("everything",), ("causal",)),
}


@rule(11, "masks together mean intersection, in any order; none is a hint", JOINED)
def joined_masks(t: Trial, case: str) -> str:
    return t.agrees(t.call(2, 3, 5, 7, 11, tree=JOINED[case]))


@rule(11, "masks together mean intersection, in any order; none is a hint", ("bias", "sinks", "softcap", "scale"))
def mask_beside(t: Trial, case: str) -> str:
    call = t.call(2, 3, 5, 7, 11, tree=JOINED["causal & padding"])
    if case == "bias":
        call.bias = t.normal(2, 3, 5, 7, seed=5, dtype=t.side)
    elif case == "sinks":
        call.sinks = t.normal(3, seed=6, dtype=t.side)
    else:
        call.options = {case: 0.7}
    return t.agrees(call)


SHAPES = {"L S": (5, 7), "1 1 L S": (1, 1, 5, 7), "B 1 1 S": (2, 1, 1, 7), "1 H L 1": (1, 3, 5, 1), "all": (2, 3, 5, 7)}


@rule(12, "masks broadcast to (B, H, L, S) and never enlarge any of the four", SHAPES)
def mask_of_shape(t: Trial, case: str) -> str:
    return t.agrees(t.call(2, 3, 5, 7, 3, tree=("keep", 3, SHAPES[case])))


ENLARGING = {"batch": (3, 1, 5, 7), "heads": (1, 3, 5, 7), "queries": (1, 1, 5, 7), "keys": (5, 7)}


@rule(12, "masks broadcast to (B, H, L, S) and never enlarge any of the four", (*ENLARGING, "padding"))
def enlarging(t: Trial, case: str) -> str:
    if case == "padding":
        call = t.call(1, 2, 5, 7, 3, tree=("padding", (3, 7), "right"))
    else:
        L, S = {"queries": (1, 7), "keys": (5, 1)}.get(case, (5, 7))
        call = t.call(1, 1, L, S, 3, tree=("keep", 3, ENLARGING[case]))
    return t.raises(ValueError, [], lambda: call.run(t.fn))


@rule(13, "&, | and ~ on mask objects equal the same on arrays", ("and", "or", "not"), DOUBLE)
def mask_algebra(t: Trial, case: str) -> str:
    masks, count = t.need("masks"), 0
    for L, S, offset in ((5, 7, None), (7, 5, 1), (3, 3, -1)):
        found = list(trees(L, S).values())
        for index, first in enumerate(found):
            second = found[(index * 5 + 3) % len(found)]
            tree: Tree = (case, first) if case == "not" else (case, first, second)
            _same_pairs(masks, tree, (2, 3, L, S), offset)
            count += 1
    return f"{count} combinations"


@rule(14, "every symbolic mask equals its materialised form for L, S in 0..9", trees(3, 3), DOUBLE)
def dense_form(t: Trial, case: str) -> str:
    masks = t.need("masks")
    for L in range(10):
        for S in range(10):
            for offset in (None, 0, 3, -2):
                _same_pairs(masks, trees(L, S)[case], (2, 3, L, S), offset)
            _same_pairs(masks, trees(L, S)[case], (2, 3, L, S), torch.tensor([1, 4]))
    return "500 rectangles"


@rule(14, "every symbolic mask equals its materialised form for L, S in 0..9", trees(3, 3), DOUBLE)
def call_with(t: Trial, case: str) -> str:
    for L in (0, 1, 3, 5, 9):
        for S in (0, 1, 2, 7, 9):
            t.agrees(t.call(2, 3, L, S, 2, tree=trees(L, S)[case]), gradients=False)
    return "25 calls"


@rule(14, "every symbolic mask equals its materialised form for L, S in 0..9", dtypes=DOUBLE)
def random_blocks_choose_count(t: Trial, case: str) -> str:
    masks = t.need("masks")
    for size, count in ((1, 3), (2, 2), (3, 1)):
        dense = masks.random_blocks(count, size, 4).dense(12, 12).numpy()
        blocks = dense.reshape(12 // size, size, 12 // size, size).transpose(0, 2, 1, 3)
        whole = blocks.all((2, 3))
        expect(bool((whole == blocks.any((2, 3))).all()), "a block is neither wholly permitted nor wholly hidden")
        expect(bool((whole.sum(1) == count).all()), f"blocks per row: {whole.sum(1)}, expected {count}")
    return "count blocks in every row"


def _same_pairs(masks: Any, tree: Tree, sizes: tuple[int, int, int, int], offset: Any) -> None:
    _, _, L, S = sizes
    found = meaning.build(masks, tree).dense(L, S, query_offset=offset)
    expected = meaning.define(tree, sizes, None if offset is None else np.asarray(offset), masks)
    pairs = np.broadcast_to(found.numpy(), sizes)
    wrong = int((pairs != expected).sum())
    expect(wrong == 0, f"{meaning.source(tree)} at L={L}, S={S}, query_offset={offset}: {wrong} pairs differ")
