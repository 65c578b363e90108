"""`regard look --cut … --ablate …`: what is typed as edits, and the difference they make to the model's answer."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from regard._display.texts import Catalogue
from regard._display.texts import text as say

if TYPE_CHECKING:
    from regard.edits import Edit

WORDS: Catalogue = {
    "next": ("what comes next, before and after:", "下一个词元，编辑前与编辑后："),
    "token": ("{token:<14} {before:7.2%} → {after:7.2%}", "{token:<14} {before:7.2%} → {after:7.2%}"),
    "loss": (
        "perplexity of the text: {before:.4g} → {after:.4g}",
        "文本的困惑度：{before:.4g} → {after:.4g}",
    ),
    "cosine": (
        "cosine of the embedding (mean over tokens) before and after: {cosine:.4f}",
        "编辑前后嵌入（各词元平均）的余弦：{cosine:.4f}",
    ),
    "moved": ("moved most (cosine of each token): {tokens}", "变化最大（各词元的余弦）：{tokens}"),
}
_MOST = 5
_ITEM = re.compile(r'"([^"]*)"|([^,]+)')
_OUTSIDE = r'(?=(?:[^"]*"[^"]*")*[^"]*$)'  # of quotes
_ARROW, _AT = re.compile(f">{_OUTSIDE}"), re.compile(f"@{_OUTSIDE}")
_NUMBER = re.compile(r"-?\d+")
_RANGE = re.compile(r"(-?\d+)?:(-?\d+)?")


class Typed(NamedTuple):
    """An edit as it was typed: with the layer and the head it is for, where those were given."""

    edit: Edit
    layer: int | None
    head: int | None
    texts: tuple[str, ...] = ()  # tokens that it names by their text
    option: str = ""  # as it was typed


def typed(cut: list[str], ablate: list[str]) -> list[Typed]:
    """Raises ValueError, with what was expected, for what cannot be read."""
    from regard import edits

    found = [_cut(text) for text in cut]
    for text in ablate:
        for one in text.split(","):
            layer, head = _place(one.strip(), "--ablate")
            found.append(Typed(edits.ablate("zero"), layer, head, option=f"--ablate {one.strip()}"))
    return found


def _cut(text: str) -> Typed:
    from regard import edits

    *places, edges = _AT.split(text)
    place = "@".join(places)
    layer, head = _place(place, "--cut") if place else (None, None)
    sides = _ARROW.split(edges)
    if len(sides) > 2:
        raise ValueError(f"--cut {text!r} has more than one '>'; expected KEYS or QUERIES>KEYS, such as 'it>cat'")
    queries, keys = sides if len(sides) == 2 else ("", edges)
    where: dict[str, Any] = {
        name: _tokens(given, text) for name, given in (("queries", queries), ("keys", keys)) if given
    }
    if not where:
        raise ValueError(f"--cut {text!r} names no tokens; expected KEYS or QUERIES>KEYS, such as '0:4' or 'it>cat'")
    named = [one for given in where.values() for one in (given if isinstance(given, list) else [given])]
    texts = tuple(one for one in named if isinstance(one, str))
    return Typed(edits.cut(**where), layer, head, texts, f"--cut {text}")


def _place(text: str, option: str) -> tuple[int, int | None]:
    layer, _, head = text.partition(".")
    if not layer.isdecimal() or (head and not head.isdecimal()) or text.endswith("."):
        raise ValueError(f"{option} has {text!r}; expected LAYER.HEAD, such as 3.5, or LAYER for all of its heads")
    return int(layer), int(head) if head else None


def _tokens(text: str, whole: str) -> Any:
    found: list[Any] = []
    for quoted, plain in _ITEM.findall(text):
        if quoted:
            found.append(quoted)
        elif _NUMBER.fullmatch(plain.strip()):
            found.append(int(plain))
        elif spanned := _RANGE.fullmatch(plain.strip()):
            found.append(slice(*(None if end is None else int(end) for end in spanned.groups())))
        elif plain.strip():
            found.append(plain.strip())
    if not found:
        raise ValueError(f"--cut {whole!r} has no tokens on one side; expected positions, ranges as 0:4, or words")
    return found[0] if len(found) == 1 else found


@contextlib.contextmanager
def edited(model: Any, given: list[Typed], tokens: list[list[str]]) -> Any:
    """The model with its edits; yields their reports."""
    import regard

    with _by_options(given), contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                regard.edit(
                    model,
                    one.edit,
                    layers=None if one.layer is None else [one.layer],
                    heads=None if one.head is None else [one.head],
                    # those of the text: a model with two sides reads another one in its encoder
                    tokens=(tokens or None) if one.texts else None,
                )
            )
            for one in given
        ]


@contextlib.contextmanager
def _by_options(given: list[Typed]) -> Iterator[None]:
    """Errors of edits name arguments of Python; here they name what was typed."""
    try:
        yield
    except ValueError as error:
        raise ValueError(_as_typed(str(error), given)) from error


def _as_typed(said: str, given: list[Typed]) -> str:
    for edit in {repr(one.edit): None for one in given}:
        said = said.replace(edit, ", ".join(dict.fromkeys(one.option for one in given if repr(one.edit) == edit)))
    for one in given:
        said = said.replace(f"layers=[{one.layer}] were asked for", f"{one.option} names layer {one.layer}")
        if one.layer is None or f"(layer {one.layer})" in said:
            said = said.replace(f"heads=[{one.head}] were asked for", f"{one.option} names head {one.head}")
        for text in one.texts:
            said = re.sub(
                f"^(queries|keys) names the token {re.escape(repr(text))}", f"{one.option} has {text!r}", said
            )
    for words, instead in _INSTEAD:
        said = re.sub(words, instead, said)
    return said


# What errors advise in Python, as what to type.
_INSTEAD = (
    (r"name the other layers with layers=\[…\]", "name another layer, as in --cut 3@0:4"),
    (r"pass regard\.edit\(.*$", "give their positions, as in --cut 0:4"),
    (r"leave queries= away", "leave the queries away"),
    (r"run without a cache, or cut by queries= and keys=", "give positions, as in --cut 0:4"),
    (r"\b(queries|keys)=", r"\1 "),
)


class Answer(NamedTuple):
    """What a model says: probabilities of what comes next, or states of its tokens."""

    chances: Any = None  # [vocabulary]
    loss: float | None = None  # nats a token of the text
    states: Any = None  # [token, width]


def answer(out: Any, ids: Any) -> Answer:
    import torch

    logits = getattr(out, "logits", None)
    if logits is not None and logits.dim() == 3:
        loss = None
        if ids is not None and ids.shape == logits.shape[:2] and ids.shape[1] > 1:
            loss = float(torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:]))
        return Answer(logits[0, -1].float().softmax(-1), loss)
    states = getattr(out, "last_hidden_state", None)
    # what a picture and a text become; their likeness, which comes first, is a single number
    embedded = [one for name in ("image_embeds", "text_embeds") if (one := getattr(out, name, None)) is not None]
    if states is None and embedded:
        states = torch.cat(embedded).unsqueeze(0)
    if states is None:
        states = logits if logits is not None else next(iter(out.values()))
    return Answer(states=states[0].float().reshape(-1, states.shape[-1]))


def difference(before: Answer, after: Answer, tokens: list[str], words: Any) -> dict[str, Any]:
    """The difference in numbers; ``words`` gives the text of a token's number."""
    import torch

    if before.chances is not None:
        best = torch.topk(before.chances, _MOST).indices.tolist()
        best += [n for n in torch.topk(after.chances, _MOST).indices.tolist() if n not in best]
        rows = [{"token": words(n), "before": float(before.chances[n]), "after": float(after.chances[n])} for n in best]
        found: dict[str, Any] = {"next": rows}
        if before.loss is not None and after.loss is not None:
            found["perplexity"] = {"before": _exp(before.loss), "after": _exp(after.loss)}
        return found
    mean = torch.cosine_similarity(before.states.mean(0), after.states.mean(0), 0)
    each = torch.cosine_similarity(before.states, after.states, 1)
    order = each.argsort()[:_MOST].tolist()
    names = tokens if len(tokens) == len(each) else [str(n) for n in range(len(each))]
    return {"cosine": float(mean), "moved": [{"token": names[n], "cosine": float(each[n])} for n in order]}


def _exp(loss: float) -> float:
    import math

    return math.exp(min(loss, 700.0))


def lines(found: dict[str, Any], lang: str) -> list[str]:
    """The same as text."""
    if "next" in found:
        said = [say(WORDS, lang, "next")]
        said += ["  " + say(WORDS, lang, "token", **{**row, "token": repr(row["token"])}) for row in found["next"]]
        if "perplexity" in found:
            said.append(say(WORDS, lang, "loss", **found["perplexity"]))
        return said
    from regard.recording._summary import show

    moved = ", ".join(f"{show(row['token'])} {row['cosine']:.3f}" for row in found["moved"])
    return [say(WORDS, lang, "cosine", cosine=found["cosine"]), say(WORDS, lang, "moved", tokens=moved)]
