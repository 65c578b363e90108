"""A story in the terminal: small matrices as coloured numbers, large ones as heatmaps, side by side where they fit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.style import Style
from rich.text import Text

from regard._display.texts import folded, left, right, text, visible, width, with_code
from regard._walk._colours import smaller, strengths
from regard._walk._story import Numbers, Panel, Step, Story, decimals, number, plain, shown
from regard._walk._words import STEPS

if TYPE_CHECKING:
    from regard._walk._table import Table

MOST_ROWS = 20  # of a matrix that is printed as numbers
LABEL, COLUMN = 12, 8  # columns of the terminal that a token may take next to a row, and above a column
TABLE_LABEL = 24  # and the name of a row in a table
GAP = 3
MOST_PANELS = 6  # of a step; a layer with many heads would fill screen after screen
SHADES = " ░▒▓█"

# Cells bring their own background, so that they can be read in a light terminal and in a dark one.
ZERO, NEGATIVE, POSITIVE, WEIGHT = (44, 44, 54), (56, 132, 255), (240, 128, 24), (34, 180, 90)


class View:
    """What `rich` prints for a story; its layout follows the width of the console."""

    def __init__(self, story: Story, lang: str) -> None:
        self.story = story
        self.say = partial(text, STEPS, lang)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # sixteen colours are too few to tell numbers apart: there, as in a pipe, shades do it
        coloured = console.color_system in ("256", "truecolor") and not console.no_color
        page = Page(options.max_width, coloured, self.say)
        yield from page.title(self.story.title)
        for line in self.story.intro:
            yield from page.sentence(line)
        panels = [panel for step in self.story.steps for panel in step.panels]
        if page.coloured or any(page.is_large(panel) for panel in panels):
            yield from page.legend()
        for index, step in enumerate(self.story.steps, 1):
            yield from page.step(index, step)


class Page:
    def __init__(self, columns: int, coloured: bool, say: partial[str]) -> None:
        self.columns, self.coloured, self.say = columns, coloured, say

    def title(self, words: str) -> list[Text]:
        return self._folded(Text(visible(words), style="bold"))

    def legend(self) -> list[Text]:
        if not self.coloured:
            return self.sentence(self.say("shades"))
        names = {"negative": NEGATIVE, "positive": POSITIVE, "weight": WEIGHT}
        line = self.say("legend", **{name: f"\0{name}\0" for name in names})
        pieces = [
            Text(f" {self.say(piece)} ", style=_filled(names[piece])) if piece in names else Text(piece)
            for piece in line.split("\0")
        ]
        return self._folded(Text("").join(pieces))

    def step(self, index: int, step: Step) -> list[RenderableType]:
        lines = [Text(), *self._heading(index, step)]
        if step.formula:
            lines += self._folded(Text(f"  {step.formula}", style="bold magenta"))
        lines += self.sentence(step.says)
        count = len(step.panels) if len(step.panels) <= MOST_PANELS else step.first
        if step.panels:
            lines += [Text(), *self._side_by_side([self.panel(panel) for panel in step.panels[:count]])]
        if rest := step.panels[count:]:
            lines += self._more(rest, bool(step.links))
        if step.links:
            lines += [Text(), *self._strongest(step.links)]
        if step.worked and (step.panels or step.links):
            lines.append(Text())
        for worked in step.worked:
            lines += self._folded(Text.assemble((self.say("by_hand"), "dim"), visible(worked)))
        if not self.coloured:  # spaces at the end of a line are seen only where they have a colour
            for line in lines:
                line.rstrip()
        return [*lines, *(part for table in step.tables for part in self._found(table))]

    def _found(self, table: Table) -> list[RenderableType]:
        return [Text(), *self._folded(Text(table.title, style="bold")), table.terminal()]

    def sentence(self, line: str) -> list[Text]:
        """A sentence whose `quoted` parts are code."""
        return self._folded(with_code(visible(line)))

    def _folded(self, line: Text) -> list[Text]:
        return folded(line, self.columns)

    def _more(self, rest: tuple[Panel, ...], weights: bool) -> list[Text]:
        """Of weights the rest as small pictures; of everything else, where it can be seen."""
        if not weights or max(rest[0].values.shape) > MOST_ROWS:
            return [Text(), *self.sentence(self.say("more", count=len(rest)))]
        small = [_equal([Text(panel.name, style="bold"), *self._pixels(panel, panel.values, 2)]) for panel in rest]
        return [Text(), *self._side_by_side(small)]

    def _heading(self, index: int, step: Step) -> list[Text]:
        """Title and shapes at the two ends of a rule; the shapes below it where they do not fit."""
        title = f"{index} · {step.title} "
        shape = f" {step.shape}" if step.shape else ""
        room = self.columns - width(title) - width(shape)
        if shape and room < 3:
            return [*self._heading(index, replace(step, shape="")), *self._folded(Text(step.shape, style="dim"))]
        return self._folded(Text.assemble((title, "bold cyan"), ("─" * room, "cyan"), (shape, "dim")))

    def panel(self, panel: Panel) -> list[Text]:
        """The lines of one matrix, all equally wide, its name and shape above it."""
        if panel.kind == "plain":
            return self._plain(panel)
        name = Text.assemble((visible(panel.name), "bold"), "  ", (str(list(panel.values.shape)), "dim"))
        return _equal([name, *(self._heatmap(panel) if self.is_large(panel) else self._cells(panel))])

    def is_large(self, panel: Panel) -> bool:
        """Whether it has more numbers than can be printed here."""
        rows, columns = panel.values.shape
        if panel.kind == "plain":
            return False
        if rows > MOST_ROWS or 2 * columns > self.columns:  # known without writing out millions of numbers
            return True
        return bool(_label_width(panel.rows) + columns * (_cell_width(panel) + 1) > self.columns)

    def _cells(self, panel: Panel) -> list[Text]:
        side, cell, digits = _label_width(panel.rows), _cell_width(panel), decimals(panel.values, panel.kind)
        head = " " * side + "".join(f" {right(visible(name), cell)}" for name in panel.columns)
        lines = [Text(head, style="dim")]
        strength = strengths(panel.values, panel.kind, panel.top)
        for name, row, colours in zip(panel.rows, panel.values, strength, strict=True):
            line = Text(left(visible(name), side))
            for value, colour in zip(row, colours, strict=True):
                line.append(*self._cell(value, colour, panel.kind, digits, cell))
            lines.append(line)
        return lines

    def _cell(self, value: float, colour: float, kind: str, digits: int, cell: int) -> tuple[str, Style]:
        word, nothing = shown(value, kind, digits)
        return f" {right(word, cell)}", Style(dim=True) if nothing else self._style(colour, kind)

    def _style(self, colour: float, kind: str) -> Style:
        return _filled(_mixed(colour, kind)) if self.coloured else Style()

    def _heatmap(self, panel: Panel) -> list[Text]:
        side = _label_width(panel.rows)
        room = self.columns - side
        per_cell = 2 if panel.values.shape[1] * 2 <= room else 1
        values, means = smaller(panel, MOST_ROWS, min(room // per_cell, 96))
        # a line that is the mean of several rows has the name of its first
        names = [panel.rows[index * len(panel.rows) // len(values)] for index in range(len(values))]
        pixels = self._pixels(panel, values, per_cell)
        lines = [Text.assemble(left(visible(name), side), line) for name, line in zip(names, pixels, strict=True)]
        finite = panel.values[np.isfinite(panel.values)].astype(np.float64)
        ends = {"low": finite.min(initial=0.0), "high": finite.max(initial=0.0)}
        note = self.say("range", **{name: number(float(value), 2) for name, value in ends.items()})
        if max(means) > 1:
            note += self.say("cell_mean", rows=means[0], columns=means[1])
        return [*lines, *(Text(piece.plain, style="dim") for piece in self._folded(Text(note)))]

    def _pixels(self, panel: Panel, values: Numbers, per_cell: int) -> list[Text]:
        lines = []
        for row in strengths(values, panel.kind, panel.top):
            line = Text()
            for colour in row:
                shade = SHADES[min(int(abs(colour) * len(SHADES)), len(SHADES) - 1)]
                line.append((" " if self.coloured else shade) * per_cell, self._style(colour, panel.kind))
            lines.append(line)
        return lines

    def _plain(self, panel: Panel) -> list[Text]:
        cells = [[plain(value) for value in row] for row in panel.values]
        return self._table(panel.rows, panel.columns, cells, TABLE_LABEL)

    def _strongest(self, links: tuple[Panel, ...]) -> list[Text]:
        """For every head and query, the key that gets the largest share."""
        queries = links[0].rows[:MOST_ROWS]
        cells: list[list[str]] = [[] for _ in queries]
        for panel in links:
            for found, row in zip(cells, panel.values[:MOST_ROWS], strict=True):
                best = int(np.argmax(row))
                whom = f"{left(visible(panel.columns[best]), COLUMN).rstrip()} {row[best]:.0%}"
                found.append(f"→ {whom}" if row[best] > 0 else self.say("nothing"))
        table = self._table(queries, tuple(panel.name for panel in links), cells, LABEL)
        rest = len(links[0].rows) - len(queries)
        more = self.sentence(self.say("more", count=rest)) if rest else []
        return [Text(self.say("strongest"), style="bold"), *table, *more]

    def _table(self, rows: tuple[str, ...], columns: tuple[str, ...], cells: list[list[str]], most: int) -> list[Text]:
        """Words under their columns, cut into as many bands as the width asks for."""
        side = _label_width(rows, most)
        room = self.columns - side
        wide = [
            min(max(width(visible(name)), *(width(row[at]) for row in cells)) + 2, room)
            for at, name in enumerate(columns)
        ]
        lines: list[Text] = []
        for band in _bands(wide, room):
            if lines:
                lines.append(Text())
            head = "".join(right(visible(columns[at]), wide[at]) for at in band)
            lines.append(Text(" " * side + head, style="bold"))
            for name, row in zip(rows, cells, strict=True):
                words = "".join(right(row[at], wide[at]) for at in band)
                lines.append(Text.assemble((left(visible(name), side), "dim"), words))
        return _equal(lines)

    def _side_by_side(self, blocks: list[list[Text]]) -> list[Text]:
        """As many blocks next to each other as the width has room for."""
        lines: list[Text] = []
        for band in _bands([width(block[0].plain) for block in blocks], self.columns, GAP):
            lines += [*([Text()] if lines else []), *_joined([blocks[at] for at in band])]
        return lines


def _bands(widths: list[int], room: int, gap: int = 0) -> list[list[int]]:
    """Columns of these widths in bands, each with as many as there is room for, and with one at least."""
    bands: list[list[int]] = [[]]
    for at, wide in enumerate(widths):
        if bands[-1] and sum(widths[other] + gap for other in bands[-1]) + wide > room:
            bands.append([])
        bands[-1].append(at)
    return bands


def _joined(band: list[list[Text]]) -> list[Text]:
    tall = max(len(block) for block in band)
    lines = []
    for at in range(tall):
        line = Text()
        for index, block in enumerate(band):
            if index:
                line.append(" " * GAP)
            line.append_text(block[at] if at < len(block) else Text(" " * width(block[0].plain)))
        lines.append(line)
    return lines


def _equal(lines: list[Text]) -> list[Text]:
    """All as wide as the widest."""
    wide = max(width(line.plain) for line in lines)
    for line in lines:
        line.append(" " * (wide - width(line.plain)))
    return lines


def _label_width(names: tuple[str, ...], most: int = LABEL) -> int:
    return min(max((width(visible(name)) for name in names), default=0), most) + 1


def _cell_width(panel: Panel) -> int:
    digits = decimals(panel.values, panel.kind)
    numbers = 1 if panel.kind == "mask" else max(len(number(float(x), digits)) for x in np.ravel(panel.values))
    names = min(max((width(visible(name)) for name in panel.columns), default=0), COLUMN)
    return max(numbers, names)


def _mixed(strength: float, kind: str) -> tuple[int, int, int]:
    end = WEIGHT if kind in ("weights", "mask") else POSITIVE if strength >= 0 else NEGATIVE
    share = abs(float(strength))
    red, green, blue = (round(zero + (full - zero) * share) for zero, full in zip(ZERO, end, strict=True))
    return red, green, blue


def _filled(colour: tuple[int, int, int]) -> Style:
    red, green, blue = colour
    bright = 0.299 * red + 0.587 * green + 0.114 * blue > 125
    return Style.parse(f"{'#000000' if bright else '#f4f4f4'} on #{red:02x}{green:02x}{blue:02x}")
