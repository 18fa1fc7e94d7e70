"""Folder of the stored files. A file has its name once it is whole; what is being written ends in `.part`, and is
locked (flock) until its writer has closed it: several relays write here, and a gateway that is taken over finishes its
uploads beside its successor. Whoever works batches has the lock of the folder itself,
`claim`.

Every method blocks, and is called in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from gateway.shared.folder_lock import FolderLock
from gateway.shared.new_file import move

PART = ".part"


class FileFolder:
    """The files in `path`, each named by its id. Methods raise OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.claim = FolderLock(path)  # of whoever works batches

    def make(self) -> None:
        """Make the folder if need be. A link to elsewhere is none."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        if self.path.is_symlink():
            raise OSError(errno.ELOOP, "it is a link to elsewhere: put the folder itself there", str(self.path))

    def begin(self, id: str, size: int = 0) -> BinaryIO:
        """Open a file to be written from `size` on: more bytes of an earlier try are cut off. A shorter file has lost
        something, and stays as it is."""
        part = self._part(id)
        with contextlib.suppress(FileNotFoundError):  # it was whole already when its writer was killed
            os.rename(self.path / id, part)
        while True:
            with contextlib.ExitStack() as stack:
                flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                file = stack.enter_context(os.fdopen(os.open(part, flags, 0o600), "wb"))
                fcntl.flock(file.fileno(), fcntl.LOCK_EX)  # at once, or as soon as whoever clears has looked at it
                if _is_at(part, file):  # else it was cleared before it was locked
                    file.truncate(min(size, os.fstat(file.fileno()).st_size))
                    file.seek(0, os.SEEK_END)
                    stack.pop_all()
                    return file

    def keep(self, id: str, file: BinaryIO) -> int:
        """Make a written file durable under its id, and return its size in bytes. Close `file` once its row is
        stored."""
        file.flush()
        os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
        move(self._part(id), self.path / id)
        return size

    def spill(self) -> BinaryIO:
        """A file without a name, which nobody has to delete."""
        return tempfile.TemporaryFile(dir=self.path)

    def drop(self, id: str, file: BinaryIO) -> None:
        """Discard an unfinished file."""
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

    def loose(self, known: Collection[str]) -> list[str]:
        """Names beside the known ones of files that nobody writes: each has a row by now, or was left behind."""
        return [entry.name for entry in os.scandir(self.path) if entry.name not in known and _is_loose(entry)]

    def clear(self, names: Iterable[str]) -> None:
        """Delete what was left behind."""
        for name in names:
            with _locked(self.path / name) as alone:
                if alone:
                    self.delete(name)

    def _part(self, id: str) -> Path:
        return self.path / f"{id}{PART}"


def _is_loose(entry: os.DirEntry[str]) -> bool:
    if not entry.is_file(follow_symlinks=False):
        return False
    with _locked(entry.path) as alone:
        return alone


@contextlib.contextmanager
def _locked(path: str | Path) -> Iterator[bool]:
    """The file's lock; False: its writer has it, the file is gone, or it is another user's."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "rb", buffering=0))
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, FileNotFoundError, PermissionError):
            yield False
        else:
            yield _is_at(path, file)


def _is_at(path: str | Path, file: FileIO | BinaryIO) -> bool:
    """Whether the path still leads to the file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
