"""What can be walked of the experiments E3 to E5, E7, E8 and E10: one small run of each, all of it computed here."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from regard._display.texts import text
from regard._walk._examples_words import EXAMPLES
from regard._walk._inputs import Layer, Settings, drawn, from_text
from regard._walk._steps import Teller, traced
from regard._walk._story import Numbers, Panel, Step, Story, number, plain
from regard._walk._tell import mask_says
from regard.reference import softmax

CAT = "The cat sat on the mat."
DOG = "The dog ran to the door."
LONGER = "The cat sat on the old red mat."


def variance(settings: Settings, lang: str) -> Story:
    """E3: the variance of dot products, without and with scaling."""
    say, rng = partial(text, EXAMPLES, lang), np.random.default_rng(settings.seed)
    head_dim, tokens = 64, 7
    q, k = rng.standard_normal((2, tokens, head_dim))
    raw, scaled = q @ k.T, q @ k.T / np.sqrt(head_dim)
    top = float(np.abs(raw).max())
    shape = f"[{tokens}, {head_dim}] · [{head_dim}, {tokens}] → [{tokens}, {tokens}]"
    steps = (
        Step(
            "draw",
            say("E3.draw.title"),
            say("E3.draw.says", head_dim=head_dim),
            shape=f"2 × [{tokens}, {head_dim}]",
            panels=(_matrix("Q", q, "q"), _matrix("K", k, "k")),
            arrays={"query": q, "key": k},
        ),
        Step(
            "raw_scores",
            say("E3.raw.title"),
            say("E3.raw.says", head_dim=head_dim, count=raw.size, variance=number(raw.var(), 2)),
            "S = Q Kᵀ",
            shape,
            (_matrix("S", raw, "q", "k", top),),
            arrays={"raw_scores": raw},
        ),
        Step(
            "scores",
            say("E3.scaled.title"),
            say("E3.scaled.says", head_dim=head_dim, variance=number(scaled.var(), 3)),
            f"S / √{head_dim}",
            f"[{tokens}, {tokens}] → [{tokens}, {tokens}]",
            (_matrix(f"S / √{head_dim}", scaled, "q", "k", top),),
            arrays={"scores": scaled},
        ),
        _at_widths(say, rng),
    )
    return _story("E3", steps, settings, lang)


def _at_widths(say: partial[str], rng: np.random.Generator) -> Step:
    pairs, widths = 4000, (4, 16, 64, 256, 1024)
    measured = np.array([_variances(rng, pairs, width) for width in widths]).T
    columns = tuple(f"d_k = {width}" for width in widths)
    return Step(
        "widths",
        say("E3.table.title"),
        say("E3.table.says", pairs=pairs),
        "Var(q · k) = d_k,  Var(q · k / √d_k) = 1",
        panels=(Panel("", measured, (say("raw"), say("scaled")), columns, "plain"),),
        arrays={"d_k": np.array(widths), "variance_raw": measured[0], "variance_scaled": measured[1]},
    )


def _variances(rng: np.random.Generator, pairs: int, width: int) -> tuple[float, float]:
    products = (rng.standard_normal((pairs, width)) * rng.standard_normal((pairs, width))).sum(1)
    return float(products.var()), float((products / np.sqrt(width)).var())


def saturation(settings: Settings, lang: str) -> Story:
    """E4: what softmax does with unscaled scores."""
    say, rng = partial(text, EXAMPLES, lang), np.random.default_rng(settings.seed)
    head_dim, queries, keys, shown = 512, 512, 64, 12
    raw = rng.standard_normal((queries, head_dim)) @ rng.standard_normal((keys, head_dim)).T
    scores = {"raw": raw, "scaled": raw / np.sqrt(head_dim)}
    weights = {name: softmax(found) for name, found in scores.items()}
    top = float(np.abs(raw[:shown]).max())
    table = np.array([_saturated(found) for found in weights.values()])
    columns = tuple(say(f"E4.{name}") for name in ("largest", "entropy", "gradient"))
    steps = (
        Step(
            "scores",
            say("E4.scores.title"),
            say("E4.scores.says", queries=queries, keys=keys, head_dim=head_dim, shown=shown),
            "S = Q Kᵀ,  S / √d_k",
            f"[{queries}, {head_dim}] · [{head_dim}, {keys}] → [{queries}, {keys}]",
            tuple(_matrix(say(name), found[:shown], "q", "k", top) for name, found in scores.items()),
            arrays={f"scores_{name}": found for name, found in scores.items()},
        ),
        Step(
            "weights",
            say("E4.weights.title"),
            say("E4.weights.says"),
            "A = softmax(S)",
            f"[{queries}, {keys}] → [{queries}, {keys}]",
            tuple(
                replace(_matrix(say(name), found[:shown], "q", "k"), kind="weights") for name, found in weights.items()
            ),
            arrays={f"weights_{name}": found for name, found in weights.items()},
        ),
        Step(
            "means",
            say("E4.table.title"),
            say("E4.table.says", queries=queries, keys=keys, most=number(float(np.log(keys)), 2)),
            panels=(Panel("", table, (say("raw"), say("scaled")), columns, "plain"),),
            arrays={name: table[:, at] for at, name in enumerate(("largest_weight", "entropy", "gradient"))},
        ),
    )
    return _story("E4", steps, settings, lang)


def _saturated(weights: Numbers) -> tuple[float, float, float]:
    return float(weights.max(1).mean()), float(_entropy(weights).mean()), float((weights * (1 - weights)).mean())


def _entropy(weights: Numbers) -> Numbers:
    """In nats, row by row; 0 log 0 is 0."""
    safe = np.where(weights > 0, weights, 1.0)
    entropy: Numbers = -(weights * np.log(safe)).sum(-1)
    return entropy


def inverted_mask(settings: Settings, lang: str) -> Story:
    """E5: the causal mask, and the same with its two meanings of True mixed up."""
    say = partial(text, EXAMPLES, lang)
    causal = replace(settings, causal=True)
    right = from_text(CAT, causal)
    length = len(right.tokens)
    wrong = replace(right, mask=np.triu(np.ones((length, length), dtype=bool), k=1))
    tellers = [Teller(layer, traced(layer), lang) for layer in (right, wrong)]
    even = number(1 / length, 4)
    steps = (
        tellers[0].masking(mask_says(causal, lang)),
        tellers[0].weighting(),
        replace(
            tellers[1].masking(say("E5.inverted.says")),
            name="inverted_mask",
            title=say("E5.inverted.title"),
            formula="triu(k=1)",
        ),
        replace(
            tellers[1].weighting(),
            name="inverted_weights",
            title=say("E5.wrong.title"),
            says=say("E5.wrong.says", even=even),
            formula="",
        ),
    )
    return _story("E5", steps, settings, lang, say("E5.intro"))


def fixed_weights(settings: Settings, lang: str) -> Story:
    """E7: a table of weights beside weights that are made from queries and keys."""
    say = partial(text, EXAMPLES, lang)
    one_head = replace(settings, heads=1)
    layers = [from_text(sentence, one_head) for sentence in (CAT, DOG, LONGER)]
    found = [traced(layer)["weights"][0, 0] for layer in layers]
    length = len(layers[0].tokens)
    table = softmax(np.random.default_rng(settings.seed).standard_normal((length, length)))
    names = (say("E7.first"), say("E7.second"))
    fixed = [_weights(name, table, layer) for name, layer in zip(names, layers, strict=False)]
    made = [_weights(name, *both) for name, *both in zip(names, found, layers, strict=False)]
    longer = len(layers[2].tokens)
    steps = (
        Step(
            "fixed",
            say("E7.fixed.title"),
            say("E7.fixed.says", same=plain(float(np.abs(fixed[0].values - fixed[1].values).max()))),
            "A = table",
            f"[{length}, {length}]",
            tuple(fixed),
            arrays={"table": table},
        ),
        Step(
            "attention",
            say("E7.attention.title"),
            say("E7.attention.says", other=number(float(np.abs(found[0] - found[1]).max()), 3)),
            "A = softmax(Q Kᵀ / √d_k)",
            f"[{length}, {length}]",
            tuple(made),
            arrays={"weights_first": found[0], "weights_second": found[1]},
        ),
        Step(
            "length",
            say("E7.length.title"),
            say("E7.length.says", long=longer, short=length, missing=longer - length),
            "A = softmax(Q Kᵀ / √d_k)",
            f"[{longer}, {longer}]",
            (_weights(LONGER, found[2], layers[2]),),
            arrays={"weights_longer": found[2]},
        ),
    )
    return _story("E7", steps, settings, lang, say("E7.intro"))


def blur(settings: Settings, lang: str) -> Story:
    """E8: the weights of two heads, and of one that had to be both."""
    say = partial(text, EXAMPLES, lang)
    layer = from_text(CAT, settings)
    teller = Teller(layer, traced(layer), lang)
    weights = teller.trace["weights"]
    mean = weights.mean(0)
    each, both = float(_entropy(weights).mean()), float(_entropy(mean).mean())
    steps = (
        replace(
            teller.weighting(),
            title=say("E8.many.title"),
            says=say("E8.many.says", each=number(each, 3)),
            worked=(),
            arrays={"weights": weights, "entropy": _entropy(weights)},
        ),
        Step(
            "mean",
            say("E8.mean.title"),
            say("E8.mean.says", mean=number(both, 3)),
            "H((A0 + A1) / 2) ≥ (H(A0) + H(A1)) / 2",
            f"{list(weights.shape)} → {list(mean.shape)}",
            (_weights(say("E8.panel"), mean, layer),),
            arrays={"mean": mean, "entropy_of_mean": _entropy(mean)},
        ),
    )
    return _story("E8", steps, settings, lang, say("E8.intro"))


def parameters(settings: Settings, lang: str) -> Story:
    """E10: how many numbers a layer holds, counted."""
    say = partial(text, EXAMPLES, lang)
    width, weights = settings.d_model, from_text(CAT, settings).weights
    total = sum(matrix.size for matrix in weights.values())
    names = {"q": "W^Q", "k": "W^K", "v": "W^V", "out": "W^O"}
    matrices = Step(
        "matrices",
        say("E10.matrices.title"),
        say("E10.matrices.says", width=width, each=weights["q"].size, total=total),
        f"4 · {width}² = {4 * width**2}",
        f"4 × [{width}, {width}]",
        tuple(_matrix(shown, weights[name]) for name, shown in names.items()),
        arrays={f"W_{name}": matrix for name, matrix in weights.items()} | {"parameters": np.array(total)},
    )
    return _story("E10", (matrices, _by_heads(settings, say), _by_width(settings, say)), settings, lang)


def _by_heads(settings: Settings, say: partial[str]) -> Step:
    heads = [count for count in (1, 2, 4, 8, 16) if settings.d_model % count == 0]
    layers = [from_text(CAT, replace(settings, heads=count)) for count in heads]
    counts = np.array([[layer.head_dim, sum(m.size for m in layer.weights.values())] for layer in layers]).T
    rows = (say("E10.width_of_head"), say("E10.count"))
    columns = tuple(say("E10.head_count", heads=count) for count in heads)
    return Step(
        "heads",
        say("E10.heads.title"),
        say("E10.heads.says"),
        panels=(Panel("", counts, rows, columns, "plain"),),
        arrays={"num_heads": np.array(heads), "head_dim": counts[0], "parameters": counts[1]},
    )


def _by_width(settings: Settings, say: partial[str]) -> Step:
    widths = np.array(sorted({8, 64, 512, settings.d_model}))
    counts = np.array([sum(matrix.size for matrix in drawn(int(width), settings.seed).values()) for width in widths])
    columns = tuple(f"d_model = {width}" for width in widths)
    table = Panel("", np.stack([counts, 4 * widths]), (say("E10.count"), say("E10.linear")), columns, "plain")
    return Step(
        "widths",
        say("E10.widths.title"),
        say("E10.widths.says"),
        "4 · d_model²",
        panels=(table,),
        arrays={"d_model": widths, "parameters": counts},
    )


def _matrix(name: str, values: Numbers, row: str = "", column: str = "", top: float | None = None) -> Panel:
    rows, columns = (
        tuple(f"{letter}{at}" for at in range(size)) for letter, size in zip((row, column), values.shape, strict=True)
    )
    return Panel(name, values, rows, columns, "signed", top)


def _weights(name: str, values: Numbers, layer: Layer) -> Panel:
    return Panel(name, values, layer.tokens, layer.key_tokens, "weights")


def _story(name: str, steps: tuple[Step, ...], settings: Settings, lang: str, *intro: str) -> Story:
    say = partial(text, EXAMPLES, lang)
    lines = [*intro, say("seed", seed=settings.seed), say("lab", name=name)]
    if name in ("E3", "E4"):
        lines.append(say("other_draw"))
    return Story(say(f"{name}.title"), tuple(lines), steps, {})
