"""The steps of a layer: what `regard.reference.trace` computes, with words, shapes and one number by hand for each."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from regard._display.texts import text
from regard._walk._inputs import Layer
from regard._walk._story import Numbers, Panel, Step, number
from regard._walk._words import STEPS
from regard.reference import Trace, trace

TERMS = 4  # of a sum that is written out; the rest is "…"


def traced(layer: Layer) -> Trace:
    """Every number of the layer, for a batch of one text."""
    x, memory = layer.x[None], layer.memory[None]
    return trace(x, memory, memory, layer.weights, num_heads=layer.heads, mask=layer.mask, scale=layer.scale)


class Side(NamedTuple):
    """One of the two texts: who looks, or who is looked at."""

    letter: str  # of its vectors
    end: str  # of the names of its arrays
    tokens: tuple[str, ...]
    before: Mapping[str, Numbers]
    x: Numbers


class Teller:
    """Tells the steps of one layer in one language; every number comes from the trace."""

    def __init__(self, layer: Layer, lang: str) -> None:
        self.layer, self.trace = layer, {name: values[0] for name, values in traced(layer).items()}
        self.say = partial(text, STEPS, lang)
        self.between = "" if lang == "zh" else " "  # of sentences
        self.query = min(1, len(layer.tokens) - 1)  # the token whose numbers are worked out
        self.key = int(self.trace["weights"][0, self.query].argmax())

    def steps(self, masked: str = "") -> list[Step]:
        """The steps from the input to the output. `masked` is the text that says what the mask is for."""
        return [
            self.projections(),
            self.split(),
            self.raw_scores(),
            self.scaling(),
            self.masking(masked or self.say("mask.none")),
            self.weighting(),
            self.heads(),
            self.concat(),
            self.output(),
        ]

    def inputs(self) -> list[Step]:
        """Tokens, embeddings and positions of every text there is."""
        return [self.tokens(), self._embeddings(self._sides()), self._positions(self._sides())]

    def _sides(self) -> list[Side]:
        layer = self.layer
        sides = [Side("X", "", layer.tokens, layer.before, layer.x)]
        if layer.is_cross:
            sides.append(Side("M", "_keys", layer.key_tokens, layer.key_before, layer.memory))
        return sides

    def given(self, title: str, says: str, shape: str) -> Step:
        """The input of a layer that is not made of embeddings here."""
        x = self.layer.x
        return Step("input", title, says, shape=shape, panels=(_vectors("X", x, self.layer.tokens),), arrays={"x": x})

    def tokens(self, says: str = "") -> Step:
        sides, rows = self._sides(), (self.say("position"), self.say("number"))
        places = [np.stack([np.arange(len(side.tokens)), side.before["ids"]]) for side in sides]
        return self._step(
            "tokens",
            says=says,
            shape=", ".join(f"{self.say('text')} → [{len(side.tokens)}]" for side in sides),
            panels=[Panel("", at, rows, side.tokens, "plain") for at, side in zip(places, sides, strict=True)],
            arrays={f"ids{side.end}": side.before["ids"] for side in sides},
        )

    def _embeddings(self, sides: list[Side]) -> Step:
        return self._step(
            "embeddings",
            formula=self.say("embeddings.formula"),
            shape=", ".join(f"[{len(side.tokens)}] → {list(side.x.shape)}" for side in sides),
            panels=[
                _vectors(f"E ({side.letter})" if len(sides) > 1 else "E", side.before["embeddings"], side.tokens)
                for side in sides
            ],
            arrays={f"embeddings{side.end}": side.before["embeddings"] for side in sides},
        )

    def _positions(self, sides: list[Side]) -> Step:
        panels: list[Panel] = []
        arrays: dict[str, Numbers] = {}
        for side in sides:
            at = side.before["positions"]
            panels += [_vectors("P", at, side.tokens), _vectors(f"{side.letter} = E + P", side.x, side.tokens)]
            arrays |= {f"positions{side.end}": at, f"x{side.end}": side.x}
        return self._step(
            "positions",
            formula=self.say("positions.formula"),
            shape=", ".join(f"{list(side.x.shape)} + {list(side.x.shape)}" for side in sides),
            panels=panels,
            arrays=arrays,
        )

    def projections(self) -> Step:
        layer, found = self.layer, self.trace
        sources = {"query": layer.tokens, "key": layer.key_tokens, "value": layer.key_tokens}
        says = [self.say("projections.says")]
        if layer.is_cross:
            says.append(self.say("projections.cross"))
        if all(_is_identity(layer.weights[name]) for name in "qkv"):
            says.append(self.say("projections.identity"))
        width, inner = layer.weights["q"].shape
        with_bias = " + b" if "q_bias" in layer.weights else ""
        lengths = dict.fromkeys(len(tokens) for tokens in sources.values())
        made_from = {"Q": "X", "K": "M" if layer.is_cross else "X", "V": "M" if layer.is_cross else "X"}
        bias = layer.weights.get("q_bias")
        return self._step(
            "projections",
            says=self.between.join(says),
            formula=",  ".join(f"{letter} = {given} W^{letter}{with_bias}" for letter, given in made_from.items()),
            shape=", ".join(f"[{length}, {width}] · [{width}, {inner}] → [{length}, {inner}]" for length in lengths),
            panels=[_vectors(name[0].upper(), found[name], tokens) for name, tokens in sources.items()],
            arrays={name: found[name] for name in sources} | {f"W_{name}": layer.weights[name] for name in "qkv"},
            worked=[
                f"Q[{layer.tokens[self.query]}, 0] = "
                + dot(layer.x[self.query], layer.weights["q"][:, 0], 0.0 if bias is None else float(bias[0]))
            ],
        )

    def split(self) -> Step:
        layer, found = self.layer, self.trace
        names = {"query_heads": layer.tokens, "key_heads": layer.key_tokens, "value_heads": layer.key_tokens}
        panels = [
            _vectors(self.say("of_head", name=name[0].upper(), head=head), found[name][head], tokens)
            for head in range(layer.heads)
            for name, tokens in names.items()
        ]
        inner, lengths = found["query"].shape[1], dict.fromkeys(len(tokens) for tokens in names.values())
        return self._step(
            "split",
            says=self.say("split.says" if layer.heads > 1 else "split.one", heads=layer.heads, head_dim=layer.head_dim),
            formula="d_k = d_model / h" if layer.heads > 1 else "",
            shape=", ".join(f"[{T}, {inner}] → [{layer.heads}, {T}, {layer.head_dim}]" for T in lengths),
            panels=panels if layer.heads > 1 else [],
            first=len(names),
            arrays={name: found[name] for name in names},
        )

    def raw_scores(self) -> Step:
        H, L, S, d = self._sizes()
        q, k = self.trace["query_heads"][0, self.query], self.trace["key_heads"][0, self.key]
        return self._step(
            "raw_scores",
            says=self.between.join([self.say("raw_scores.says"), self.say("rows_and_columns")]),
            formula="S = Q Kᵀ",
            shape=f"[{H}, {L}, {d}] · [{H}, {d}, {S}] → [{H}, {L}, {S}]",
            panels=self._by_head("raw_scores"),
            arrays={"raw_scores": self.trace["raw_scores"]},
            worked=[f"{self._pair()}: {dot(q, k)}"],
        )

    def scaling(self) -> Step:
        off = self.layer.scale is not None
        root_of_width = self.layer.head_dim**0.5
        root = number(root_of_width, 0 if root_of_width.is_integer() else 3)
        raw, scaled = (float(self.trace[name][0, self.query, self.key]) for name in ("raw_scores", "scores"))
        return self._step(
            "scores",
            says=self.say("scores.off" if off else "scores.says", root=root),
            formula="S" if off else f"S / √d_k = S / √{self.layer.head_dim}",
            shape=self._unchanged(),
            panels=[] if off else self._by_head("scores"),
            arrays={"scores": self.trace["scores"]},
            worked=[] if off else [f"{self._pair()}: {_fixed(raw)} / {root} {_equals(raw, scaled)} {_fixed(scaled)}"],
        )

    def masking(self, says: str) -> Step:
        mask = self.layer.mask
        if mask is None:
            return self._step("mask", says=says, shape=self._unchanged())
        allowed = Panel(self.say("mask.panel"), mask, self.layer.tokens, self.layer.key_tokens, "mask")
        return self._step(
            "mask",
            says=says,
            formula=self.say("mask.formula"),
            shape=self._unchanged(),
            panels=[allowed, *self._by_head("logits")],
            first=2,
            arrays={"mask": mask, "logits": self.trace["logits"]},
        )

    def weighting(self) -> Step:
        panels = self._by_head("weights", "weights")
        return self._step(
            "weights",
            formula="A[i, j] = exp(S[i, j]) / Σ_k exp(S[i, k])",
            shape=self._unchanged(),
            panels=panels,
            links=tuple(panels),
            arrays={"weights": self.trace["weights"]},
            worked=[f"{self._pair()}: {shares(self.trace['logits'][0, self.query], self.key)}"],
        )

    def heads(self) -> Step:
        H, L, S, d = self._sizes()
        weights, values = self.trace["weights"][0, self.query], self.trace["value_heads"][0, :, 0]
        return self._step(
            "heads",
            formula="H = A V",
            shape=f"[{H}, {L}, {S}] · [{H}, {S}, {d}] → [{H}, {L}, {d}]",
            panels=[
                _vectors(self.say("head", head=head), found, self.layer.tokens)
                for head, found in enumerate(self.trace["heads"])
            ],
            arrays={"heads": self.trace["heads"]},
            worked=[f"{self.say('head', head=0)}: H[{self.layer.tokens[self.query]}, 0] = {dot(weights, values)}"],
        )

    def concat(self) -> Step:
        H, L, _, d = self._sizes()
        one = H == 1
        return self._step(
            "concat",
            says=self.say("concat.one" if one else "concat.says"),
            formula="C = Concat(" + ", ".join(f"H{head}" for head in range(min(H, 3))) + (", …)" if H > 3 else ")"),
            shape=f"[{H}, {L}, {d}] → [{L}, {H * d}]",
            panels=[] if one else [_vectors("C", self.trace["concat"], self.layer.tokens)],
            arrays={"concat": self.trace["concat"]},
        )

    def output(self) -> Step:
        layer = self.layer
        matrix, bias = layer.weights["out"], layer.weights.get("out_bias")
        L, inner = self.trace["concat"].shape
        given = 0.0 if bias is None else float(bias[0])
        return self._step(
            "output",
            says=self.say("output.identity" if _is_identity(matrix) else "output.says"),
            formula="Y = C W^O" + ("" if bias is None else " + b"),
            shape=f"[{L}, {inner}] · [{inner}, {matrix.shape[1]}] → [{L}, {matrix.shape[1]}]",
            panels=[_vectors("Y", self.trace["output"], layer.tokens)],
            arrays={"output": self.trace["output"], "W_out": matrix},
            worked=[f"Y[{layer.tokens[self.query]}, 0] = {dot(self.trace['concat'][self.query], matrix[:, 0], given)}"],
        )

    def _sizes(self) -> tuple[int, int, int, int]:
        H, L, S = self.trace["weights"].shape
        return H, L, S, self.layer.head_dim

    def _unchanged(self) -> str:
        H, L, S, _ = self._sizes()
        return f"[{H}, {L}, {S}] → [{H}, {L}, {S}]"

    def _by_head(self, name: str, kind: str = "signed") -> list[Panel]:
        rows, columns = self.layer.tokens, self.layer.key_tokens
        # a head's raw, scaled and masked scores share their colours, so that the eye sees what each step does to them
        tops = np.abs(self.trace["raw_scores"]).max(axis=(1, 2), initial=0.0)
        return [
            Panel(self.say("head", head=head), values, rows, columns, kind, float(tops[head]))
            for head, values in enumerate(self.trace[name])
        ]

    def _pair(self) -> str:
        query, key = self.layer.tokens[self.query], self.layer.key_tokens[self.key]
        return self.say("pair", head=0, query=query, key=key)

    def _step(self, name: str, says: str = "", **parts: Any) -> Step:
        for several in ("panels", "worked"):
            parts[several] = tuple(parts.get(several, ()))
        return Step(name, self.say(f"{name}.title"), says or self.say(f"{name}.says"), **parts)


def _vectors(name: str, values: Numbers, tokens: tuple[str, ...]) -> Panel:
    return Panel(name, values, tokens, tuple(str(column) for column in range(values.shape[1])))


def _is_identity(matrix: Numbers) -> bool:
    return matrix.shape[0] == matrix.shape[1] and bool((matrix == np.eye(len(matrix))).all())


def dot(left: Numbers, right: Numbers, bias: float = 0.0) -> str:
    """Σ left · right + bias, its first terms written out."""
    terms = [f"{_signed(a)}·{_signed(b)}" for a, b in zip(left[:TERMS], right[:TERMS], strict=True)]
    if len(left) > TERMS:
        terms.append("…")
    if bias:
        terms.append(_signed(bias))
    total = float(left @ right) + bias
    exact = all(_equals(float(value)) == "=" for value in (*left, *right, bias, total))
    return f"{' + '.join(terms)} {'=' if exact else '≈'} {_fixed(total)}"


def shares(logits: Numbers, key: int) -> str:
    """The softmax of one row at one key, written out."""
    allowed = [float(value) for value in logits if value > -np.inf]
    terms = [f"e^{_signed(value)}" for value in allowed[:TERMS]] + (["…"] if len(allowed) > TERMS else [])
    weight = 1.0 / sum(np.exp(value - logits[key]) for value in allowed)
    return f"e^{_signed(float(logits[key]))} / ({' + '.join(terms)}) {_equals(weight)} {_fixed(weight)}"


def _fixed(value: float) -> str:
    """Up to four digits after the point, no zeros at the end."""
    shown = number(float(value), 4)
    return shown.rstrip("0").rstrip(".") if "." in shown and "e" not in shown else shown


def _signed(value: float) -> str:
    shown = _fixed(value)
    return f"({shown})" if shown.startswith("-") else shown


def _equals(*values: float) -> str:
    """ "=" where four digits say all of every number, "≈" where they do not."""
    return "=" if all(abs(value * 1e4 - round(value * 1e4)) < 1e-7 for value in values) else "≈"
