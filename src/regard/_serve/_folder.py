"""The recordings of a folder, and nothing outside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

MOST_LISTED = 500
MOST_BYTES = 8 << 30


class Refusal(Exception):
    """A request that is answered with a status and one sentence."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


class Folder:
    """Names are paths relative to the folder, with forward slashes."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._titles: dict[str, tuple[float, str]] = {}  # by name: when the file was written, and what it is called

    def path(self, name: str) -> Path:
        """The file of a recording; what lies outside the folder, by dots or by links, is not there."""
        if "\0" in name or "\\" in name or not name.endswith(".regard") or len(name) > 1000:
            raise Refusal(404, "there is no such recording")
        found = Path(os.path.realpath(self.root / name))
        if not found.is_relative_to(self.root) or not found.is_file() or found.suffix != ".regard":
            raise Refusal(404, "there is no such recording")
        if found.stat().st_size > MOST_BYTES:
            raise Refusal(413, f"recordings of at most {MOST_BYTES} bytes are opened")
        return found

    def recordings(self) -> list[dict[str, Any]]:
        """Newest first; in the folder itself and in the folders that it holds."""
        found: list[dict[str, Any]] = []
        for pattern in ("*.regard", "*/*.regard"):
            for path in self.root.glob(pattern):
                name = path.relative_to(self.root).as_posix()
                try:
                    real = self.path(name).stat()
                except (Refusal, OSError):
                    continue
                found.append({"name": name, "bytes": real.st_size, "modified": real.st_mtime})
        found.sort(key=lambda one: (-one["modified"], one["name"]))
        return [{**one, "title": self._title(one["name"], one["modified"])} for one in found[:MOST_LISTED]]

    def _title(self, name: str, modified: float) -> str:
        from regard.recording._files import title

        if self._titles.get(name, (None, ""))[0] != modified:
            self._titles[name] = (modified, title(self.root / name))
        return self._titles[name][1]

    def models(self) -> list[str]:
        """Folders with a model in Hugging Face's format, directly inside this one."""
        found = []
        for path in sorted(self.root.glob("*/config.json")):
            inside = Path(os.path.realpath(path.parent))
            if inside.is_relative_to(self.root) and path.is_file():
                found.append(path.parent.name)
        return found[:MOST_LISTED]
