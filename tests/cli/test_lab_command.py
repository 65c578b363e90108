"""`regard lab`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import base64
import itertools
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rich.cells import cell_len
from rich.console import Console
from tests.lab.quick import quick
from typer.testing import CliRunner

from regard import lab
from regard.cli import app, terminal
from regard.cli.commands import lab as command


def run(*words: str):
    return CliRunner().invoke(app, ["lab", *words])


@pytest.fixture
def trained_shortly(monkeypatch):
    monkeypatch.setattr(lab, "run", quick)


@pytest.fixture
def nothing_runs(monkeypatch):
    monkeypatch.setattr(lab, "run", lambda name: pytest.fail("it ran"))


@pytest.fixture
def columns(request, monkeypatch):
    """The command in a terminal of this width."""
    monkeypatch.setattr(terminal, "console", lambda: Console(width=request.param))
    return request.param


def test_alone_it_lists_every_experiment_on_one_line():
    lines = run().stdout.splitlines()
    for name, topic in lab.TOPICS.items():
        (line,) = [line for line in lines if line.startswith(f"{name} ")]
        assert topic.replace("_", "-") in line
        assert lab.words(name)["title"][0] in line


def test_the_list_lines_up_in_chinese_and_as_json_names_the_topics():
    lines = run("--lang", "zh").stdout.splitlines()[: len(lab.TOPICS)]
    assert len({cell_len(line) for line in lines}) == 1
    rows = json.loads(run("--json").stdout)
    assert [row["name"] for row in rows] == lab.names()
    assert rows[14] == {"name": "X1", "topic": "growing-width", "title": lab.words("X1")["title"][0]}


def test_one_experiment_prints_its_numbers_what_to_look_at_and_what_a_note_gets_wrong():
    printed = run("e4").stdout
    assert "0.92" in printed and "3.68" in printed
    assert "What to look at" in printed and "Wrong" in printed and "Right" in printed and "Why" in printed
    printed = run("variance").stdout
    assert "63.867 " in printed and "0.997922 " in printed and "63.8670" not in printed
    numbers = json.loads(run("variance", "--json").stdout)["numbers"]
    assert (numbers["raw"], numbers["scaled"]) == (63.867000579833984, 0.997921884059906)
    assert "Wrong" not in printed


@pytest.mark.parametrize("name", ["E1", "E5", "E8", "E10", "X1", "X4"])
def test_tables_line_up_in_chinese(name):
    printed = run(name, "--lang", "zh").stdout
    columns: list[set[tuple[int, ...]]] = []
    for block in printed.split("\n\n"):
        ruled = [line for line in block.splitlines() if "│" in line or "┃" in line]
        if ruled:
            columns.append({tuple(cell_len(line[:at]) for at, c in enumerate(line) if c in "│┃") for line in ruled})
    assert columns and all(len(places) == 1 for places in columns)
    assert "看什么" in printed


@pytest.mark.usefixtures("trained_shortly")
@pytest.mark.parametrize("columns", [40, 80], indirect=True)
@pytest.mark.parametrize("name", ["E4", "E5", "X3"])
def test_chinese_is_broken_between_characters_and_no_line_begins_with_a_closing_sign(name, columns):
    lines = [line.rstrip() for line in run(name, "--lang", "zh").stdout.splitlines()]
    assert max(map(cell_len, lines)) <= columns
    assert not any(line.split("│")[0].rstrip().endswith("…") for line in lines if "│" in line)  # no cell is cut
    prose = lines[lines.index(next(line for line in lines if line.startswith("看什么"))) :]
    assert not any(line[0] in "，。；：、）”" for line in prose if line)
    # every line but the last of a paragraph has no room for what follows it
    for line, following in itertools.pairwise(prose):
        if line and following and not re.match(r"[A-Za-z(\[]", following):
            assert cell_len(line) > columns - 12, line


@pytest.mark.usefixtures("trained_shortly", "columns")
@pytest.mark.parametrize("columns", [80], indirect=True)
@pytest.mark.parametrize("name", ["E7", "E8", "E11", "E13", "E14", "X3", "M21"])
def test_in_80_columns_every_row_of_a_table_is_one_line(name):
    rows = [line for line in run(name).stdout.splitlines() if "│" in line]
    assert rows and all(line.split("│")[0].strip() for line in rows)


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_long_answer_is_printed_in_paragraphs_and_code_without_its_quotes(lang):
    printed = run("E13", "--lang", lang).stdout
    paragraphs = lab.words("E13")["look"][["en", "zh"].index(lang)].replace("`", "").split("\n\n")
    assert len(paragraphs) == 4 and "regard lab S15" in paragraphs[0] and "`" not in printed
    for paragraph in paragraphs[1:]:
        assert f"\n\n{paragraph[:20]}" in printed


def test_json_of_one_is_an_object_and_of_several_a_list():
    one = json.loads(run("E3", "--json").stdout)
    assert one["numbers"]["raw"] == 63.867000579833984
    assert json.loads(run("E3", "--json", "--lang", "zh").stdout)["title"] == lab.words("E3")["title"][1]
    assert [row["experiment"] for row in json.loads(run("X4", "E1", "x4", "--json").stdout)] == ["X4", "E1"]


def test_out_writes_the_figure_and_the_numbers(tmp_path):
    result = run("E3", "--out", str(tmp_path / "new" / "folder"), "--format", "svg")
    assert result.exit_code == 0, result.stderr
    assert sorted(file.name for file in (tmp_path / "new" / "folder").iterdir()) == ["E3.json", "E3.svg"]
    assert json.loads((tmp_path / "new" / "folder" / "E3.json").read_text())["numbers"]["raw"] == 63.867000579833984
    assert "E3.json, E3.svg" in result.stderr


@pytest.mark.usefixtures("trained_shortly")
def test_all_writes_everything_and_an_index(tmp_path, monkeypatch, fonts):

    # the figures themselves are drawn in another test
    def figure(found, lang="en"):
        return SimpleNamespace(savefig=lambda file, **how: file.write_text(f"a figure in {lang}"))

    monkeypatch.setattr(lab.Result, "figure", figure)
    fonts(chinese=True)
    result = run("all", "--out", str(tmp_path), "--lang", "zh")
    assert result.exit_code == 0, result.stderr
    names = {f"{name}.{end}" for name in lab.names() for end in ("png", "json")}
    assert {file.name for file in tmp_path.iterdir()} == names | {"index.html"}
    assert result.stderr.splitlines()[-1] == f"已写入 {tmp_path / 'index.html'}，含 {len(lab.names())} 个实验的图和数据"
    page = (tmp_path / "index.html").read_text()
    assert '<html lang="zh-CN">' in page and "default-src &#x27;none&#x27;" in page
    figure = base64.b64encode(b"a figure in zh").decode()
    assert page.count(f'src="data:image/png;base64,{figure}"') == len(lab.names())  # nothing is fetched
    for name in lab.names():
        assert f'href="{name}.json"' in page and lab.words(name)["title"][1].split("“")[0].strip() in page
    assert "://" not in page and "<script" not in page
    assert "<code>regard lab S15</code>" in page and "`" not in page
    for paragraph in lab.words("E14")["look"][1].split("\n\n")[:-1]:
        assert f"<p>{paragraph}</p>" in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["E33"], "'E33' is no experiment; did you mean E3"),
        (["saturaton"], "did you mean saturation?"),
        (["E3", "nothing"], "'nothing' is no experiment"),
        (["E3", "--format", "gif"], "--format is 'gif'; expected png or svg"),
        (["E3", "--lang", "fr"], "--lang is 'fr'; expected en (English) or zh (Chinese)"),
        (["--out", "folder"], "--out was given and no experiment"),
        (["E3", "--format", "svg"], "--format svg is of the figures that --out writes; give --out too"),
    ],
)
def test_bad_words_end_with_status_2_and_one_line(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*words)
    assert result.exit_code == 2
    assert said in result.stderr and result.stderr.count("\n") == 1
    assert result.stdout == "" and list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_of_the_folder_is_said_in_one_line(tmp_path):
    (tmp_path / "taken").write_text("")
    result = run("E1", "--out", str(tmp_path / "taken"))
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and "taken" in result.stderr


@pytest.mark.usefixtures("nothing_runs")
def test_without_matplotlib_numbers_are_printed_and_figures_are_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("E7", "--out", str(tmp_path / "folder"))
    assert result.exit_code == 2 and "pip install matplotlib" in result.stderr
    assert not (tmp_path / "folder").exists()


@pytest.mark.usefixtures("nothing_runs")
def test_without_a_chinese_font_figures_in_chinese_are_refused_before_the_work(tmp_path, fonts):
    fonts(chinese=False)
    result = run("E7", "--out", str(tmp_path / "folder"), "--lang", "zh")
    assert result.exit_code == 2 and "figures in Chinese need a font" in result.stderr
    assert result.stderr.count("\n") == 1 and not (tmp_path / "folder").exists()


def test_numbers_load_no_matplotlib_and_the_list_no_torch():
    code = """
import sys, regard
from regard import lab
lab.words("E3"); before = "torch" in sys.modules
lab.two_tokens().tables("zh")
print(before, "matplotlib" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False False", done.stderr


def test_a_shell_offers_the_names_that_there_are():
    assert list(command.NAMES) == [*lab.names(), "all"]
