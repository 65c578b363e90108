"""README.zh-CN.md says what README.md says: the same code, the same numbers in its tables, the same links."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))
EACH_OTHER = {"README.md", "README.zh-CN.md"}


def code(page: str) -> list[str]:
    """The lines of all blocks, without what is said in comments."""
    blocks = re.findall(r"^```\w+\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = (re.sub(r"\s*#.*", "", line) for block in blocks for line in block.splitlines())
    return [line for line in lines if line]


def table_numbers(page: str) -> list[list[str]]:
    """The numbers of every row of every table; within a row a language may say them in another order."""
    rows = [line for line in page.splitlines() if line.startswith("|")]
    return [sorted(re.findall(r"\d+(?:[ .]\d+)*", row)) for row in rows]


def links(page: str) -> list[str]:
    return sorted(link for link in re.findall(r"\]\(([^)]+)\)", page) if link not in EACH_OTHER)


def test_the_two_lead_to_each_other() -> None:
    assert "(README.zh-CN.md)" in ENGLISH
    assert "(README.md)" in CHINESE


def test_both_have_the_same_code() -> None:
    assert code(CHINESE) == code(ENGLISH)


def test_both_have_the_same_numbers_row_by_row() -> None:
    assert table_numbers(CHINESE) == table_numbers(ENGLISH)


def test_both_have_the_same_headings_and_links() -> None:
    assert links(CHINESE) == links(ENGLISH)
    assert CHINESE.count("\n## ") == ENGLISH.count("\n## ")
