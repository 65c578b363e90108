"""The front end that ships: built from the sources that are here, small, and the same wherever it is built."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import regard

FRONTEND = Path(__file__).parents[2] / "frontend"
SHARED = ("examples.json", "layer.json")  # words that the command prints too
BUNDLE = Path(regard.__file__).parent / "_page" / "page.js"


def digest(folder: Path) -> str:
    """Of the sources, as frontend/build.mjs computes it."""
    sources = [path for path in (folder / "src").rglob("*") if path.suffix in (".ts", ".css")]
    others = ["build.mjs", "package-lock.json", *(f"../src/regard/_walk/{name}" for name in SHARED)]
    names = sorted([path.relative_to(folder).as_posix() for path in sources] + others)
    found = hashlib.sha256()
    for name in names:
        text = (folder / name).read_text(encoding="utf-8").replace("\r\n", "\n")
        found.update(f"{name}\n{text}\0".encode())
    return found.hexdigest()


def test_the_bundle_is_built_from_the_sources_that_are_here() -> None:
    first = BUNDLE.read_text(encoding="utf-8").split("\n", 1)[0]
    named = re.fullmatch(r"/\* regard page, built from frontend/ ([0-9a-f]{64}) \*/", first)
    assert named is not None
    assert named[1] == digest(FRONTEND), "src/regard/_page/page.js is stale: run make page"


def test_a_changed_source_makes_it_stale(tmp_path: Path) -> None:
    shutil.copytree(FRONTEND, tmp_path / "frontend", ignore=shutil.ignore_patterns("node_modules", "build"))
    words = tmp_path / "src" / "regard" / "_walk"
    words.mkdir(parents=True)
    for name in SHARED:
        (words / name).write_text("{}")
    found = [digest(tmp_path / "frontend")]
    (tmp_path / "frontend" / "src" / "new.ts").write_text("export {};\n")
    found.append(digest(tmp_path / "frontend"))
    for name in SHARED:
        (words / name).write_text('{"a": 1}')
        found.append(digest(tmp_path / "frontend"))
    assert len(set(found)) == 2 + len(SHARED)


def test_the_bundle_is_small_and_asks_for_nothing() -> None:
    text = BUNDLE.read_text(encoding="utf-8")
    assert len(text.encode()) < 150_000
    assert not re.search(r"https?://|XMLHttpRequest|WebSocket|\beval\(|innerHTML|</script|<!--|\bimport\(", text)
    # the local page asks the server that gave it; the policy of a file forbids even that
    assert set(re.findall(r"[\"'`](/[a-z][^\"'`?$]*)", text)) <= {
        "/api/state",
        "/api/look",
        "/api/recording",
        "/api/weights",
        "/page.js",
    }


def test_it_can_be_built_again_byte_for_byte_and_its_unit_tests_pass() -> None:
    if shutil.which("node") is None or not (FRONTEND / "node_modules" / "esbuild").is_dir():
        pytest.skip("node or frontend/node_modules is not there: npm ci in frontend/ (make does it where there is npm)")
    before = BUNDLE.read_bytes()
    for words in (
        ["node", "build.mjs"],
        ["node", "node_modules/typescript/bin/tsc", "-p", "."],
        ["node", "build.mjs", "test"],
    ):
        run = subprocess.run(words, cwd=FRONTEND, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
    assert BUNDLE.read_bytes() == before
    tests = sorted(str(path) for path in (FRONTEND / "build").glob("*.test.mjs"))
    run = subprocess.run(["node", "--test", *tests], cwd=FRONTEND, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
