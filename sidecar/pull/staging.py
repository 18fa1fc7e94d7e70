"""Staging folder of a pull: what has come of a model's files, beside the folder that they become in the end.

The model's folder appears by one rename, once every file is there, has its size and its checksum, and is on the disk.
Until then all is in `.NAME.pulling` beside it: `listing.json`, what is to come; `files/`, the whole ones; `part`, the
one that is under way. A pull that was killed goes on there, unless the source has changed. A lock keeps a second one
away; it goes with its process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

import msgspec

from sidecar.pull.listing import Digest, Listing, SourceFile
from sidecar.pull.source import Pieces

PIECE = 4 * 1024 * 1024  # bytes
MAX_MANIFEST = 64 * 1024 * 1024


class StagingError(Exception):
    """Failure to store files; the message says why and what to do."""


class Staging:
    """Staging folder of the model's folder `target`, whose parent is made if missing. Raises StagingError."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.folder = target.parent / f".{target.name}.pulling"
        self._lock: int | None = None

    def open(self, listing: Listing) -> None:
        """Lock it, and forget what an earlier pull has left of another listing."""
        with self._failing():
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            seen = self.folder.lstat()
            if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid() or seen.st_mode & 0o022:
                raise StagingError(f"{self.folder} is not this user's own folder: remove it")
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StagingError(f"another pull of {self.target} is under way") from None
            wanted = msgspec.json.encode(listing)
            if self._manifest() != wanted:
                for name in ("files", "part", "listing.json"):
                    _remove(self.folder / name)
                _write(self.folder / "listing.json", wanted)
            (self.folder / "files").mkdir(exist_ok=True)

    def close(self) -> None:
        """Give the lock back. What has come stays."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _manifest(self) -> bytes:
        with contextlib.suppress(FileNotFoundError), (self.folder / "listing.json").open("rb") as file:
            return file.read(MAX_MANIFEST)
        return b""

    # -- files ----------------------------------------------------------------------------------------------------

    def has(self, file: SourceFile) -> bool:
        """Whether it is here, whole."""
        with self._failing(), contextlib.suppress(FileNotFoundError):
            return (self.folder / "files" / file.name).lstat().st_size == file.size
        return False

    def here(self, listing: Listing) -> int:
        """Bytes that need not come any more."""
        whole = sum(file.size for file in listing.files if self.has(file))
        return whole + self._part_size()

    def _part_size(self) -> int:
        with self._failing(), contextlib.suppress(FileNotFoundError):
            return (self.folder / "part").lstat().st_size
        return 0

    def check_room(self, missing: int) -> None:
        """Raises StagingError where the disk has fewer bytes free."""
        with self._failing():
            free = shutil.disk_usage(self.folder).free
        if missing > free:
            gib = 1 << 30
            raise StagingError(
                f"{missing / gib:.2f} GiB are to come, and the disk of {self.target.parent} has {free / gib:.2f} GiB "
                "free: free some, or give the model a folder on another disk"
            )

    def take(self, file: SourceFile, read: Callable[[int], Pieces], told: Callable[[int], None]) -> None:
        """Store one file: what `read(start)` gives from byte `start` on, after what is there of it. `told` is called
        with the bytes of each piece. Raises StagingError, BadContent, and what `read` raises."""
        part = self.folder / "part"
        with self._failing(), _part(part) as out:
            start = out.seek(0, os.SEEK_END)
            if start > file.size:
                start = 0
                out.truncate(0)
            digest = _Hash(file)
            digest.of(out, start)
            if start < file.size:
                digest = self._read(file, read(start), out, digest, told)
            if out.tell() < file.size:
                raise BadContent(f"{file.name} ended after {out.tell()} of {file.size} bytes", cut=True)
            if not digest.right():
                told(-out.tell())
                out.truncate(0)
                raise BadContent(f"{file.name} has another checksum than the source lists")
            os.fsync(out.fileno())
        with self._failing():
            final = self.folder / "files" / file.name
            final.parent.mkdir(parents=True, exist_ok=True)
            part.replace(final)

    def _read(self, file: SourceFile, pieces: Pieces, out: FileIO, digest: _Hash, told: Callable[[int], None]) -> _Hash:
        """Write what comes behind what is there; the checksum of all of it."""
        with contextlib.closing(pieces):
            for piece in pieces:
                if piece is None:
                    told(-out.tell())
                    out.seek(0)
                    out.truncate(0)
                    digest = _Hash(file)
                    continue
                if out.tell() + len(piece) > file.size:
                    told(-out.tell())
                    out.truncate(0)
                    raise BadContent(f"{file.name} is longer than the {file.size} bytes that the source lists")
                _whole(out, piece)
                digest.update(piece)
                told(len(piece))
        return digest

    def finish(self, *, replace: bool) -> None:
        """The model's folder by one rename, on the disk when this returns. `replace`: what is there goes."""
        with self._failing():
            files = self.folder / "files"
            for folder, _, _ in os.walk(files):
                _sync(Path(folder))
            old = self.folder / "old"
            _remove(old)
            if replace and self.target.exists():
                self.target.rename(old)
            files.rename(self.target)
            _sync(self.target.parent)
            shutil.rmtree(self.folder)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            advice = ": free some space, the next pull goes on from here" if error.errno in (28, 122) else ""
            raise StagingError(f"{error.filename or self.folder}: {error.strerror or error}{advice}") from error


class BadContent(Exception):
    """A file that is not what the listing says. `cut`: it ended early."""

    def __init__(self, message: str, *, cut: bool = False) -> None:
        super().__init__(message)
        self.cut = cut


class _Hash:
    """Checksum of a file while it comes; right for any content where the listing has none."""

    def __init__(self, file: SourceFile) -> None:
        self._wanted: Digest | None = file.digest
        self._hash = None
        if file.digest is not None:
            # Git's object names, not a protection of ours: that they are SHA-1 is given.
            self._hash = hashlib.sha256() if file.digest.kind == "sha256" else hashlib.sha1(usedforsecurity=False)
            if file.digest.kind == "git":
                self._hash.update(b"blob %d\0" % file.size)

    def update(self, data: bytes) -> None:
        if self._hash is not None:
            self._hash.update(data)

    def of(self, file: FileIO, size: int) -> None:
        """Take in the first `size` bytes of a file, and leave it there."""
        file.seek(0)
        left = size if self._hash is not None else 0
        while left:
            data = file.read(min(PIECE, left))
            self.update(data)
            left -= len(data)
        file.seek(size)

    def right(self) -> bool:
        return self._hash is None or self._wanted is None or self._hash.hexdigest() == self._wanted.value


def whole(folder: Path, listing: Listing) -> bool:
    """Whether a folder has every file of a listing, by their sizes."""
    with contextlib.suppress(OSError):
        return bool(listing.files) and all((folder / file.name).stat().st_size == file.size for file in listing.files)
    return False


def _part(path: Path) -> FileIO:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    return FileIO(fd, "r+")


def _whole(file: FileIO, data: bytes) -> None:
    """Write all of it: a raw file may take less, where the disk fills up."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def point(reference: Path, commit: str) -> None:
    """Have a hub's cache know by which commit a revision is called: its file `refs/REVISION`. Raises StagingError."""
    try:
        reference.parent.mkdir(parents=True, exist_ok=True)
        _write(reference, commit.encode(), 0o644)
    except OSError as error:
        raise StagingError(f"{reference}: {error.strerror}") from error


def _write(path: Path, data: bytes, mode: int = 0o600) -> None:
    new = path.with_name(f"{path.name}.new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)
    new.replace(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
