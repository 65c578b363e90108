"""Files that are replaced whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


def write_atomically(path: Path, content: Iterable[bytes | memoryview]) -> None:
    """Write beside the file, flush to the disk, then take its place: whatever happens, a whole file stands there.

    What a link points to is written, and the link stays. A device or a pipe (/dev/stdout) is no file whose place
    another could take: it is written to.

    Raises:
        OSError: with the name that was given, not that of the file beside it.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder; give the name of a file", str(path))
    if path.exists() and not path.is_file():
        with path.open("wb") as stream:
            for piece in content:
                stream.write(piece)
        return
    path = Path(os.path.realpath(path))
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", dir=path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        with os.fdopen(handle, "wb") as file:
            for piece in content:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only their owner may read
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
