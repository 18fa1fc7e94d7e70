"""Source of a model's files that is a folder of this machine: a network file system, another disk, a hub's cache.

Links are followed to files below the folder, or among the blobs of the cache that the folder is a snapshot of. Others
are refused, and so are devices and pipes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path

from sidecar.pull.listing import (
    MAX_FILES,
    MAX_LISTING,
    SUMS,
    BadListing,
    Digest,
    Listing,
    SourceFile,
    checked,
    chosen,
    sums,
)
from sidecar.pull.source import Pieces, SourceError

PIECE = 4 * 1024 * 1024  # bytes


class FolderSource:
    """`path`: of the folder. `only`, `everything`: see `listing.chosen`."""

    def __init__(self, path: Path, only: Sequence[str] = (), *, everything: bool = False) -> None:
        self._path = path
        self._only = only
        self._everything = everything

    def listing(self) -> Listing:
        """List the folder's files with sizes, and with checksums if the folder has a SHA256SUMS. Raises BadListing,
        SourceError."""
        try:
            names = sorted(self._names())
            known = self._sums() if SUMS in names else {}
            files = []
            for name in chosen(names, self._only, everything=self._everything):
                seen = os.stat(self._inside(name))
                if not stat.S_ISREG(seen.st_mode):
                    raise BadListing(f"{self._path / name} is no plain file")
                version = f"{seen.st_mtime_ns}-{seen.st_ino}"
                files.append(SourceFile(name=name, size=seen.st_size, digest=known.get(name), version=version))
        except OSError as error:
            raise SourceError(f"{error.filename or self._path} cannot be read: {error.strerror}") from error
        return Listing(source=str(self._path), files=checked(files))

    def _names(self) -> Iterator[str]:
        count = 0
        for folder, folders, names in os.walk(self._path, onerror=_raised):
            below = Path(folder).relative_to(self._path)
            folders[:] = [name for name in folders if not name.startswith(".") and not Path(folder, name).is_symlink()]
            for name in names:
                count += 1
                if count > MAX_FILES:
                    raise BadListing(f"{self._path} has more than {MAX_FILES} files: it is no model's folder")
                yield (below / name).as_posix()

    def _inside(self, name: str) -> Path:
        """The file itself, without links. Raises BadListing for one that leads elsewhere."""
        found, root = (self._path / name).resolve(strict=True), self._path.resolve()
        blobs = root.parent.parent / "blobs"
        if found.is_relative_to(root) or (root.parent.name == "snapshots" and found.is_relative_to(blobs)):
            return found
        raise BadListing(f"{self._path / name} is a link that leads out of the folder, to {found}")

    def _sums(self) -> dict[str, Digest]:
        with self._opened(SUMS) as file:
            return sums((file.read(MAX_LISTING) or b"").decode(errors="replace"))

    def _opened(self, name: str) -> FileIO:
        fd = os.open(self._inside(name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not hold us up
        return FileIO(fd)

    def read(self, file: SourceFile, start: int) -> Pieces:
        """As Source. A file that changes meanwhile is a SourceError."""
        try:
            with self._opened(file.name) as opened:
                opened.seek(start)
                while piece := opened.read(PIECE):
                    yield piece
                seen = os.fstat(opened.fileno())
        except OSError as error:
            raise SourceError(f"{self._path / file.name} cannot be read: {error.strerror}") from error
        if (seen.st_size, f"{seen.st_mtime_ns}-{seen.st_ino}") != (file.size, file.version):
            raise SourceError(f"{self._path / file.name} has changed while it was copied")


def _raised(error: OSError) -> None:
    raise error
