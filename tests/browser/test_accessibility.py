"""axe, the accessibility checker, finds nothing in any view."""

from __future__ import annotations

import pytest
from tests.browser.recordings import sentence, translation


def violations(opened, axe: str) -> list[str]:
    opened.page.evaluate(axe)
    found = opened.page.evaluate("axe.run(document.querySelector('.regard'))")
    return [
        f"{one['id']}: {node['html'][:160]} {node['failureSummary'][:200]}"
        for one in found["violations"]
        for node in one["nodes"]
    ]


@pytest.mark.parametrize(("lang", "dark"), [("en", False), ("zh", True)], ids=["light", "dark"])
def test_no_view_has_a_violation(open_page, axe, lang, dark) -> None:
    opened = open_page(sentence(), against=sentence(seed=3, title="another"), lang=lang, dark=dark)
    for view in ("text", "overview", "head", "compare", "walk", "cost"):
        opened.view(view)
        if view == "walk":  # axe looks at every cell: a few of each kind are enough
            opened.page.fill("#walk-text", "I am")
            opened.page.click('[data-switch="width:4"]')
        assert violations(opened, axe) == [], view


def test_cross_attention_has_none_either(open_page, axe) -> None:
    opened = open_page(translation(["Die", "Katze", "schläft"], ["The", "cat", "sleeps"]))
    opened.pick("layer2")
    opened.word(1)
    assert violations(opened, axe) == []
