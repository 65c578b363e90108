"""Files that are replaced whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where a file that somebody writes cannot be removed anyway
    fcntl = None  # type: ignore[assignment]

_ENDING = ".partial"


def write_atomically(path: Path, content: Iterable[bytes | memoryview]) -> None:
    """Write next to the file, flush to the disk, then take its place: whatever happens, a whole file stands there.

    What a link points to is written, and the link stays. A device or a pipe (/dev/stdout) is no file whose place
    another could take: it is written to. What a process that was killed in here left behind goes with the next
    write that ends well.

    Raises:
        OSError: with the name that was given, not that of the file next to it.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder; give the name of a file", str(path))
    if path.exists() and not path.is_file():
        with path.open("wb") as stream:
            for piece in content:
                stream.write(piece)
        return
    staged = Staged(path)
    try:
        staged.write(content)
        staged.commit()
    finally:
        staged.close()


class Staged:
    """A file that is complete next to its place before it takes it: several can be ready before the first does.

    It is locked while its writer lives: what nobody holds was left behind by a process that was killed.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))
        try:
            self._name, self._file = self._open()
        except OSError as error:
            why = "its folder does not exist" if isinstance(error, FileNotFoundError) else error.strerror
            raise OSError(error.errno, why, str(self.path)) from None

    def _open(self) -> tuple[str, int]:
        while True:
            handle, name = tempfile.mkstemp(prefix=_beginning(self.path), suffix=_ENDING, dir=self.path.parent)
            if _lock(handle) is not False and os.path.exists(name):
                return name, handle
            os.close(handle)  # another writer's clearing came between the two: this name is taken away

    def write(self, content: Iterable[bytes | memoryview]) -> None:
        try:
            with os.fdopen(self._file, "wb", closefd=False) as file:
                for piece in content:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:  # a full disk, say: the system names no file
            raise OSError(error.errno, error.strerror, error.filename or str(self.path)) from None

    def commit(self) -> None:
        # mkstemp makes files that only their owner may read
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(self._name, 0o666 & ~umask)
        if fcntl is None:
            self._release()  # an open file cannot be moved there
        os.replace(self._name, self.path)
        _sync_folder(self.path.parent)
        self.close()
        _clear(self.path)

    def close(self) -> None:
        """Take away what was not committed."""
        if self._name and os.path.exists(self._name):
            with contextlib.suppress(OSError):
                if fcntl is None:
                    self._release()
                os.unlink(self._name)
        self._name = ""
        self._release()

    def _release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def _beginning(path: Path) -> str:
    return f".{path.name[:50]}."  # names have a limit in bytes, and a character up to four


def _clear(path: Path) -> None:
    """Remove what writers of this file left behind when they were killed."""
    left = re.compile(rf"{re.escape(_beginning(path))}[a-z0-9_]{{8}}{re.escape(_ENDING)}")
    with contextlib.suppress(OSError):
        for name in os.listdir(path.parent):
            if left.fullmatch(name):
                with contextlib.suppress(OSError):
                    _remove_if_nobody_writes(path.parent / name)


def _remove_if_nobody_writes(file: Path) -> None:
    handle = os.open(file, os.O_RDWR)
    try:
        if fcntl is not None and _lock(handle):
            os.unlink(file)
    finally:
        os.close(handle)
    if fcntl is None:
        os.unlink(file)  # fails while it is open somewhere


def _lock(handle: int) -> bool | None:
    """Whether this process holds the file now; None where the system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # this file system has none
        return None
    return True


def _sync_folder(folder: Path) -> None:
    """The new name, too, outlives a loss of power; not every system lets a folder be opened for this."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
