"""The page: token text is data (rule 61)."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest
import torch
from tests.page_tree import Tree
from tests.watching.models import ByHand, Stack

import regard
from regard.recording import Recording

PLAIN = [f"word{n}" for n in range(11)]
NASTY = [
    "</title><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style><style>*{background:url(//evil)}",
    "<!--",
    "]]>",
    "&lt;script&gt;",
    "javascript:alert(1)",
    "\x00\x1b[31m\n",
    "\udc80",
    "\u202eevil\u2066",
    "{{7*7}}${7*7}",
]


def recorded(tokens: list[str]) -> Recording:
    torch.manual_seed(0)
    model = Stack(ByHand(), ByHand(is_causal=True))
    with regard.watch(model, tokens=tokens) as recording:
        model(torch.randn(2, 11, 21))
    return recording


@pytest.mark.parametrize("tokens", [NASTY, ["same"] * 11, [""] * 11, []], ids=["nasty", "same", "empty", "none"])
def test_the_elements_are_the_same_for_any_tokens(tokens: list[str]) -> None:
    plain, other = Tree(recorded(PLAIN).to_html()), Tree(recorded(tokens).to_html())
    assert other.elements == plain.elements
    assert other.attributes == plain.attributes


def test_token_text_can_be_read_on_the_page_with_control_characters_shown() -> None:
    text = "".join(Tree(recorded(NASTY).to_html()).text)
    assert "\x00" not in text and "\x1b" not in text
    assert any(token in text for token in NASTY[:7])


def test_the_page_has_one_script_of_its_own_no_handlers_no_requests_and_a_policy_that_allows_nothing_else() -> None:
    page = recorded(NASTY).to_html()
    tree = Tree(page)
    names = {tag for tag, _ in tree.elements}
    assert names.isdisjoint({"iframe", "object", "embed", "link", "base", "form", "a", "svg", "video", "img"})
    assert not any(name.startswith("on") or name in ("style", "href", "srcset", "src") for name, _ in tree.attributes)
    policy = next(value for name, value in tree.attributes if name == "content" and "default-src" in (value or ""))
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy and "http" not in policy
    for pattern in (r"<style>(.*?)</style>", r'<script type="module">(.*?)</script>'):
        found = re.findall(pattern, page, re.DOTALL)
        assert len(found) == 1
        assert base64.b64encode(hashlib.sha256(found[0].encode()).digest()).decode() in policy
    assert [names for tag, names in tree.elements if tag == "script"] == [("type", "id"), ("type",)]
    data = re.search(r'<script type="text/plain" id="regard-data">(.*?)</script>', page, re.DOTALL)
    assert data is not None and re.fullmatch(r"[A-Za-z0-9+/]+=*", data[1])


def test_the_page_is_written_whole_as_utf8(tmp_path: Path) -> None:
    recording = recorded(NASTY)
    recording.to_html(tmp_path / "run.html")
    assert (tmp_path / "run.html").read_text(encoding="utf-8") == recording.to_html()
    assert [path.name for path in tmp_path.iterdir()] == ["run.html"]


def test_a_title_from_elsewhere_is_text_too() -> None:
    recording = recorded(PLAIN)
    recording.title = "<script>"
    recording.missed.append(("<b>", "<i>"))
    tree = Tree(recording.to_html())
    names = [tag for tag, _ in tree.elements]
    assert names.count("script") == 2 and not {"b", "i"} & set(names)
    assert "<script>" in "".join(tree.text)
