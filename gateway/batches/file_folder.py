"""Folder of the stored files. A file has its name once it is whole; what is being written ends in `.part`.

Every method blocks, and is called in a thread.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
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
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.fdopen(os.open(self._part(id), flags, 0o600), "wb")

    def keep(self, id: str, file: BinaryIO) -> int:
        """It is whole and on the disk from now on. Its size in bytes."""
        with file:
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

    def clean(self, ids: Collection[str]) -> None:
        """Delete all that is none of these: parts of earlier processes, and files that nobody knows."""
        for entry in os.scandir(self.path):
            if entry.is_file(follow_symlinks=False) and entry.name not in ids:
                os.unlink(entry.path)

    def _part(self, id: str) -> Path:
        return self.path / f"{id}{PART}"
