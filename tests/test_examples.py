"""Every notebook of examples/ runs from top to bottom, as a reader would run it, and shows what it says it shows."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parent.parent / "examples"


def shown(cell: Any) -> set[str]:
    """The kinds of what a cell shows by its last line."""
    return {kind for output in cell.outputs if output.output_type == "execute_result" for kind in output.data}


def said(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


@pytest.fixture(scope="module")
def tour(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The executed code cells, by the first words of their last lines."""
    own = tmp_path_factory.mktemp("jupyter")
    names = {f"JUPYTER_{name}_DIR": str(own / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    names |= {"IPYTHONDIR": str(own), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    notebook = nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(own)}}).execute()
    return {cell.source.splitlines()[-1].split("(")[0]: cell for cell in notebook.cells if cell.cell_type == "code"}


def test_no_cell_of_the_tour_warns(tour: dict[str, Any]) -> None:
    warned = [
        o.text for cell in tour.values() for o in cell.outputs if o.output_type == "stream" and o.name == "stderr"
    ]
    assert warned == []


def test_the_tour_shows_masks_plans_statistics_recordings_and_heads(tour: dict[str, Any]) -> None:
    for name in ("local", "regard.explain", "seen", "recording", "head"):
        assert "text/html" in shown(tour[name]), name


def test_the_tour_finds_the_head_that_matters(tour: dict[str, Any]) -> None:
    lines = said(next(cell for name, cell in tour.items() if "effect" in cell.source)).splitlines()
    without = {line.split()[-2]: float(line.split()[-1]) for line in lines if line.startswith("without")}
    assert without["cat"] > 2 * without["mat"] and without["cat"] > without["[CLS]"]
    first, second = (float(line.split()[-1]) for line in lines if line.startswith("layer"))
    assert second > 5 * first


def test_the_tour_watches_a_circuit_form(tour: dict[str, Any]) -> None:
    right = {line.split()[0]: int(line.split()[1].rstrip("%")) for line in said(tour["found.figure"]).splitlines()}
    assert right["before_first"] < 20 < 60 < right["before_second"]


def test_notebooks_are_kept_without_outputs() -> None:
    for path in EXAMPLES.glob("*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), path.name
