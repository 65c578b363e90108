"""Files that are replaced whole; devices, pipes and links, which must not be replaced at all."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from regard.recording import Recording


def test_a_link_stays_and_what_it_points_to_is_written(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"before")
    link.symlink_to(target)
    Recording("one").save(link)
    assert link.is_symlink()
    assert Recording.load(target).title == "one"
    assert sorted(os.listdir(tmp_path)) == ["link", "target"]


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    # as /dev/stdout and /dev/null are: taking the place of the latter would break a whole machine
    pipe, link = tmp_path / "pipe", tmp_path / "link"  # /dev/stdout is a link
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    Recording("one").save(link)
    reader.join(timeout=60)
    Recording("one").save(tmp_path / "plain")
    assert read == [(tmp_path / "plain").read_bytes()]
    (tmp_path / "plain").unlink()
    assert pipe.is_fifo() and link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


def test_the_output_of_a_process_is_written_to_by_its_name() -> None:
    code = "from regard.recording import Recording; Recording('one').to_html('/dev/stdout')"
    written = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).stdout
    assert written.startswith(b"<!doctype html>") and written.rstrip().endswith(b"</html>")


@pytest.mark.parametrize(("given", "named"), [(".", "folder"), ("missing/page.html", "its folder does not exist: ")])
def test_what_cannot_be_written_is_named_as_it_was_given(given: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        Recording("one").to_html(tmp_path / given)
    assert named in str(caught.value) and str(tmp_path / given) in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_failure_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "page.html"
    file.write_bytes(b"before")

    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)  # when all is written, and nothing has taken its place
    with pytest.raises(KeyboardInterrupt):
        Recording("one").to_html(file)
    assert file.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["page.html"]
