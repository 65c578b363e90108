"""Files that are replaced whole; devices, pipes and links, which must not be replaced at all."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from regard._files.write import write_atomically


def test_a_link_stays_and_what_it_points_to_is_written(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"before")
    link.symlink_to(target)
    write_atomically(link, [b"af", b"ter"])
    assert link.is_symlink()
    assert target.read_bytes() == b"after"
    assert sorted(os.listdir(tmp_path)) == ["link", "target"]


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    # as /dev/stdout and /dev/null are: taking the place of the latter would break a whole machine
    pipe, link = tmp_path / "pipe", tmp_path / "link"  # /dev/stdout is a link
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_atomically(link, [b"a page"])
    reader.join(timeout=60)
    assert read == [b"a page"]
    assert pipe.is_fifo() and link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


def test_the_output_of_a_process_is_written_to_by_its_name() -> None:
    code = "from pathlib import Path; from regard._files import write as files; "
    code += "files.write_atomically(Path('/dev/stdout'), [b'page'])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).stdout == b"page"


@pytest.mark.parametrize(("given", "named"), [(".", "folder"), ("missing/page.html", "its folder does not exist: ")])
def test_what_cannot_be_written_is_named_as_it_was_given(given: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        write_atomically(tmp_path / given, [b"a page"])
    assert named in str(caught.value) and str(tmp_path / given) in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_failure_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_bytes(b"before")

    def broken() -> object:
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(file, broken())  # type: ignore[arg-type]
    assert file.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["page.html"]
