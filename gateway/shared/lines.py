"""Non-blocking writer of lines to a file, a pipe or a terminal, which may be full, slow or gone: callers never wait.

One daemon thread per output writes the lines that have gathered. Memory is bounded: beyond `LIMIT` bytes lines are
dropped. A line that cannot be written is lost too. Both are counted (`lost`), and told in one line when writing works
again. A line torn by a full disk is ended first, so that the next one begins where readers expect it. The thread does
not keep the process from ending: the last lines get `CLOSE_WITHIN` seconds.

A file that was moved or deleted, as log rotation does, is opened anew under its path.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO, cast

from gateway.shared.notice import Notice
from gateway.shared.operator_log import RAW, as_text, framed, plain

EVERY = 0.25  # seconds between writes of what is in no hurry
LIMIT = 8 * 1024 * 1024  # bytes waiting to be written
CLOSE_WITHIN = 2.0  # seconds
FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
MODE = 0o640


class LineWriter:
    """Writes to the descriptor `fd`, which was opened at `path` if it is a file that may be moved. `say` takes lines
    for the operator about this output, and has another one. `text`: its lines are text, not JSON. Every method may be
    called from any thread."""

    def __init__(
        self, fd: int, path: Path | None = None, say: Callable[[str], None] = lambda _: None, *, text: bool = False
    ) -> None:
        self.lost = 0  # lines, since the start
        self.trouble: tuple[str, float] | None = None  # why lines are lost now, and since when (Unix seconds)
        self._text = text
        self._fd = fd
        self.path = path
        self._say = say
        self._lock = threading.Lock()
        self._lines: list[bytes] = []
        self._size = 0
        self._writing = False  # lines that were taken
        self._untold = 0  # lost lines that no line has told of
        self._wanted = threading.Event()  # there is something to do
        self._awake = False  # the thread will look at what has come
        self._hurry = threading.Event()
        self._thread: threading.Thread | None = None
        # The thread's own from here on.
        self._error = ""
        self._failed = False
        self._stuck = False
        self._torn = path is not None and _ends_torn(path)

    @classmethod
    def at(cls, path: Path, say: Callable[[str], None], *, text: bool = False) -> LineWriter:
        """Append to a file, made if need be. Raises OSError."""
        return cls(open_to_append(path), path, say, text=text)

    def write(self, line: bytes, *, hurry: bool = False) -> None:
        """Take a line with its end. `hurry`: write it now, and not with others that gather meanwhile."""
        with self._lock:
            if self._size > LIMIT:
                self.lost += 1
                self._untold += 1
                self.trouble = self.trouble or ("whoever reads it is too slow", time.time())
                return
            self._lines.append(line)
            self._size += len(line)
        if hurry or not self._awake:  # else the thread has yet to take what has gathered
            self._wake(hurry=hurry)

    def look(self) -> None:
        """See now whether the file has been moved."""
        if self.path is not None:
            self._wake(hurry=True)

    def drain(self) -> None:
        """Write what is left, in bounded time."""
        for pause in self._pauses():
            time.sleep(pause)

    async def adrain(self) -> None:
        """`drain`, in a running loop."""
        for pause in self._pauses():
            await asyncio.sleep(pause)

    def _pauses(self) -> Iterator[float]:
        """Times to wait until everything that has come is written, or the patience ends."""
        until = time.monotonic() + CLOSE_WITHIN
        while (self._lines or self._writing) and time.monotonic() < until:
            self._wake(hurry=True)
            yield 0.002

    def _wake(self, *, hurry: bool) -> None:
        self._awake = True
        if hurry:
            self._hurry.set()
        if not self._wanted.is_set():
            self._wanted.set()
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="weir-lines", daemon=True)
                    self._thread.start()

    # -- in the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._hurry.wait(EVERY)
            self._wanted.clear()
            self._hurry.clear()
            with self._lock:
                lines, self._lines, self._size = self._lines, [], 0
                self._awake, self._writing = False, True
            self._find_again()
            if lines:
                data = b"".join(lines)
                left = self._write(data) if self._told() else len(data)
                with self._lock:
                    lost = data[-left:].count(b"\n") if left else 0
                    self.lost += lost
                    self._untold += lost
            self._writing = False

    def _told(self) -> bool:
        """Tell of lost lines, if there are any. False: that line cannot be written either."""
        untold = self._untold
        if not untold:
            return True
        if self._write(self._of_lost(untold)):
            return False
        with self._lock:
            self._untold -= untold
        if self._failed:
            self._say(Notice(f"{self.path}: can be written again; {untold} lines were lost", "log_written"))
        self._failed, self._error, self.trouble = False, "", None
        return True

    def _of_lost(self, lines: int) -> bytes:
        """The line that tells of lost ones."""
        if self._text:
            why = self._error or "whoever reads them is too slow"
            return framed(Notice(f"{lines} lines were lost: {why}", "lines_lost", "warning"), text=True)
        error = b',"error":"%b"' % self._error.encode() if self._error else b""
        head = b'{"ts":%.3f,"level":"warning","event":"lines_lost"' % time.time()
        return b'%b,"dropped_lines":%d%b}\n' % (head, lines, error)

    def _write(self, data: bytes) -> int:
        """Write all of the data, however long that takes. Return the number of bytes that could not be written."""
        if self._torn:
            data = b"\n" + data
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:  # whoever shares the descriptor has made it so
                _wait_until_writable(self._fd)
            except OSError as error:
                written = len(data) - len(view)
                if written:
                    self._torn = data[written - 1 : written] != b"\n"
                self._failing(error.strerror or str(error))
                return len(view)
        self._torn = False
        return 0

    def _failing(self, error: str) -> None:
        self._error = error
        if not self._failed:
            self._failed, self.trouble = True, (error, time.time())
            line = f"{self.path}: cannot be written: {error}; lines are lost until it can"
            self._say(Notice(line, "log_failed", "error"))

    def _find_again(self) -> None:
        """Open the path anew where it is no longer the file that is open."""
        if self.path is None:
            return
        try:
            now, own = os.stat(self.path), os.fstat(self._fd)
            if (now.st_dev, now.st_ino) == (own.st_dev, own.st_ino):
                return
        except OSError:  # it is not there: it is made again
            pass
        try:
            opened = open_to_append(self.path)
        except OSError as error:
            if not self._stuck:
                self._stuck = True
                line = f"{self.path}: cannot be opened again: {error.strerror}; lines go into the file that was moved"
                self._say(Notice(line, "log_failed", "warning"))
            return
        os.close(self._fd)
        self._fd, self._torn, self._stuck = opened, _ends_torn(self.path), False


class ErrorOutput:
    """Standard error as a text stream that blocks nobody: prints, logs and tracebacks go through a LineWriter, each of
    their lines with time, level and event."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, lines: LineWriter, *, text: bool) -> None:
        self._lines = lines
        self._text = text
        self._part = threading.local()

    def write(self, text: str) -> int:
        """Gather text of this thread up to the end of its line."""
        gathered = getattr(self._part, "text", "") + text
        whole, end, self._part.text = gathered.rpartition("\n")
        if end:
            for line in whole.split("\n"):
                if line:
                    self.say(Notice(line, RAW, "error"))
        return len(text)

    def say(self, line: str) -> None:
        """Write one line for the operator."""
        self._lines.write(framed(line, text=self._text), hurry=True)

    def flush(self) -> None:
        """Do nothing: the thread writes at once."""

    def isatty(self) -> bool:
        """Whether standard error is a terminal."""
        return os.isatty(self.fileno())

    def fileno(self) -> int:
        """File descriptor of standard error."""
        return 2


@contextlib.contextmanager
def standard_error(*, text: bool) -> Iterator[LineWriter]:
    """`sys.stderr` through a LineWriter, until the end of the block; what is left is written then, in bounded time."""
    lines, before = LineWriter(2, text=text), sys.stderr
    sys.stderr = cast(TextIO, ErrorOutput(lines, text=text))
    try:
        yield lines
    finally:
        sys.stderr = before
        lines.drain()


def say(line: str) -> None:
    """Write a line for the operator on standard error, which `standard_error` may have taken over."""
    out = sys.stderr
    if isinstance(out, ErrorOutput):
        out.say(line)
    else:
        plain(text=as_text(None))(line)


def _wait_until_writable(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    poll.poll(1000)


def open_to_append(path: Path) -> int:
    """Open a file to append to, made if need be. Raises OSError, also for a pipe that nobody reads: to wait for its
    reader would hold up the start."""
    try:
        descriptor = os.open(path, FLAGS | os.O_NONBLOCK, MODE)
    except OSError as error:
        raise OSError(
            error.errno, "nobody reads this pipe" if error.errno == errno.ENXIO else error.strerror
        ) from error
    os.set_blocking(descriptor, True)
    return descriptor


def _ends_torn(path: Path) -> bool:
    """Whether a file ends in the middle of a line, as after a full disk. An unreadable file is taken for whole."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size  # 0 of a pipe or a device
            return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        finally:
            os.close(descriptor)
    except OSError:
        return False
