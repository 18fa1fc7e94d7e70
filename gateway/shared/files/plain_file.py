"""Files that a flag or a field names, opened without waiting: a pipe that nobody writes would hang a command."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

PIPES = ("/dev/fd/", "/proc/self/fd/", "/dev/stdin")  # where a shell's <(command) and | are


def open_plain(path: Path, *, pipes: bool = False) -> BinaryIO:
    """Open a file to read. Raises OSError, also for a folder, a device or a pipe. `pipes`: take a shell's own pipe,
    which can be read once."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if pipes and stat.S_ISFIFO(mode) and str(path).startswith(PIPES):
            os.set_blocking(descriptor, True)
        elif not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
