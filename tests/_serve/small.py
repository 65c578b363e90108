"""A model that a test can wait for, run as the server runs others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.watching.models import ByHand, Stack

import regard
from regard._serve import application
from regard._serve._folder import Folder
from regard._serve._looks import Looks
from regard.recording import Recording


def looks_at(folder: Path, models: Any) -> Looks:
    """The looks that the local page of this folder takes at these models."""
    return Looks(folder, models)


def served(looks: Looks, folder: Path, *hosts: str) -> Any:
    """The local page of a folder, which answers under these names."""
    return application(folder, looks, frozenset(hosts))


def models_of(models: Any, folder: Path) -> list[str]:
    """The models that are offered there."""
    return models.names(Folder(folder))


class Small:
    """Reads words; each of its layers waits until it may go on."""

    seed = 0

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.begun = threading.Event()

    def names(self, folder: Folder) -> list[str]:
        return ["small", "broken"]

    def load(self, name: str, folder: Folder) -> Any:
        if name == "broken":
            raise ValueError("no model can be loaded from it")
        torch.manual_seed(self.seed)
        return Stack(ByHand(), ByHand(is_causal=True))

    def layers(self, loaded: Any) -> int | None:
        return 2

    def run(self, loaded: Any, text: str, on_call: Callable[..., None], **watch: Any) -> Recording:
        words = text.split()

        def called(call: Any) -> None:
            self.begun.set()
            self.go.wait(20)
            on_call(call)

        torch.manual_seed(1)
        with regard.watch(loaded, tokens=words, on_call=called, **watch) as recording:
            loaded(torch.randn(1, len(words), 21))
        return recording
