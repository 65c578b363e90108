"""A table as the lab and the walk show it: in the terminal and on a page. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from regard._page._document import as_text

if TYPE_CHECKING:
    from rich.table import Table as RichTable

Row = tuple[float, ...]
Matrix = tuple[Row, ...]


class Table(NamedTuple):
    """A table as it is shown: the first column names the row."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    weights: Matrix | None = None  # the numbers themselves where they are attention weights: the walk colours them

    def terminal(self) -> RichTable:
        """What `rich` prints, without the title; long cells are folded."""
        from rich.markup import escape
        from rich.table import Table as RichTable

        table = RichTable(show_edge=False, pad_edge=False, show_header=any(self.columns))
        for at, column in enumerate(self.columns):
            justify: Any = "left" if at == 0 or not any(self.columns) else "right"
            table.add_column(escape(column), justify=justify, overflow="fold")
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table

    def html(self) -> str:
        head = "".join(f"<th>{as_text(cell)}</th>" for cell in self.columns) if any(self.columns) else ""
        body = "".join("<tr>" + "".join(f"<td>{as_text(cell)}</td>" for cell in row) + "</tr>" for row in self.rows)
        return f"<table><caption>{as_text(self.title)}</caption><tr>{head}</tr>{body}</table>"
