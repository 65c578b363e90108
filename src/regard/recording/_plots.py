"""Pictures of a recording, with matplotlib."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from regard._display.texts import Catalogue, text
from regard.recording._summary import show
from regard.recording._summary_words import WORDS as LABELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from regard.recording import Head, Recording

KINDS = ("map", "entropy", "keys")
_LABELS = 40  # positions that are named along an axis, at most
_BARS = 24
WORDS: Catalogue = {
    "head": ("head {head}", "头 {head}"),
    "labelled": ("head {head}: {label}", "头 {head}：{label}"),
    "heads": ("{count} heads", "{count} 个头"),
    "layer": ("layer", "层"),
    "place": ("layer {layer}: {path}", "第 {layer} 层：{path}"),
    "weight": ("weight", "权重"),
    "mean weight": ("mean weight", "平均权重"),
    "key": ("key", "键"),
    "query": ("query", "查询"),
    "most": ("most possible", "最大可能值"),
    "a head": ("a head", "一个头"),
    "mean": ("mean of the layer", "该层平均"),
    "entropy": ("entropy (nats)", "熵（nat）"),
    "share": ("share of the weight received", "得到的权重占比"),
    "keys": ("layer {layer}, {who}: the keys that receive most", "第 {layer} 层，{who}：得到最多权重的键"),
}


def draw(
    recording: Recording,
    kind: str | None,
    layer: int | str | None,
    head: int | None,
    call: int,
    item: int,
    lang: str = "en",
) -> Figure:
    if kind is None:
        kind = "entropy" if layer is None else "map"
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if not recording.calls:
        raise ValueError("the recording is empty: nothing attended inside the block")
    try:
        from regard._display.figures import lettered
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install matplotlib") from error
    say, named = partial(text, WORDS, lang), partial(text, LABELS, lang)
    with lettered(lang):
        if layer is None:
            if kind != "entropy" or head is not None or call:
                asked = f"kind={kind!r}" if kind != "entropy" else "head=" if head is not None else "call="
                raise ValueError(f"{asked} needs a layer, such as layer=0")
            return _entropy_of_layers(recording, item, say)
        calls = recording.at(layer)
        if head is not None:
            heads: tuple[int, ...] = (head,)
        else:  # a call that is not there is refused by `select`
            heads = calls[call].heads if -len(calls) <= call < len(calls) else (0,)
        chosen = [recording.select(layer, one, call=call, item=item) for one in heads]
        if kind == "entropy":
            return _entropy(chosen, say)
        return _keys(chosen, say) if kind == "keys" else _maps(recording, chosen, say, named)


def _figure(width: float, height: float) -> Figure:
    from regard._display.figures import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _maps(recording: Recording, heads: list[Head], say: Any, named: Any) -> Figure:
    columns = min(4, math.ceil(math.sqrt(len(heads))))
    rows = math.ceil(len(heads) / columns)
    alone = len(heads) == 1
    figure = _figure(6.4 if alone else 2.5 * columns, 5.6 if alone else 2.4 * rows + 0.5)
    picture: Any = None
    for at, head in enumerate(heads):
        axes = figure.add_subplot(rows, columns, at + 1)
        values = _cells(head)
        picture = axes.imshow(
            values,
            cmap="viridis",
            norm=_norm(),
            interpolation="nearest",
            aspect="auto",
            extent=(-0.5, head.call.keys - 0.5, head.call.queries - 0.5, -0.5),
        )
        label = _label(recording, head)
        title = say("labelled", head=head.head, label=named(label)) if label else say("head", head=head.head)
        axes.set_title(title, fontsize=10)
        if alone:
            _name_ticks(axes, head)
        else:
            axes.tick_params(labelsize=7)
    if alone:
        exact = head.call.queries * head.call.keys == values.size
        figure.colorbar(picture, label=say("weight" if exact else "mean weight"))
    figure.suptitle(say("place", layer=heads[0].call.layer, path=heads[0].call.path), fontsize=11, parse_math=False)
    figure.supxlabel(say("key"), fontsize=9)
    figure.supylabel(say("query"), fontsize=9)
    return figure


def _norm() -> Any:
    from matplotlib.colors import PowerNorm

    return PowerNorm(0.5, vmin=0)  # square roots: one large weight must not make all others invisible


def _cells(head: Head) -> Any:
    """The exact weights when all of them were kept, else the map."""
    whole = head.call.parts.get("weights")
    if whole is not None and whole.shape[2:] == (head.call.queries, head.call.keys):
        return head.weights.numpy()
    return head.map.numpy()


def _name_ticks(axes: Axes, head: Head) -> None:
    small: dict[str, Any] = {"fontsize": 7, "parse_math": False}
    if head.call.keys <= _LABELS:
        axes.set_xticks(range(head.call.keys), [show(token) for token in head.key_tokens], rotation=90, **small)
    if head.call.queries <= _LABELS:
        axes.set_yticks(range(head.call.queries), [show(token) for token in head.query_tokens], **small)


def _label(recording: Recording, head: Head) -> str:
    rows = recording.described(head.call)
    return next(str(row["label"]) for row in rows if (row["item"], row["head"]) == (head.item, head.head))


def _entropy(heads: list[Head], say: Any) -> Figure:
    """Each head of a layer along the queries."""
    call, figure = heads[0].call, _figure(7.2, 4.0)
    axes = figure.add_subplot()
    for head, colour in zip(heads, _colours(len(heads)), strict=True):
        axes.plot(head.entropy.numpy(), label=say("head", head=head.head), linewidth=1, color=colour)
    counts = heads[0].permitted
    most = counts.clamp_min(1).log().masked_fill(counts == 0, torch.nan)
    axes.plot(most.numpy(), color="0.6", linestyle="--", linewidth=1, label=say("most"))
    axes.set_xlabel(say("query"))
    axes.set_title(say("place", layer=call.layer, path=call.path), fontsize=11, parse_math=False)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return _from_zero(figure, axes, say)


def _entropy_of_layers(recording: Recording, item: int, say: Any) -> Figure:
    """The mean of each head, by layer."""
    there = max(call.batch for call in recording.calls)
    if not 0 <= item < there:
        raise IndexError(f"item {item} of the batch was not recorded; there are {there}")
    rows = [row for row in recording.to_dicts() if row["item"] == item and row["entropy"] is not None]
    figure = _figure(7.2, 4.0)
    axes = figure.add_subplot()
    places, found = [row["layer"] for row in rows], [row["entropy"] for row in rows]
    axes.scatter(places, found, s=14, alpha=0.5, label=say("a head"))
    layers = sorted({row["layer"] for row in rows})
    means = [torch.tensor([row["entropy"] for row in rows if row["layer"] == at]).mean().item() for at in layers]
    axes.plot(layers, means, color="C1", label=say("mean"))
    axes.set_xticks(layers if len(layers) <= 16 else layers[:: math.ceil(len(layers) / 16)])
    axes.set_xlabel(say("layer"))
    axes.set_title(recording.title, fontsize=11, parse_math=False)
    axes.legend(fontsize=8)
    return _from_zero(figure, axes, say)


def _from_zero(figure: Figure, axes: Axes, say: Any) -> Figure:
    axes.set_ylabel(say("entropy"))
    axes.set_ylim(bottom=0)
    return figure


def _colours(count: int) -> list[Any]:
    """One colour per head; the usual ten would come round again."""
    if count <= 10:
        return [f"C{at}" for at in range(count)]
    from matplotlib import colormaps

    return [colormaps["turbo"](0.05 + 0.9 * at / (count - 1)) for at in range(count)]


def _keys(heads: list[Head], say: Any) -> Figure:
    """The keys that receive most, heads added up."""
    mass = torch.stack([head.key_mass for head in heads]).sum(0)
    share = mass / mass.sum().clamp_min(1e-30)
    best = torch.topk(share, min(_BARS, len(share))).indices.sort().values
    figure = _figure(7.2, 4.0)
    axes = figure.add_subplot()
    axes.bar(range(len(best)), share[best].numpy())
    names = [f"{show(heads[0].key_tokens[at])} ({at})" for at in best.tolist()]
    axes.set_xticks(range(len(best)), names, rotation=90, fontsize=7, parse_math=False)
    axes.set_ylabel(say("share"))
    who = say("head", head=heads[0].head) if len(heads) == 1 else say("heads", count=len(heads))
    axes.set_title(say("keys", layer=heads[0].call.layer, who=who), fontsize=11)
    return figure
