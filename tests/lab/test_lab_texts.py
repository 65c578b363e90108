"""Texts in both languages, tables that line up, figures that draw, pages that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from string import Formatter

import pytest
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.text import Text
from tests.lab.quick import quick
from typer.testing import CliRunner

from regard import lab
from regard.cli import app

DOCS = Path(__file__).parent.parent.parent / "docs" / "lab"
CHINESE = re.compile(r"[\u4e00-\u9fff]")
# In figures in Chinese: names and symbols, and the sentences that are read.
KEPT = {
    "ALiBi", "CNN", "GPT", "LSTM", "RNN", "argmax", "d_k", "d_model", "float", "ln", "masks.causal", "nat", "softmax",
    "triu", "The", "cat", "sat", "on", "the", "mat", "dog", "bites", "man",
}  # fmt: skip


@pytest.mark.parametrize("name", lab.names())
def test_the_texts_are_there_in_both_languages(name):
    words = lab.words(name)
    assert {"title", "question", "look"} <= set(words)
    assert len({"claim", "right", "why"} & set(words)) in (0, 3)
    for key in ("title", "question", "look", "claim", "right", "why"):
        if key in words:
            assert CHINESE.search(words[key][1]) and not CHINESE.search(words[key][0])


def test_the_examples_that_correct_a_note_say_so():
    corrects = {name for name in lab.names() if "claim" in lab.words(name)}
    assert {"E1", "E2", "E4", "E5", "E10"} <= corrects


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("name", lab.names())
def test_the_tables_are_whole(name, lang):
    tables = quick(name).tables(lang)
    assert tables
    for table in tables:
        assert table.title and table.rows
        assert {len(row) for row in table.rows} == {len(table.columns)}
        assert all(isinstance(cell, str) and cell for row in table.rows for cell in row)


@pytest.mark.parametrize("name", lab.names())
def test_every_text_is_used(name):
    """A key that neither the tables nor the figure nor the command asks for is left over from something."""
    found, asked = quick(name), {"title", "question", "look", "claim", "right", "why"}

    class Listening(dict):
        def __getitem__(self, key):
            asked.add(key)
            return super().__getitem__(key)

    heard = Listening(found.words())
    other = type("Heard", (type(found),), {"words": classmethod(lambda cls: heard)})
    copy = object.__new__(other)
    copy.__dict__.update(found.__dict__)
    copy.tables("zh")
    copy.figure()
    assert set(heard) - asked <= {"no"}  # what would be said if a promise were broken


@pytest.mark.parametrize("name", lab.names())
def test_the_numbers_are_plain_json(name):
    found = quick(name).to_dict()
    again = json.loads(json.dumps(found, allow_nan=False))
    assert again["experiment"] == name
    assert set(again) == {"experiment", "title", "torch", "numbers"}


@pytest.mark.parametrize("name", lab.names())
def test_the_figure_draws_without_a_warning_and_keeps_its_words_inside(name):
    figure = quick(name).figure()
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()
    inside = figure.bbox.padded(2)
    title = figure._suptitle.get_window_extent()
    assert inside.x0 <= title.x0 and title.x1 <= inside.x1
    for axes in figure.axes:
        assert axes.get_tightbbox().x1 <= inside.x1 and axes.get_tightbbox().x0 >= inside.x0
        assert axes.get_title() or len(figure.axes) == 1


def labels(figure: Figure) -> list[str]:
    """Every text of a figure but formulas, ticks as they will be drawn."""
    ticks = [tick for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for tick in axis.get_ticklabels()]
    found = [text.get_text() for text in (*ticks, *figure.findobj(Text))]
    return [label for label in found if label and "$" not in label]


@pytest.mark.parametrize("name", lab.names())
def test_a_figure_in_chinese_has_no_english_words(name, fonts):
    fonts(chinese=True)
    said = "\n".join(labels(quick(name).figure("zh")))
    words = re.findall(r"[A-Za-z][A-Za-z_.]+", said)
    assert [word for word in words if word not in KEPT] == []
    assert CHINESE.search(said) and not CHINESE.search("\n".join(labels(quick(name).figure())))


def test_every_label_is_in_a_figure():
    def pattern(english):
        parts = [(re.escape(said), name) for said, name, *_ in Formatter().parse(english)]
        return re.compile("".join(said + (r"[-\d .%]+" if name else "") for said, name in parts))

    written = json.loads((Path(lab.__file__).parent / "labels.json").read_text(encoding="utf-8")).values()
    drawn = {label for name in lab.names() for label in labels(quick(name).figure())}
    assert [english for group in written for english in group if not any(map(pattern(english).fullmatch, drawn))] == []


def drawn(name: str, folder: Path, kind: str, lang: str = "en") -> Path:
    """The figure that the command writes."""
    words = ["lab", name, "--out", str(folder), "--format", kind, "--lang", lang]
    assert CliRunner().invoke(app, words).exit_code == 0
    return folder / f"{name}.{kind}"


@pytest.mark.filterwarnings("ignore:Glyph")
def test_a_drawing_and_its_ticks_are_in_the_language_asked_for(fonts, tmp_path):
    fonts(chinese=True)
    with rc_context({"svg.fonttype": "none"}):
        page = drawn("E14", tmp_path, "svg", "zh").read_text(encoding="utf-8")
    assert "2020，窗口" in page and "每一步省下多少" in page and "window" not in page
    with pytest.raises(ValueError, match=r"'fr'; expected en \(English\) or zh"):
        quick("E14").figure("fr")
    fonts(chinese=False)
    with pytest.raises(ValueError, match="figures in Chinese need a font"):
        quick("E14").figure("zh")


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_drawing_is_the_same_every_time(kind, tmp_path):
    first, second = (drawn("X4", tmp_path / name, kind) for name in "ab")
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("name", lab.names())
def test_there_is_a_page_with_the_figure_and_the_index_leads_to_it(name):
    page = (DOCS / f"{name.lower()}.md").read_text()
    assert f"regard lab {name}" in page
    assert f"lab.{lab.TOPICS[name]}(" in page
    assert f"({name}.svg)" in page and (DOCS / f"{name}.svg").stat().st_size < 200_000
    assert ("gets wrong" in page) == ("claim" in lab.words(name))
    assert f"({name.lower()}.md)" in (DOCS / "index.md").read_text()


def test_names_and_topics_are_found_in_any_spelling_and_others_are_refused():
    assert lab.find("e3") == lab.find(" Variance ") == "E3"
    assert lab.find("two-relations") == lab.find("TWO_RELATIONS") == "X2"
    with pytest.raises(ValueError, match=r"'varience' is no experiment; did you mean variance\? There are E1, E2"):
        lab.find("varience")
    with pytest.raises(ValueError, match=r"^'q' is no experiment; there are E1"):
        lab.find("q")
    with pytest.raises(TypeError, match="named by a str, such as 'E3', got 3"):
        lab.run(3)
    with pytest.raises(AttributeError, match="no attribute 'entropie'"):
        _ = lab.entropie
    assert set(lab.TOPICS.values()) <= set(dir(lab))
