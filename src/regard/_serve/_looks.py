"""Looks at models, one at a time, on a thread of their own, with progress and cancel."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from regard._display.texts import beginning, reason
from regard._serve._folder import Folder, Refusal

if TYPE_CHECKING:
    from pathlib import Path

    from regard.recording import Recording

MOST_CELLS = 1 << 20  # weights of one rectangle


class Cancelled(Exception):
    """The reader no longer wants the look."""


class Runner(Protocol):
    """Loads a model and runs it under ``regard.watch``; given by the command, which knows where models are."""

    def names(self, folder: Folder) -> list[str]: ...

    def load(self, name: str, folder: Folder) -> Any: ...

    def run(self, loaded: Any, text: str, on_call: Callable[..., None], **watch: Any) -> Recording: ...

    def layers(self, loaded: Any) -> int | None: ...


class Looks:
    """The look that runs or ran last, and the recordings that were made."""

    def __init__(self, folder: Path, runner: Runner) -> None:
        self._folder, self._runner = Folder(folder), runner
        self._lock = threading.Lock()
        self._detail = threading.Lock()  # one rectangle at a time: the first may load a model
        self._cancel = threading.Event()
        self._state: dict[str, Any] = {"state": "none"}
        self._made: dict[str, tuple[Recording, Any, str]] = {}  # by name: recording, loaded model, text
        self._thread: threading.Thread | None = None

    def models(self) -> list[str]:
        return self._runner.names(self._folder)

    def state(self) -> dict[str, Any]:
        with self._lock:
            return dict(self._state)

    def begin(self, model: str, text: str) -> None:
        if model not in self.models():
            raise Refusal(404, "there is no such model on this machine")
        with self._lock:
            if self._state["state"] == "running":
                raise Refusal(409, "another look is running; cancel it or wait")
            self._cancel = threading.Event()
            self._state = {"state": "running", "stage": "loading", "model": model, "done": 0, "total": None}
            self._thread = threading.Thread(target=self._work, args=(model, text, self._cancel), daemon=True)
            self._thread.start()

    def cancel(self) -> None:
        with self._lock:
            if self._state["state"] == "running":
                self._cancel.set()
                self._state = {"state": "cancelled"}

    def wait(self, seconds: float) -> None:
        """Until the look is done: for tests, and for a server that stops."""
        if self._thread is not None:
            self._thread.join(seconds)

    def recording(self, name: str) -> Recording | None:
        made = self._made.get(name)
        return None if made is None else made[0]

    def can_detail(self, name: str, recording: Recording) -> bool:
        """Whether single weights can be computed: the model that made the recording is on this machine."""
        return name in self._made or (bool(recording.origin) and recording.origin["model"] in self.models())

    def _set(self, cancel: threading.Event, **changes: Any) -> None:
        with self._lock:
            if self._cancel is cancel and not cancel.is_set():
                self._state = {**self._state, **changes}

    def _work(self, model: str, text: str, cancel: threading.Event) -> None:
        try:
            loaded = self._runner.load(model, self._folder)
            if cancel.is_set():
                return
            self._set(cancel, stage="reading", total=self._runner.layers(loaded))
            done = 0

            def advance(_: object) -> None:
                nonlocal done
                if cancel.is_set():
                    raise Cancelled
                done += 1
                self._set(cancel, done=done)

            recording = self._runner.run(loaded, text, advance)
            recording.title = f"{model}: {beginning(text)}"
            recording.origin = {"model": model, "text": text}
            name = self._save(recording, model)
            self._made = {name: (recording, loaded, text)}  # the last one only: models are large
            self._set(cancel, state="done", name=name)
        except Cancelled:
            pass
        except Exception as error:  # whatever a model does wrong is told to the reader
            self._set(cancel, state="failed", why=reason(error))

    def _save(self, recording: Recording, model: str) -> str:
        """Next to the others, under a name that is free; kept in memory alone where the folder cannot be written."""
        stem = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in model)[:60]
        number = 1
        while (self._folder.root / f"{stem}-{number}.regard").exists() or f"{stem}-{number}.regard" in self._made:
            number += 1
        name = f"{stem}-{number}.regard"
        with contextlib.suppress(OSError):
            recording.save(self._folder.root / name)
        return name

    def weights(self, given: dict[str, Any]) -> bytes:
        """The exact weights of a rectangle, as float32 rows: the model runs once more for them."""
        with self._detail:
            try:
                return self._weights(given)
            except Refusal:
                raise
            except Exception as error:
                raise Refusal(422, reason(error)) from None

    def _weights(self, given: dict[str, Any]) -> bytes:
        from regard.statistics import Want

        recording, loaded, text = self._opened(str(given.get("name")))
        numbers = [given.get(key) for key in ("layer", "head", "row", "rows", "column", "columns")]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise Refusal(400, "layer, head, row, rows, column and columns must be whole numbers")
        layer, head, row, rows, column, columns = (int(number or 0) for number in numbers)
        calls = recording.at(layer) if layer < len(recording.sites) else []
        if not calls or head not in calls[0].heads or not 0 < rows * columns <= MOST_CELLS:
            raise Refusal(400, f"there is no such layer or head, or more than {MOST_CELLS} weights were asked for")
        if row + rows > calls[0].queries or column + columns > calls[0].keys:
            raise Refusal(400, "the rectangle goes past the end")
        want = Want.none().but(weights=(slice(row, row + rows), slice(column, column + columns)))
        found = self._runner.run(loaded, text, lambda _: None, want=want, layers=[layer], heads=[head])
        if not _agree(found, recording, layer, head):
            raise Refusal(409, "the model on this machine gives other weights than this recording has; look again")
        part = found.calls[0].weights[0, 0].float().cpu().contiguous()
        return part.numpy().tobytes()

    def _opened(self, name: str) -> tuple[Recording, Any, str]:
        """A recording with the model and the text that made it; the model is loaded where it is not."""
        from regard.recording import load

        if name not in self._made:
            recording = load(self._folder.path(name))
            if not self.can_detail(name, recording):
                raise Refusal(404, "the model of that recording is not known, or not on this machine")
            loaded = self._runner.load(recording.origin["model"], self._folder)
            self._made = {name: (recording, loaded, recording.origin["text"])}
        return self._made[name]


def _agree(found: Recording, recording: Recording, layer: int, head: int) -> bool:
    """Whether a second run read the same tokens and came to the same sums of exponentials, up to the rounding of
    another device or dtype: a model of that name may have changed since."""
    import torch

    before, now = recording.at(layer)[0], found.calls[0]
    sums = before.lse[0, before.heads.index(head)], now.lse[0, 0]
    one, other = (each.float().cpu() for each in sums)
    same = found.tokens == recording.tokens and one.shape == other.shape
    return same and torch.allclose(one, other, rtol=1e-2, atol=1e-2)
