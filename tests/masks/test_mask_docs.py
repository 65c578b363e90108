"""The drawings in the docstrings are what the masks draw."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest

from regard import _hash, masks

CONSTRUCTORS = [name for name in masks.__all__ if inspect.isfunction(getattr(masks, name)) and name != "rebuild"]
MODULES = [masks, _hash] + [
    importlib.import_module(info.name) for info in pkgutil.iter_modules(masks.__path__, "regard.masks.")
]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_the_examples_of_a_module_hold(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_every_constructor_draws_its_rectangle_for_more_keys_than_queries(name):
    text = inspect.getdoc(getattr(masks, name))
    drawings = [line for line in text.splitlines() if " queries, " in line]
    assert drawings
    queries, keys = drawings[0].split(": ")[1].split(", ")[:2]
    assert int(keys.split()[0]) > int(queries.split()[0])
    assert "■" in text


def test_the_constructors_of_the_design_are_all_there():
    assert set(CONSTRUCTORS) == {
        "everything", "causal", "window", "padding", "documents", "prefix", "columns", "strided", "blocks",
        "random_blocks", "keep", "drop", "from_additive", "rule",
    }  # fmt: skip
