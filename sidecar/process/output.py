"""Output of an engine: a file of bounded size, and its last lines in a ring buffer.

The engine's stdout and stderr are the file itself, and this module follows the file. A pipe to us would block the
engine or kill it by EPIPE; a file never does, however fast it writes, and also while no sidecar runs. The ring's size
bounds what is read in one turn. Bytes further back than that would have left the ring anyway: they are passed over, and
the file still has them.

Past `most` bytes the file's end is copied to `PATH.1` and the file is truncated in place, since the engine holds it
open. That bound is checked every POLL seconds, or QUIET where nothing is written. A flood overshoots it by the bytes
written meanwhile, and nobody truncates the file while no sidecar runs.

The file's room is reserved beforehand, so that a disk that others fill up does not make the engine's writes fail. Where
the file cannot be had (no such folder, a read-only one, a full disk, no regular file), memory takes its place, with
the same bound on a smaller size and without a `.1`. `error` then says why, and the engine runs as it would have.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

LINES = 2000  # of the ring
SIZE = 256 * 1024  # bytes of the ring
LINE_MOST = 8 * 1024  # bytes of one line that are kept
POLL, QUIET = 0.1, 0.5  # seconds between two looks: at an engine that writes, at one that does not
MOST = 16 * 1024 * 1024  # bytes of the file, and of the one before it
SPARE = 4  # one part in so many more is reserved, for what comes between two looks
SLICE = 1024 * 1024  # bytes copied in one turn of the loop
IN_MEMORY = 4  # times the ring's size, where there is no file
MODE = 0o640  # of both files: prompts may be in them
KEEP_SIZE = 0x01  # FALLOC_FL_KEEP_SIZE of linux/falloc.h
APPEND = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY
UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS)  # by this file system: it goes without


class Ring:
    """The end of an engine's output, bounded in bytes, and its last lines. `feed` takes output as it comes.

    What a carriage return has overwritten is no line's, so a progress bar is one line and not a thousand, and pushes
    no other line out. Of a line LINE_MOST bytes are kept: the last ones while it is being written.
    """

    def __init__(self, lines: int = LINES, size: int = SIZE) -> None:
        self._data = b""
        self._most_lines = lines
        self.size = size

    def feed(self, data: bytes) -> None:
        """Take what was written next, cut anywhere."""
        before, end, begun = self._data.rpartition(b"\n")
        whole, newline, rest = (begun + data).rpartition(b"\n")
        lines = map(_shown, whole.rsplit(b"\n", self._most_lines)[-self._most_lines :])
        data = before + end + b"\n".join(lines) + newline + rest[-LINE_MOST:]
        if len(data) > self.size:
            data = data[-self.size :]
            data = data.partition(b"\n")[2] or data  # without the line that is cut
        self._data = data

    def skip(self) -> None:
        """End the line that was being written: what follows it was not looked at."""
        if self._data and not self._data.endswith(b"\n"):
            self.feed(b"\n")

    def lines(self, last: int | None = None) -> list[str]:
        """The lines from old to new, at most `last`; the one being written is the newest."""
        found = self._data.removesuffix(b"\n").split(b"\n")[-self._most_lines :] if self._data else []
        found = found if last is None else found[max(0, len(found) - last) :]
        return [_shown(line).decode(errors="replace") for line in found]


def _shown(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2][:LINE_MOST]


class Output:
    """Output of one engine. `fd`: its stdout and stderr.

    `heard`: called with new bytes, if set. `error`: the last failure with the file.
    `path`: None if memory stands in for the file.
    """

    def __init__(
        self,
        path: Path,
        *,
        writer: int | None = None,
        ring: Ring | None = None,
        most: int = MOST,
    ) -> None:
        """For a new engine; `writer`: for the one with this pid, which has had its output for longer."""
        self.ring = ring or Ring()
        self.path: Path | None = path
        self.error: str | None = None
        self.heard: Callable[[bytes], None] | None = None
        self._most = most
        try:
            self.fd = _made(path, most + most // SPARE) if writer is None else _written_by(writer, path)
        except OSError as error:
            self._failed(f"{path} cannot take the engine's output" if writer is None else f"{path}", error)
            self.fd = _memory()
        if writer is not None:
            self.path = _path_of(self.fd, path, writer)
        elif self.error is not None:
            self.path = None
        if self.path is None:
            self._most = IN_MEMORY * self.ring.size
        size = os.fstat(self.fd).st_size
        self._at = size if writer is None else max(0, size - self.ring.size)

    def _failed(self, what: str, error: OSError) -> None:
        self.error = f"{what}: {error.strerror or error}"

    def _reserve(self) -> None:
        try:
            _allocate(self.fd, self._most + self._most // SPARE)
        except OSError as error:
            self._failed(f"no room for {self._most} bytes of output in {self.path}", error)

    def read(self) -> bool:
        """Read new output, at most as much as the ring holds. Return whether there was any."""
        try:
            size = os.fstat(self.fd).st_size
            if size < self._at:  # somebody else has cut it
                self._at = 0
            new = size - self._at
            if new <= 0:
                return False
            if new > self.ring.size:
                self.ring.skip()
                self._at = size - self.ring.size
            data = os.pread(self.fd, self.ring.size, self._at)
        except OSError as error:
            self._failed(f"the engine's output in {self.path} cannot be read", error)
            return False
        self._at += len(data)
        self.ring.feed(data)
        if self.heard is not None:
            self.heard(data)
        return True

    async def follow(self) -> None:
        """Read and bound the file until cancelled."""
        pause = POLL
        while True:
            pause = POLL if self.read() else min(1.2 * pause, QUIET)
            try:
                await self._bound()
            except OSError as error:
                self._failed(f"{self.path} cannot be cut", error)
            await asyncio.sleep(pause)

    async def _bound(self) -> None:
        size = os.fstat(self.fd).st_size
        if size <= self._most:
            return
        if self.path is not None:
            await self._copy(self.path, size - self._most, size)
        self.read()
        os.ftruncate(self.fd, 0)
        self._at = 0
        if self.path is not None:
            self._reserve()

    async def _copy(self, path: Path, at: int, end: int) -> None:
        """Copy the file from `at` to `end` into `PATH.1`, and what came since if that is not much."""
        try:
            with _before(path) as file:
                while at < end:
                    sent = os.sendfile(file.fileno(), self.fd, at, min(SLICE, end - at))
                    if not sent:
                        break
                    at += sent
                    await asyncio.sleep(0)
                os.sendfile(file.fileno(), self.fd, at, SLICE)
        except OSError as error:
            self._failed(f"{path}.1 cannot be written", error)

    def close(self) -> None:
        """A last look, then the file is closed."""
        self.read()
        os.close(self.fd)


def _before(path: Path) -> BinaryIO:
    """The file that the output before the present one is kept in, empty. Raises OSError."""
    fd = _opened(f"{path}.1", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
    os.ftruncate(fd, 0)
    return open(fd, "wb")


def _opened(path: str | Path, flags: int) -> int:
    """A plain file of this user's own at this very path: no link, nor one more name of another. Raises OSError."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, MODE)  # a FIFO must not hold us up
    seen = os.fstat(fd)
    if stat.S_ISREG(seen.st_mode) and seen.st_uid == os.geteuid() and seen.st_nlink == 1:
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file of this user's own")


def _memory() -> int:
    fd = os.memfd_create("engine-output", os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)  # else what is written after a cut would leave a hole before it
    return fd


def _made(path: Path, size: int) -> int:
    """The file, to read and to append to, with room for `size` bytes. Raises OSError also where it is no plain file."""
    fd = _opened(path, APPEND | os.O_CREAT)
    try:
        _allocate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd


def _written_by(pid: int, path: Path) -> int:
    """The file that a process has as its stdout, opened anew; `path` where that cannot be seen. Raises OSError."""
    own = f"/proc/{pid}/fd/1"
    if not os.access(own, os.R_OK | os.W_OK):
        return _opened(path, APPEND)
    if not stat.S_ISREG(os.stat(own).st_mode):
        raise OSError(errno.EINVAL, "the engine's output is not a regular file")
    return os.open(own, APPEND)


def _path_of(fd: int, path: Path, pid: int) -> Path | None:
    """The present path of the file that was made at `path`, which may have been moved; None: it is gone."""
    for candidate in (path, Path(f"/proc/{pid}/fd/1")):
        try:
            resolved = candidate.resolve()
            if os.path.samestat(os.fstat(fd), resolved.stat()):
                return resolved
        except OSError:
            continue
    return None


def _allocate(fd: int, size: int) -> None:
    """Make sure of room for the first `size` bytes of a file without making it longer. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if libc.fallocate(fd, KEEP_SIZE, 0, size) and (number := ctypes.get_errno()) not in UNSUPPORTED:
        raise OSError(number, os.strerror(number))
