"""Source of a model's files that is a folder of this machine: a network file system, another disk, a hub's cache.

Links are followed to files below the folder, or among the blobs of the cache that the folder is a snapshot of. Others
are refused, and so are devices and pipes. Functions raise PullError, and OSError.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

from sidecar.pull.listing import MAX_FILES, SUMS, Listing, PullError, Select, SourceFile, check_names, checksums

PIECE = 4 * 1024 * 1024  # bytes
MAX_SUMS = 1 << 20  # bytes of a SHA256SUMS


def list_folder(folder: Path, select: Select) -> Listing:
    """List the selected files with sizes, and with checksums if the folder has a SHA256SUMS."""
    names = sorted(_names(folder))
    check_names(names)
    sums: dict[str, str] = {}
    if SUMS in names:
        with _opened(folder, SUMS) as file:
            sums = checksums((file.read(MAX_SUMS) or b"").decode(errors="replace"))
    return Listing(
        source=str(folder), files=tuple(_described(folder, name, sums.get(name, "")) for name in select(names))
    )


def copy_file(folder: Path, file: SourceFile, to: Path, came: Callable[[int], None]) -> None:
    """Copy a file of the folder's listing; `came` gets the bytes of each piece. The file appears at `to` once it is
    whole, has its checksum and is on the disk."""
    part, digest = to.with_name(f"{to.name}.part"), hashlib.sha256()
    with _opened(folder, file.name) as source, part.open("wb") as out:
        while piece := source.read(PIECE):
            out.write(piece)
            if file.sha256:
                digest.update(piece)
            came(len(piece))
        out.flush()
        os.fsync(out.fileno())
    if _described(folder, file.name, file.sha256) != file:
        raise PullError(f"{folder / file.name} has changed while it was copied")
    if file.sha256 not in ("", digest.hexdigest()):
        raise PullError(f"{file.name} has another checksum than {SUMS} lists")
    part.replace(to)


def _names(folder: Path) -> Iterator[str]:
    count = 0
    for path, folders, names in os.walk(folder, onerror=_raised):
        below = Path(path).relative_to(folder)
        folders[:] = [name for name in folders if not name.startswith(".") and not Path(path, name).is_symlink()]
        count += len(names)
        if count > MAX_FILES:
            raise PullError(f"{folder} has more than {MAX_FILES} files: it is no model's folder")
        yield from ((below / name).as_posix() for name in names if not name.startswith("."))


def _described(folder: Path, name: str, sha256: str) -> SourceFile:
    seen = os.stat(_resolved(folder, name))
    if not stat.S_ISREG(seen.st_mode):
        raise PullError(f"{folder / name} is no plain file")
    return SourceFile(name=name, size=seen.st_size, sha256=sha256, version=f"{seen.st_mtime_ns}-{seen.st_ino}")


def _resolved(folder: Path, name: str) -> Path:
    """The file itself, without links. Raises PullError for one that leads elsewhere."""
    found, root = (folder / name).resolve(strict=True), folder.resolve()
    blobs = root.parent.parent / "blobs"
    if found.is_relative_to(root) or (root.parent.name == "snapshots" and found.is_relative_to(blobs)):
        return found
    raise PullError(f"{folder / name} is a link that leads out of the folder, to {found}")


def _opened(folder: Path, name: str) -> FileIO:
    return FileIO(os.open(_resolved(folder, name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))  # a FIFO must not block


def _raised(error: OSError) -> None:
    raise error
