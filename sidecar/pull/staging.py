"""Staging folder of a pull: what has come of a model's files, beside the folder that they become in the end.

The model's folder appears by one rename, once every file is there, has its size and its checksum, and is on the disk.
Until then all is in `.NAME.pulling` beside it: `listing.json`, what is to come, and `files/`. A pull that was killed
goes on there, unless the source has changed. A lock keeps a second one away; it goes with its process.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import msgspec

from sidecar.pull.listing import MAX_FILES, SUMS, Listing, PullError, Select, SourceFile, check_names, checksums

GIB = 1 << 30
FULL = (28, 122)  # ENOSPC, EDQUOT
PIECE = 4 * 1024 * 1024  # bytes
MAX_SUMS = 1 << 20  # bytes of a SHA256SUMS


class Pulled(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a pull."""

    folder: str
    files: int
    size: int  # bytes of all files
    resumed: int = 0  # bytes of them that an earlier pull had left
    was_there: bool = False  # the folder had all of it


class Staging:
    """Staging folder of the model's folder `target`, locked from `open` to `close`. Raises PullError, OSError."""

    def __init__(self, target: Path, listing: Listing) -> None:
        self.target = target
        self.folder = target.parent / f".{target.name}.pulling"
        self.files = self.folder / "files"
        self._listing = listing
        self._lock: int | None = None

    def open(self) -> None:
        """Lock it, and forget what an earlier pull has left of another listing."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        seen = self.folder.lstat()
        if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid() or seen.st_mode & 0o022:
            raise PullError(f"{self.folder} is not this user's own folder: remove it")
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PullError(f"another pull of {self.target} is under way") from None
        manifest, wanted = self.folder / "listing.json", msgspec.json.encode(self._listing)
        if not manifest.exists() or manifest.read_bytes() != wanted:
            _remove(self.files)
            manifest.write_bytes(wanted)
        self.files.mkdir(exist_ok=True)

    def close(self) -> None:
        """Give the lock back. What has come stays."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def missing(self) -> list[SourceFile]:
        """Files that are to come."""
        return [file for file in self._listing.files if not has_file(self.files, file)]

    def check_room(self) -> None:
        """Raise PullError where the disk has fewer bytes free than are to come."""
        free, missing = shutil.disk_usage(self.folder).free, sum(file.size for file in self.missing())
        if missing > free:
            raise PullError(
                f"{missing / GIB:.2f} GiB are to come, and the disk of {self.target.parent} has {free / GIB:.2f} GiB "
                "free: free some, or give the model a folder on another disk"
            )

    def finish(self, *, replace: bool) -> None:
        """Make it the model's folder by one rename, on the disk when this returns. `replace`: what is there goes."""
        for folder, _, names in os.walk(self.files):
            for path in (*(os.path.join(folder, name) for name in names), folder):
                _sync(path)
        old = self.folder / "old"
        _remove(old)
        if replace and self.target.exists():
            self.target.rename(old)
        self.files.rename(self.target)
        _sync(self.target.parent)
        shutil.rmtree(self.folder)


def pull_into(
    target: Path, listing: Listing, fetch: Callable[[Staging], None], check: Callable[[Path], None], *, replace: bool
) -> Pulled:
    """Have the files of `listing` in the folder `target`. `fetch` brings those that are missing, `check` looks at all
    of them before the model appears. `replace`: another model there goes. Raises PullError, and what `check` raises."""
    pulled = Pulled(folder=str(target), files=len(listing.files), size=listing.size)
    if not listing.files:
        raise PullError(f"{listing.source} has no files of a model")
    staging = Staging(target, listing)
    with _explained():
        if all(has_file(target, file) for file in listing.files):
            return msgspec.structs.replace(pulled, was_there=True)
        if not replace and target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise PullError(f"{target} is there and is not what {listing.source} has: --replace puts that in its place")
        try:
            staging.open()
            staging.check_room()
            resumed = listing.size - sum(file.size for file in staging.missing())
            fetch(staging)
            if missing := staging.missing():
                raise PullError(f"{missing[0].name} has not the {missing[0].size} bytes that {listing.source} lists")
            check(staging.files)
            staging.finish(replace=replace)
        finally:
            staging.close()
    return msgspec.structs.replace(pulled, resumed=resumed)


def has_file(folder: Path, file: SourceFile) -> bool:
    """Whether a folder has a file of that name and size."""
    try:
        return (folder / file.name).stat().st_size == file.size
    except (FileNotFoundError, NotADirectoryError):
        return False


def write_reference(reference: Path, commit: str) -> None:
    """Have a hub's cache know by which commit a revision is called: its file `refs/REVISION`. Raises PullError."""
    with _explained():
        reference.parent.mkdir(parents=True, exist_ok=True)
        new = reference.with_name(f"{reference.name}.new")
        new.write_text(commit)
        new.replace(reference)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        advice = ": free some space, the next pull goes on from here" if error.errno in FULL else ""
        raise PullError(f"{error.filename or 'the disk'}: {error.strerror or error}{advice}") from error


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: str | Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# -- a source that is a folder of this machine: a network file system, another disk, a hub's cache ---------------------
#
# Links are followed to files below the folder, or among the blobs of the cache that the folder is a snapshot of. Others
# are refused, and so are devices and pipes. Functions raise PullError, and OSError.


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
