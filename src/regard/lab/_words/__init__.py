"""The texts of the experiments, English and Chinese side by side; one file each, called as the experiment is."""

from __future__ import annotations

from importlib import import_module

from regard._display.texts import Catalogue


def words_of(topic: str) -> Catalogue:
    """The texts of one experiment; they load without the experiment itself, and without torch."""
    found: Catalogue = import_module(f"regard.lab._words.{topic}").WORDS
    return found
