"""Hot reload of a file: the gateway's policy, a certificate, the sidecar's file.

A valid file is applied within a second; a faulty one changes nothing and is reported.

Every POLL seconds a thread compares the status (device, inode, size, times) of the file and of each that it names,
through all symbolic links. Once they have not changed for SETTLE seconds it reads them.

Polling replaces inotify for four reasons. Inotify sees no network file systems, no swap of a symbolic link above the
watched folder (as Kubernetes does it), and no folder that comes back; and busy machines run out of its instances.
Polling is soon enough, costs about ten microseconds a look, and has no state that can go wrong.

A half-written file is not read. An empty file is an error although it would be valid: a full disk leaves such files,
and it would remove every engine.

A thread is used because a hung file system, or the parsing of a large file, must not stop the event loop. It is a
daemon, so that it does not keep the process from ending. The thread only reads; the loop decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import threading
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from gateway.shared.files.checked import InvalidFile
from gateway.shared.files.file_status import FileStatus
from gateway.shared.files.plain_file import open_plain
from gateway.shared.notice import Notice
from gateway.shared.threads import in_thread

POLL = 0.25  # seconds between two looks
SETTLE = 0.2  # seconds without a change before files are read, so that a write in several steps has ended
PATIENCE = 2.0  # seconds after which files that never settle are read all the same
CLOSE_WITHIN = 2.0  # seconds
LIMIT = 16 * 1024 * 1024  # bytes of one file
UNFORESEEN = "It failed in a way nobody foresaw. This is a bug in Weir; the traceback is in its output."

Mark = tuple[int, ...]  # equal marks: the same file, unchanged
Read = Callable[[Path], bytes]
Loaded = Any  # what `load` makes is handed to `apply` as it is


class _Files:
    """The files that one attempt reads. A file's mark is taken before its bytes, so that a change in between is
    noticed.
    """

    def __init__(self, first: Path) -> None:
        self.marks = {first: _mark(first)}
        self._hashes: dict[Path, bytes] = {}

    def read(self, path: Path) -> bytes:
        """The whole content of a file. Raises OSError, also where it is no regular file or larger than LIMIT."""
        self.marks[path] = _mark(path)
        with open_plain(path) as file:
            self.marks[path] = _mark_of(os.fstat(file.fileno()))
            data = file.read(LIMIT + 1)
        if len(data) > LIMIT:
            raise OSError(errno.EFBIG, f"larger than {LIMIT} bytes", str(path))
        self._hashes[path] = hashlib.sha256(data).digest()
        return data

    def empty(self, path: Path) -> bool:
        return self._hashes.get(path) == hashlib.sha256().digest()

    @property
    def digest(self) -> str:
        """SHA-256 over the contents of all files. For a single file it equals the output of `sha256sum`."""
        hashes = list(self._hashes.values())
        return hashes[0].hex() if len(hashes) == 1 else hashlib.sha256(b"".join(hashes)).hexdigest()

    def changed(self) -> bool:
        return any(_mark(path) != mark for path, mark in self.marks.items())


class FileReading(msgspec.Struct, frozen=True):
    """The result of one attempt: what was loaded, or an error."""

    digest: str
    loaded: Loaded = None
    error: str | None = None


class WatchedFile:
    """Watcher of one file, from its first reading to the end of the process.

    `load` makes what is applied, for example a policy. It reads its files with the function passed to it, so that the
    watcher knows which files to watch. `load` runs in a thread. `log` takes lines for people, which begin with `name`.
    `failures`: exceptions that `load` and `apply` may raise for unusable files. `poll` and `settle` are seconds.
    """

    def __init__(
        self,
        path: Path,
        load: Callable[[Read], Loaded],
        log: Callable[[str], None],
        *,
        failures: tuple[type[Exception], ...] = (InvalidFile, OSError, ValueError),
        poll: float = POLL,
        settle: float = SETTLE,
        name: str = "policy",
    ) -> None:
        self.status = FileStatus(file=str(path))
        self._path = path
        self._load = load
        self._log = log
        self._failures = failures
        self._poll = poll
        self._settle = settle
        self._name = name
        self._apply: Callable[[Loaded], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._digest = ""
        self._bad: tuple[str, str] | None = None  # digest and error of the failure that was logged last
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._thread: threading.Thread | None = None
        self._end = threading.Event()
        self._asked = 0  # number of requests to reload; only the loop counts it
        self._wake = threading.Event()
        # The attributes below are the thread's own.
        self._answered = 0
        self._again = False
        self._files = _Files(path)

    def first(self) -> Loaded:
        """Load the first value. Raises what `load` raises, because there is no earlier value to keep."""
        loaded = self._load(self._files.read)
        self._digest = self._files.digest
        self.status = FileStatus(file=str(self._path), digest=self._digest[:12], loaded_at=_now())
        return loaded

    def refuse(self) -> None:
        """Have what the first reading gave, or could not give, judged again once the watch runs: it is not active."""
        self._digest, self.status = "", FileStatus(file=str(self._path))
        self.ask()

    def start(self, apply: Callable[[Loaded], None]) -> None:
        """Start the watch in the running loop. If `apply` raises, it must have changed nothing."""
        self._apply = apply
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._watch, args=(self._loop,), name="weir-watch", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Read the files now, changed or not. May be called by a signal handler."""
        self._asked += 1
        self._wake.set()

    async def reload_now(self) -> FileStatus:
        """Read the files now, changed or not, and return the resulting status."""
        if self._loop is not None and not self._end.is_set():
            self.ask()
            waiter = self._loop.create_future()
            self._waiters.append((self._asked, waiter))
            await waiter
        return self.status

    async def aclose(self) -> None:
        """Stop the watch within CLOSE_WITHIN. Nothing is applied afterwards."""
        if self._thread is None:
            return
        self._end.set()
        self._wake.set()
        with contextlib.suppress(TimeoutError):
            await in_thread(self._thread.join, within=CLOSE_WITHIN)
        self._answer(self._asked)

    # -- in the thread ------------------------------------------------------------------------------------------

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._end.is_set():
            asked = self._asked
            try:
                self._wake.wait(self._poll)
                self._wake.clear()
                asked = self._asked
                if asked == self._answered and not self._again and not self._files.changed():
                    continue
                reading = self._read_at_rest()
            except BaseException:  # a bug, no memory: the watch goes on, and reads again after the next look
                with contextlib.suppress(Exception):  # words need memory too
                    traceback.print_exc()
                self._again = True
                reading = FileReading("", error=UNFORESEEN)
            self._answered = asked
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._take, reading, asked)

    def _read_at_rest(self) -> FileReading:
        """Read at once if nothing has changed since the last look, else once the files have settled."""
        until = time.monotonic() + PATIENCE
        before = self._files.marks
        while True:
            now = {path: _mark(path) for path in before}
            hurry = self._end.is_set() or time.monotonic() > until
            if now == before or hurry:
                reading = self._read()
                if hurry or not self._files.changed():
                    return reading
                now = {path: _mark(path) for path in self._files.marks}
            before = now
            self._end.wait(self._settle)

    def _read(self) -> FileReading:
        files = self._files = _Files(self._path)
        self._again = False
        try:
            loaded = self._load(files.read)
        except self._failures as error:
            # A failure to read may pass without a change of any file.
            self._again = isinstance(error, OSError) or isinstance(error.__cause__, OSError)
            return FileReading(files.digest, error=words(error))
        except BaseException:  # a bug, or a panic of Rust: what it was is told, and the next change is read
            traceback.print_exc()
            return FileReading(files.digest, error=UNFORESEEN)
        if files.empty(self._path):
            return FileReading(files.digest, error=f"{self._path}: the file is empty")
        return FileReading(files.digest, loaded)

    # -- in the loop --------------------------------------------------------------------------------------------

    def _take(self, reading: FileReading, asked: int) -> None:
        try:
            if not self._end.is_set():
                self._judge(reading)
        finally:
            self._answer(asked)

    def _judge(self, reading: FileReading) -> None:
        before = self.status
        if reading.error is not None:
            self._failed(reading.digest, reading.error)
        elif reading.digest == self._digest:
            if before.error is not None:
                self._bad, self.status = None, before.mended()
                line = f"{self._name}: {self._path} is again what is active (version {before.version})"
                self._log(Notice(line, f"{self._name}_loaded"))
        else:
            assert self._apply is not None  # noqa: S101 # start() has set it
            self.status = before.failed(UNFORESEEN, _now())  # the status if `apply` raises anything else
            try:
                self._apply(reading.loaded)
            except self._failures as error:
                self.status = before
                self._failed(reading.digest, words(error))
            else:
                self._bad, self._digest = None, reading.digest
                self.status = before.applied(reading.digest[:12], _now())
                line = f"{self._name}: version {self.status.version} is active ({self.status.digest}, {self._path})"
                self._log(Notice(line, f"{self._name}_loaded"))

    def _failed(self, digest: str, error: str) -> None:
        if self._bad == (digest, error):
            return
        self._bad = (digest, error)
        self.status = self.status.failed(error, _now())
        line = f"{self._name}: version {self.status.version} stays active, as the file cannot be used:\n{error}"
        self._log(Notice(line, f"{self._name}_refused", "error"))

    def _answer(self, asked: int) -> None:
        """Wake callers that asked before the reading began."""
        for number, waiter in self._waiters:
            if number <= asked and not waiter.done():
                waiter.set_result(None)
        self._waiters = [(number, waiter) for number, waiter in self._waiters if not waiter.done()]


def _mark(path: Path) -> Mark:
    """The mark of the file at a path, through symbolic links; the error number where its status cannot be read."""
    try:
        return _mark_of(os.stat(path))
    except OSError as error:
        return (error.errno or 0,)


def _mark_of(status: os.stat_result) -> Mark:
    """The mark of a file's status. It includes ctime, which no program can set back and a chmod moves."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def words(error: Exception) -> str:
    """The error in words, with the file that could not be read."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or error.__class__.__name__


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
