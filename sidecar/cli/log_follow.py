"""An engine's log file, followed as it grows: through the sidecar's rotation, a move, and engines that come and go.

The sidecar rotates a file by copying its end to `PATH.1` and cutting it in place (`sidecar.process.output`). So what
was not read before the cut is found in `PATH.1`, behind the last bytes that were read.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

PIECE = 1024 * 1024  # bytes read in one turn
MARK = 4096  # bytes before the place in the file that are remembered
BEFORE = 32 * 1024 * 1024  # bytes of PATH.1 that are looked at
LONGEST = 64 * 1024  # bytes of a line


class LogFile:
    """The file at `path`. `lost`: whether lines were passed over since it was last asked, as more came than is kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = False
        self._fd: int | None = None
        self._at = 0
        self._mark = b""
        self._rest = b""  # of the line that is being written

    def open(self, tail: int) -> bool:
        """Open it, not more than `tail` bytes before its end. Whether it is there. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            self._fd = _opened(self.path)
            self._at = max(0, os.fstat(self._fd).st_size - tail)
        return self._fd is not None

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def lines(self) -> list[str]:
        """The whole lines that came since the last look, some of them where there are many. Raises OSError."""
        *whole, self._rest = (self._rest + b"".join(self._new())).split(b"\n")
        self._rest = self._rest[-LONGEST:]
        shown = (line.rstrip(b"\r").rpartition(b"\r")[2][:LONGEST] for line in whole)
        return [line.decode(errors="replace") for line in shown]

    def _new(self) -> Iterator[bytes]:
        assert self._fd is not None  # noqa: S101 - it is open
        if self._cut():
            yield self._missed()
            self._at, self._mark = 0, b""
        data = os.pread(self._fd, PIECE, self._at)
        self._at += len(data)
        self._mark = (self._mark + data)[-MARK:]
        yield data
        if not data and self._moved():
            self.close()
            if self.open(0):
                self._at, self._mark = 0, b""

    def _cut(self) -> bool:
        """Whether it was cut since the last look, even if it is as long again by now."""
        assert self._fd is not None  # noqa: S101 - it is open
        before = os.pread(self._fd, len(self._mark), self._at - len(self._mark))
        return os.fstat(self._fd).st_size < self._at or before != self._mark

    def _missed(self) -> bytes:
        """Return the bytes that were written between the last look and the cut; if they are gone, set `lost` and end
        the line."""
        with contextlib.suppress(OSError):
            fd = _opened(Path(f"{self.path}.1"))
            with open(fd, "rb") as file:
                file.seek(max(0, os.fstat(fd).st_size - BEFORE))
                _, found, after = file.read(BEFORE).rpartition(self._mark)
                if found:
                    return after
        self.lost = True
        return b"\n"  # ends the line that was being written

    def _moved(self) -> bool:
        """Whether another file is at its path now. While there is none, it is still this one."""
        assert self._fd is not None  # noqa: S101 - it is open
        with contextlib.suppress(FileNotFoundError):
            return not os.path.samestat(os.fstat(self._fd), self.path.stat())
        return False


def _opened(path: Path) -> int:
    """Raises OSError also for what is no plain file."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not hold us up
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(0, "not a plain file", str(path))
