"""A story as one HTML file: no scripts, no requests; token text is data, and no element depends on what it says."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from functools import partial

import numpy as np

from regard._display.texts import left, text, visible
from regard._page._document import as_text, document
from regard._page._png import picture
from regard._walk._colours import smaller, strengths
from regard._walk._story import Numbers, Panel, Step, Story, decimals, number, shown
from regard._walk._style import LEVELS, STYLE
from regard._walk._words import STEPS

MOST_ROWS, MOST_COLUMNS = 24, 16  # of a matrix that is printed as numbers
OPEN_PANELS = 8  # a step with more of them folds the rest away
MOST_LINKED = 24  # tokens that are joined by lines

# from negative over zero to positive; a picture has one set of colours for light and dark pages
_SIGNED = np.array([(37, 99, 235), (226, 232, 240), (234, 88, 12)], dtype=np.float64)
_WEIGHTS = np.array([(226, 232, 240), (22, 163, 74), (5, 72, 38)], dtype=np.float64)


def html(story: Story, lang: str) -> str:
    """The page, in the language of the story."""
    say = partial(text, STEPS, lang)
    names = ("negative", "positive", "weight")
    chips = {name: f'<span class="chip {name}">{as_text(say(name))}</span>' for name in names}
    body = [
        f"<header><h1>{as_text(story.title)}</h1>",
        *(f"<p>{_words(line)}</p>" for line in story.intro),
        f"<p>{say('legend', **chips)}</p></header>",
        f"<nav>{''.join(_entry(index, step) for index, step in enumerate(story.steps, 1))}</nav>",
        *(_step(index, step, say) for index, step in enumerate(story.steps, 1)),
    ]
    return document(story.title, STYLE, body, {"en": "en", "zh": "zh-CN"}[lang])


def _entry(index: int, step: Step) -> str:
    return f'<a href="#step-{index}"><b>{index}</b> {as_text(step.title)}</a>'


def _step(index: int, step: Step, say: partial[str]) -> str:
    figures = [_figure(panel, say) for panel in step.panels]
    count = OPEN_PANELS // step.first * step.first  # whole heads
    parts = [
        f'<section id="step-{index}"><h2><span class="index">{index}</span> {as_text(step.title)}',
        f' <code class="shape">{as_text(step.shape)}</code></h2>',
        f'<p class="formula">{as_text(step.formula)}</p>' if step.formula else "",
        f"<p>{_words(step.says)}</p>",
        *_rows(figures[:count], step.first),
    ]
    if step.links and max(step.links[0].values.shape) <= MOST_LINKED:
        drawn = [_links(panel) for panel in step.links[:OPEN_PANELS]]
        parts += [f"<h3>{as_text(say('strongest'))}</h3>", _panels(drawn)]
    if more := figures[count:]:
        parts.append(f"<details><summary>+ {len(more)}</summary>{''.join(_rows(more, step.first))}</details>")
    by_hand = as_text(say("by_hand"))
    parts += [f'<p class="worked"><b>{by_hand}</b> <bdi>{as_text(line)}</bdi></p>' for line in step.worked]
    return "".join([*parts, "</section>"])


def _rows(figures: list[str], first: int) -> list[str]:
    """Queries, keys and values of a head in a row of their own; other matrices flow."""
    size = first if first > 2 else max(len(figures), 1)
    return [_panels(figures[at : at + size]) for at in range(0, len(figures), size)]


def _panels(figures: Iterable[str]) -> str:
    inside = "".join(figures)
    return f'<div class="panels">{inside}</div>' if inside else ""


def _figure(panel: Panel, say: partial[str]) -> str:
    rows, columns = panel.values.shape
    shape = f'<code class="shape">[{rows}, {columns}]</code>'
    caption = f"<figcaption>{as_text(panel.name)} {shape}</figcaption>"
    if panel.kind == "plain":
        return f"<figure>{_table(panel)}</figure>"
    if rows <= MOST_ROWS and columns <= MOST_COLUMNS:
        return f"<figure>{caption}{_table(panel)}</figure>"
    inside, means = _strips(panel) if rows <= MOST_ROWS else _picture(panel)
    finite = np.asarray(panel.values, dtype=np.float64)[np.isfinite(panel.values)]
    note = say("range", low=number(finite.min(initial=0.0), 2), high=number(finite.max(initial=0.0), 2))
    if max(means) > 1:
        note += say("cell_mean", rows=means[0], columns=means[1])
    return f'<figure class="wide">{caption}{inside}<p class="note">{as_text(note)}</p></figure>'


def _table(panel: Panel) -> str:
    digits = decimals(panel.values, panel.kind)
    head = "".join(f"<th>{_token(name)}</th>" for name in panel.columns)
    strength = strengths(panel.values, panel.kind, panel.top)
    rows = []
    for name, values, colours in zip(panel.rows, panel.values, strength, strict=True):
        cells = (_cell(value, colour, panel.kind, digits) for value, colour in zip(values, colours, strict=True))
        rows.append(f"<tr><th>{_token(name)}</th>{''.join(cells)}</tr>")
    inside = f"<thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="scroll"><table>{inside}</table></div>'


def _cell(value: float, colour: float, kind: str, digits: int) -> str:
    word, nothing = shown(value, kind, digits)
    letter = "w" if kind in ("weights", "mask") else "a" if colour >= 0 else "b"
    level = f"{letter}{round(abs(float(colour)) * LEVELS)}"
    return f'<td class="{"x" if nothing else "p" if kind == "plain" else level}">{word}</td>'


def _strips(panel: Panel) -> tuple[str, tuple[int, int]]:
    """A picture a row, beside its token."""
    values, means = smaller(panel, MOST_ROWS, 512)
    strength = strengths(values, panel.kind, panel.top)
    rows = [
        f'<tr><th>{_token(name)}</th><td class="strip">{_image(row[None], panel.kind, 480, 18)}</td></tr>'
        for name, row in zip(panel.rows, strength, strict=True)
    ]
    return f'<div class="scroll"><table><tbody>{"".join(rows)}</tbody></table></div>', means


def _picture(panel: Panel) -> tuple[str, tuple[int, int]]:
    values, means = smaller(panel, 256, 512)
    rows, columns = values.shape
    size = max(1, min(8, 480 // max(rows, columns)))
    strength = strengths(values, panel.kind, panel.top)
    return _image(strength, panel.kind, columns * size, rows * size), means


def _image(strength: Numbers, kind: str, wide: int, high: int) -> str:
    signed = kind not in ("weights", "mask")
    drawn = picture((strength + 1) / 2, _SIGNED) if signed else picture(strength, _WEIGHTS)
    data = base64.b64encode(drawn).decode()
    return f'<img alt="" width="{wide}" height="{high}" src="data:image/png;base64,{data}">'


def _links(panel: Panel) -> str:
    """Lines from who looks (left) to who is looked at (right), the stronger the more weight."""
    queries, keys = panel.values.shape
    step, near, far, wide = 24, 96, 236, 332
    high = step * max(queries, keys)
    lines = [
        f'<line x1="{near}" y1="{step * i + step // 2}" x2="{far}" y2="{step * j + step // 2}" '
        f'stroke-opacity="{panel.values[i, j]:.3f}" stroke-width="{1 + 3 * panel.values[i, j]:.2f}"></line>'
        for i in range(queries)
        for j in range(keys)
    ]
    sides = [(panel.rows, near - 8, "end"), (panel.columns, far + 8, "start")]
    names = [
        f'<text x="{at}" y="{step * index + step // 2 + 5}" text-anchor="{anchor}">{_short(name)}</text>'
        for tokens, at, anchor in sides
        for index, name in enumerate(tokens)
    ]
    drawing = f'<svg viewBox="0 0 {wide} {high}" width="{wide}" height="{high}">{"".join(lines)}{"".join(names)}</svg>'
    return f"<figure><figcaption>{as_text(panel.name)}</figcaption>{drawing}</figure>"


def _short(name: str) -> str:
    return as_text(left(visible(name), 10).rstrip())


def _token(name: str) -> str:
    return f"<bdi>{as_text(name)}</bdi>"


def _words(line: str) -> str:
    """A sentence whose `quoted` parts are code."""
    pieces = line.split("`")
    return "".join(f"<code>{as_text(piece)}</code>" if at % 2 else as_text(piece) for at, piece in enumerate(pieces))
