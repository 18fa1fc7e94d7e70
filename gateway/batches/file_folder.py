"""Folder of the stored files. A file has its name once it is whole; what is being written ends in `.part`, and is
locked (flock) until its writer has closed it: a gateway that is taken over finishes its uploads beside its successor.

Every method blocks, and is called in a thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import BinaryIO

PART = ".part"


class FileFolder:
    """The files in `path`, each named by its id. Methods raise OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> None:
        """Make the folder if need be."""
        self.path.mkdir(mode=0o700, exist_ok=True)

    def begin(self, id: str) -> BinaryIO:
        """A new file, to be written to its end. What an earlier try has left of it is gone."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._part(id))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = os.fdopen(os.open(self._part(id), flags, 0o600), "wb")
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file

    def keep(self, id: str, file: BinaryIO) -> int:
        """It is whole and on the disk from now on. Its size in bytes. Close it once its row is there."""
        file.flush()
        os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
        os.replace(self._part(id), self.path / id)
        return size

    def drop(self, id: str, file: BinaryIO) -> None:
        """It is given up."""
        with contextlib.suppress(OSError):  # what is still to be written has no place on a full disk
            file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._part(id))

    def delete(self, id: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path / id)

    def read(self, id: str, offset: int, length: int) -> bytes:
        """So many bytes from `offset`, fewer at its end."""
        with open(self.path / id, "rb", buffering=0) as file:
            return os.pread(file.fileno(), length, offset)

    def loose(self) -> list[str]:
        """Names of the files that nobody writes: those that have a row by now, and what earlier processes have left."""
        return [entry.name for entry in os.scandir(self.path) if _loose(entry)]

    def _part(self, id: str) -> Path:
        return self.path / f"{id}{PART}"


def _loose(entry: os.DirEntry[str]) -> bool:
    if not entry.is_file(follow_symlinks=False):
        return False
    try:
        with open(entry.path, "rb", buffering=0) as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):
        return False
    return True
