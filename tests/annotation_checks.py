"""Runtime checks of annotations, switched on in the tests only."""

from __future__ import annotations

import importlib
import typing

import jaxtyping
from beartype import BeartypeConf, beartype

# An int where a float is declared is right, as it is for static checkers.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))

# What lies behind the public calls. The entry points (api, masks, compat, nn, reference, testing) are not among them:
# what they say about a wrong argument is tested, and must be theirs. Nor is spec: the compiler traces its constructors.
CHECKED = ["_hash", "backends", "backends._guard", "plan", "observation", "observation._rows"]


def load_with_checks() -> None:
    """Import these so that every function of theirs checks its arguments and its result against its annotations.

    Names that only annotations need are imported under TYPE_CHECKING; a check whose names are missing would be passed
    over in silence.
    """
    importlib.import_module("regard.masks")  # to be loaded as users load it
    with jaxtyping.install_import_hook([f"regard.{name}" for name in CHECKED], f"{__name__}.check"):
        typing.TYPE_CHECKING = True
        try:
            for name in CHECKED:
                importlib.import_module(f"regard.{name}")
        finally:
            typing.TYPE_CHECKING = False
