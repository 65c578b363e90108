"""A page taken apart, to see that what users wrote is text in it and nothing else."""

from __future__ import annotations

from html.parser import HTMLParser


class Tree(HTMLParser):
    """Elements and attributes in order, and the text apart."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(name for name, _ in attrs)))
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        self.elements.append((f"/{tag}", ()))

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def handle_data(self, data: str) -> None:
        self.text.append(data)
